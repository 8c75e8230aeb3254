"""Whoever a driver or an engine asks over HTTP, it has an end: also where a byte comes now and then."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from swdriver_shim.adapters import remote
from swdriver_shim.adapters.remote import RemoteObjects, RemotePrefixes
from swdriver_shim.data_plane import agent_control
from swdriver_shim.data_plane.agent_control import AgentControl, PullResult
from swdriver_shim.desired import GroupSpec, ModelSpec
from tests.hostile.agent import Peer
from tests.hostile.answers import Answer, Asked, head

SECONDS = 1.0
PAUSE_SECONDS = 0.05  # far less than any wait for the next byte
MODEL = ModelSpec(name="llama", groups=(GroupSpec(name="full", bytes_per_token=(64,)),))


def drips(first: bytes, byte: bytes) -> Answer:
    """One byte after the other, until the other side has gone."""

    def answer(_asked: Asked, connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(byte)
            time.sleep(PAUSE_SECONDS)

    return answer


DRIPS = {
    "head": drips(b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "body": drips(head(200, length=1 << 20), b" "),
    "chunks": drips(head(200, "Transfer-Encoding: chunked"), b"1\r\n \r\n"),
    "interim answers": drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.fixture(params=DRIPS)
def dripping(request: pytest.FixtureRequest) -> Iterator[Peer]:
    with Peer(DRIPS[request.param]) as peer:
        yield peer


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_SECONDS", SECONDS)
    monkeypatch.setattr(agent_control, "ASK_SECONDS", SECONDS)


@pytest.mark.slow
def test_a_daemon_that_drips_is_a_miss(dripping: Peer) -> None:
    mine = RemotePrefixes(dripping.url, "token", MODEL)
    assert mine.query([1, 2, 3]) == 0
    assert "within 1 s" in (mine.lost_because or "")
    mine.close()
    objects = RemoteObjects(dripping.url, "token")
    assert objects.exists([b"k" * 16]) == [False]
    objects.close()


def test_an_agent_that_drips_has_not_pulled(dripping: Peer) -> None:
    assert AgentControl(dripping.url, "token").pull(
        "s", "tcp:127.0.0.1:9", "s", "job7", 0, [1]
    ) == PullResult(False, 0)
