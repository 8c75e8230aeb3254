"""Hosts whose names have several addresses."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvss_agent.client import Credentials, Lost, connect
from kvss_agent.dialing import ADDRESSES_MAX
from kvss_agent.http.answers import Budget, Unanswered
from kvss_agent.http.blocking_exchange import BlockingExchange
from tests.kvss_agent.plane import DRIVER, SECRET, running

NOBODY = "127.0.0.2"  # nothing listens there
Named = Callable[..., None]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Named:
    def have(*hosts: str) -> None:
        def look_up(_host: str, port: int, **_: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return have


def test_an_agent_is_reached_at_any_address_of_its_name(tmp_path: Path, named: Named) -> None:
    """Such as one that listens with IPv4 alone, whose name has an IPv6 address, too."""
    with running(tmp_path) as plane:
        plane.add()
        named(NOBODY, "127.0.0.1")
        address, credentials = f"tcp:ax-1.example:{plane.tcp}", Credentials(DRIVER, SECRET)
        with connect(address, "s", credentials) as client:
            assert client.slots == 8
        named(NOBODY, NOBODY)
        with pytest.raises(Lost, match="refused"):
            connect(address, "s", credentials)


def test_all_addresses_of_a_name_have_one_deadline(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waited = [0.0], list[float]()

    class Silent(socket.socket):
        seconds = 0.0

        def settimeout(self, value: float | None) -> None:
            self.seconds = value or 0.0

        def connect(self, _: object) -> None:
            waited.append(self.seconds)
            now[0] += self.seconds
            raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "socket", Silent)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    named(*[NOBODY] * (ADDRESSES_MAX + 1))
    exchange = BlockingExchange("http://ax-1.example")
    with pytest.raises(Unanswered, match="within 4 s"):
        exchange.ask("GET", "/v1/observed", "token", Budget(4.0))
    assert waited == pytest.approx([4.0 / ADDRESSES_MAX] * ADDRESSES_MAX)


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
def test_a_name_that_no_host_can_have_is_told_in_a_sentence(host: str) -> None:
    with pytest.raises(Lost, match="is no name of a host"):
        connect(f"tcp:{host}:8411", "s", Credentials(DRIVER, SECRET))
