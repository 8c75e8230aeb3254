"""Borrowing columns for a driver: the shard's slots are filled from those of a sibling's shard.

That shard may be here as well; then it is a copy in memory. Otherwise its agent is asked like by any
reader. Each column is checked by its seal: it is the one that was asked for, whole, or it is a miss. So
the lender has to be trusted with nothing, and what it costs is bounded: a borrow ends at its deadline.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from kvss_agent import native
from kvss_agent.client.connection import Credentials, Lost
from kvss_agent.client.requests import Pending, Requests
from kvss_agent.clock import FOREVER, Clock
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.wire import Lender, Tier, TierAnswer
from kvss_agent.limits.background import Background, Rate, Totals, Usual
from kvss_agent.shard import seal
from kvss_agent.shard.core import LEASE_SECONDS_MAX, Request, Serve, Verb, batches
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.own_member import OwnMember
from kvss_agent.shard.seal import Column, Header, Miss, Transfer

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
_NOWHERE: Final = memoryview(bytearray())

Answer = TierAnswer | Miss
Answers = tuple[Answer, ...]
Then = Callable[[Answers, tuple[int, ...]], None]


@dataclass(slots=True)
class Borrowed:
    """Since the start. Any thread may add to it."""

    bytes: Counter[str] = field(
        default_factory=Counter
    )  # from the "same_agent", or from an "other_agent"
    missed: Counter[str] = field(default_factory=Counter)  # columns, by Miss
    late: int = 0  # borrows that did not end in time
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Link:
    """To another agent. Whatever shards lend, it comes over the same links, and keeps to one budget."""

    def __init__(self, totals: Totals) -> None:
        self._rate = Rate()
        self._background = Background(
            self._rate,
            totals,
            piece_bytes=PIECE_BYTES,
            yields=YIELDS,
            yield_seconds_max=YIELD_SECONDS_MAX,
            measure=Usual(),
        )
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def background(self, bytes_per_second: int) -> Iterator[Background]:
        """By the budget of whoever asks, 0 for none: drivers may be told different ones. All wait for
        the bytes of all, each for as long as they take by its own budget."""
        with self._lock:
            self._rate.bytes_per_second = bytes_per_second or None
            yield self._background


class _Way:
    """To one shard of another agent, in the name of one driver."""

    def __init__(self, lender: Lender, credentials: Callable[[], Credentials], link: _Link) -> None:
        self.used_at = time.monotonic()
        self.bytes_per_second = lender.bytes_per_second
        self._link = link
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
            if there := self.opened():
                return there
            self.close()
            if time.monotonic() < self._away_until:
                raise Lost(f"{self._address} could not be reached a moment ago")
            try:
                address = Address.parse(self._address)
                self._requests = Requests(address, self._shard, self._credentials())
                native.follow(self._requests)
            except (Lost, ValueError) as error:
                self._away_until = time.monotonic() + AWAY_SECONDS
                raise error if isinstance(error, Lost) else Lost(str(error)) from error
            return self._requests
        finally:
            self._opening.release()

    def opened(self) -> Requests | None:
        """The same, if that waits for nobody."""
        there = self._requests
        return there if there and not there.connection.channel.has_ended else None

    def background(self) -> contextlib.AbstractContextManager[Background]:
        """What its pieces keep to."""
        return self._link.background(self.bytes_per_second)

    def close(self) -> None:
        if there := self._requests:
            there.close()


def _columns(piece_bytes: int, slot_bytes: int) -> int:
    """How many columns a piece has: with the last one it is as large. A batch of 256 KiB each, whose
    slots have a header as well, is one piece of 16 MiB and not one and a column more."""
    return -(-piece_bytes // slot_bytes)


class _FromAgent:
    """From a shard of another agent."""

    def __init__(self, way: _Way, requests: Requests, slot_bytes: int) -> None:
        self._way, self._requests = way, requests
        self._slot_bytes = slot_bytes
        self._ended = threading.Event()
        self._has_turn = False  # lost under the lock: until then nobody else uses the connection
        self._lock = threading.Lock()
        self._asked: Pending | None = None
        self._asked_at = 0.0
        self._columns_asked = 0

    def begin(self, sources: Sequence[int]) -> None:
        """Ask for the first piece of these slots, unless that has to wait: a lender takes a moment. Who
        begins ends it by `leave`."""
        way = self._way
        if way.turn.acquire(blocking=False):
            self._has_turn = True
            if not self._rest():
                with contextlib.suppress(Lost, struct.error):  # `fill` finds out
                    self._begin_piece()
                    self._asked = self._requests.begin_fill(sources[: self._columns_asked])
            if self._ended.is_set():
                self.hang_up()  # was too early

    def fill(
        self, sources: Sequence[int], columns: Sequence[Column], slots: Sequence[memoryview]
    ) -> Iterator[list[Header | Miss]]:
        """Bring columns from these sources to these slots and seal them there, piece by piece. Those
        without memory get nothing. Raises Lost and Breach."""
        way, at = self._way, 0
        while at < len(columns):
            with self._turn():
                if self._asked is None:
                    self._ended.wait(self._rest())
                    self._begin_piece()
                self._check_runs()
                end = at + self._columns_asked
                found = self._receive(sources[at:end], columns[at:end], slots[at:end])
                now = time.monotonic()
                size = sum(one.length for one in found if isinstance(one, Header))
                with way.background() as background:
                    background.moved(size, now - self._asked_at, now)
                way.used_at = now
            yield found
            at = end

    def _rest(self) -> float:
        """For how long to move nothing yet."""
        with self._way.background() as background:
            return background.rest(time.monotonic())

    def _begin_piece(self) -> None:
        with self._way.background() as background:
            self._columns_asked = _columns(background.piece(), self._slot_bytes)
        self._asked_at = time.monotonic()

    def _receive(
        self, sources: Sequence[int], columns: Sequence[Column], slots: Sequence[memoryview]
    ) -> list[Header | Miss]:
        """A piece that was asked for already, or is now. Raises Lost."""
        asked, self._asked = self._asked, None
        if asked:
            return self._requests.finish_fill(asked, columns, slots)
        return self._requests.fill(sources, columns, slots)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        while not self._has_turn and not self._way.turn.acquire(timeout=TURN_LOOK_SECONDS):
            self._check_runs()
        self._has_turn = True
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """The next one has its turn. What was asked and not received would come to that one, so it ends
        the connection."""
        with self._lock:
            if not self._has_turn:
                return
            if self._asked:
                self._requests.close()
            self._has_turn = False
            self._way.turn.release()

    def _check_runs(self) -> None:
        if self._ended.is_set():
            raise Lost("the borrow was given up")

    def hang_up(self) -> None:
        """Others read over the same connection: it ends only if it is this one's turn. Also for who is
        in the middle of sending to a lender that does not read."""
        self._ended.set()
        with self._lock:
            if self._has_turn:
                self._requests.close()


class _FromHere:
    """From a shard of this agent: under a lease, so that its memory stays."""

    def __init__(self, shard: HostedShard, driver: str) -> None:
        self._shard = shard
        self._member = OwnMember(shard, driver, lambda: None)

    def fill(
        self, sources: Sequence[int], columns: Sequence[Column], slots: Sequence[memoryview]
    ) -> Iterator[list[Header | Miss]]:
        shard, member = self._shard, self._member
        request = Request(Verb.REFILL, member.number, 1, 0, sources, 0.0, LEASE_SECONDS_MAX)
        with member.attached():
            serve = member.ask(request)
            if not isinstance(serve, Serve):
                raise Lost("the shard takes no more readers now")
            try:
                for piece in batches(
                    zip(serve.slots, slots, columns, strict=True),
                    _columns(PIECE_BYTES, shard.identity.slot_bytes),
                ):
                    if member.closed:
                        raise member.closed
                    yield self._fill(piece)
            finally:
                shard.done(serve.lease, member)

    def _fill(self, piece: Sequence[tuple[int | Miss, memoryview, Column]]) -> list[Header | Miss]:
        arena = self._shard.arena
        try:
            transfers = [
                Transfer(arena.slot(slot), into, column)
                for slot, into, column in piece
                if into and not isinstance(slot, Miss)
            ]
        except IndexError as error:
            raise Lost("the shard has ended") from error
        found = iter(seal.transfer_all(transfers, native.current()))
        return [
            slot if isinstance(slot, Miss) else next(found) if into else Miss.STALE
            for slot, into, _ in piece
        ]

    def leave(self) -> None:
        """There are no turns."""

    def hang_up(self) -> None:
        self._member.close(Cause.GONE, "the borrow was given up")


From = _FromAgent | _FromHere


def _from_agent(shard: HostedShard, way: _Way, requests: Requests) -> _FromAgent:
    """Raises Lost."""
    if requests.connection.welcome.slot_bytes != shard.identity.slot_bytes:
        raise Lost("the slots of the lender have another size")
    return _FromAgent(way, requests, shard.identity.slot_bytes)


def _no_thread() -> From:
    raise Lost("there can be no thread for it")


class _Borrow:
    """One request. `run` fills slots in a thread, until `give_up`."""

    def __init__(
        self, shard: HostedShard, asked: Tier, slots: Sequence[int | Miss], *, is_here: bool
    ) -> None:
        """`is_here`: the lender's shard is of this agent."""
        self.answers: list[Answer] = [slot if isinstance(slot, Miss) else Miss.LOST for slot in slots]
        self.bytes = 0
        self.is_here = is_here
        self.is_given_up = False
        self._shard, self._asked = shard, asked
        self._slots = {number: slot for number, slot in enumerate(slots) if not isinstance(slot, Miss)}
        self._purges = shard.purges  # that had begun before a lender was asked
        self._lock = threading.Lock()
        self._is_claimed = False
        self._from: From | None = None

    def claim(self) -> bool:
        """Whether the caller is to `run` it: the first one."""
        with self._lock:
            is_first, self._is_claimed = not self._is_claimed, True
            return is_first

    def begin(self, found: _FromAgent) -> None:
        """Ask before `run`, which fills slots from there then."""
        with self._lock:
            if self.is_given_up or not self._slots:
                return
            self._from = found
        found.begin([self._asked.columns[number].note for number in self._slots])

    def give_up(self) -> bool:
        """Whether slots may still be written to until `run` ends, which is soon then."""
        with self._lock:
            self.is_given_up = True
            if self._from is None:
                return False
        self._from.hang_up()
        return True

    def run(self, find: Callable[[], From]) -> None:
        """`find` may take a while. No slot is touched meanwhile."""
        try:
            if found := self._from or self._found(find):
                try:
                    self._fill(found)
                finally:
                    found.leave()
        except Exception:
            log.exception("A borrow from %s has failed", self._asked.lender)

    def _found(self, find: Callable[[], From]) -> From | None:
        """None if nothing can be borrowed, or it was given up meanwhile."""
        try:
            found = find()
        except Lost as error:
            log.debug("Nothing can be borrowed from %s: %s", self._asked.lender, error)
            return None
        with self._lock:
            if self.is_given_up:
                return None
            self._from = found
        return found

    def _fill(self, found: From) -> None:
        numbers = list(self._slots)
        slots = [self._opened(number, slot) for number, slot in self._slots.items()]
        asked = [self._asked.columns[number] for number in numbers]
        columns = [Column(one.key, one.tag, self._asked.after) for one in asked]
        # Then the lender may have sent this before it was purged itself, and no purge here has found it.
        is_purged = self._shard.purges != self._purges
        done = 0
        try:
            sources = [one.note for one in asked]
            for headers in found.fill(sources, columns, slots) if columns and not is_purged else ():
                for header in headers:
                    self._note(numbers[done], slots[done], header)
                    done += 1
        except (Lost, Breach) as error:
            log.debug("Nothing more is borrowed from %s: %s", self._asked.lender, error)
        finally:
            for number, slot in zip(numbers[done:], slots[done:], strict=True):
                self._note(number, slot, Miss.LOST)

    def _opened(self, number: int, slot: int) -> memoryview:
        """The slot for this column, open for it. Empty if it has to stay as it is; then it is known what
        to answer."""
        shard, after = self._shard, self._asked.after
        try:
            memory = shard.arena.slot(slot)
        except IndexError:  # the shard has ended
            return _NOWHERE
        if seal.open_unless_newer(memory, after, shard.core.accepted, self._asked.columns[number].tag):
            return memory
        self.answers[number] = Miss.STALE
        return _NOWHERE

    def _note(self, number: int, slot: memoryview, header: Header | Miss) -> None:
        """What became of a column. Of one that has not come, nothing stays."""
        if not isinstance(header, Miss):
            self.answers[number] = TierAnswer.DONE
            self.bytes += header.length
        elif slot:
            seal.clear(slot, self._asked.after, scrub=True)
            self.answers[number] = header


