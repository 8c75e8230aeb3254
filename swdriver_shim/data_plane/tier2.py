"""Transfers of columns between memory and tier 2, in threads of their own: carries out what the ledger
decides, on agents.

A lookup runs while the engine computes. What it finds is in memory then, for any request; what comes too
late for one request is there for the next.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, NamedTuple, TypeVar

from kvss_agent.client import TIER_SECONDS, Miss, Purged
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.lookup import Match
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason, Removal
from swdriver_shim.cache.recalls import Answer, Question, Recall, Search
from swdriver_shim.cache.request_log import HasKeys, PromptKeys
from swdriver_shim.cache.spills import Dates, Spill
from swdriver_shim.cache.tier2_deletes import TierDelete, TierPurge
from swdriver_shim.data_plane.break_even import BreakEven, LinearFit
from swdriver_shim.data_plane.calendar import Calendar, Offsets
from swdriver_shim.data_plane.shard.columns import RecallColumn, SpillColumn
from swdriver_shim.data_plane.shard.control import ShardControl
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import Keys

log = logging.getLogger(__name__)

SEARCHES_AT_ONCE: Final = 16
SEARCHES_MAX: Final = 256  # with those that wait for their turn; more are not begun
SEARCHES_AHEAD_MAX: Final = 64  # of all searches, while a brain's request may begin another one
SPILLS_AT_ONCE: Final = 2
SPILL_COLUMNS: Final = 64  # at once
RESTORE_COLUMNS: Final = 64
DELETE_COLUMNS: Final = 256
THREADS_MAX: Final = 64
RETRY_SECONDS: Final = 0.2
AHEAD_SECONDS: Final = 5.0  # clocks of agents may be ahead by so much
_NOTE: Final = struct.Struct("<II")  # stored and used at: seconds since 1970
_NUMBER: Final = struct.Struct("<Q")
_REASONS: Final = {Miss.LOST: Reason.AGENT_LOST, Miss.ABSENT: Reason.DISPLACED}
_DAMAGED: Final = (Miss.TORN, Miss.STALE, Miss.FOREIGN, Miss.CORRUPT)

T = TypeVar("T")


def is_damage(miss: Miss) -> bool:
    return miss in _DAMAGED


def reason_of(miss: Miss) -> Reason:
    """Why the tokens of a column are missed whose bytes did not come from memory. Only damage is a
    refused seal, which pages on-call: over a slow path an evict may still be running, and an agent that
    was restarted, or is too busy, has nothing to return."""
    if is_damage(miss):
        return Reason.SEAL_REFUSED
    return Reason.WRITING if miss is Miss.LATE else Reason.AGENT_LOST


def warn_of_damage(misses: Iterable[Miss]) -> None:
    """Say which kinds of damage are among these, for who is woken by the reason."""
    if damage := sorted({miss for miss in misses if is_damage(miss)}):
        log.warning("Not what was stored, and not served: %s", ", ".join(damage))


class _Rest(NamedTuple):
    """A search for what a sibling does not lend of a prompt. All who seek it share one."""

    trail: PromptKeys
    is_over: threading.Event
    matches: list[Match]  # which hear why their tokens are missed


class _Coming(NamedTuple):
    """What a sibling lends of a prompt."""

    is_over: threading.Event
    then: list[_Rest]  # searches that wait for it


class Recomputing(Container[str]):
    """The orgs whose engines compute faster than tier 2 recalls. Each is looked at when it is asked
    for: there may be thousands, of which few have columns to copy."""

    def __init__(self, transfers: Tier2Transfers) -> None:
        self._transfers = transfers

    def __contains__(self, org: object) -> bool:
        return isinstance(org, str) and self._transfers.tokens_min(org) is None


class Tier2Transfers:
    """All methods may be called from any thread."""

    def __init__(
        self,
        ledger: Ledger,
        lock: FairLock,
        shards: Sequence[Sequence[ShardControl]],
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        on_change: Callable[[], None],
        is_served: Callable[[Keys], bool] = lambda _: True,
    ) -> None:
        """`lock` is the ledger's. `on_change` is called when there may be more to do in `keep_house`.
        `is_served`: whether the org is served with these keys, asked under the lock."""
        self.refilling, self.recalling = LinearFit(), LinearFit()
        self._paces: dict[str, BreakEven] = {}  # by org: one must not spoil it for the others
        self.data_keys: Mapping[str, bytes] = {}  # by org
        self.arrived = threading.Condition()  # something has come, or is not going to
        self._ledger = ledger
        ledger.on_drop(lambda org: self._paces.pop(org, None))
        self._lock = lock
        self.shards = shards
        self._clock = clock
        self._calendar = Calendar(wall_clock, clock)
        self._on_change = on_change
        self._is_served = is_served
        self._searching = 0
        self._coming: dict[bytes, _Coming] = {}  # from siblings, by the first missing column
        self._seekings: set[threading.Event] = set()
        self._spilling = 0
        self._is_promoting = False
        self._is_busy = False  # restoring, forgetting or purging
        self._turn = 0  # of those three
        count = min(THREADS_MAX, 2 * sum(map(len, shards)))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tier2")
        self._searches = ThreadPoolExecutor(SEARCHES_AT_ONCE, thread_name_prefix="search")
        self._works = ThreadPoolExecutor(SPILLS_AT_ONCE + 2, thread_name_prefix="carrier")

    def close(self) -> None:
        """Once the shards are closed: what is under way ends soon."""
        for pool in (self._searches, self._works, self._threads):
            pool.shutdown(cancel_futures=True)
        for seeking in list(self._seekings):  # those that never had their turn
            seeking.set()
        self._say_arrived()

    def pace(self, org: str) -> BreakEven:
        """Compares fetching from tier 2 with the computing of an org's engines."""
        pace = self._paces.get(org)
        if pace is None:
            pace = self._paces[org] = BreakEven([self.recalling, self.refilling], LinearFit())
        return pace

    @property
    def orgs_that_compute(self) -> list[str]:
        """The orgs whose engines have reported how long computing takes."""
        return [org for org, pace in self._paces.items() if pace.computing.count]

    def tokens_min(self, org: str) -> int | None:
        """From how many tokens on it is faster to bring them back than to compute them; None for
        never."""
        layout = self._ledger.layout
        return self.pace(org).tokens_min(layout.token_bytes, layout.state_bytes)

    # Back

    def seek(
        self, trail: HasKeys, start: int, match: Match | None = None, most: int = SEARCHES_MAX
    ) -> threading.Event | None:
        """Bring what tier 2 has behind the first so many columns. Returns what is set when all that it
        has found is in memory; None if tier 2 is not asked, as while so many searches are running.

        The match, if there is one, hears why its tokens are missed.
        """
        with self._lock:
            coming = self._coming.get(trail.keys[start]) if start < len(trail.keys) else None
            for rest in coming.then if coming else ():
                if rest.trail.keys == trail.keys:
                    rest.matches.extend([match] if match else [])
                    return rest.is_over
            if self._searching >= most:
                return coming.is_over if coming else None
            search = self._ledger.tier2.search(trail, start, self._clock())
            if search is None:
                return coming.is_over if coming else None
            trail = PromptKeys(trail.maker, list(trail.keys))  # a prompt goes on meanwhile
            self._searching += 1
            seeking = threading.Event()
            self._seekings.add(seeking)
            matches = [match] if match else []
            if coming:  # tier 2 is asked for what is missing then
                coming.then.append(_Rest(trail, seeking, matches))
            else:
                self._searches.submit(self._do_search, trail, search, seeking, matches)
            return seeking

    def is_coming(self, first: bytes) -> bool:
        """Whether a prompt is on its way from a sibling whose first missing column this is. The caller
        holds the lock."""
        return first in self._coming

    def is_to_come(self, first: bytes) -> None:
        """From now on; who seeks it waits until `has_come`. The caller holds the lock."""
        self._coming[first] = _Coming(threading.Event(), [])

    def has_come(self, first: bytes) -> None:
        """Or is not going to."""
        with self._lock:
            coming = self._coming.pop(first)
        coming.is_over.set()
        self._say_arrived()
        with contextlib.suppress(RuntimeError):  # it is closed
            for rest in coming.then:
                self._searches.submit(self._seek_rest, *rest)

    def look(self, trail: HasKeys, start: int) -> list[set[int]]:
        """By group, the columns behind the first so many that would be brought back from tier 2."""
        with self._lock:
            search = self._ledger.tier2.search(trail, start, self._clock())
        return self._answered(trail, search) if search else [set() for _ in self.shards]

    def _seek_rest(self, trail: HasKeys, seeking: threading.Event, matches: Sequence[Match]) -> None:
        with self._lock:
            now = self._clock()
            search = self._ledger.tier2.search(trail, self._ledger.tier2.has(trail, now), now)
        self._do_search(trail, search, seeking, matches)

    def _do_search(
        self,
        trail: HasKeys,
        search: Search | None,
        seeking: threading.Event,
        matches: Sequence[Match],
    ) -> None:
        try:
            there = self._answered(trail, search) if search else []
            if any(there):
                self._bring(trail, there, matches)
        except Exception:
            log.exception("A look-up in tier 2 has failed")
        finally:
            with self._lock:
                self._searching -= 1
            self._seekings.discard(seeking)
            seeking.set()
            self._say_arrived()

    def _answered(self, trail: HasKeys, search: Search) -> list[set[int]]:
        try:
            question = next(search)
            while True:
                question = search.send(self._ask(trail, question))
        except StopIteration as ended:
            there: list[set[int]] = ended.value
            return there

    def _ask(self, trail: HasKeys, question: Question) -> Answer:
        """A column is there if every shard has its part."""
        tag = trail.maker.tag

        def ask(group: int, shard: ShardControl) -> list[bool]:
            return shard.exists([(trail.keys[depth], tag) for depth in question[group]])

        found = self._on_each(ask, [group for group, depths in question.items() if depths])
        return {
            group: {
                depth for depth, there in zip(question[group], zip(*parts, strict=True), strict=True)
                if all(there)
            }
            for group, parts in found.items()
        }  # fmt: skip

    def _bring(self, trail: HasKeys, there: Sequence[set[int]], matches: Sequence[Match]) -> None:
        with self._lock:
            now = self._clock()
            tokens, size = self._ledger.tier2.gain(trail, there, now)
            recalls: list[Recall] = []
            if self.pace(trail.maker.org).is_worth_it(tokens, size, now):
                recalls = self._ledger.tier2.begin_recalls(trail, there, now)
            else:
                self._ledger.tier2.skip_recalls(trail, there)
            for match in matches:
                self._ledger.recount(match, now)
        self.carry_back(recalls, self._recalled)

    def carry_back(
        self, recalls: Sequence[Recall], fetch: Callable[[Recall], dict[Column, Dates | Reason]]
    ) -> bool:
        """One after the other: who waits can use the first while the next are on their way. Returns
        whether none has failed as a whole."""
        for place, recall in enumerate(recalls):
            found: dict[Column, Dates | Reason] = {}
            try:
                with self._lock:
                    is_wanted = self._ledger.tier2.start_recall(recall, self._clock())
                if is_wanted:
                    found = fetch(recall)
            finally:
                has_failed = len(found) < len(recall.places)  # as a whole, and so do the rest
                with self._lock:
                    for one in recalls[place:] if has_failed else [recall]:
                        self._ledger.tier2.finish_recall(one, self._clock(), found)
                self._say_arrived()
            if has_failed:
                return False
        return True

    def _recalled(self, recall: Recall) -> dict[Column, Dates | Reason]:
        began = time.perf_counter()
        data_key = self._data_key(recall.encrypted_for)
        if data_key is None:
            return {}
        with self._lock:
            groups: dict[int, list[tuple[Column, RecallColumn]]] = {}
            for column, slot in recall.places:
                back = RecallColumn(slot, column.key, recall.tag)
                groups.setdefault(column.group, []).append((column, back))

        def bring(group: int, shard: ShardControl) -> list[int | Miss]:
            return shard.recall([back for _, back in groups[group]], data_key)

        now, offset = self._clock(), self._offsets().most
        found: dict[Column, Dates | Reason] = {}
        size = 0
        for group, parts in self._on_each(bring, groups, recall.shards).items():
            for (column, _), notes in zip(groups[group], zip(*parts, strict=True), strict=True):
                found[column] = _dates(notes, offset, now)
                size += column.bytes
        if recall.shards is None:
            self.recalling.add(size, time.perf_counter() - began)
        return found

    def _offsets(self) -> Offsets:
        with self._lock:
            return self._calendar.offsets(self._ledger.tier2.ttl_seconds_max)

    def _say_arrived(self) -> None:
        with self.arrived:
            self.arrived.notify_all()

    # Housekeeping

    def keep_house(self) -> None:
        """Begin what there is to do, as far as not enough is under way. Returns at once."""
        with self._lock:
            now = self._clock()
            while self._spilling < SPILLS_AT_ONCE:
                spill = self._ledger.tier2.begin_spill(now, SPILL_COLUMNS, Recomputing(self))
                if spill is None:
                    break
                self._spilling += 1
                self._works.submit(self._spill, spill)
            self._begin_promotion(now)
            if self._is_busy:
                return
            for _ in range(3):  # in turns: what fails must not keep the others from being done
                self._turn = (self._turn + 1) % 3
                if self._turn == 0 and (recall := self._ledger.tier2.begin_restore(RESTORE_COLUMNS)):
                    self._submit(self._restore, recall)
                elif self._turn == 1 and (deletes := self._ledger.tier2.take_deletes(DELETE_COLUMNS)):
                    self._submit(self._delete, deletes)
                elif self._turn == 2 and (purge := self._ledger.tier2.take_purge()):
                    self._submit(self._purge, purge)
                else:
                    continue
                return

    def _begin_promotion(self, now: float) -> None:
        """Unless a request waits for tier 2. The caller holds the lock."""
        if self._is_promoting or self._searching:
            return
        prompt = self._ledger.tier2.next_promotion(now)
        if prompt is not None and self._may_promote(prompt, now):
            self._is_promoting = True
            self._works.submit(self._promote, prompt)

    def _promote(self, prompt: PromptKeys) -> None:
        """Recall some of a prompt that is expected soon; the rest has its turn in `keep_house`."""
        try:
            tier2, search, recalls = self._ledger.tier2, None, list[Recall]()
            exists: list[set[int]] = [set() for _ in self.shards]
            with self._lock:
                now = self._clock()
                if self._may_promote(prompt, now):
                    search = tier2.search(prompt, tier2.has(prompt, now), now)
            if search:
                exists = self._answered(prompt, search)
            with self._lock:
                now = self._clock()
                if self._may_promote(prompt, now):
                    tokens, size = tier2.gain(prompt, exists, now)
                    if not self.pace(prompt.maker.org).is_worth_it(tokens, size, now):
                        exists = [set() for _ in self.shards]
                    recalls = tier2.begin_promotion(prompt, exists, now)
            self.carry_back(recalls, self._recalled)
            with self._lock:
                tier2.hold_promoted(recalls, self._clock())
        except Exception:
            log.exception("A promotion from tier 2 has failed")
        finally:
            with self._lock:
                self._is_promoting = False
        self._on_change()

    def _may_promote(self, prompt: PromptKeys, now: float) -> bool:
        """The caller holds the lock."""
        return (
            not self._searching
            and self._is_served(prompt.maker)
            and self._ledger.tier2.is_promotion_wanted(prompt, now)
        )

    def _submit(self, work: Callable[[T], None], what: T) -> None:
        self._is_busy = True
        self._works.submit(self._do, work, what)

    def _do(self, work: Callable[[T], None], what: T) -> None:
        try:
            work(what)
        except Exception:
            log.exception("Something in tier 2 has failed")
        finally:
            with self._lock:
                self._is_busy = False
        self._on_change()

    def _restore(self, recall: Recall) -> None:
        self.carry_back([recall], self._recalled)

    def _spill(self, spill: Spill) -> None:
        kept: list[bool] = []
        try:
            kept = self._spilled(spill)
        except Exception:
            log.exception("Columns could not be copied to tier 2")
        finally:
            with self._lock:
                self._spilling -= 1
                self._ledger.tier2.finish_spill(spill, kept)
        self._on_change()

    def _spilled(self, spill: Spill) -> list[bool]:
        """For each whether all shards have copied their part."""
        offset = self._offsets().least
        places: dict[int, list[int]] = {}
        for place, one in enumerate(spill.copies):
            places.setdefault(one.group, []).append(place)
        kept = [False] * len(spill.copies)

        def copy(group: int, shard: ShardControl) -> list[bool]:
            mine = [spill.copies[place] for place in places[group]]
            if again := [(one.key, one.tag) for one in mine if one.again]:
                shard.delete(again)
            copied = [False] * len(mine)
            # One request for each key, and one for each way to store columns.
            for org, redundant in dict.fromkeys((one.encrypted_for, one.redundant) for one in mine):
                if self._ledger.tier2.seconds_left(spill, self._clock()) < 2 * TIER_SECONDS:
                    break  # it would be given up while it is copied
                data_key = self._data_key(org)
                its = [
                    place
                    for place, one in enumerate(mine)
                    if (one.encrypted_for, one.redundant) == (org, redundant)
                ]
                if data_key is None:
                    continue
                copies = [
                    SpillColumn(mine[at].slot, mine[at].key, mine[at].tag, _note(mine[at].dates, offset))
                    for at in its
                ]
                answers = shard.spill(copies, data_key, redundant=redundant)
                for at, is_kept in zip(its, answers, strict=True):
                    copied[at] = is_kept
            return copied

        for group, parts in self._on_each(copy, places).items():
            for place, copied in zip(places[group], zip(*parts, strict=True), strict=True):
                kept[place] = all(copied)
        return kept

    def _data_key(self, encrypted_for: str) -> bytes | None:
        """Of an org; none is needed in the clear. None if it was taken away."""
        return self.data_keys.get(encrypted_for) if encrypted_for else b""

    def _delete(self, deletes: Sequence[TierDelete]) -> None:
        keys = [(one.key, one.tag) for one in deletes]
        is_done = False
        try:
            gone = self._on_each(lambda _, shard: shard.delete(keys), [deletes[0].group])
            is_done = all(gone[deletes[0].group])
        finally:
            with self._lock:
                self._ledger.tier2.finish_deletes(deletes, is_done=is_done)
        self._pause(is_done)

    def _purge(self, purge: TierPurge) -> None:
        gone: list[Purged | None] = []
        is_done = False
        try:
            for tag in purge.tags:
                gone += self._purged(tag, purge.removal)
            is_done = None not in gone
        finally:
            with self._lock:
                purge.removal.files += sum(one.files for one in gone if one)
                purge.removal.file_bytes += sum(one.bytes for one in gone if one)
                self._ledger.tier2.finish_purge(purge, is_done=is_done)
        self._pause(is_done)

    def _purged(self, tag: bytes, removal: Removal) -> list[Purged | None]:
        """What each shard had of this tag; None where some may be left."""

        def empty(_: int, shard: ShardControl) -> Purged | None:
            gone = shard.purge(tag)
            if gone:
                with self._lock:
                    removal.confirmed[shard.name] = self._clock()
            return gone

        return [one for of in self._on_each(empty, range(len(self.shards))).values() for one in of]

    def _pause(self, is_done: bool) -> None:  # noqa: FBT001
        """What could not be done is tried again, and not in a hurry."""
        if not is_done:
            time.sleep(RETRY_SECONDS)

    def _on_each(
        self,
        work: Callable[[int, ShardControl], T],
        groups: Iterable[int],
        shards: frozenset[int] | None = None,
    ) -> dict[int, list[T]]:
        """Do this for each shard of these groups at the same time; what came of it, by group."""
        return on_each(
            self._threads, self.shards, lambda group, _, shard: work(group, shard), groups, shards
        )


