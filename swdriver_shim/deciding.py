"""The driver without bytes: the ledger, what keeps it in step with agents, and what can be asked of it.

An engine that decides in one process and moves bytes in others has a `Decider` there, over stand-ins of
the `Shard`s that its workers hold (`halves`), and tells it how each move went:

    asked = driver.begin_load(prompt)     # asked.match: slots to refill from, which stay as they are
    driver.end_load(asked, came)          # what was not as it should be is not served again
    store = driver.begin_store(prompt, verified)     # store.places: slots to evict to
    driver.end_store(store, failed)

`Driver` is one that moves bytes itself. No exception of an agent reaches the engine: what cannot be had
is a miss with its reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kvss_agent.client import Miss
from kvss_agent.data_plane.wire import DATA_KEY_BYTES
from kvss_agent.shard.core import BATCH_MAX
from swdriver_shim.cache import missing, resuming
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.matching import Match
from swdriver_shim.cache.missing import ColumnState
from swdriver_shim.cache.prefix_map import Column, Expired
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.remembered import Remembered
from swdriver_shim.cache.removal import Removal
from swdriver_shim.cache.resuming import LedgerNote
from swdriver_shim.cache.slots import Place
from swdriver_shim.cache.storing import Store
from swdriver_shim.cache.trails import Trail
from swdriver_shim.data_plane.break_even import BreakEven
from swdriver_shim.data_plane.shard.control import ShardControl
from swdriver_shim.data_plane.tier2 import Tier2Lookup, Tier2Transfers, is_damage, reason_of
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, DisplacementName, OrgPolicies, Rules
from telemetry.histogram import Histogram

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS: Final = 0.2
CLEARS_AT_ONCE: Final = 64
PURGES_MAX: Final = 4096  # of tags whose figures are kept
THREADS_MAX: Final = 32

T = TypeVar("T")
Permit = Callable[[], bool]  # whether whoever asked still may. Asked when the effect is had


def always() -> bool:
    """Nobody can be refused any more."""
    return True


class Notes(NamedTuple):
    """A directory, and the keys of orgs that are served, by namespace."""

    directory: Path
    keys: Callable[[str, Namespace], Keys | None]

    @property
    def path(self) -> Path:
        return self.directory / resuming.NAME


class Asked(NamedTuple):
    """A prompt that is being loaded: what of it is in memory, and a look-up in tier 2 for the rest."""

    match: Match
    seeking: Tier2Lookup | None

    @property
    def coming(self) -> int:
        """So many tokens more may be there soon."""
        match, is_known = self.match, self.seeking is None or self.seeking.done.is_set()
        return match.coming if is_known else match.asked - max(match.tokens, match.had)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was removed from memory and from tier 2, where each shard's part of a column is a file; and
    after how many seconds each shard had removed the last of it. `done` when all have."""

    columns: int
    bytes: int
    tier2_files: int
    tier2_bytes: int
    done: bool
    confirmed: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GroupState:
    name: str
    slots: int
    used: int
    free: int


@dataclass(frozen=True, slots=True)
class OrgState:
    """Tokens since the start, but for `bytes`, which is now. `hit_rate` is None without traffic."""

    org: str
    bytes: int
    requests: int
    requested_tokens: int
    hit_tokens: Mapping[str, int]  # by tier
    missed_tokens: Mapping[str, int]  # by reason
    hit_rate: float | None
    expired: Expired


@dataclass(frozen=True, slots=True)
class Worth:
    """From how many tokens on a refill is worth it; 0 while too little was measured, None for never."""

    dram_tokens_min: int | None
    tier2_tokens_min: int | None


class Moved:
    """What has gone out and come back of an org, and how long it took: all columns of a request
    together, over all shards."""

    def __init__(self) -> None:
        self.evict, self.refill = Histogram(), Histogram()
        self.evicted_bytes = self.refilled_bytes = self.failed_columns = 0


