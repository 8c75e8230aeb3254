"""Gateways that lose their picker, or that are configured otherwise: with a real Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference_brain.picker import Answer, Asked
from inference_brain.picker.server import Picker
from inference_brain.picker.settings import PickerSettings, Tls
from tests.inference_brain import gateway
from tests.inference_brain.gateway import Replica
from tests.inference_brain.routers import RecordedPlace, RecordedRouter
from tests.kvss_agent.authority import Authority

pytestmark = pytest.mark.slow
BODY = {"model": "m", "prompt": "Hello"}
PATH = "/v1/completions"


@pytest.fixture
async def backends() -> AsyncIterator[list[Replica]]:
    async with gateway.replicas(["one", "two"]) as found:
        yield found


@contextlib.contextmanager
def fixed_picker(endpoint: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "tests.inference_brain.fixed_picker", endpoint]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@contextlib.asynccontextmanager
async def picking(
    directory: Path, router: RecordedRouter, found: list[Replica], **changes: Any
) -> AsyncIterator[httpx.AsyncClient]:
    picker = Picker(router, PickerSettings(("127.0.0.1", 0)))
    port = await picker.start()
    async with (
        gateway.envoy(directory, port, found, **changes) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client
        await picker.stop(0)


def always(endpoint: str) -> RecordedRouter:
    return RecordedRouter(lambda asked: RecordedPlace([endpoint], asked.body))


async def answers_with(client: httpx.AsyncClient, status: int) -> list[httpx.Response]:
    """Wait until all answers of a while do: at first some requests still find what has just ended."""
    answers: list[httpx.Response] = []
    async with asyncio.timeout(60):
        while len(answers) < 10:
            answer = await client.post(PATH, json=BODY)
            answers = [*answers, answer] if answer.status_code == status else []
            await asyncio.sleep(0.1)
    return answers


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_picker_that_is_killed(
    tmp_path: Path, backends: list[Replica], *, is_open: bool
) -> None:
    """Open: the gateway soon decides by itself, by its fallback policy. Closed: nobody is served."""
    one, two = backends
    with fixed_picker(one.endpoint) as (process, port):
        async with (
            gateway.envoy(tmp_path, port, backends, failure_mode_allow=is_open) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            for _ in range(4):
                assert (await client.post(PATH, json=BODY)).json()["replica"] == "one"
            process.send_signal(signal.SIGKILL)
            process.wait()
            answers = await answers_with(client, 200 if is_open else 500)
    if is_open:
        assert {answer.json()["replica"] for answer in answers} == {"one", "two"}
        assert all(answer.json()["bytes"] == len(answer.json()["echo"]) > 0 for answer in answers)
    else:
        assert (len(one.requests), len(two.requests)) == (4, 0)


async def test_a_picker_that_stalls_is_given_up(tmp_path: Path, backends: list[Replica]) -> None:
    """By pings: in full-duplex mode a gateway waits for the picker without an end."""
    with fixed_picker(backends[0].endpoint) as (process, port):
        async with (
            gateway.envoy(tmp_path, port, backends) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            assert (await client.post(PATH, json=BODY)).status_code == 200
            process.send_signal(signal.SIGSTOP)
            answer = await client.post(PATH, json=BODY)
            assert answer.status_code in (500, 503, 504)
            process.send_signal(signal.SIGCONT)
            await answers_with(client, 200)


async def test_only_endpoints_that_the_gateway_allows(tmp_path: Path, backends: list[Replica]) -> None:
    router = always(backends[1].endpoint)
    hint = gateway.subset(["10.0.0.1:80", "10.0.0.2"])
    async with picking(tmp_path, router, backends, before=[hint]) as client:
        assert (await client.post(PATH, json=BODY)).status_code == 200
    assert router.asked[0].among == {"10.0.0.1:80", "10.0.0.2"}


async def test_bodies_that_a_gateway_sends_whole(tmp_path: Path, backends: list[Replica]) -> None:
    made = b'{"prompt": "Hello, and more than there was"}'

    def decide(asked: Asked) -> RecordedPlace:
        return RecordedPlace([backends[1].endpoint], made, {"content-type": "application/json"})

    router = RecordedRouter(decide)
    mode = {"request_body_mode": "BUFFERED", "response_body_mode": "NONE"}
    async with picking(tmp_path, router, backends, processing_mode=mode) as client:
        answer = await client.post(PATH, json=BODY, headers={"cookie": "a=b"})
        assert answer.json()["echo"].encode() == made
        await asyncio.wait_for(router.places[0].over.wait(), 60)
    head, got = backends[1].requests[0]
    assert got == made
    assert head["content-length"] == str(len(made))
    assert "cookie" not in head
    assert router.places[0].told == [("answered", 200, backends[1].endpoint), ("ended", True)]


async def test_a_gateway_that_sends_no_bodies_is_told_so(
    tmp_path: Path, backends: list[Replica]
) -> None:
    router = always(backends[0].endpoint)
    async with picking(
        tmp_path, router, backends, processing_mode={"request_body_mode": "NONE"}
    ) as client:
        answer = await client.post(PATH, json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "gateway_misconfigured"
    assert not router.asked


async def test_a_router_that_fails_is_an_answer_of_ours(tmp_path: Path, backends: list[Replica]) -> None:
    def fail(_: Asked) -> RecordedPlace | Answer:
        raise RuntimeError("a mistake")

    async with picking(tmp_path, RecordedRouter(fail), backends) as client:
        answer = await client.post(PATH, json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert not backends[0].requests


async def test_gateways_show_who_they_are(tmp_path: Path, backends: list[Replica]) -> None:
    authority = Authority.make(tmp_path / "ours")
    other = Authority.make(tmp_path / "others", "others")
    certificate, key, believed = authority.issue("picker")
    picker = Picker(
        always(backends[0].endpoint),
        PickerSettings(("127.0.0.1", 0), tls=Tls(certificate, key, believed)),
    )
    port = await picker.start()
    statuses = []
    for signed in (authority.issue("gateway"), other.issue("stranger")):
        transport = _transport(*signed[:2], believed)
        async with (
            gateway.envoy(tmp_path, port, backends, transport=transport) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            statuses.append((await client.post(PATH, json=BODY)).status_code)
    assert statuses[0] == 200
    assert statuses[1] in (500, 503)
    await picker.stop(0)


def _transport(certificate: Path, key: Path, believed: Path) -> dict[str, Any]:
    kind = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    pair = {
        "certificate_chain": {"filename": str(certificate)},
        "private_key": {"filename": str(key)},
    }
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"type.googleapis.com/{kind}",
            "common_tls_context": {
                "tls_certificates": [pair],
                "validation_context": {"trusted_ca": {"filename": str(believed)}},
                "alpn_protocols": ["h2"],
            },
        },
    }
