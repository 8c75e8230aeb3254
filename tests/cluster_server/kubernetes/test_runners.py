"""Asking runners of pods, in which programs of strangers run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest

from cluster_server.kubernetes import runners
from cluster_server.kubernetes.runners import Conversation
from cluster_server.processes.manager_status import COUNT_MAX, ManagerStatus
from telemetry.decoder import Malformed

HOST = "127.0.0.1"


class Hostile:
    """A pod that answers at once, whatever is asked."""

    def __init__(self) -> None:
        self.filler = ""
        self.asked = 0
        self.version = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        version = self.version or self.asked
        body = json.dumps({"version": version, "job": {"said_last": self.filler}}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()


@pytest.fixture
def pod() -> Hostile:
    return Hostile()


@pytest.fixture
async def port(pod: Hostile) -> AsyncIterator[int]:
    server = await asyncio.start_server(pod.answer, HOST, 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


async def test_a_pod_that_answers_at_once_is_not_asked_at_once(pod: Hostile, port: int) -> None:
    runner = Conversation(HOST, "key", port=port)
    loop = asyncio.get_running_loop()
    began = loop.time()
    versions = [(await runner.ask()).version for _ in range(4)]
    assert versions == [1, 2, 3, 4]
    assert loop.time() - began >= 3 * runners.PAUSE_SECONDS


async def test_a_pod_that_says_much_is_asked_less_often(pod: Hostile, port: int) -> None:
    pod.filler = "x" * (256 << 10)
    runner = Conversation(HOST, "key", runners.RESULT_BYTES_MAX, port=port)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(2):
        await runner.ask()
    assert loop.time() - began >= 1.0


async def test_an_instance_says_less_than_a_job(pod: Hostile, port: int) -> None:
    pod.filler = "x" * (64 << 10)
    with pytest.raises(Malformed):
        await Conversation(HOST, "key", port=port).ask()
    report = await Conversation(HOST, "key", runners.RESULT_BYTES_MAX, port=port).ask()
    assert report.job is not None
    assert report.job.said_last == pod.filler


@pytest.mark.parametrize("version", [1 << 64, -1, 10**30])
async def test_a_version_that_nobody_can_ask_after_is_not_taken(
    pod: Hostile, port: int, version: int
) -> None:
    """It can't be sent back, so that nothing was asked any more."""
    pod.version = version
    runner = Conversation(HOST, "key", port=port)
    with pytest.raises(Malformed):
        await runner.ask()
    pod.version = 0
    assert (await runner.ask()).version == 2


@pytest.mark.parametrize("count", ["version", "restarts", "running_requests"])
def test_a_count_that_a_runner_can_not_pass_on_is_not_taken(count: str) -> None:
    with pytest.raises(Malformed):
        msgspec.structs.replace(ManagerStatus("ready"), **{count: 1 << 64}).check()
    most = msgspec.structs.replace(ManagerStatus("ready"), **{count: COUNT_MAX})
    most.check()
    assert msgspec.json.decode(msgspec.json.encode(most), type=ManagerStatus) == most
