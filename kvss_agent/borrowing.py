"""Borrowing columns for a driver: the shard's slots are filled from those of a sibling's shard.

That shard may be here as well; then it is a copy in memory. Otherwise its agent is asked like by any
reader. Each column is checked by its seal: it is the one that was asked for, whole, or it is a miss. So
the lender has to be trusted with nothing, and what it costs is bounded: a borrow ends at its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvss_agent import native
from kvss_agent.client.connection import Address, Credentials, Lost
from kvss_agent.client.interface import Wanted
from kvss_agent.client.requests import Requests
from kvss_agent.data_plane import channel as channels
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.wire import Lender, Tier, TierAnswer
from kvss_agent.limits.background import Background, Totals
from kvss_agent.mover import Mover
from kvss_agent.shard import seal
from kvss_agent.shard.core import LEASE_SECONDS_MAX, Request, Serve, Verb
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.own_member import OwnMember
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss

log = logging.getLogger(__name__)

AT_ONCE: Final = 128
OF_DRIVER_AT_ONCE: Final = 32  # one for each shard, of what a driver borrows at once
SECONDS_MAX: Final = 30.0  # of one borrow; slots are kept for no longer
STALL_SECONDS: Final = 5.0  # of a lender that says nothing
AWAY_SECONDS: Final = 5.0  # for which a lender that can't be reached is not tried again
IDLE_SECONDS: Final = 30.0  # after which a connection to a lender is closed
WAYS_MAX: Final = 256
TURN_LOOK_SECONDS: Final = 0.05  # between looks whether a borrow that waits for its turn was given up
# A request waits for these bytes as well, and computes them if they take too long: they yield less than
# those of moves.
PIECE_BYTES: Final = 16 << 20
YIELDS: Final = 0.25
YIELD_SECONDS_MAX: Final = 0.02

Answer = TierAnswer | Miss
Answers = tuple[Answer, ...]
Then = Callable[[Answers, tuple[int, ...]], None]


class From(Protocol):
    """Where columns are borrowed."""

    def read(self, wanted: Sequence[Wanted], into: Sequence[memoryview]) -> Iterator[Header | Miss]:
        """Copy columns to the front of `into`, one after the other. Raises Lost and Breach."""

    def hang_up(self) -> None:
        """End what is being read."""


@dataclass(slots=True)
class Borrowed:
    """Since the start. Any thread may add to it."""

    bytes: Counter[str] = field(
        default_factory=Counter
    )  # from the "same_agent", or from an "other_agent"
    missed: Counter[str] = field(default_factory=Counter)  # columns, by Miss
    late: int = 0  # borrows that did not end in time
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Way:
    """To one shard of another agent, in the name of one driver."""

    def __init__(self, lender: Lender, credentials: Callable[[], Credentials], totals: Totals) -> None:
        self.bytes_per_second = lender.bytes_per_second
        self.used_at = time.monotonic()
        self.background = Background(
            lambda: self.bytes_per_second or None,
            totals,
            piece_bytes=PIECE_BYTES,
            yields=YIELDS,
            yield_seconds_max=YIELD_SECONDS_MAX,
        )
        self.turn = threading.Lock()  # one piece at a time
        self._address, self._shard = lender.address, lender.shard
        self._credentials = credentials
        self._requests: Requests | None = None
        self._opening = threading.Lock()
        self._away_until = 0.0

    def requests(self) -> Requests:
        """Raises Lost."""
        if not self._opening.acquire(timeout=STALL_SECONDS):
            raise Lost(f"{self._address} takes long to connect to")
        try:
            if (there := self._requests) and not there.connection.channel.has_ended:
                return there
            if time.monotonic() < self._away_until:
                raise Lost(f"{self._address} could not be reached a moment ago")
            try:
                address = Address.parse(self._address)
                self._requests = Requests(address, self._shard, self._credentials())
            except (Lost, ValueError) as error:
                self._away_until = time.monotonic() + AWAY_SECONDS
                raise error if isinstance(error, Lost) else Lost(str(error)) from error
            return self._requests
        finally:
            self._opening.release()

    def close(self) -> None:
        if there := self._requests:
            there.close()


class _FromAgent:
    def __init__(self, way: _Way, requests: Requests, slot_bytes: int) -> None:
        self._way, self._requests = way, requests
        self._slot_bytes = slot_bytes
        self._ended = threading.Event()
        self._has_turn = False

    def read(self, wanted: Sequence[Wanted], into: Sequence[memoryview]) -> Iterator[Header | Miss]:
        way, requests, at = self._way, self._requests, 0
        while at < len(wanted):
            with self._turn():
                self._ended.wait(way.background.rest(time.monotonic()))
                self._check_runs()
                end = at + max(1, way.background.piece() // self._slot_bytes)
                began = time.monotonic()
                found = requests.refill(wanted[at:end], into[at:end], 0, 0.0, of_any_evict=True)
                now = time.monotonic()
                size = sum(one.length for one in found if isinstance(one, Header))
                way.background.moved(size, now - began, now)
                way.used_at = now
            at = end
            yield from found

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        while not self._way.turn.acquire(timeout=TURN_LOOK_SECONDS):
            self._check_runs()
        self._has_turn = True
        try:
            yield
        finally:
            self._has_turn = False
            self._way.turn.release()

    def _check_runs(self) -> None:
        if self._ended.is_set():
            raise Lost("the borrow was given up")

    def hang_up(self) -> None:
        """Others read over the same connection: it ends only if it is this one's turn."""
        self._ended.set()
        if self._has_turn:
            channels.hang_up(self._requests.connection.channel.socket)


