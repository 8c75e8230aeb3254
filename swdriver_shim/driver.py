"""The whole driver in one process: a decider, and a `Shard` for each shard, which moves the bytes.

    driver = Driver(layout, "llama", shards)
    prompt = Keys("acme", secret, namespace).prompt(tokens)
    loaded = driver.load(prompt, into)          # compute what follows the first loaded.tokens
    prompt.extend(answer)
    driver.store(prompt, verified, read)

An engine that decides in one process and moves bytes in others has a `Decider`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvss_agent.client import Evict, Miss
from kvss_agent.shard.core import BATCH_MAX
from swdriver_shim.cache.lookup import Match
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import Place
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.shard.columns import RefillColumn
from swdriver_shim.decider.decider import Decider, Load, Permit, Snapshots, always, is_new
from swdriver_shim.keys import Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.object_store import ObjectStore
from swdriver_shim.policy import AS_USUAL, Rules

RETRIES: Final = 3  # of a load whose columns were refused
WAIT_SECONDS_MAX: Final = 0.05  # between two checks of what was recalled


class Part(Protocol):
    """The engine's memory for a column's part in one shard: read by a store, written by a load. Of a
    state group it is the state after the column's last token."""

    def __call__(self, group: int, shard: int, depth: int, tokens: int) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many tokens from the start were refilled, of those asked for. `pending`: how many more may
    follow soon."""

    tokens: int
    asked: int
    pending: int = 0


@dataclass(frozen=True, slots=True)
class ResumableLoad(Loaded):
    """A load that `Driver.load_more` can continue."""

    match: Match = field(kw_only=True, repr=False)
    lookup: threading.Event | None = field(kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Stored:
    """Columns that were evicted, their size, and columns that failed."""

    columns: int
    bytes: int
    failed: int

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.columns + other.columns, self.bytes + other.bytes, self.failed + other.failed)


class Driver(Decider):
    """All methods may be called from any thread."""

    def __init__(
        self,
        layout: Layout,
        model: str,
        shards: Sequence[Sequence[Shard]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`shards` of each group, in the layout's order. `snapshots` as in `Decider`, with the
        shards' in the same directory."""
        self._shards = shards
        super().__init__(layout, model, shards, clock=clock, wall_clock=wall_clock, snapshots=snapshots)
        self._objects: ObjectStore | None = None
        if layout.groups[0].alone:
            self._objects = ObjectStore(
                self.ledger,
                self._lock,
                shards[0],
                self._tier2,
                self._shard_threads,
                self.is_served,
                clock=clock,
                wake=self._wake,
            )

    @property
    def objects(self) -> ObjectStore:
        """For columns that stand alone. Raises ValueError for a layout of prefixes."""
        if self._objects is None:
            raise ValueError(
                "This driver keeps prefixes: for objects its layout has one group that is `alone`."
            )
        return self._objects

    @property
    def keeps_objects(self) -> bool:
        return self._objects is not None

    def load(self, prompt: Prompt, into: Part, *, seconds: float = 0.0) -> ResumableLoad:
        """Refill the longest cached prefix to where `into` says. Memory behind it may have any content
        then.

        The rest is recalled from tier 2 meanwhile. This waits at most so long; `load_more` continues
        while the engine computes.
        """
        return self._load(self.begin_load(prompt), into, seconds)

    def load_more(self, loaded: ResumableLoad, into: Part, *, seconds: float = 0.0) -> ResumableLoad:
        """Refill what was recalled since: `into` is called for columns behind `loaded.tokens` only."""
        load = self.rematch(Load(loaded.match, loaded.lookup), loaded.tokens)
        return self._load(load, into, seconds)

    def _load(self, load: Load, into: Part, seconds: float) -> ResumableLoad:
        used: tuple[int, Reason] | None = None
        try:
            if seconds > 0:
                load = self._wait(load, seconds)
            for _ in range(RETRIES):
                self.skip_if_slower(load.match)
                began = time.perf_counter()
                refused = self._refill(load.match, into)
                if not refused:
                    self.record_refill(load.match, time.perf_counter() - began)
                    break
                why = self.refuse(refused)
                load = self.rematch(load)
            else:
                used = 0, why
        finally:
            self.end_load(load, used)
        match = load.match
        there = max(match.tokens, match.refilled)
        return ResumableLoad(there, match.asked, load.pending, match=match, lookup=load.lookup)

    def _wait(self, load: Load, seconds: float) -> Load:
        """Wait until everything is recalled, at most so long. The result replaces the load."""
        until = time.monotonic() + seconds
        if load.lookup:
            load.lookup.wait(seconds)
            load = self.rematch(load)
        while (
            load.match.pending and (left := until - time.monotonic()) > 0
        ):  # another request recalls it
            with self._tier2.arrived:
                self._tier2.arrived.wait(min(left, WAIT_SECONDS_MAX))
            load = self.rematch(load)
        return load

    def store(
        self,
        prompt: Prompt,
        verified: int,
        read: Part,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        permit: Permit = always,
        states: Collection[int] = (),
    ) -> Stored:
        """Evict the columns of the first `verified` tokens that are not stored yet.

        `first`: the token from which on the engine has KV of each group, if not from the start, as where
        a window has moved on. Columns before it are not read. `states`: after how many tokens it has the
        state of each state group; `read` is asked for those that are stored, see `Ledger.begin_store`.
        Without `permit`, or if the org has another tag by now, nothing is stored, even if that shows at
        the end only.
        """
        begun = self.begin_store(prompt, verified, rules, first, permit, states)
        failed = dict.fromkeys(begun.columns, Reason.AGENT_LOST)
        began = time.perf_counter()
        try:
            failed = self._send(prompt, begun.places, read)
        finally:
            if not self.end_store(begun, failed, time.perf_counter() - began, permit):
                failed = dict.fromkeys(begun.columns, Reason.PURGED)
        size = sum(column.bytes for column in begun.columns if column not in failed)
        return Stored(len(begun.columns) - len(failed), size, len(failed))

    def _send(self, prompt: Prompt, places: Sequence[Place], read: Part) -> dict[Column, Reason]:
        def send(group: int, index: int) -> bool:
            shard = self._shards[group][index]
            mine = [place for place in places if place.column.group == group]
            for at in range(0, len(mine), BATCH_MAX):
                columns = [
                    Evict(
                        slot,
                        column.key,
                        prompt.maker.tag,
                        column.tokens,
                        read(group, index, column.depth, column.tokens),
                    )
                    for column, slot in mine[at : at + BATCH_MAX]
                ]
                if not shard.evict(columns, prompt.request):
                    return False
            return True

        sent = self._shard_threads.each(send, {place.column.group for place in places})
        lost = {group for (group, _), done in sent.items() if not done}
        return {column: Reason.AGENT_LOST for column, _ in places if column.group in lost}

    def _refill(self, match: Match, into: Part) -> dict[Column, Miss]:
        """Refill the match. Returns the columns that a shard could not refill."""
        if match.tokens <= match.refilled:
            return {}
        new = [
            [(column, slot) for column, slot in zip(hit, slots, strict=True) if is_new(column, match)]
            for hit, slots in zip(match.columns, match.slots, strict=True)
        ]

        def refill(group: int, index: int) -> list[tuple[Column, Miss]]:
            shard, places = self._shards[group][index], new[group]
            refused: list[tuple[Column, Miss]] = []
            for at in range(0, len(places), BATCH_MAX):
                batch = places[at : at + BATCH_MAX]
                wanted = [
                    RefillColumn(
                        slot,
                        column.key,
                        match.prompt.maker.tag,
                        column.tokens,
                        into(group, index, column.depth, column.tokens),
                    )
                    for column, slot in batch
                ]
                misses = zip(batch, shard.refill(wanted, match.prompt.request), strict=True)
                refused += [(column, miss) for (column, _), miss in misses if miss is not None]
                if refused:
                    break
            return refused

        groups = {group for group, columns in enumerate(new) if columns}
        found = self._shard_threads.each(refill, groups)
        return {column: miss for refused in found.values() for column, miss in refused}