class Borrowing:
    """Each borrow has a thread, and is answered from there, or when its time is over. One piece from a
    shard of this agent is copied by the thread that asks: others would take as long to hand it over."""

    def __init__(
        self, shards: Mapping[str, HostedShard], credentials: Callable[[str], Credentials]
    ) -> None:
        """`shards`: of this agent. `credentials`: what is shown to other agents in a driver's name.
        Raises Lost if there are none."""
        self.borrowed = Borrowed()
        self.totals = Totals()
        self._shards = shards
        self._credentials = credentials
        self._ways: OrderedDict[tuple[str, str, str], _Way] = OrderedDict()
        self._links = WeakValueDictionary[str, _Link]()  # by address, as long as there are ways
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()  # threads, by driver
        self._unanswered: dict[_Borrow, tuple[float, Then]] = {}  # until when, by `time.monotonic`
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="borrow")
        self._clock = Clock(self._tick, "borrow clock")

    def start(self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...], then: Then) -> None:
        driver, lender = shard.identity.driver, asked.lender
        if lender is None:
            then(tuple(Miss.REFUSED for _ in slots), ())
            return
        here = self._shards.get(lender.shard)
        find = partial(self._find_here, shard, here) if here else partial(self._find, shard, lender)
        borrow = _Borrow(shard, asked, slots, is_here=here is not None)
        until = time.monotonic() + min(lender.seconds, SECONDS_MAX)
        with self._lock:
            is_full = self._running[driver] >= OF_DRIVER_AT_ONCE or self._running.total() >= AT_ONCE
            if not is_full:
                self._running[driver] += 1
                self._unanswered[borrow] = until, then
        if is_full:
            then(tuple(Miss.REFUSED for _ in slots), ())
            return
        if here and len(slots) <= _columns(PIECE_BYTES, shard.identity.slot_bytes):
            self._run(borrow, find, driver)
            return
        if here is None and (found := self._find_opened(shard, lender)):
            borrow.begin(found)
        try:
            self._threads.submit(self._run, borrow, find, driver)
        except RuntimeError:
            # Closed, or no thread can begin. One that is there already may come to it later.
            borrow.give_up()
            self._run(borrow, _no_thread, driver)
        else:
            self._clock.at(until)

    def close(self) -> None:
        with self._lock:
            ways = list(self._ways.values())
        for way in ways:
            way.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._clock.stop()

    def _run(self, borrow: _Borrow, find: Callable[[], From], driver: str) -> None:
        if not borrow.claim():
            return
        try:
            borrow.run(find)
        finally:
            with self._lock:  # a thread that hangs counts, also when its borrow was answered
                self._running[driver] -= 1
            self._answer(borrow)

    def _answer(self, borrow: _Borrow) -> None:
        """Once, by whoever comes first."""
        with self._lock:
            _, then = self._unanswered.pop(borrow, (0.0, None))
        if then is None:
            return
        self._count(borrow)
        then(tuple(borrow.answers), ())

    def _tick(self) -> float:
        """End what is late, and connections that nobody uses; when to come again."""
        now = time.monotonic()
        with self._lock:
            late = [borrow for borrow, (until, _) in self._unanswered.items() if until <= now]
            idle = [name for name, way in self._ways.items() if way.used_at + IDLE_SECONDS <= now]
            closing = [self._ways.pop(name) for name in idle]
        for way in closing:
            way.close()
        for borrow in late:
            self._end(borrow)
        with self._lock:
            ends = [until for borrow, (until, _) in self._unanswered.items() if not borrow.is_given_up]
            ends += [way.used_at + IDLE_SECONDS for way in self._ways.values()]
        return min(ends, default=FOREVER)

    def _end(self, borrow: _Borrow) -> None:
        """Its time is over. If it is writing to slots, its thread answers, soon."""
        if borrow.is_given_up:
            return
        self.borrowed.late += 1
        if not borrow.give_up():
            self._answer(borrow)

    def _find_here(self, shard: HostedShard, lender: HostedShard) -> From:
        """Raises Lost."""
        if lender.identity.slot_bytes != shard.identity.slot_bytes:
            raise Lost("the slots of the lender have another size")
        return _FromHere(lender, shard.identity.driver)

    def _find(self, shard: HostedShard, lender: Lender) -> _FromAgent:
        """Raises Lost."""
        way = self._way(lender, shard.identity.driver)
        return _from_agent(shard, way, way.requests())

    def _find_opened(self, shard: HostedShard, lender: Lender) -> _FromAgent | None:
        """The same, if there is a connection already."""
        way = self._way(lender, shard.identity.driver)
        requests = way.opened()
        try:
            return _from_agent(shard, way, requests) if requests else None
        except Lost:  # `_find` finds out
            return None

    def _way(self, lender: Lender, driver: str) -> _Way:
        name = lender.address, lender.shard, driver
        with self._lock:
            if (way := self._ways.get(name)) is None:
                if (link := self._links.get(lender.address)) is None:
                    link = self._links[lender.address] = _Link(self.totals)
                way = self._ways[name] = _Way(lender, partial(self._credentials, driver), link)
            self._ways.move_to_end(name)
            way.used_at = time.monotonic()
            way.bytes_per_second = lender.bytes_per_second
            least = self._ways.popitem(last=False)[1] if len(self._ways) > WAYS_MAX else None
        self._clock.at(way.used_at + IDLE_SECONDS)
        if least:
            least.close()
        return way

    def _count(self, borrow: _Borrow) -> None:
        with self.borrowed.lock:
            self.borrowed.bytes["same_agent" if borrow.is_here else "other_agent"] += borrow.bytes
            for answer in borrow.answers:
                if isinstance(answer, Miss):
                    self.borrowed.missed[answer] += 1