class _FromHere:
    """From a shard of this agent: under a lease, so that its memory stays."""

    def __init__(self, shard: HostedShard, driver: str) -> None:
        self._shard = shard
        self._member = OwnMember(shard, driver, lambda: None)

    def read(self, wanted: Sequence[Wanted], into: Sequence[memoryview]) -> Iterator[Header | Miss]:
        shard, member, mover = self._shard, self._member, native.current()
        asked = [one.slot for one in wanted]
        request = Request(Verb.REFILL, member.number, 1, 0, asked, 0.0, LEASE_SECONDS_MAX)
        with member.attached():
            serve = member.ask(request)
            if not isinstance(serve, Serve):
                raise Lost("the shard takes no more readers now")
            try:
                for slot, one, place in zip(serve.slots, wanted, into, strict=True):
                    if isinstance(slot, Miss):
                        yield slot
                    else:
                        yield _copy(shard.arena.slot(slot), one.column, place, mover)
            finally:
                shard.done(serve.lease, member)

    def hang_up(self) -> None:
        self._member.close(Cause.GONE, "the borrow was given up")


def _copy(slot: memoryview, wanted: Column, into: memoryview, mover: Mover) -> Header | Miss:
    found = seal.identify_any(slot[:HEADER_BYTES], wanted.key, wanted.tag)
    if isinstance(found, Miss):
        return found
    return seal.copy_out(slot, wanted._replace(sequence=found.sequence), into, mover)


class _Borrow:
    """One request. `run` fills slots in a thread, until `give_up`."""

    def __init__(self, shard: HostedShard, asked: Tier, slots: Sequence[int | Miss]) -> None:
        self.answers: list[Answer] = [slot if isinstance(slot, Miss) else Miss.LOST for slot in slots]
        self.bytes = 0
        self._shard, self._asked, self._slots = shard, asked, slots
        self._lock = threading.Lock()
        self._from: From | None = None
        self._is_given_up = False

    def give_up(self) -> bool:
        """Whether slots may still be written to until `run` ends, which is soon then."""
        with self._lock:
            self._is_given_up = True
            if self._from is None:
                return False
        self._from.hang_up()
        return True

    def run(self, find: Callable[[], From]) -> None:
        """`find` may take a while. No slot is touched meanwhile."""
        try:
            found = find()
        except Lost as error:
            log.debug("Nothing can be borrowed from %s: %s", self._asked.lender, error)
            return
        with self._lock:
            if self._is_given_up:
                return
            self._from = found
        try:
            self._fill(found)
        except Exception:
            log.exception("A borrow from %s has failed", self._asked.lender)

    def _fill(self, found: From) -> None:
        shard, asked = self._shard, self._asked
        places: list[int] = []
        memories: list[memoryview] = []
        for place, slot in enumerate(self._slots):
            if isinstance(slot, Miss):
                continue
            try:
                memory = shard.arena.slot(slot)
            except IndexError:  # the shard has ended
                continue
            if seal.is_newer(memory, asked.after, shard.core.accepted):
                self.answers[place] = Miss.STALE
                continue
            seal.open_slot_for(memory, asked.after, asked.columns[place].tag)
            places.append(place)
            memories.append(memory)
        columns = [asked.columns[place] for place in places]
        wanted = [Wanted(one.note, Column(one.key, one.tag, 0)) for one in columns]
        into = [memory[HEADER_BYTES:] for memory in memories]
        done = 0
        try:
            if wanted:
                for header in found.read(wanted, into):
                    self._finish(places[done], memories[done], header)
                    done += 1
        except (Lost, Breach) as error:
            log.debug("Nothing more is borrowed from %s: %s", asked.lender, error)
        finally:
            for place, memory in zip(places[done:], memories[done:], strict=True):
                self._finish(place, memory, Miss.LOST)

    def _finish(self, place: int, memory: memoryview, header: Header | Miss) -> None:
        """What has come is sealed as of now; of what has not, nothing stays."""
        after, tag = self._asked.after, self._asked.columns[place].tag
        if isinstance(header, Header) and not seal.is_open_for(memory, after, tag):
            header = Miss.ABSENT  # it was purged meanwhile
        if isinstance(header, Miss):
            seal.clear(memory, after, scrub=True)
            self.answers[place] = header
            return
        column = Column(header.key, header.tag, after)
        memory[:HEADER_BYTES] = seal.pack(column, header.tokens, header.length, header.checksum)
        self.answers[place] = TierAnswer.DONE
        self.bytes += header.length


