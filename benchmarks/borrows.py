"""How fast columns are borrowed, and what a sibling costs that is dead. Part of `benchmarks.sharing`.

A borrow is of up to 64 columns: the driver asks its agent, and that copies them from a shard of its own,
compared with memcpy, or from another agent over TCP, compared with a driver that refills the same
columns over TCP. Both in turns, with one list of columns that is made before; medians. The dead sibling
takes connections and says nothing: its driver, or its agent. What is counted is how much longer a load
takes than without it, the first one after its death. Those after that one do not ask it.
"""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import msgspec

from benchmarks.dataplane import DRIVER, KEY, SECRET, TAG, Agent, Memory, running
from benchmarks.harness import Row, limited, percentile, progress, timed
from kvss_agent import native
from kvss_agent.client import Column, Credentials, Lender, Miss, ShardClient, Wanted
from swdriver_shim.data_plane.homes import Home
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.siblings import Sibling
from swdriver_shim.desired import SiblingHome, SiblingSpec
from swdriver_shim.driver import Driver
from swdriver_shim.keys import Keys, Namespace
from swdriver_shim.layout import Group, Layout
from swdriver_shim.lending import LentAnswer, LentColumn
from swdriver_shim.policy import OrgPolicies, Policy

MIB: Final = 1 << 20
SIZES: Final = {"256KiB": 256 << 10, "1MiB": MIB, "4MiB": 4 * MIB}
SLOTS: Final = 64
COLUMNS: Final = 16  # of a prompt, where the sibling is dead
LAYOUT: Final = Layout((Group("full", (1024,)),))
COLUMN_BYTES: Final = LAYOUT.column_bytes
SLOT: Final = LAYOUT.groups[0].slot_bytes[0]
ROUNDS, QUICK_ROUNDS = 25, 7
DEAD_TRIES, QUICK_DEAD_TRIES = 100, 20
HERE_GOAL, TCP_GOAL = 0.8, 0.85
ADDED_GOAL: Final = 0.25  # seconds


def borrows(*, quick: bool) -> list[Row]:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    rows: list[Row] = []
    with running() as near, running() as far:
        for label, size in SIZES.items():
            progress(f"columns of {label} are borrowed")
            rows += _here(near, label, size, rounds)
            rows += _over_tcp(near, far, label, size, rounds)
    return [*rows, *_dead(quick=quick)]