class Decider:
    """All methods may be called from any thread."""

    def __init__(
        self,
        layout: Layout,
        model: str,
        shards: Sequence[Sequence[ShardControl]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        notes: Notes | None = None,
    ) -> None:
        """`shards` of each group, in the layout's order. `notes`: to go on with what an earlier life has
        left, and to leave what the next one goes on with."""
        if [len(group.bytes_per_token) for group in layout.groups] != [len(of) for of in shards]:
            raise ValueError("there is one shard for each that the layout names")
        self.layout = layout
        self.ledger = Ledger(layout, model)
        self._keepers = shards
        self._lives = [[0] * len(of) for of in shards]
        self._clock = clock
        self._lock = threading.Lock()
        self._moves = 0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._housekept = threading.Condition()
        count = min(THREADS_MAX, sum(map(len, shards)))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="shard")
        self._carrier = Tier2Transfers(
            self.ledger, self._lock, shards, clock=clock, wall_clock=wall_clock, on_change=self._wake.set
        )
        self._paces: dict[str, BreakEven] = {}  # of refills, by org
        self._moved: dict[str, Moved] = {}  # by org
        self._purges: dict[bytes, Removal] = {}  # of tags that are nobody's any more
        self._served: Mapping[str, bytes] | None = None  # tags by org; None: nobody has said so
        self._emptiers = ThreadPoolExecutor(count, thread_name_prefix="former homes")
        self._emptying: set[str] = set()  # shards
        for shard in self._all:
            shard.on_change = self._wake.set
        self._wall_clock = wall_clock
        self._notes = notes
        self._unknown: dict[int, list[int]] = {}  # slots to be emptied before anything is served
        if notes:
            self._go_on(notes)
        self._follow_shards()
        self._keeping = [
            threading.Thread(target=self._keep_house, name="housekeeping", daemon=True),
            threading.Thread(target=self._keep_sweeping, name="sweeping", daemon=True),
        ]
        for each in self._keeping:
            each.start()

    def close(self) -> None:
        """Who asks from here on is told that nothing is there."""
        self._stop.set()
        self._wake.set()
        for each in self._keeping:
            each.join()
        with self._lock:
            self.ledger.stock.reachable = False
        with self._housekept:
            self._housekept.notify_all()  # nothing more is going to be removed
        if self._notes:
            self._leave(self._notes)
        self._threads.shutdown()
        for shard in self._all:
            shard.close()
        self._emptiers.shutdown(cancel_futures=True)
        self._carrier.close()

    def _go_on(self, notes: Notes) -> None:
        """With what an earlier life has left. Without the ledger's note those of shards are worth
        nothing: nobody would know what is in their slots, and no purge would find it."""
        left = resuming.take(notes.path, LedgerNote)
        if left is None:
            for shard in self._all:
                (notes.directory / shard.name).unlink(missing_ok=True)
            return
        unknown = resuming.go_on(self.ledger.stock, left, notes.keys, self._clock(), self._wall_clock())
        self._unknown = {group: slots for group, slots in enumerate(unknown) if slots}

    def _leave(self, notes: Notes) -> None:
        with self._lock:
            if self._unknown:
                return  # it has never begun
            note = resuming.left_by(self.ledger.stock, self._clock(), self._wall_clock())
        try:
            resuming.write(notes.path, note)
        except OSError as error:
            log.warning("No note can be left for the next life: %s", error)

    @property
    def _all(self) -> list[ShardControl]:
        return [shard for of in self._keepers for shard in of]

    # Requests

    def query(self, prompt: Prompt) -> int:
        """How many tokens a load would give."""
        with self._lock:
            return self.ledger.query(prompt, self._clock())

    def begin_load(self, prompt: Prompt) -> Asked:
        """The longest prefix that is there. Its slots stay as they are until `end_load`, which has to
        follow; what tier 2 has of the rest is brought into memory meanwhile."""
        with self._lock:
            match = self.ledger.match(prompt, self._clock())
        try:
            seeking = None
            if match.tokens < prompt.tokens and self.is_served(prompt.maker):
                seeking = self._carrier.seek(prompt, match.tokens // COLUMN_TOKENS, match)
        except BaseException:
            with self._lock:
                self.ledger.release(match)
            raise
        return Asked(match, seeking)

    def again(self, asked: Asked, had: int | None = None) -> Asked:
        """What of the prompt is there by now; takes the place of what was there before, and `end_load`
        has to follow for this one only. `had`: so many tokens have been refilled."""
        match = asked.match
        with self._lock:
            return Asked(
                self.ledger.again(match, self._clock(), match.had if had is None else had),
                asked.seeking,
            )

    def leave_if_slower(self, match: Match) -> None:
        """A refill that takes longer than computing is not done."""
        new, size = match.tokens - match.had, sum(column.bytes for column in new_columns(match))
        with self._lock:
            if new > 0 and not self._pace(match.prompt.org).is_worth_it(new, size, self._clock()):
                self.ledger.shorten(match, match.had, Reason.NOT_WORTH_IT)

    def note_refill(self, match: Match, seconds: float) -> None:
        """All of it was refilled, which took so long."""
        if match.tokens > match.had:
            size = sum(column.bytes for column in new_columns(match))
            with self._lock:
                self._carrier.refilling.add(size, seconds)
                moved = self._moved_of(match.prompt.org)
                moved.refill.record(seconds)
                moved.refilled_bytes += size

    def refuse(self, refused: Mapping[Column, Miss]) -> Reason:
        """What is not as it should be is not served again; an agent that is lost may come back with
        everything. Why the rest of the prompt is missed, where nobody tries again."""
        with self._lock:
            if Miss.LOST in refused.values():
                self.ledger.stock.reachable = False
                self._wake.set()
                return Reason.AGENT_LOST
            for column, miss in refused.items():
                self.ledger.restoring.refuse(column, reason_of(miss))
        if damage := sorted({miss for miss in refused.values() if is_damage(miss)}):
            log.warning("Not what was stored, and not served: %s", ", ".join(damage))
        first = min(refused, key=lambda column: column.depth)
        return reason_of(refused[first])

    def end_load(self, asked: Asked, came: tuple[int, Reason] | None = None) -> None:
        """Nobody reads those slots any more. `came`: only so many tokens, and why the others were
        refused."""
        with self._lock:
            if came is not None:
                self.ledger.shorten(asked.match, *came)
            self.ledger.release(asked.match)
            self.ledger.remember(asked.match, self._clock())

    def begin_store(
        self,
        prompt: Prompt,
        verified: int,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        permit: Permit = always,
    ) -> Store:
        """Slots for what is not stored yet of the first so many tokens, which are verified. `end_store`
        has to follow. None if its org is gone or has another tag since the keys were made, or without
        `permit`."""
        with self._lock:
            if not (self.is_served(prompt.maker) and permit()):
                return Store([])
            return self.ledger.begin_store(prompt, verified, self._clock(), rules, first)

    def is_served(self, maker: Keys) -> bool:
        """Whether its org is here, with the tag that the keys were made for. Under the lock, where it
        has to stay so."""
        return self._served is None or self._served.get(maker.org) == maker.tag

    def end_store(
        self,
        store: Store,
        failed: Mapping[Column, Reason],
        seconds: float = 0.0,
        permit: Permit = always,
    ) -> bool:
        """Its columns are in their slots on every agent, but for those that failed. That took so long.
        Without `permit` none of them is served, and their slots are emptied. Whether there was one."""
        with self._lock:
            if not (may := permit()):
                failed = {column: Reason.PURGED for column, _ in store.places}
            self.ledger.finish_store(store, self._clock(), failed)
            if store.places:
                self._note_evict(store.places, failed, seconds)
            if self.ledger.spilling.is_short_of_room or not may:
                self._wake.set()
            return may

    def _note_evict(
        self, places: Sequence[Place], failed: Mapping[Column, Reason], seconds: float
    ) -> None:
        moved = self._moved_of(places[0].column.home.account.org)
        moved.failed_columns += len(failed)
        moved.evicted_bytes += sum(place.column.bytes for place in places if place.column not in failed)
        if len(failed) < len(places):
            moved.evict.record(seconds)

    def _moved_of(self, org: str) -> Moved:
        """Under the lock."""
        return self._moved.setdefault(org, Moved())

    def prefetch(self, org: str, continue_id: str) -> bool:
        """A conversation is about to go on: bring what tier 2 has of it into memory. Whether there is
        something to look for."""
        trail = self.ledger.stock.trails.find(org, continue_id)
        return trail is not None and self._carrier.seek(trail, 0) is not None

    def computed(self, org: str, tokens: int, seconds: float) -> None:
        """So many tokens of this org took the engine so long: what fetching its columns is held
        against."""
        with self._lock:
            self._carrier.pace(org).computing.add(tokens, seconds)

    def _on_each(self, work: Callable[[int, int], T], groups: Iterable[int]) -> dict[tuple[int, int], T]:
        """Do this for each shard of these groups, at the same time where there are several."""
        which = [
            (group, index) for group in sorted(groups) for index in range(len(self._keepers[group]))
        ]
        if len(which) == 1:
            return {which[0]: work(*which[0])}
        futures = {each: self._threads.submit(work, *each) for each in which}
        wait(futures.values())  # though one fails: the others are at the same slots and memory
        return {each: future.result() for each, future in futures.items()}

    # Verbs

    def set_policies(
        self, policies: Mapping[str, OrgPolicies], tags: Mapping[str, bytes] | None = None
    ) -> None:
        """They hold at once, and for what is stored already. `tags`: the isolation tags of orgs, to
        reach what lies in tier 2 of those that have asked for nothing yet. From then on nothing is
        stored under any other tag, whenever that was begun."""
        with self._lock:
            self._served = tags
            self.ledger.set_policies(policies, self._clock(), tags)
        self._wake.set()

    def set_data_keys(self, keys: Mapping[str, bytes]) -> None:
        """Of orgs whose columns are encrypted in tier 2: 32 bytes each. Without its key, what an org has
        there can't be read by anybody any more. Raises ValueError for what is no key."""
        for key in keys.values():
            if len(key) != DATA_KEY_BYTES:
                raise ValueError(f"a data key has {DATA_KEY_BYTES} bytes")
        with self._lock:
            self._carrier.data_keys = dict(keys)
            self.ledger.stock.orgs_with_keys = frozenset(keys)

    def set_displacement(self, org: str, name: DisplacementName) -> None:
        """What goes first of this org's, also of what is stored; until its policies are set again."""
        with self._lock:
            self.ledger.set_displacement(org, name, self._clock())

    def explain(self, prompt: Prompt) -> dict[str, list[ColumnState]]:
        """Group by group and column by column: what is there, until when, and why not. Asks tier 2."""
        with self._lock:
            now = self._clock()
            told = missing.explain(self.ledger.stock, prompt, now)
            tokens = self.ledger.query(prompt, now)
        return self._with_tier2(told, prompt, tokens // COLUMN_TOKENS)

    def explain_keys(self, trail: Trail) -> dict[str, list[ColumnState]]:
        """The same of whole columns whose tokens are not here."""
        with self._lock:
            told = missing.explain_keys(self.ledger.stock, trail, self._clock())
        ready = [takewhile(lambda one: one.state == "ready", columns) for columns in told.values()]
        return self._with_tier2(told, trail, min(sum(1 for _ in run) for run in ready))

    def _with_tier2(
        self, told: Mapping[str, list[ColumnState]], trail: Trail, start: int
    ) -> dict[str, list[ColumnState]]:
        there = self._carrier.look(trail, start)
        return {
            name: [
                replace(column, tier2=True) if depth in depths else column
                for depth, column in enumerate(columns)
            ]
            for (name, columns), depths in zip(told.items(), there, strict=True)
        }

    def remembered(self, org: str, request: str) -> tuple[Remembered, float] | None:
        """What became of a request, and how many seconds ago; None if it is too old, was never here, or
        its org has another secret since."""
        with self._lock:
            found = self.ledger.stock.requests.find(org, request)
            if found is None or not self.ledger.is_current(found.maker):
                return None
            return found, self._clock() - found.at

    def orgs_of_request(self, request: str) -> list[str]:
        with self._lock:
            return self.ledger.stock.requests.orgs_of(request)

    def newest_requests(self, org: str, most: int) -> list[tuple[Remembered, float]]:
        with self._lock:
            now = self._clock()
            return [(one, now - one.at) for one in self.ledger.stock.requests.newest(org, most)]

    def set_priority(self, prompt: Prompt, priority: int) -> int:
        with self._lock:
            return self.ledger.set_priority(prompt, priority, self._clock())

    def set_ttl(self, prompt: Prompt, seconds: int) -> int:
        with self._lock:
            return self.ledger.set_ttl(prompt, seconds)

    def delete(self, prompt: Prompt, *, shared: bool = False, seconds: float = 30) -> Receipt:
        """Remove a prompt as far as nobody else goes on from it; with `shared` all of it. Waits until
        every slot is empty, at most so long."""
        org, tag = prompt.org, prompt.maker.tag
        return self._removed(lambda: self.ledger.delete(prompt, shared=shared), seconds, org, tag)

    def purge(
        self,
        org: str,
        namespace: Namespace | None = None,
        *,
        tag: bytes | None = None,
        seconds: float = 30,
    ) -> Receipt:
        """Remove all of an org, or all of it in one namespace; from tier 2 always all of it. It is not
        found from here on; waits until nothing is left, at most so long.

        `tag`: the org's, needed for tier 2 if none of its prompts may have been here since the start.
        """
        return self._removed(lambda: self.ledger.purge(org, namespace, tag), seconds, org, tag)

    def start_purge(self, org: str, tag: bytes) -> None:
        """Remove all that carries this tag, which is not its org's any more. `finish_purge` waits."""
        with self._lock:
            self._purge_of(org, tag)
        self._wake.set()

    def finish_purge(self, org: str, tag: bytes, seconds: float) -> Receipt:
        """Wait until nothing is left of what carries this tag, at most so long. Asked again, it tells
        the same figures."""
        return self._removed(lambda: self._purge_of(org, tag), seconds, org, tag)

    def _purge_of(self, org: str, tag: bytes) -> Removal:
        """Under the lock: begun once. Nothing is stored under a tag that is nobody's (`begin_store`)."""
        found = self._purges.get(tag)
        if found is None:
            if len(self._purges) >= PURGES_MAX:
                del self._purges[next(iter(self._purges))]
            found = self._purges[tag] = self.ledger.purge_tag(org, tag)
        return found

    def _removed(
        self, begin: Callable[[], Removal], seconds: float, org: str, tag: bytes | None
    ) -> Receipt:
        began = self._clock()
        with self._lock:
            removal = begin()
            tags = self.ledger.stock.tags(org, tag)
        self._wake.set()
        with self._housekept:
            self._housekept.wait_for(lambda: removal.done or self._stop.is_set(), seconds)
        until = began + seconds
        is_done = (
            removal.done
            and not self._stop.is_set()
            and self._is_applied(until - self._clock())
            and self._is_here_only(tags, until)
        )
        with self._lock:
            confirmed = {name: at - began for name, at in removal.confirmed.items()}
            return Receipt(
                removal.columns,
                removal.bytes,
                removal.files,
                removal.file_bytes,
                is_done,
                confirmed,
            )

    def _is_applied(self, seconds: float) -> bool:
        """Whether agents have all that was evicted: what lies under it is there until then."""
        until = self._clock() + seconds  # in this thread: those of shards are for work, not for waiting
        return all(keeper.wait_applied(max(0.0, until - self._clock())) for keeper in self._all)

    def _is_here_only(self, tags: Collection[bytes], until: float) -> bool:
        """Wait until no home that a shard has left can have anything of these tags any more; of any, if
        there is none. What the ledger knew of is removed by now, and where it was read from. Homes may
        have more: what was there when it moved, and has been overwritten at the new one since."""

        def is_so() -> bool:
            return not any(
                shard.may_be_elsewhere(tag)
                for shard in self._all
                if shard.has_former_homes
                for tag in tags or (None,)
            )

        if is_so():
            return True
        self._wake.set()
        with self._housekept:
            self._housekept.wait_for(
                lambda: self._stop.is_set() or is_so(), max(0.0, until - self._clock())
            )
        return not self._stop.is_set() and is_so()

    # How it stands

    def groups(self) -> list[GroupState]:
        with self._lock:
            return [
                GroupState(group.name, pool.line, pool.used, pool.free)
                for group, pool in zip(self.layout.groups, self.ledger.slots.pools, strict=True)
            ]

    def orgs(self) -> list[OrgState]:
        """What each org has, asked for and got, so far."""
        with self._lock:
            return [
                OrgState(
                    org,
                    account.bytes,
                    account.tally.requests,
                    account.tally.requested,
                    dict(account.tally.hits),
                    {reason.value: count for reason, count in (+account.tally.missed).items()},
                    account.tally.hit_rate,
                    replace(account.expired),
                )
                for org, account in self.ledger.stock.accounts.items()
            ]

    def moved(self) -> dict[str, Moved]:
        """What has gone out and come back, by org. It goes on being counted."""
        with self._lock:
            return dict(self._moved)

    def worth(self) -> dict[str, Worth]:
        """From how many tokens on fetching is faster than computing, as measured: for each org whose
        engines have told what computing takes."""
        with self._lock:
            each = sum(sum(group.bytes_per_token) for group in self.layout.groups)
            return {
                org: Worth(self._pace(org).tokens_min(each), self._carrier.tokens_min(org))
                for org in self._carrier.orgs_that_compute
            }

    def _pace(self, org: str) -> BreakEven:
        """Of refills, against the computing of an org's engines."""
        pace = self._paces.get(org)
        if pace is None:
            computing = self._carrier.pace(org).computing
            pace = self._paces[org] = BreakEven([self._carrier.refilling], computing)
        return pace

    # Housekeeping

    def _keep_house(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(HOUSEKEEPING_SECONDS)
            self._wake.clear()
            try:
                self._follow_shards()
                until = self._clock() + HOUSEKEEPING_SECONDS
                while not self._stop.is_set() and self._a_little():
                    if self._clock() >= until:  # shards and tier 2 have their turn
                        self._wake.set()
                        break
                self._carrier.keep_house()
                self._empty_former_homes()
            except Exception:
                log.exception("Housekeeping has failed; it goes on")
                self._stop.wait(HOUSEKEEPING_SECONDS)  # and not in a hurry
            with self._housekept:
                self._housekept.notify_all()

    def _empty_former_homes(self) -> None:
        """Each shard's in a thread of its own: one that can't be reached holds up nothing else."""
        with self._lock:
            accounts = self.ledger.stock.accounts.values()
            scrub = any(account.policy.scrub for account in accounts)
        for shard in self._all:
            if shard.has_former_homes and shard.name not in self._emptying:
                self._emptying.add(shard.name)
                self._emptiers.submit(self._empty_homes_of, shard, scrub)

    def _empty_homes_of(self, shard: ShardControl, scrub: bool) -> None:  # noqa: FBT001
        try:
            shard.empty_former_homes(scrub=scrub)
        except Exception:
            log.exception("Homes that %s has left can't be emptied; they are tried again", shard.name)
        finally:
            self._emptying.discard(shard.name)
        with self._housekept:
            self._housekept.notify_all()

    def _keep_sweeping(self) -> None:
        """Apart from all that waits for shards: a slow path, or an agent that does not answer, makes no
        column outlive its time and no org exceed its quota."""
        while not self._stop.wait(HOUSEKEEPING_SECONDS):
            try:
                more = True
                while more and not self._stop.is_set():
                    with self._lock:
                        more = self.ledger.sweep(self._clock())
            except Exception:
                log.exception("Sweeping has failed; it goes on")

    def _a_little(self) -> bool:
        """Some of the long work; whether there is more. Requests come in between."""
        with self._lock:
            more = self.ledger.reclaim()
            clears = self.ledger.slots.take_clears(CLEARS_AT_ONCE)
        if clears:
            group, scrub = clears[0].group, clears[0].scrub
            slots = [clear.slot for clear in clears]

            def clear_there(of: int, index: int) -> float | None:
                is_done = self._keepers[of][index].clear(slots, scrub=scrub)
                return self._clock() if is_done else None

            removals = {id(clear.removal): clear.removal for clear in clears if clear.removal}.values()
            moments: dict[tuple[int, int], float | None] = {}
            is_done = False
            try:
                moments = self._on_each(clear_there, [group])
                is_done = None not in moments.values()
            finally:
                with self._lock:
                    for removal in removals:
                        for (of, index), at in moments.items():
                            if at is not None:
                                removal.confirmed[self._keepers[of][index].name] = at
                    (self.ledger.slots.cleared if is_done else self.ledger.slots.not_cleared)(clears)
            more |= is_done
            if any(removal.done for removal in removals):  # who waits for it does not wait for the rest
                with self._housekept:
                    self._housekept.notify_all()
        return more

    def _follow_shards(self) -> None:
        """Agents come, go, come back empty, and give more slots or fewer."""
        lost = [shard for shard in self._all if not shard.is_open]
        list(
            self._threads.map(lambda shard: shard.open(), lost)
        )  # at the same time: each may take seconds
        with self._lock:
            for group, shards in enumerate(self._keepers):
                lives = [shard.memory_resets for shard in shards]
                new = {at for at, life in enumerate(lives) if life != self._lives[group][at]}
                if new:
                    self._lives[group] = lives
                    self.ledger.restoring.lose(group, frozenset(new))
                lines = [shard.slots for shard in shards if shard.slots is not None]
                if len(lines) == len(shards) and min(lines) != self.ledger.slots.pools[group].line:
                    self.ledger.set_line(group, min(lines))
            if (moves := sum(shard.moves for shard in self._all)) != self._moves:
                self._moves = moves
                self.ledger.stock.purge_again()
        for group in list(self._unknown):
            self._empty(group)
        with self._lock:
            is_here = all(shard.slots is not None for shard in self._all)
            self.ledger.stock.reachable = is_here and not self._unknown

    def _empty(self, group: int) -> None:
        """The slots of which nobody knows what an earlier life has left in them."""
        slots, shards = self._unknown[group], self._keepers[group]
        if any(shard.slots is None for shard in shards):
            return
        while slots:
            some = slots[-BATCH_MAX:]
            if not all(shard.clear(some, scrub=False) for shard in shards):
                return
            del slots[-BATCH_MAX:]
        del self._unknown[group]


def is_new(column: Column, match: Match) -> bool:
    """Not refilled before: that ends in the middle of a column where a tail was."""
    return column.depth * COLUMN_TOKENS + column.tokens > match.had


def new_columns(match: Match) -> Iterator[Column]:
    return (column for hit in match.columns for column in hit if is_new(column, match))
