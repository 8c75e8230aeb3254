"""The spine of the demo: what is placed across it goes through it, and nothing else does."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from django.test import override_settings

from console.demo import places, spine, ways
from console.fleet.models import Node
from console.placement.topology import Tier
from kvss_agent.data_plane.address import Address

SAID = bytes(range(256)) * 400  # more than a piece


def through(state: Path, node: str) -> socket.socket:
    where = Address.parse(places.over_spine(state, node).read_text())
    connection = socket.create_connection((where.host, where.port), timeout=30)
    connection.settimeout(30)
    return connection


def received(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (piece := connection.recv(count - len(found))):
        found += piece
    return found


def test_it_carries_all_bytes_both_ways_and_ends_with_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spine, "BYTES_A_SECOND", 1e9)
    places.directory_of(tmp_path, "ax-1").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as agent, spine.Spine(tmp_path):
        agent.bind(str(places.data_socket(tmp_path, "ax-1")))
        agent.listen()
        with through(tmp_path, "ax-1") as driver:
            its, _ = agent.accept()
            with its:
                its.settimeout(30)
                sending = threading.Thread(target=driver.sendall, args=(SAID,))
                sending.start()
                assert received(its, len(SAID)) == SAID
                sending.join()
                its.sendall(SAID)
                assert received(driver, len(SAID)) == SAID
            assert driver.recv(1) == b"", "the agent has gone, and so has the way to it"
        with through(tmp_path, "ax-2") as driver:
            assert driver.recv(1) == b"", "there is no such agent"


def test_a_sender_soon_waits_for_it(tmp_path: Path) -> None:
    """However few requests there are: 4 MiB in buffers of a loopback would be minutes of evicts."""
    places.directory_of(tmp_path, "ax-1").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as agent, spine.Spine(tmp_path):
        agent.bind(str(places.data_socket(tmp_path, "ax-1")))
        agent.listen()
        with through(tmp_path, "ax-1") as driver:
            driver.settimeout(1)
            with pytest.raises(TimeoutError):
                driver.sendall(bytes(1 << 20))


def test_its_addresses_are_the_same_after_a_restart(tmp_path: Path) -> None:
    """A driver asks there for what it has left."""
    places.folder(tmp_path).mkdir()

    def written() -> list[str]:
        return [places.over_spine(tmp_path, node).read_text() for node in places.NODES]

    with spine.Spine(tmp_path):
        first = written()
        with spine.Spine(tmp_path):
            assert not set(written()) & set(first), "those are in use"
            second = written()
    with spine.Spine(tmp_path):
        assert written() == second


def test_an_address_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """The next start reads it, also after this one was killed while it wrote."""
    places.folder(tmp_path).mkdir()
    written, before = places.over_spine(tmp_path, "ax-1"), tmp_path / "before"
    with spine.Spine(tmp_path):
        before.hardlink_to(written)
        first = written.read_text()
        with spine.Spine(tmp_path):
            assert written.read_text() != first
            assert before.read_text() == first, "nobody has written into it"


def test_only_what_crosses_the_spine_to_a_node_of_the_demo_takes_it(tmp_path: Path) -> None:
    places.folder(tmp_path).mkdir()
    places.over_spine(tmp_path, "ax-1").write_text("tcp:127.0.0.1:9")
    with override_settings(STATE_DIR=tmp_path):
        found = {
            (node, tier): ways.over_spine(Node(name=node), tier)
            for node in ("ax-1", "ax-2", "theirs")
            for tier in Tier
        }
    assert {at: where for at, where in found.items() if where} == {
        ("ax-1", Tier.SPINE): "tcp:127.0.0.1:9"
    }