class Borrowing:
    """`start` may be called from any thread; the rest belongs to the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        shards: Mapping[str, HostedShard],
        credentials: Callable[[str], Credentials],
    ) -> None:
        """`shards`: of this agent. `credentials`: what is shown to other agents in a driver's name.
        Raises Lost if there are none."""
        self.borrowed = Borrowed()
        self.totals = Totals()
        self._loop = loop
        self._shards = shards
        self._credentials = credentials
        self._ways: OrderedDict[tuple[str, str, str], _Way] = OrderedDict()
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()  # by driver
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="borrow")

    def start(self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...], then: Then) -> None:
        driver = shard.identity.driver
        with self._lock:
            is_refused = self._running[driver] >= OF_DRIVER_AT_ONCE or self._running.total() >= AT_ONCE
            self._running[driver] += not is_refused
        if is_refused or asked.lender is None:
            then(tuple(Miss.REFUSED for _ in slots), ())
        else:
            asyncio.run_coroutine_threadsafe(self._run(shard, asked, slots, then), self._loop)

    def close(self) -> None:
        with self._lock:
            ways = list(self._ways.values())
        for way in ways:
            way.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...], then: Then
    ) -> None:
        lender, driver = asked.lender, shard.identity.driver
        assert lender is not None  # noqa: S101 - `start` has seen to it
        borrow = _Borrow(shard, asked, slots)
        try:
            work = self._loop.run_in_executor(
                self._threads, borrow.run, lambda: self._find(shard, lender)
            )
            work.add_done_callback(lambda _: self._ended(driver))
            done, _ = await asyncio.wait({work}, timeout=min(lender.seconds, SECONDS_MAX))
            if not done:
                self.borrowed.late += 1
                if borrow.give_up():
                    await asyncio.wait({work})
        finally:
            self._count(borrow, is_here=lender.shard in self._shards)
            then(tuple(borrow.answers), ())
            self._loop.call_later(IDLE_SECONDS, self._close_idle)

    def _ended(self, driver: str) -> None:
        """Its thread has: one that hangs counts, also when its borrow was answered."""
        with self._lock:
            self._running[driver] -= 1

    def _find(self, shard: HostedShard, lender: Lender) -> From:
        """Raises Lost."""
        identity = shard.identity
        if (here := self._shards.get(lender.shard)) is not None:
            if here.identity.slot_bytes != identity.slot_bytes:
                raise Lost("the slots of the lender have another size")
            return _FromHere(here, identity.driver)
        way = self._way(lender, identity.driver)
        way.bytes_per_second = lender.bytes_per_second
        requests = way.requests()
        if requests.connection.welcome.slot_bytes != identity.slot_bytes:
            raise Lost("the slots of the lender have another size")
        return _FromAgent(way, requests, identity.slot_bytes)

    def _way(self, lender: Lender, driver: str) -> _Way:
        name = lender.address, lender.shard, driver
        with self._lock:
            if (way := self._ways.get(name)) is None:
                way = self._ways[name] = _Way(lender, lambda: self._shown(driver), self.totals)
            self._ways.move_to_end(name)
            way.used_at = time.monotonic()
            least = self._ways.popitem(last=False)[1] if len(self._ways) > WAYS_MAX else None
        if least:
            least.close()
        return way

    def _shown(self, driver: str) -> Credentials:
        return self._credentials(driver)

    def _close_idle(self) -> None:
        before = time.monotonic() - IDLE_SECONDS
        with self._lock:
            idle = [name for name, way in self._ways.items() if way.used_at <= before]
            ways = [self._ways.pop(name) for name in idle]
        for way in ways:
            way.close()

    def _count(self, borrow: _Borrow, *, is_here: bool) -> None:
        with self.borrowed.lock:
            self.borrowed.bytes["same_agent" if is_here else "other_agent"] += borrow.bytes
            for answer in borrow.answers:
                if isinstance(answer, Miss):
                    self.borrowed.missed[answer] += 1