def _columns(size: int) -> int:
    return min(SLOTS, (64 << 20) // size)


def _filled(client: ShardClient, memory: Memory, count: int) -> None:
    for slot in range(count):
        number = client.evict(slot, _key(slot), TAG, 64, memory.sources[slot])
    client.wait_applied(number, 60.0)


def _key(slot: int) -> bytes:
    return slot.to_bytes(2) + KEY[2:]


def _wanted(count: int) -> list[Wanted]:
    return [Wanted(slot, Column(_key(slot), TAG, slot + 1)) for slot in range(count)]


def _borrowed(client: ShardClient, lender: Lender, wanted: Sequence[Wanted]) -> None:
    answers = client.borrow(wanted, range(len(wanted)), lender)
    if missed := [answer for answer in answers if isinstance(answer, Miss)]:
        raise RuntimeError(f"columns were not borrowed: {missed}")


def _row(
    name: str, size: int, ours: Sequence[float], limit: Sequence[float], what: str, goal: float
) -> Row:
    middle = statistics.median(ours)
    ratio = statistics.median(limit) / middle
    return Row(
        name, size / middle / 1e9, "GB/s", what, ratio, goal, {"p99 ms": 1e3 * percentile(ours, 0.99)}
    )


def _in_turns(
    rounds: int, ours: Callable[[int], float], limit: Callable[[int], float]
) -> tuple[list[float], list[float]]:
    ours(0), limit(0)
    pairs = [(ours(at), limit(at)) for at in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _here(agent: Agent, label: str, size: int, rounds: int) -> list[Row]:
    count, memory = _columns(size), Memory(size)
    agent.be(ours=(count, size), theirs=(count, size))
    mover = native.current()
    with agent.client("tcp", "ours", mover) as ours, agent.client("tcp", "theirs", mover) as theirs:
        _filled(theirs, memory, count)
        lender = Lender(f"tcp:127.0.0.1:{agent.tcp}", "theirs", 30.0)
        wanted = _wanted(count)

        def borrow(_: int) -> float:
            return timed(lambda: _borrowed(ours, lender, wanted))

        def copy(at: int) -> float:
            return sum(memory.memcpy(at * count + index) for index in range(count))

        took, limit = _in_turns(rounds, borrow, copy)
    return [_row(f"p2p.refill.here.{label}", count * size, took, limit, "memcpy", HERE_GOAL)]


def _over_tcp(near: Agent, far: Agent, label: str, size: int, rounds: int) -> list[Row]:
    count, memory = _columns(size), Memory(size)
    near.be(ours=(count, size))
    far.be(theirs=(count, size))
    mover = native.current()
    with near.client("tcp", "ours", mover) as ours, far.client("tcp", "theirs", mover) as theirs:
        _filled(theirs, memory, count)
        lender = Lender(f"tcp:127.0.0.1:{far.tcp}", "theirs", 30.0)
        wanted = _wanted(count)

        def borrow(_: int) -> float:
            return timed(lambda: _borrowed(ours, lender, wanted))

        def refill(_: int) -> float:
            return timed(lambda: theirs.refill(wanted, memory.places[:count]))

        took, limit = _in_turns(rounds, borrow, refill)
    return [_row(f"p2p.refill.tcp.{label}", count * size, took, limit, "a refill over TCP", TCP_GOAL)]


class _Lender(BaseHTTPRequestHandler):
    """A sibling that says it has everything, at an agent that is silent."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        columns = tuple(LentColumn(depth, depth, 0.0, 0.0) for depth in range(COLUMNS))
        answer = msgspec.json.encode(LentAnswer((columns,)))
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def _silent() -> Iterator[str]:
    """Takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def _lending() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Lender) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _dead(*, quick: bool) -> list[Row]:
    tries = QUICK_DEAD_TRIES if quick else DEAD_TRIES
    rows = []
    with running() as agent, _silent() as silent, _lending() as lending:
        agent.be(ours=(1024, COLUMN_BYTES))
        home = Home(f"tcp:127.0.0.1:{agent.tcp}", "ours", lambda: Credentials(DRIVER, SECRET), SLOT)
        driver = Driver(LAYOUT, "bench", [[Shard("ours", home)]])
        try:
            while driver.statistics.groups()[0].slots < 1024:
                time.sleep(0.01)
            driver.set_policies({"bench": OrgPolicies(policy=Policy())})
            alone = [_load(driver, None, number) for number in range(tries)]
            for name, url in (("driver", silent), ("agent", lending)):
                progress(f"a sibling whose {name} is dead")
                place = SiblingHome("full", 0, f"tcp:{silent}", "theirs", "leaf")
                spec = SiblingSpec("other", f"http://{url}", "0" * 64, (place,))
                sibling = Sibling(spec, DRIVER, "0" * 64, lambda: None)
                took = [_load(driver, sibling, number) for number in range(tries)]
                added = [one - statistics.median(alone) for one in took]
                worst = percentile(added, 0.99)
                more = {"p50 ms": 1e3 * statistics.median(added), "worst ms": 1e3 * max(added)}
                row = f"p2p.dead_sibling.{name}.added.p99"
                rows.append(limited(row, 1e3 * worst, "ms", 1e3 * ADDED_GOAL, more))
        finally:
            driver.close()
    return rows


def _load(driver: Driver, sibling: Sibling | None, number: int) -> float:
    """Of a prompt that nobody has; a tenth of a second after the one before."""
    maker = Keys("bench", b"s" * 32, Namespace("bench", "", "", ""))
    prompt = maker.prompt([random.getrandbits(16) for _ in range(64 * COLUMNS)], str(number))
    time.sleep(0.1)
    place = memoryview(bytearray(COLUMN_BYTES))
    began = time.perf_counter()
    if sibling:
        sibling._answered_at = time.monotonic()  # noqa: SLF001 - it has just died, each time
        driver.borrow(prompt, sibling)
    if driver.load(prompt, lambda *_: place, seconds=10.0).tokens:
        raise RuntimeError("a dead sibling has lent something")
    return time.perf_counter() - began
