"""The whole driver in one process: the ledger, a `Shard` for each shard, and a thread that keeps house.

    driver = Driver(layout, "llama", shards)
    prompt = Keys("acme", secret, namespace).prompt(tokens)
    loaded = driver.load(prompt, into)          # compute what follows the first loaded.tokens
    prompt.extend(answer)
    driver.store(prompt, verified, read)

An engine that moves bytes in other processes than it decides in has a `Decider`, see there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvss_agent.client import Miss
from kvss_agent.shard.core import BATCH_MAX
from swdriver_shim.cache.matching import Match
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import Place
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.shard.columns import EvictColumn, RefillColumn
from swdriver_shim.data_plane.tier2 import Tier2Lookup
from swdriver_shim.deciding import Asked, Decider, Notes, Permit, always, is_new
from swdriver_shim.keys import Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.object_store import ObjectStore
from swdriver_shim.policy import AS_USUAL, Rules

RETRIES: Final = 3  # of a load whose columns were refused
WAIT_SECONDS_MAX: Final = 0.05  # between looks at what has come


class Part(Protocol):
    """Memory for one column's part in one shard: to read from for a store, to write to for a load."""

    def __call__(self, group: int, shard: int, depth: int, tokens: int) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """So many tokens from the start are there, of those that were asked for. `coming`: so many more may
    be there soon."""

    tokens: int
    asked: int
    coming: int = 0


@dataclass(frozen=True, slots=True)
class Loading(Loaded):
    """And how to ask for more."""

    match: Match = field(kw_only=True, repr=False)
    seeking: Tier2Lookup | None = field(kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Stored:
    """So many columns went out, with so many bytes; so many failed."""

    columns: int
    bytes: int
    failed: int


class Driver(Decider):
    """All methods may be called from any thread."""

    def __init__(
        self,
        layout: Layout,
        model: str,
        shards: Sequence[Sequence[Shard]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        notes: Notes | None = None,
    ) -> None:
        """`shards` of each group, in the layout's order. `notes` as in `Decider`: the shards' are in the
        same directory."""
        self._shards = shards
        super().__init__(layout, model, shards, clock=clock, wall_clock=wall_clock, notes=notes)
        self._objects: ObjectStore | None = None
        if layout.groups[0].alone:
            self._objects = ObjectStore(
                self.ledger,
                self._lock,
                shards[0],
                self._carrier,
                self._on_each,
                self.is_served,
                clock=clock,
                wake=self._wake.set,
            )

    @property
    def objects(self) -> ObjectStore:
        """The columns that stand alone. Raises ValueError if the layout is one of prefixes."""
        if self._objects is None:
            raise ValueError(
                "This driver keeps prefixes: for objects its layout has one group that is `alone`."
            )
        return self._objects

    @property
    def keeps_objects(self) -> bool:
        return self._objects is not None

    def load(self, prompt: Prompt, into: Part, *, seconds: float = 0.0) -> Loading:
        """Bring the longest prefix that is there to where `into` says. Beyond it memory may hold
        anything.

        What tier 2 has of the rest is brought into memory meanwhile. This waits for it at most so long;
        `load_more` asks again, while the engine computes.
        """
        return self._load(self.begin_load(prompt), into, seconds)

    def load_more(self, loaded: Loading, into: Part, *, seconds: float = 0.0) -> Loading:
        """What has come since, and only that: `into` is asked for columns behind `loaded.tokens`."""
        asked = self.again(Asked(loaded.match, loaded.seeking), loaded.tokens)
        return self._load(asked, into, seconds)

    def _load(self, asked: Asked, into: Part, seconds: float) -> Loading:
        came: tuple[int, Reason] | None = None
        try:
            if seconds > 0:
                asked = self._wait(asked, seconds)
            for _ in range(RETRIES):
                self.leave_if_slower(asked.match)
                began = time.perf_counter()
                refused = self._bring(asked.match, into)
                if not refused:
                    self.note_refill(asked.match, time.perf_counter() - began)
                    break
                why = self.refuse(refused)
                asked = self.again(asked)
            else:
                came = 0, why
        finally:
            self.end_load(asked, came)
        match = asked.match
        there = max(match.tokens, match.had)
        return Loading(there, match.asked, asked.coming, match=match, seeking=asked.seeking)

    def _wait(self, asked: Asked, seconds: float) -> Asked:
        """Until all that can come has, at most so long. What this gives takes the place of the other."""
        until = time.monotonic() + seconds
        if asked.seeking:
            asked.seeking.done.wait(seconds)
            asked = self.again(asked)
        while asked.match.coming and (left := until - time.monotonic()) > 0:  # somebody else brings it
            with self._carrier.arrived:
                self._carrier.arrived.wait(min(left, WAIT_SECONDS_MAX))
            asked = self.again(asked)
        return asked

    def store(
        self,
        prompt: Prompt,
        verified: int,
        read: Part,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        permit: Permit = always,
    ) -> Stored:
        """Send out what is not stored yet of the first so many tokens, which are verified.

        `first`: the token from which on the engine has KV of each group, if not from the start, as where
        a window has gone on. What is before it is not asked for. Without `permit`, or if the org has
        another tag by now, nothing is stored, be it that this shows at the end only.
        """
        begun = self.begin_store(prompt, verified, rules, first, permit)
        failed: dict[Column, Reason] = {column: Reason.AGENT_LOST for column, _ in begun.places}
        began = time.perf_counter()
        try:
            failed = self._send(prompt, begun.places, read)
        finally:
            if not self.end_store(begun, failed, time.perf_counter() - began, permit):
                failed = {column: Reason.PURGED for column, _ in begun.places}
        size = sum(place.column.bytes for place in begun.places if place.column not in failed)
        return Stored(len(begun.places) - len(failed), size, len(failed))

    def _send(self, prompt: Prompt, places: Sequence[Place], read: Part) -> dict[Column, Reason]:
        def send(group: int, index: int) -> bool:
            shard = self._shards[group][index]
            mine = [place for place in places if place.column.home.group == group]
            for at in range(0, len(mine), BATCH_MAX):
                columns = [
                    EvictColumn(
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

        sent = self._on_each(send, {place.column.home.group for place in places})
        lost = {group for (group, _), done in sent.items() if not done}
        return {column: Reason.AGENT_LOST for column, _ in places if column.home.group in lost}

    def _bring(self, match: Match, into: Part) -> dict[Column, Miss]:
        """Columns that some shard does not have as they should be."""
        if match.tokens <= match.had:
            return {}
        new = [
            [(column, slot) for column, slot in zip(hit, slots, strict=True) if is_new(column, match)]
            for hit, slots in zip(match.columns, match.slots, strict=True)
        ]

        def bring(group: int, index: int) -> list[tuple[Column, Miss]]:
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
        found = self._on_each(bring, groups)
        return {column: miss for refused in found.values() for column, miss in refused}
