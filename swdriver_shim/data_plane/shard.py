"""The moving half of the driver: the bytes of one shard, in and out of the slots that the ledger chose.

One `Shard` for each worker and shard. It knows which evict wrote each slot, so that a refill gets just
those bytes, sealed, or a miss; and where each slot's bytes are, while the shard moves to another agent.
An agent that is lost costs misses and nothing else: no method raises because of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Protocol

from kvss_agent.client import (
    Column,
    Evict,
    Header,
    Lost,
    Miss,
    NotApplied,
    Purged,
    ShardClient,
    TierAnswer,
    Views,
    Wanted,
)
from kvss_agent.shard.core import BATCH_MAX
from swdriver_shim.cache.resuming import ShardNote, take, write
from swdriver_shim.data_plane.agent_control import PullResult
from swdriver_shim.data_plane.former_homes import TAGS_MAX, Connect, FormerHome, FormerHomes
from swdriver_shim.data_plane.paths import PathSpec, PathTraffic, TrafficCounter, path_between
from swdriver_shim.data_plane.slow_transfers import SlowestTransfers, SlowTransfer

log = logging.getLogger(__name__)

RECONNECT_SECONDS: Final = 1.0  # between attempts
PULL_SLOTS: Final = 64  # that move at once: evicts to them wait meanwhile
PULL_TRIES: Final = 5  # before what is left is given up
PULL_AGAIN_SECONDS: Final = 1.0  # after a pull that has failed
COUNT_MARGIN: Final = 1 << 32  # evicts until a move begins, after its new home was made

# Fetch these slots, all written once so many evicts are applied there. What is not done is tried again.
Pull = Callable[[Sequence[int], int], PullResult]


def _nobody() -> None:
    """Nobody has to be told."""


class EvictColumn(NamedTuple):
    """One column on its way out."""

    slot: int
    key: bytes
    tag: bytes
    tokens: int
    payload: memoryview


class RefillColumn(NamedTuple):
    """One column to be brought back, and where to."""

    slot: int
    key: bytes
    tag: bytes
    tokens: int
    into: memoryview


class SpillColumn(NamedTuple):
    """One column to be copied to tier 2, with a note that comes back with it."""

    slot: int
    key: bytes
    tag: bytes
    note: int


class RecallColumn(NamedTuple):
    """One column to be brought back from tier 2, into this slot."""

    slot: int
    key: bytes
    tag: bytes


class ViewColumn(NamedTuple):
    """One column to be read where it lies."""

    slot: int
    key: bytes
    tag: bytes
    tokens: int


class ShardControl(Protocol):
    """What whoever decides asks of a shard. No bytes of columns go through here, so that it may be a
    stand-in for a `Shard` in another process."""

    name: str
    on_line: Callable[[], None]

    @property
    def lost_because(self) -> str: ...
    @property
    def moves(self) -> int: ...
    @property
    def lives(self) -> int: ...
    @property
    def slots(self) -> int | None: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def count_from(self) -> int: ...
    @property
    def left_to_move(self) -> int: ...
    @property
    def carried(self) -> Sequence[PathTraffic]: ...
    @property
    def former_homes(self) -> list[str]: ...
    @property
    def has_former_homes(self) -> bool: ...

    def may_be_elsewhere(self, tag: bytes | None) -> bool: ...
    def empty_former_homes(self, *, scrub: bool) -> None: ...
    def open(self) -> bool: ...
    def clear(self, slots: Sequence[int], *, scrub: bool) -> bool: ...
    def kept(self, columns: Sequence[tuple[bytes, bytes]]) -> list[bool]: ...
    def spill(self, columns: Sequence[SpillColumn], data_key: bytes = b"") -> list[bool]: ...
    def recall(self, columns: Sequence[RecallColumn], data_key: bytes = b"") -> list[int | Miss]: ...
    def forget(self, columns: Sequence[tuple[bytes, bytes]]) -> bool: ...
    def purge(self, tag: bytes) -> Purged | None: ...
    def applied(self, seconds: float) -> bool: ...
    def close(self) -> None: ...


class ColumnViews:
    """Columns to be read where they lie, checked; nobody writes there until the end of the `with`."""

    def __init__(self, columns: list[memoryview | Miss], views: Sequence[Views]) -> None:
        self._columns = columns
        self._views = views

    def __enter__(self) -> list[memoryview | Miss]:
        return self._columns

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for views in self._views:
            views.release()


class Shard:
    """All methods may be called from any thread; evicts are taken one after the other."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        notes: Path | None = None,
        path: PathSpec | None = None,
        former: Sequence[Connect] = (),
    ) -> None:
        """`notes`: a directory where it leaves what its next life goes on with (`resuming`). `path`: how
        bytes get to where it is. `former`: homes that an earlier life may have left bytes at."""
        self.name = name
        self._note = notes / name if notes else None
        # Told, from any thread, when `slots` may have changed.
        self.on_line: Callable[[], None] = _nobody
        self.lost_because = "not connected yet"
        self.moves = 0  # to other homes
        self.lives = 0  # how often its memory was new: what was there before is gone
        self._connect = connect
        self._writing = threading.Lock()  # one evict or clear at a time, and none while its home changes
        self._lock = threading.RLock()  # never held while bytes move: refills wait for no evict
        self._client: ShardClient | None = None
        self._incarnation = b""
        self._tried_at = -RECONNECT_SECONDS
        self._written = array("Q")  # one more than the number of what wrote each slot; 0: unknown
        self._number = 0  # of the last evict to where it is now
        self._tally = TrafficCounter(path)
        self._slowest = SlowestTransfers()
        self._leaving: FormerHome | None = None  # where it moves away from
        self._old_path: PathSpec | None = None
        self._still_there: set[int] = set()  # slots whose bytes are at the old home
        self._pulling: frozenset[int] = frozenset()
        self._changed = threading.Condition(self._lock)
        self._tags: set[bytes] | None = None  # whose bytes may be at its home; None: anybody's
        self._former = FormerHomes(self._lock, self._clear_late)
        for place in former:
            self._former.add(FormerHome(place, None, b"", None, is_left=True))
        self._is_closed = threading.Event()

    @property
    def slots(self) -> int | None:
        """How many may be used; None while the agent is lost."""
        client = self._client
        return client.slots if client else None

    @property
    def is_open(self) -> bool:
        """As far as is known without asking the agent."""
        client = self._client
        return client is not None and client.lost is None

    @property
    def _old(self) -> ShardClient | None:
        """The home that it moves away from, while that is there."""
        return self._leaving.client if self._leaving else None

    # Its home

    def open(self) -> bool:
        """Connect if we are not connected; whether we are. Tries again no sooner than after a while.

        Requests never wait for this: it is for whoever keeps house.
        """
        client = self._client
        if client and client.lost:
            self._lose(client, client.lost)
        with self._lock:
            if self._client:
                return True
            if time.monotonic() < self._tried_at + RECONNECT_SECONDS:
                return False
            self._tried_at, connect = time.monotonic(), self._connect
        try:
            client = connect()
            if not self._incarnation and not self._goes_on_with(client):
                _empty(client)
        except Lost as error:
            self.lost_because = str(error)
            return False
        with self._writing:
            is_settled = self._settle_anew(client, connect)
        if not is_settled:
            client.close()
        self.on_line()
        return True

    def _goes_on_with(self, client: ShardClient) -> bool:
        """Whether its memory is as an earlier life has left it, to the last evict."""
        left = take(self._note, ShardNote) if self._note else None
        if left is None or (client.incarnation, client.applied) != (left.incarnation, left.applied):
            return False
        with self._lock:
            self._incarnation, self._written = left.incarnation, left.numbers
        return True

    def _settle_anew(self, client: ShardClient, connect: Connect) -> bool:
        """Evicts that were on their way when the connection broke never happened: what they were to
        overwrite still lies there, and nobody would know. False if it is lost again, or has moved."""
        with self._lock:
            if self._client or self._connect is not connect:
                return False
            never = []
            if client.incarnation == self._incarnation:
                # What is still at the home that is left was counted there.
                never = [
                    at
                    for at, written in enumerate(self._written)
                    if written - 1 > client.applied and at not in self._still_there
                ]
        try:
            if never and client.delete(never, scrub=True):
                return False
        except Lost as error:
            self.lost_because = str(error)
            return False
        with self._lock:
            for slot in never:
                self._written[slot] = 0
            self._settle(client)
        return True

    def _settle(self, client: ShardClient) -> None:
        if client.incarnation != self._incarnation:  # its memory is new, and empty
            self._written = array("Q", bytes(8 * client.slots))
            self._no_longer_there(set(self._still_there))  # with which numbers it was written is lost
            self._incarnation = client.incarnation
            self._tags = set()
            self.lives += 1
        client.on_line = client.on_lost = self._tell
        self._client, self._number, self.lost_because = client, client.applied, ""

    def _tell(self, *_: object) -> None:
        self.on_line()

    def _lose(self, client: ShardClient, error: Exception) -> None:
        with self._lock:
            if self._client is client:
                log.warning("Shard %s is lost: %s", self.name, error)
                self._client, self.lost_because = None, str(error)
            elif self._leaving and self._leaving.client is client:
                log.warning("The home that shard %s is leaving is lost: %s", self.name, error)
                self._leaving.client, self._leaving.reason = None, str(error)
        client.close()
        self.on_line()

    def close(self) -> None:
        self._is_closed.set()
        if self._note:
            self._leave(self._note)
        with self._lock:
            client, self._client, self._leaving = self._client, None, None
        if client:
            client.close()
        self._former.close()

    def _leave(self, note: Path) -> None:
        with self._writing, self._lock:
            client, is_whole = self._client, not self._still_there
            if client is None or not is_whole:
                return
            try:
                client.wait_applied(self._number)
                write(note, ShardNote(client.incarnation, client.applied, self._written.tobytes()))
            except (Lost, NotApplied, OSError) as error:
                log.warning("Shard %s can't leave a note for its next life: %s", self.name, error)

    # Bytes

    @property
    def carried(self) -> Sequence[PathTraffic]:
        """How many, by the paths that they took."""
        return self._tally.carried()

    def take_slowest(self) -> Sequence[SlowTransfer]:
        """The slowest transfers since the last time."""
        return self._slowest.take()

    def take(self, path: PathSpec | None) -> None:
        """From now on bytes get there on another path, though it is the same home."""
        self._tally.path = path

    def evict(self, columns: Sequence[EvictColumn], request: str = "") -> bool:
        """Put these, which are of one org, into their slots, in this order; False if the agent is
        lost. `request`: what they are for, where that has a name."""
        with self._writing:
            with self._lock:
                self._wait_for_pull(column.slot for column in columns)
                client = self._client
                if client is None:
                    return False
                self._reach(max(column.slot for column in columns))
                self._note_tag(columns[0].tag)
                path = self._tally.path
            began = time.perf_counter()
            try:
                last = client.evict_batch([Evict(*column) for column in columns])
            except Lost as error:
                self._lose(client, error)
                return False
            seconds = time.perf_counter() - began
            with self._lock:
                self._number = last
                for sequence, column in enumerate(columns, last - len(columns) + 1):
                    self._written[column.slot] = sequence + 1
                if self._leaving:
                    self._no_longer_there(column.slot for column in columns)
        size = sum([len(column.payload) for column in columns])
        self._tally.add(path, "out", size, seconds)
        self._slowest.note("out", seconds, columns, size, path, request)
        return True

    def refill(self, columns: Sequence[RefillColumn], request: str = "") -> list[Miss | None]:
        """Bring these, which are of one org, back, checked; a miss where that can't be, and then `into`
        may hold anything."""
        found = self.fetch(columns, request)
        return [_checked(answer, column) for answer, column in zip(found, columns, strict=True)]

    def fetch(self, columns: Sequence[RefillColumn], request: str = "") -> list[Header | Miss]:
        """The same where it is not known how much there is: their seals tell. What does not fit `into`
        is a miss."""
        with self._reading(columns) as (wanted, missing, by_home, paths):
            found: list[Header | Miss] = [*missing]
            for client, at in by_home.items():
                began = time.perf_counter()
                self._refill_from(client, at, wanted, columns, found)
                seconds = time.perf_counter() - began
                came = [one.length for place in at if not isinstance(one := found[place], Miss)]
                asked = [columns[place] for place in at]
                self._count_in(paths[client], seconds, asked, sum(came), request)
        return found

    @contextlib.contextmanager
    def _reading(
        self, columns: Sequence[RefillColumn] | Sequence[ViewColumn]
    ) -> Iterator[
        tuple[
            list[Wanted],
            list[Miss],
            dict[ShardClient, list[int]],
            dict[ShardClient | None, PathSpec | None],
        ]
    ]:
        """What to ask for, why not where nobody can be asked, which of them to ask whom for, and on
        which path they come from there. No home is left meanwhile."""
        with self._lock:
            self._reach(max((column.slot for column in columns), default=0))
            left = (
                self._old or self._client
            )  # which, without an old home, has nothing there, or has it now
            homes = [left if one.slot in self._still_there else self._client for one in columns]
            wanted = [self._wanted(one.slot, one.key, one.tag) for one in columns]
            clients = frozenset(home for home in homes if home)
            reading = self._former.begin_reading(clients)
            paths = {self._old: self._old_path, self._client: self._tally.path}
        by_home: dict[ShardClient, list[int]] = {}
        for place, (home, one) in enumerate(zip(homes, wanted, strict=True)):
            if home and one.column.sequence >= 0:
                by_home.setdefault(home, []).append(place)
        try:
            yield wanted, [Miss.ABSENT if home else Miss.LOST for home in homes], by_home, paths
        finally:
            self._former.end_reading(reading)

    def _refill_from(
        self,
        client: ShardClient,
        at: Sequence[int],
        wanted: Sequence[Wanted],
        columns: Sequence[RefillColumn],
        found: list[Header | Miss],
    ) -> None:
        answers: Sequence[Header | Miss]
        try:
            answers = client.refill([wanted[i] for i in at], [columns[i].into for i in at])
        except Lost as error:
            self._lose(client, error)
            answers = [Miss.LOST] * len(at)
        except ValueError:  # where memory is shared: one of them is too large, and the others are not
            if len(at) > 1:
                for index in at:
                    self._refill_from(client, [index], wanted, columns, found)
                return
            answers = [Miss.CORRUPT]
        for index, answer in zip(at, answers, strict=True):
            found[index] = answer

    def view(self, columns: Sequence[ViewColumn], request: str = "") -> ColumnViews:
        """The same to read in place, where the transport can."""
        views: list[Views] = []
        with self._reading(columns) as (wanted, missing, by_home, paths):
            found: list[memoryview | Miss] = [*missing]
            for client, at in by_home.items():
                began = time.perf_counter()
                try:
                    views.append(client.view([wanted[i] for i in at]))
                except Lost as error:
                    self._lose(client, error)
                    answers: Sequence[memoryview | Miss] = [Miss.LOST] * len(at)
                else:
                    answers, seconds = views[-1].columns, time.perf_counter() - began
                    came = [len(one) for one in answers if not isinstance(one, Miss)]
                    asked = [columns[i] for i in at]
                    self._count_in(paths[client], seconds, asked, sum(came), request)
                for index, answer in zip(at, answers, strict=True):
                    found[index] = answer
        # What is leased stays mapped though the home change from here on: its views hold the memory.
        return ColumnViews(found, views)

    def _count_in(
        self,
        path: PathSpec | None,
        seconds: float,
        columns: Sequence[RefillColumn] | Sequence[ViewColumn],
        size: int,
        request: str,
    ) -> None:
        if size:
            self._tally.add(path, "in", size, seconds)
            self._slowest.note("in", seconds, columns, size, path, request)

    def clear(self, slots: Sequence[int], *, scrub: bool) -> bool:
        """Empty these slots where their bytes are read from; whether that is done. What other homes may
        have of them is `may_be_elsewhere`."""
        with self._writing:
            return self._clear(slots, scrub=scrub)

    def _clear(self, slots: Sequence[int], *, scrub: bool) -> bool:
        with self._lock:
            self._wait_for_pull(slots)
            client, old = self._client, self._old
            if client is None:
                return False
        # It has them all, also those that have been pulled or evicted anew, and goes first: a pull that
        # is under way brings nothing from there then.
        if old and not self._clear_old(old, slots, scrub=scrub):
            return False
        try:
            if client.delete(list(slots), scrub=scrub):
                return False
        except Lost as error:
            self._lose(client, error)
            return False
        with self._lock:
            if self._old is not old or old is None:
                self._no_longer_there(slots)
            for slot in slots:
                self._still_there.discard(slot)
                if slot < len(self._written):
                    self._written[slot] = 0
        return True

    def _clear_old(self, old: ShardClient, slots: Sequence[int], *, scrub: bool) -> bool:
        try:
            if old.delete(list(slots), scrub=scrub):
                return False
        except Lost as error:
            self._lose(old, error)  # what it has is a matter of the homes that are left
            return True
        with self._lock:
            if self._leaving:
                self._former.emptied_there(self._leaving, slots)
        return True

    # Tier 2

    def kept(self, columns: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Which of these, by key and tag, tier 2 has."""
        client = self._client
        if client is None:
            return [False] * len(columns)
        try:
            return client.exists([Column(key, tag, 0) for key, tag in columns])
        except Lost as error:
            self._lose(client, error)
            return [False] * len(columns)

    def spill(self, columns: Sequence[SpillColumn], data_key: bytes = b"") -> list[bool]:
        """Copy these to tier 2, encrypted if there is a key; whether it has them now."""
        with self._lock:
            self._reach(max(column.slot for column in columns))
            wanted = [self._wanted(one.slot, one.key, one.tag) for one in columns]
            mine = [
                place
                for place, one in enumerate(wanted)
                if one.slot not in self._still_there and one.column.sequence >= 0
            ]
            client = self._client
        kept = [False] * len(columns)
        if client is None or not mine:
            return kept
        try:
            answers = client.spill(
                [wanted[place] for place in mine],
                notes=[columns[place].note for place in mine],
                data_key=data_key,
            )
        except Lost as error:
            self._lose(client, error)
            return kept
        for place, answer in zip(mine, answers, strict=True):
            kept[place] = answer in (TierAnswer.DONE, TierAnswer.ALREADY)
        return kept

    def recall(self, columns: Sequence[RecallColumn], data_key: bytes = b"") -> list[int | Miss]:
        """Bring these back from tier 2 into their slots, which nobody uses: their notes, or why not."""
        with self._lock:
            self._wait_for_pull(column.slot for column in columns)
            self._reach(max(column.slot for column in columns))
            client = self._client
            if self._leaving:  # what lay there is nobody's any more: it is not pulled, either
                self._no_longer_there(column.slot for column in columns)
            for one in columns:
                self._written[one.slot] = 0
                self._note_tag(one.tag)
        if client is None:
            return [Miss.LOST] * len(columns)
        try:
            wanted = [Wanted(one.slot, Column(one.key, one.tag, 0)) for one in columns]
            found = client.recall(wanted, data_key=data_key)
        except Lost as error:
            self._lose(client, error)
            return [Miss.LOST] * len(columns)
        answers: list[int | Miss] = []
        with self._lock:
            if self._client is not client:  # lost or moved meanwhile: what came is not where we are now
                return [Miss.LOST] * len(columns)
            for one, answer in zip(columns, found, strict=True):
                if not isinstance(answer, Miss):
                    self._written[one.slot] = answer.number + 1
                answers.append(answer if isinstance(answer, Miss) else answer.note)
        return answers

    def forget(self, columns: Sequence[tuple[bytes, bytes]]) -> bool:
        """Remove these, by key and tag, from tier 2; whether they are gone."""
        client = self._client
        if client is None:
            return False
        try:
            answers = client.forget([Column(key, tag, 0) for key, tag in columns])
        except Lost as error:
            self._lose(client, error)
            return False
        return all(answer is TierAnswer.DONE for answer in answers)

    def purge(self, tag: bytes) -> Purged | None:
        """Remove all of this tag from tier 2, in this shard's namespace; what that was, None if it is
        not done."""
        client = self._client
        if client is None:
            return None
        try:
            return client.purge(tag)
        except Lost as error:
            self._lose(client, error)
            return None

    def applied(self, seconds: float) -> bool:
        """Wait until the agent has applied all evicts so far; whether it has."""
        with self._lock:
            client, number = self._client, self._number
        if not client:
            return False
        try:
            client.wait_applied(number, seconds)
        except (Lost, NotApplied):
            return False
        return True

    @property
    def _last(self) -> int:
        """The number of the last evict whose bytes are still known."""
        return max(0, max(self._written, default=0) - 1)

    def _wanted(self, slot: int, key: bytes, tag: bytes) -> Wanted:
        """What lies in a slot, if it is this column."""
        return Wanted(slot, Column(key, tag, self._written[slot] - 1))

    def _reach(self, slot: int) -> None:
        """The shard may have grown."""
        if slot >= len(self._written):
            self._written.frombytes(bytes(8 * (slot + 1 - len(self._written))))

    # Moving to another agent

    @property
    def count_from(self) -> int:
        """The count that a new home has to begin with: above all evicts until the move begins, also
        those whose slots have been emptied since."""
        with self._lock:
            return max(self._last, self._number) + COUNT_MARGIN

    @property
    def left_to_move(self) -> int:
        return len(self._still_there)

    def move(self, connect: Connect, pull: Pull, path: PathSpec | None = None) -> bool:
        """Go on at another agent; False if it can't be reached, and nothing has changed.

        The shard has to be there, with a count of `count_from`. Evicts go to the new home from here on.
        Refills go where the bytes are, while `pull` has them moved, some slots at a time.
        """
        with self._former.emptying:
            try:
                client = connect()
                _empty(client)  # it may be a home that was left before, or another life's
            except Lost as error:
                log.warning("Shard %s can't move: %s", self.name, error)
                return False
            with self._writing:
                leaving, slots = self._go_on_at(client, connect, path)
                self.on_line()  # before anything is evicted there
        try:
            for at in range(0, len(slots), PULL_SLOTS):
                if not self._pull(leaving, slots[at : at + PULL_SLOTS], pull):
                    break
        finally:
            self._leave_for_good(leaving)
        return True

    def _go_on_at(
        self, client: ShardClient, connect: Connect, path: PathSpec | None
    ) -> tuple[FormerHome, list[int]]:
        """From here on its home is this one; which one it leaves, and the slots to be fetched there."""
        with self._lock:
            old, tags = self._client, self._tags
            leaving = FormerHome(
                self._connect, old, self._incarnation, frozenset(tags) if tags is not None else None
            )
            self._former.forget(connect)
            self._former.add(leaving)
            self._leaving, self._connect = leaving, connect
            self._old_path, self._tally.path = self._tally.path, path
            self.moves += 1
            slots: list[int] = []  # without an old home they are lost; tier 2 may have them
            if old:
                slots = [slot for slot, number in enumerate(self._written) if number]
                self._incarnation = client.incarnation  # its bytes are on their way
                self._still_there = set(slots)
                self._former.mark_stale(leaving, set(range(old.slots)) - self._still_there)
            self._settle(client)
            return leaving, slots

    def _pull(self, leaving: FormerHome, slots: Sequence[int], pull: Pull) -> bool:
        """Have what is still there of these fetched; whether that is done."""
        for _ in range(PULL_TRIES):
            with self._writing, self._lock:
                batch = [slot for slot in slots if slot in self._still_there]
                if not batch:
                    return True
                if self._old is None or self._is_closed.is_set():
                    return False
                self._pulling = frozenset(batch)
                after = max(self._written[slot] for slot in batch) - 1
            is_done = False
            try:
                is_done, size = pull(batch, after)
                self._tally.add(path_between(self._old_path, self._tally.path), "pull", size)
            finally:
                with self._lock:
                    if is_done:
                        self._no_longer_there(batch)
                    else:
                        leaving.unsure.update(batch)  # it may still be under way
                    self._pulling = frozenset()
                    self._changed.notify_all()
            if is_done:
                return True
            self._is_closed.wait(PULL_AGAIN_SECONDS)
        return False

    def _leave_for_good(self, leaving: FormerHome) -> None:
        """What has not come is not going to. What it has is emptied in housekeeping."""
        with self._lock:
            if self._still_there:
                log.warning("%d slots of %s could not be fetched", len(self._still_there), self.name)
                for slot in self._still_there:
                    self._written[slot] = 0
                self._still_there.clear()
                self.lives += not any(self._written)
            leaving.is_left = True
            self._leaving = None
        self.on_line()

    def _wait_for_pull(self, slots: Iterable[int]) -> None:
        """Under the lock. Nobody writes to slots while another agent fetches them."""
        while self._pulling and not self._pulling.isdisjoint(slots):
            self._changed.wait()

    # Homes that it has left

    @property
    def has_former_homes(self) -> bool:
        """Or is leaving one."""
        return bool(self._former)

    @property
    def former_homes(self) -> list[str]:
        """Those that are left and not known to be empty, for people."""
        return self._former.shown

    def may_be_elsewhere(self, tag: bytes | None) -> bool:
        """Whether another home may have something of this tag, or of any, that is not read from there
        any more."""
        return self._former.may_hold(tag)

    def empty_former_homes(self, *, scrub: bool) -> None:
        """As far as they can be reached. It may take long, and holds up nothing else."""
        self._former.empty(scrub=scrub)

    def forget_removed(self, addresses: Collection[str]) -> None:
        """Of all agents, these are no more, and nothing that was left there is."""
        self._former.removed = frozenset(addresses)

    def _no_longer_there(self, slots: Iterable[int]) -> None:
        """Under the lock. What these slots have at the home that it moves away from is not needed."""
        if self._leaving:
            slots = list(slots)
            self._still_there.difference_update(slots)
            self._former.mark_stale(self._leaving, slots)

    def _note_tag(self, tag: bytes) -> None:
        """Under the lock. Bytes of this tag are on their way to its home."""
        if self._tags is not None:
            self._tags.add(tag)
            if len(self._tags) > TAGS_MAX:
                self._tags = None

    def _clear_late(self, slots: Collection[int]) -> bool:
        """Empty these where nothing is known to be written: a pull may have come after they were."""
        with self._writing:
            with self._lock:
                self._wait_for_pull(slots)
                client, known = self._client, self._written
                late = [slot for slot in slots if slot >= len(known) or not known[slot]]
            if client is None:
                return not late
            try:
                for first in range(0, len(late), BATCH_MAX):
                    if client.delete(late[first : first + BATCH_MAX], scrub=True):
                        return False
            except Lost as error:
                self._lose(client, error)
                return False
        return True


def _empty(client: ShardClient) -> None:
    """What another driver, or this one in another life, has left there: nobody knows what it is, so that
    no purge would find it."""
    for first in range(0, client.slots, BATCH_MAX):
        slots = range(first, min(client.slots, first + BATCH_MAX))
        if client.delete(slots) is not None:
            client.close()
            raise Lost("its slots could not be emptied")


def _checked(answer: Header | Miss, column: RefillColumn) -> Miss | None:
    if isinstance(answer, Miss):
        return answer
    return None if answer.tokens == column.tokens else Miss.STALE
