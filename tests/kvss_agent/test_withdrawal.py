"""Memory of a refill that was taken back: no answer writes there, however late it comes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvss_agent.client import WAIT_SECONDS, Column, Credentials, Lost, Miss, Wanted, connect
from kvss_agent.client import withdrawal as withdrawals
from kvss_agent.client.withdrawal import Withdrawal
from kvss_agent.redundancy.layout import fragment_slot_bytes
from tests.kvss_agent.redundancy.holders import DRIVER, SECRET, SLOT, running
from tests.live import wait_until

SIZE = fragment_slot_bytes(SLOT, 1) - 64
KEY, TAG = b"k" * 16, b"t" * 16


class Relay:
    """Between a client and an agent. What the agent sends stays here from a byte on, until released."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.left: int | None = None  # bytes that still pass; None: all
        self.released = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [here, there]
                threading.Thread(target=self._pump, args=(here, there), daemon=True).start()
                threading.Thread(target=self._pump_answers, args=(there, here), daemon=True).start()

    def _pump(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while got := source.recv(4096):
                to.sendall(got)
            to.shutdown(socket.SHUT_WR)

    def _pump_answers(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while got := source.recv(4096):
                if self.left is not None:
                    to.sendall(got[: self.left])
                    got, self.left = got[self.left :], max(0, self.left - len(got))
                    if got:
                        assert self.released.wait(60)
                        self.left = None
                to.sendall(got)
            to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.released.set()
        for one in (self._listener, *self._sockets):
            one.close()


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    with running(tmp_path, 1, 1) as world:
        made = Relay(world.agents[0].port)
        yield made
        made.close()


@pytest.mark.parametrize("passes", [0, 20_000], ids=["before it", "in the middle of it"])
def test_an_answer_that_comes_late_writes_nothing_to_memory_that_was_taken_back(
    relay: Relay, passes: int
) -> None:
    address, credentials = f"tcp:127.0.0.1:{relay.port}", Credentials(DRIVER, SECRET, stall_seconds=20)
    with connect(address, "fragments", credentials, transport="stream") as client:
        content = memoryview(bytearray(b"a" * SIZE))
        number = client.evict(0, KEY, TAG, 1, content)
        client.wait_applied(number)
        wanted = [Wanted(0, Column(KEY, TAG, number))]
        memory, withdrawal = memoryview(bytearray(SIZE)), Withdrawal()

        def refill() -> list[object]:
            requests = client.requests
            return [*requests.refill(wanted, [memory], number, WAIT_SECONDS, withdrawal=withdrawal)]

        relay.left = passes
        with ThreadPoolExecutor(1) as pool:
            refilling = pool.submit(refill)
            if passes:
                wait_until("a part of it has come", lambda: memory[0] == ord("a"))
            withdrawal.withdraw()
            memory[:] = b"b" * SIZE  # as a slot that has another column by now
            if passes:
                with pytest.raises(Lost):
                    refilling.result(60)
            relay.released.set()
            if not passes:
                (found,) = refilling.result(60)
                assert isinstance(found, Miss)
                into = memoryview(bytearray(SIZE))
                assert not isinstance(client.refill(wanted, [into])[0], Miss), "the connection goes on"
                assert into == content
        assert memory == b"b" * SIZE


def test_nobody_ends_a_connection_for_an_answer_that_is_arriving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(withdrawals, "GRACE_SECONDS", 20.0)
    withdrawal, ended = Withdrawal(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with withdrawal.receiving(ended.set) as may_write:
            assert may_write
            taking = pool.submit(withdrawal.withdraw)
            wait_until("it is taken back", lambda: withdrawal._is_withdrawn)
            assert not taking.done(), "it is still written to"
        taking.result(60)
    assert not ended.is_set()
    with withdrawal.receiving(ended.set) as may_write:
        assert not may_write