def on_each(
    threads: ThreadPoolExecutor,
    shards: Sequence[Sequence[ShardControl]],
    work: Callable[[int, int, ShardControl], T],
    groups: Iterable[int],
    only: frozenset[int] | None = None,
) -> dict[int, list[T]]:
    """Do this in these threads for each shard of these groups, with its group and place; what came of
    it, by group."""
    futures = {
        group: [
            threads.submit(work, group, index, shard)
            for index, shard in enumerate(shards[group])
            if only is None or index in only
        ]
        for group in groups
    }
    wait([future for of in futures.values() for future in of])
    return {group: [future.result() for future in of] for group, of in futures.items()}


def _note(dates: Dates, offset: float) -> int:
    """What tier 2 keeps of a column's dates: those of the calendar, which outlive this process. Whole
    seconds, downwards: a copy rather expires early, and what was stored in the second of a purge counts
    as purged when it comes back."""
    seconds = [min(max(0, int(at + offset)), 2**32 - 1) for at in dates]
    (note,) = _NUMBER.unpack(_NOTE.pack(*seconds))
    return int(note)


def _dates(notes: Sequence[int | Miss], offset: float, now: float) -> Dates | Reason:
    """The earliest of all shards', or why it has not come."""
    stored_at, used_at = [], []
    for note in notes:
        if isinstance(note, Miss):
            damaged = Reason.SEAL_REFUSED if is_damage(note) else Reason.TIER2_LATE
            return _REASONS.get(note, damaged)
        stored, used = _NOTE.unpack(_NUMBER.pack(note))
        stored_at.append(stored - offset)
        used_at.append(used - offset)
    if max(*stored_at, *used_at) > now + AHEAD_SECONDS:
        return Reason.EXPIRED  # as far as anybody can tell: the calendar has been put back
    return Dates(min(stored_at), min(used_at))
