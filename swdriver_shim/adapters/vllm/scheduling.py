"""The scheduler's half: which prefixes are loaded and stored, and when. Knows requests, and no vLLM.

A request arrives (`arrived`), is asked about until it is scheduled (`matched`), gets blocks
(`allocated`), is in steps (`step`), and ends (`finished`), perhaps after it was preempted and all of
this came anew. What of it is loaded is whole units, and its last token is computed in any case: its
logits are wanted. What is stored is whole units of tokens that are known and whose KV is there at the
end of a step: no draft, no placeholder.

Where layers keep states, vLLM offers with a step which blocks hold the state after which token when the
step is over. Those at the ends of units are stored. A load ends where there is a state, at least one
token before the end of the prompt: the logits of the last token need the state before it.

While a load is under way nothing is stored of its request, nor of others that share its blocks: what
was computed behind columns that turn out not to be there is worth nothing.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from kvss_agent.client import Miss
from swdriver_shim.adapters.vllm.blocks import SKIP_BLOCK
from swdriver_shim.adapters.vllm.events import UnitEvents
from swdriver_shim.adapters.vllm.orders import (
    ColumnOrder,
    LoadResult,
    Order,
    SaveResult,
    Step,
    WorkerReport,
)
from swdriver_shim.cache.lookup import Match
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import USE_SECONDS_MAX
from swdriver_shim.cache.stores import Store
from swdriver_shim.decider.decider import Decider, Load
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Media, Prompt
from swdriver_shim.policy import AS_USUAL, Rules

log = logging.getLogger(__name__)

MEASURED_TOKENS_MIN: Final = 64  # of one request in a step, to learn from it how long computing takes
MEASURED_PART_MIN: Final = 0.8  # of the step's tokens
ASKED_SECONDS_MAX: Final = 60.0  # after so long in vLLM's queue, tier 2 is asked anew
PIN_SECONDS: Final = 0.25  # where blocks are short, saves that are older are given up
LOOK_SECONDS: Final = 0.005  # between looks at what is there by now
IDLE_SECONDS: Final = 0.005  # for an engine that has nothing else to do
_INTERNAL_ID: Final = re.compile(r"(?:(?P<completion>cmpl-.+)-\d+|(?P<other>.+))-[0-9a-f]{8}")
NULL_BLOCK: Final = 0  # vLLM's name for one that is not there, as before a window


class Request(Protocol):
    """What is looked at of a vLLM request."""

    request_id: str

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def skip_reading_prefix_cache(self) -> bool | None: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...


class BlockPins(Protocol):
    """The engine's pool of blocks: one that is pinned is given to nobody. In the scheduler's thread."""

    def pin(self, blocks: Collection[int]) -> None: ...
    def unpin(self, blocks: Collection[int]) -> None: ...
    def is_short(self) -> bool:
        """Whether few blocks are left."""


@dataclass(frozen=True, slots=True)
class Requester:
    """What a request is cached with: its org's keys, its rules, its inputs that are not tokens, and the
    driver that its prompt is to be borrowed from, empty for none."""

    keys: Keys
    rules: Rules = AS_USUAL
    media: Sequence[Media] = ()
    sibling: str = ""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Tokens in a block of a group, and its window. `is_state`: a block is the state after its last
    token."""

    block_tokens: int
    window: int | None = None
    is_state: bool = False


class StateOffer(NamedTuple):
    """A block that holds the state after so many tokens of a request when the step is over."""

    group: int
    block: int
    tokens: int


def shown_name(request_id: str) -> str:
    """The id that the caller of a request knows: vLLM adds the number of the prompt to that of a
    completion, and characters of its own to all."""
    found = _INTERNAL_ID.fullmatch(request_id)
    return found["completion"] or found["other"] if found else request_id


def goes_on_from_blocks(groups: Sequence[GroupShape]) -> bool:
    """Whether a request whose load has failed can be computed from the first block that did not come.
    With several groups vLLM can't be told which that is, and behind a window or without a state nothing
    is there to go on from: it is computed from its start."""
    return len(groups) == 1 and groups[0].window is None and not groups[0].is_state


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request."""

    request: Request
    asker: Requester
    prompt: Prompt
    asked: Load | None = None  # found, and held until it has blocks or is not wanted
    asked_at: float = 0.0
    looked_at: float = 0.0
    waiting_since: float | None = None  # for tier 2
    found: int = 0  # tokens that are there, as was said last
    computed: int = 0  # tokens that vLLM had itself then
    load: int | None = None
    waits_for_load: bool = False  # instead of being computed beside it, see `loads_ahead`
    is_doubtful: bool = False  # it may have been computed behind what was not there: nothing is stored
    stored: int = 0  # so many of its tokens are stored, or on their way
    named: int = 0  # so many of its units have vLLM's names for events
    last_blocks: Sequence[Sequence[int]] | None = None  # it has ended, with these

    @property
    def id(self) -> str:
        return self.request.request_id


@dataclass(slots=True)
class PendingLoad:
    ongoing: TrackedRequest
    asked: Load
    columns: list[list[Column]]  # as in the order
    blocks: set[int]
    table: Sequence[int]  # of its request, in the first group
    end: int  # so many tokens are there then
    is_ahead: bool  # its request waits for it
    loaded: LoadResult | None = None

    def fills(self, tables: Sequence[Sequence[int]]) -> bool:
        """Whether a request with these blocks looks at what is loaded."""
        return not all(self.blocks.isdisjoint(table) for table in tables)


@dataclass(slots=True)
class PendingStore:
    store: Store
    columns: list[list[Column]]  # as in the order
    blocks: Collection[int]
    request: str
    ordered_at: float
    is_pinned: bool = False
    failed: dict[Column, Reason] = field(default_factory=dict)
    workers: int = 0


class ConnectorScheduler:
    """Called by the engine's scheduler, all but `saved`, which the lines to the workers call."""

    def __init__(
        self,
        groups: Sequence[GroupShape],
        unit_tokens: int,
        workers: int,
        who: Callable[[Any], Requester | None],
        is_served: Callable[[Requester], bool] = lambda _: True,
        *,
        wait_seconds: float = 0.0,
        only_if_faster: bool = True,
        events: UnitEvents | None = None,
        pins: BlockPins | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`who` asks with a request; None if it is cached for nobody. `is_served`: whether it still is,
        as it was; an org may be taken out while its requests go on. `wait_seconds`: how long a request
        waits, at most, for what tier 2 has of it. `only_if_faster`: what was found to take longer than
        computing is not loaded. `pins`: where a step writes to new blocks before workers could give up
        saves from them. Before `use`, `who` has to say None."""
        self.counts: Counter[str] = Counter()  # since the start
        self._decider: Decider | None = None
        self._groups = groups
        self._of_states = {at for at, group in enumerate(groups) if group.is_state}
        self._unit = unit_tokens
        self._workers = workers
        self._who = who
        self._is_served = is_served
        self._wait_seconds = wait_seconds
        self._is_far = False
        self._only_if_faster = only_if_faster
        self._events = events
        self._pins = pins
        self._given_up: deque[list[int]] = deque()  # saves, by step that is under way
        self._to_unpin: deque[Collection[int]] = deque()  # blocks whose pins are needed no longer
        self._steps: deque[tuple[float, str, int]] = deque()  # under way: since when, whose, how much
        self._clock = clock
        self._ongoing: dict[str, TrackedRequest | None] = {}
        self._numbers = 0
        self._is_idle = True  # nothing was computed in the last step
        self._loads: dict[int, PendingLoad] = {}
        self._failed: list[PendingLoad] = []  # what they were to fill is being computed anew
        self._unfilled: set[int] = set()  # blocks that do not hold what vLLM thinks
        self._stores: dict[int, PendingStore] = {}
        self._new_loads: list[Order] = []  # of this step
        self._new_loads_ahead: list[Order] = []
        self._taken: set[int] = set()  # blocks that this step's loads write to
        self._ended: deque[TrackedRequest] = deque()  # with something that may still be stored
        self._lock = threading.Lock()  # of `_stores`

    def use(self, driver: Decider, *, is_far: bool) -> None:
        """Cache with this driver from here on. `is_far`: agents are not on the workers' nodes. Call it
        again when that changes: it holds for loads that begin then."""
        self._decider, self._is_far = driver, is_far

    def is_quiet(self) -> bool:
        """Whether no load and no save is under way. From any thread."""
        with self._lock:
            return not (self._loads or self._stores)

    @property
    def _driver(self) -> Decider:
        if self._decider is None:
            raise RuntimeError("no request is tracked before there is a driver")
        return self._decider

    @property
    def loads_ahead(self) -> bool:
        """Whether requests wait for loads that begin now, instead of being computed layer by layer
        beside them.

        They do where bytes come from afar, so that no step waits for a network; and where vLLM can't go
        on from the first block that did not come, see `goes_on_from_blocks`.
        """
        return self._is_far or not goes_on_from_blocks(self._groups)

    # Loads

    def arrived(self, request: Request) -> None:
        """It is in vLLM's queue. What a brain counts on a sibling for is borrowed from now on, so that
        the first look finds it on its way, and the rest is recalled from tier 2 after that. A
        conversation that continues is recalled meanwhile: by its trail, or by its own columns where this
        driver has no trail of it. Of another prompt the rest is recalled if its beginning is in
        memory."""
        one = self._of(request)
        if one is None:
            return
        if (sibling := one.asker.sibling) and (limit := self._loadable(request)):
            self._extend(one, limit)
            if self._driver.borrow_from(one.prompt, sibling):
                self._driver.prefetch_rest(one.prompt)
                return
        continue_id = one.asker.rules.continue_id
        if continue_id and self._driver.prefetch(one.asker.keys.org, continue_id):
            return
        if limit := self._loadable(request):
            self._extend(one, limit)
            if continue_id:
                self._driver.prefetch_prompt(one.prompt)
            else:
                self._driver.prefetch_begun(one.prompt)

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind those that vLLM has itself are there; None to be asked again. And
        whether the request has to wait for its load."""
        one = self._of(request)
        if one is None or one.load is not None or request.skip_reading_prefix_cache:
            return 0, False
        now = self._clock()
        asked = self._look(one, now)
        if asked is None:
            return 0, False
        one.found, one.computed = self._usable(one, asked), computed
        if self._is_worth_waiting(one, asked, now):
            if self._is_idle and asked.lookup:  # it would ask again and again, without a pause
                asked.lookup.wait(IDLE_SECONDS)
            return None, False
        if self._only_if_faster:
            self._driver.skip_if_slower(asked.match)
        one.found = self._usable(one, asked)
        if one.found <= computed:
            one.stored = max(one.stored, asked.match.tokens)
            self._let_go(one)
            return 0, False
        one.waits_for_load = self.loads_ahead
        return one.found - computed, one.waits_for_load

    @staticmethod
    def _usable(one: TrackedRequest, asked: Load) -> int:
        """How many tokens need not be computed: never the last one, whose logits are needed. Its KV is
        loaded with its block, and is computed once more."""
        return min(asked.match.tokens, one.request.num_tokens - 1)

    def _loadable(self, request: Request) -> int:
        """So many tokens are asked for, as whole units. A state can't be taken back by the last token,
        as KV can: with states the load has to end before it."""
        tokens = request.num_tokens - 1 if self._of_states else request.num_tokens
        return tokens // self._unit * self._unit

    def _look(self, one: TrackedRequest, now: float) -> Load | None:
        """What there is by now."""
        if not self._is_served(one.asker):
            self._let_go(one)
            return None
        if one.asked and now < one.asked_at + ASKED_SECONDS_MAX:
            if now >= one.looked_at + LOOK_SECONDS:  # it may have expired, or tier 2 has brought more
                one.asked, one.looked_at = self._driver.rematch(one.asked), now
            return one.asked
        self._let_go(one)
        limit = self._loadable(one.request)
        if not limit:
            return None
        one.prompt.rewind(limit)
        self._extend(one, limit)
        one.asked = self._driver.begin_load(one.prompt)
        one.asked_at = one.looked_at = now
        return one.asked

    def _is_worth_waiting(self, one: TrackedRequest, asked: Load, now: float) -> bool:
        if not asked.pending or asked.match.tokens + asked.pending <= one.computed:
            return False
        if one.waiting_since is None:
            one.waiting_since = now
        return now < one.waiting_since + self._wait_seconds

    def allocated(self, request: Request, blocks: Sequence[Sequence[int]], external: int) -> None:
        """It has these blocks, and so many tokens are to be loaded to them."""
        one = self._ongoing.get(request.request_id)
        if one is None or one.asked is None:
            return
        if not external:
            self._let_go(one)
            return
        match, end = one.asked.match, one.computed + external
        self._check_states(match, end, blocks)
        asked, one.asked, one.waiting_since = one.asked, None, None
        number = self._next_number()
        columns: list[list[Column]] = [[] for _ in self._groups]
        carries: tuple[list[ColumnOrder], ...] = tuple([] for _ in self._groups)
        for group, (hit, slots) in enumerate(zip(match.columns, match.slots, strict=True)):
            each = self._groups[group].block_tokens
            for column, slot in zip(hit, slots, strict=True):
                wanted = tuple(
                    SKIP_BLOCK
                    if not one.computed <= index * each < end or blocks[group][index] == NULL_BLOCK
                    else blocks[group][index]
                    for index in self._blocks_of(group, column.depth)
                )
                if any(block != SKIP_BLOCK for block in wanted):
                    carries[group].append(
                        ColumnOrder(slot, column.key, self._part(group, column.depth), wanted)
                    )
                    columns[group].append(column)
        one.load = number
        one.stored = max(one.stored, match.tokens)
        order = Order(number, one.id, one.prompt.request, one.asker.keys.tag, carries)
        filled = order.blocks - {SKIP_BLOCK}
        is_ahead = one.waits_for_load
        self._loads[number] = PendingLoad(one, asked, columns, filled, blocks[0], end, is_ahead)
        (self._new_loads_ahead if is_ahead else self._new_loads).append(order)
        self._taken |= filled

    def _check_states(self, match: Match, end: int, blocks: Sequence[Sequence[int]]) -> None:
        """Raises RuntimeError unless vLLM goes on from just the states that are loaded. With any other
        it would answer something else, and nobody would notice."""
        for group in self._of_states:
            [at] = self._blocks_of(group, end // COLUMN_TOKENS - 1)
            table = blocks[group]
            if end != match.tokens or len(table) <= at or table[at] == NULL_BLOCK:
                raise RuntimeError(
                    f"vLLM was given states after {match.tokens} tokens, and goes on after {end} "
                    "without a block for them. This version of it has another interface for states."
                )

    def heard(self, report: WorkerReport) -> None:
        """Take what workers report with the output of a step."""
        for number, loaded in report.loads.items():
            load = self._loads.get(number)
            if load is None:
                continue
            if load.loaded is None:
                load.loaded = loaded
            else:
                load.loaded.add(loaded)
            if load.loaded.workers >= self._workers:
                del self._loads[number]
                self._end_load(load, load.loaded)

    def _end_load(self, load: PendingLoad, loaded: LoadResult) -> None:
        refused = {load.columns[one.group][one.at]: Miss(one.miss) for one in loaded.refused}
        match, one = load.asked.match, load.ongoing
        self.counts["loaded_bytes"] += loaded.bytes
        self.counts["refused_columns"] += len(refused)
        if refused:
            first = min(column.depth for column in refused) * COLUMN_TOKENS
            first -= first % self._unit
            why = self._driver.refuse(refused)
            self._driver.end_load(load.asked, (first, why))
            one.stored = 0  # what is there still is found out then
            if not load.is_ahead:  # else no request depends on its blocks yet
                self._failed.append(load)
                self._unfilled.update(load.table[first // self._groups[0].block_tokens :])
                for ended in self._ended:  # of which vLLM takes nothing back
                    ended.is_doubtful |= ended is one or load.fills(ended.last_blocks or ())
        else:
            self._driver.record_refill(match, loaded.seconds)
            self._driver.end_load(load.asked)
        one.load = None

    def take_unfilled(self) -> set[int]:
        """Blocks since the last time that vLLM's own cache must not find: what was to be loaded to them
        has not come, and what was computed behind that is wrong."""
        taken, self._unfilled = self._unfilled, set()
        return taken

    def _let_go(self, one: TrackedRequest) -> None:
        if one.asked:
            self._driver.end_load(one.asked)
            one.asked = None

    # Steps

    def step(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], Sequence[Sequence[int]] | None],
        given: Iterable[tuple[Sequence[Sequence[int]], int]],
        states: Mapping[str, Iterable[tuple[int, int, int]]] | None = None,
    ) -> Step:
        """What workers are to do in a step in which so many tokens of each request are computed.
        `given`: blocks that requests get, and of how many tokens they hold the KV already. `states`: see
        `StateOffer`, by request."""
        made = Step(self._new_loads, self._new_loads_ahead, is_idle=not scheduled)
        self._unpin()
        self._steps.append((self._clock(), *self._measured(scheduled)))
        self._is_idle = not scheduled
        self._new_loads, self._new_loads_ahead = [], []
        wanted, self._taken = self._taken, set()
        for tables, computed in given:  # those before are shared, and nobody writes to them
            for table, group in zip(tables, self._groups, strict=False):
                wanted.update(table[computed // group.block_tokens :])
        with self._lock:
            late = self._clock() - PIN_SECONDS if self._pins and self._pins.is_short() else None
            made.over_first = [
                number
                for number, storing in self._stores.items()
                if (late is not None and storing.is_pinned and storing.ordered_at <= late)
                or not wanted.isdisjoint(storing.blocks)
                or self._is_lost(storing)
            ]
        self._given_up.append(made.over_first)
        self._doubt(scheduled, blocks_of)
        for name, count in scheduled.items():
            one = self._ongoing.get(name)
            if one is None or one.load is not None or one.is_doubtful:
                continue
            request = one.request
            done = min(request.num_computed_tokens + count, len(request.all_token_ids))
            if done // self._unit * self._unit <= one.stored or not (blocks := blocks_of(name)):
                continue
            if not self._is_loading(blocks):
                offers = (StateOffer(*offer) for offer in (states or {}).get(name, ()))
                self._store(one, done, blocks, made, offers)
        for _ in range(len(self._ended)):
            one = self._ended.popleft()
            if one.load in self._loads or self._is_loading(one.last_blocks or ()):
                self._ended.append(one)  # until it is known what it has computed with
                continue
            if one.last_blocks is not None and not one.is_doubtful:
                done = min(one.request.num_computed_tokens, len(one.request.all_token_ids))
                self._store(one, done, one.last_blocks, made)
            if self._pins and self._is_saving(one):
                self._ended.append(one)  # while it is there steps go on, which pins need to end
                continue
            made.ending.append(one.id)
        return made

    def _is_lost(self, storing: PendingStore) -> bool:
        """Whether a worker's result of it will not come any more: the line to it was lost in between."""
        return self._clock() >= storing.ordered_at + USE_SECONDS_MAX

    def _is_saving(self, one: TrackedRequest) -> bool:
        with self._lock:
            return any(storing.request == one.id for storing in self._stores.values())

    def _unpin(self) -> None:
        """Let go of blocks that have been saved since."""
        while self._pins and self._to_unpin:
            self._pins.unpin(self._to_unpin.popleft())

    def _is_loading(self, tables: Sequence[Sequence[int]]) -> bool:
        """Whether some of these blocks are being filled, beside the steps that look at them."""
        return any(not load.is_ahead and load.fills(tables) for load in self._loads.values())

    def _doubt(
        self, scheduled: Collection[str], blocks_of: Callable[[str], Sequence[Sequence[int]] | None]
    ) -> None:
        """Mark requests that use blocks that another one is computing anew: they may be too early."""
        self._failed = [load for load in self._failed if self._is_computed_anew(load)]
        for name in scheduled if self._failed else ():
            one, blocks = self._ongoing.get(name), blocks_of(name)
            if one and blocks:
                one.is_doubtful |= any(
                    load.ongoing is not one and load.fills(blocks) for load in self._failed
                )

    def _is_computed_anew(self, load: PendingLoad) -> bool:
        one = load.ongoing
        return self._ongoing.get(one.id) is one and one.request.num_computed_tokens < load.end

    def _measured(self, scheduled: Mapping[str, int]) -> tuple[str, int]:
        """The org whose tokens a step computes, and how many; none if there are several, or loads."""
        name = max(scheduled, key=scheduled.__getitem__, default="")
        tokens, one = scheduled.get(name, 0), self._ongoing.get(name)
        is_one = tokens >= max(MEASURED_TOKENS_MIN, MEASURED_PART_MIN * sum(scheduled.values()))
        has_loads = self._new_loads or self._new_loads_ahead
        if one is None or not is_one or has_loads or self._steps:  # or steps overlap
            return "", 0
        return one.asker.keys.org, tokens

    def stepped(self) -> None:
        """The oldest step that is under way is over."""
        began, org, tokens = self._steps.popleft()
        if tokens:
            self._driver.computed(org, tokens, self._clock() - began)
        lost = []
        with self._lock:  # what was given up with it reads no block any more
            for number in self._given_up.popleft():
                if (storing := self._stores.get(number)) is None:
                    continue
                if storing.is_pinned:
                    storing.is_pinned = False
                    self._to_unpin.append(storing.blocks)
                if self._is_lost(storing):
                    lost.append(self._stores.pop(number))
        for storing in lost:
            failed = dict.fromkeys(storing.store.columns, Reason.AGENT_LOST)
            self.counts["not_saved_columns"] += len(failed)
            self._driver.end_store(storing.store, failed)
        self._unpin()

    def _store(
        self,
        one: TrackedRequest,
        done: int,
        blocks: Sequence[Sequence[int]],
        made: Step,
        offers: Iterable[StateOffer] = (),
    ) -> None:
        """Store what is not stored yet of the first so many tokens, as far as it is in blocks."""
        done -= done % self._unit
        if done <= one.stored or not self._is_served(one.asker):
            return
        self._extend(one, done)
        states = self._states(offers, one.stored, done)
        first = [self._first(group, blocks[group], done) for group in range(len(self._groups))]
        store = self._driver.begin_store(one.prompt, done, one.asker.rules, first, states=states)
        one.stored = done
        if not store.columns:
            self._driver.end_store(store, {})
            return
        number = self._next_number()
        carries: tuple[list[ColumnOrder], ...] = tuple([] for _ in self._groups)
        columns: list[list[Column]] = [[] for _ in self._groups]
        for column, slot in store.places:
            group = column.group
            if group in self._of_states:
                of: tuple[int, ...] = (states[(column.depth + 1) * COLUMN_TOKENS][group],)
            else:
                of = tuple(blocks[group][index] for index in self._blocks_of(group, column.depth))
            carries[group].append(ColumnOrder(slot, column.key, self._part(group, column.depth), of))
            columns[group].append(column)
        order = Order(number, one.id, one.prompt.request, one.asker.keys.tag, carries)
        storing = PendingStore(store, columns, order.blocks, one.id, self._clock())
        if self._pins:
            self._pins.pin(storing.blocks)
            storing.is_pinned = True
        with self._lock:
            self._stores[number] = storing
        made.stores.append(order)

    def _states(self, offers: Iterable[StateOffer], stored: int, done: int) -> dict[int, dict[int, int]]:
        """After how many tokens every state group has a state, between these, and in which block each:
        at ends of units, where a load can end."""
        found: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            is_wanted = stored < tokens <= done and tokens % self._unit == 0
            if is_wanted and group in self._of_states and block != NULL_BLOCK:
                found.setdefault(tokens, {})[group] = block
        return {end: of for end, of in found.items() if of.keys() == self._of_states}

    def _first(self, group: int, blocks: Sequence[int], done: int) -> int:
        """From which token on a group has KV, as a border of units: those before its window are gone."""
        if group in self._of_states:
            return 0
        each = self._groups[group].block_tokens
        there = blocks[: done // each]
        gone = next((at for at in reversed(range(len(there))) if there[at] == NULL_BLOCK), -1)
        return -(-(gone + 1) * each // self._unit) * self._unit

    def saved(self, told: SaveResult) -> None:
        """How a save went at one worker. From any thread."""
        with self._lock:
            storing = self._stores.get(told.store)
            if storing is None:
                return
            storing.workers += 1
            for group, index in told.failed:
                storing.failed[storing.columns[group][index]] = Reason.AGENT_LOST
            self.counts["saved_bytes"] += told.bytes
            self.counts["saves_given_up"] += told.dropped
            if storing.workers < self._workers:
                return
            del self._stores[told.store]
            if storing.is_pinned:
                self._to_unpin.append(storing.blocks)
            self.counts["not_saved_columns"] += len(storing.failed)
        self._driver.end_store(storing.store, storing.failed, told.seconds)

    # The end

    def finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        """It has ended, with these blocks. Whether they are to be kept until its saves are over."""
        one = self._ongoing.pop(request.request_id, None)
        if one is None:
            return False
        self._let_go(one)
        if one.load is not None and one.waits_for_load:
            return False  # it was given up while it waited: vLLM keeps its blocks until that is over
        done = min(request.num_computed_tokens, len(request.all_token_ids)) // self._unit * self._unit
        may_store = done > one.stored or one.load is not None
        if not blocks or not any(blocks) or not (may_store or self._is_saving(one)):
            return False
        one.last_blocks = blocks if may_store else None
        self._ended.append(one)
        return True

    def let_go_all(self) -> None:
        """Hold nothing for requests that are not scheduled yet. They are looked for anew."""
        for one in self._ongoing.values():
            if one:
                self._let_go(one)

    def close(self) -> None:
        """No worker will report any more."""
        self.let_go_all()
        for load in self._loads.values():
            self._driver.end_load(load.asked)
        self._loads.clear()

    # Inside

    def _of(self, request: Request) -> TrackedRequest | None:
        name = request.request_id
        if name not in self._ongoing:
            asker = self._who(request)
            made = None
            if asker:
                prompt = asker.keys.prompt(request=shown_name(name), media=asker.media)
                made = TrackedRequest(request, asker, prompt)
            self._ongoing[name] = made
        return self._ongoing[name]

    def _extend(self, one: TrackedRequest, tokens: int) -> None:
        """Its prompt has so many tokens, at least. Each is hashed once."""
        if one.prompt.tokens < tokens:
            one.prompt.extend(list(one.request.all_token_ids[one.prompt.tokens : tokens]))
        if self._events:
            columns = self._unit // COLUMN_TOKENS
            for unit in range(one.named, tokens // self._unit):
                keys = one.prompt.keys[unit * columns : (unit + 1) * columns]
                self._events.name(unit, keys, one.request.block_hashes)
            one.named = max(one.named, tokens // self._unit)

    def _part(self, group: int, depth: int) -> int:
        """Which part of its unit a column is. A state is all that there is of it."""
        return 0 if group in self._of_states else depth % (self._unit // COLUMN_TOKENS)

    def _blocks_of(self, group: int, depth: int) -> range:
        """The places in a request's table of the blocks of a column's unit: of a state the last one."""
        count = self._unit // self._groups[group].block_tokens
        unit = depth * COLUMN_TOKENS // self._unit
        first, end = unit * count, (unit + 1) * count
        return range(end - 1 if group in self._of_states else first, end)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers
