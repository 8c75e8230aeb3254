"""Which columns of a prompt go out, and into which slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swdriver_shim.cache.matching import key_before, over, tails_of
from swdriver_shim.cache.payers import Payers
from swdriver_shim.cache.prefix_map import Column, PrefixMap, State
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.room import Room
from swdriver_shim.cache.slots import Place, Use, prune
from swdriver_shim.cache.spilling import Spilling
from swdriver_shim.cache.stock import Stock
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.policy import Rules, Tiers


@dataclass(slots=True, eq=False)
class Store(Use):
    """What of a prompt is to be evicted, in this order."""

    places: list[Place]


class _Run(NamedTuple):
    """Columns of one group that are to be stored: from `first` on, of the first `verified` tokens."""

    home: PrefixMap
    prompt: Prompt
    first: int
    verified: int
    have_from: int  # before this column the engine has no KV any more
    rules: Rules
    now: float


class Storing:
    def __init__(self, stock: Stock, room: Room, spilling: Spilling) -> None:
        self._stock = stock
        self._room = room
        self._spilling = spilling

    def begin(
        self, prompt: Prompt, verified: int, now: float, rules: Rules, first: Sequence[int]
    ) -> Store:
        """As `Ledger.begin_store` says. `finish` has to follow."""
        if not 0 <= verified <= prompt.tokens:
            raise ValueError(f"the prompt has {prompt.tokens} tokens; {verified} can't be verified")
        if prompt.maker.unit_columns > 1:
            verified -= verified % prompt.maker.unit_tokens  # of a unit there is no tail
        stock, store = self._stock, Store([])
        account = stock.account(prompt.org)
        if not rules.no_store:
            account.recorder.stored(prompt, verified, now)
        if not stock.reachable:
            pass  # it could not go everywhere
        elif rules.no_store or account.policy.tiers is Tiers.NONE:
            for key in prompt.keys[: verified // COLUMN_TOKENS]:
                if stock.ghosts.why(key) is Reason.NEVER_STORED:
                    stock.ghosts.add(key, Reason.NO_STORE)
        else:
            if account.policy.tiers is Tiers.TIER2:
                stock.trails.remember(rules.continue_id, prompt)
            maps = stock.maps_of(prompt.maker)
            have = [-(-token // COLUMN_TOKENS) for token in first or [0] * len(maps)]
            for home, have_from in zip(maps, have, strict=True):
                if home.linked:
                    run = _Run(home, prompt, 0, verified, have_from, rules, now)
                    verified = min(verified, self._take_places(run, store.places))
            for home, have_from in zip(maps, have, strict=True):
                if not home.linked:
                    run = _Run(home, prompt, 0, verified, have_from, rules, now)
                    self._take_places_of_window(run, store.places)
        stock.slots.begin(store, now)
        return store

    def finish(self, store: Store, now: float, failed: Mapping[Column, Reason] | None = None) -> None:
        """The columns are in their slots on every agent, but for those that failed."""
        stock = self._stock
        if not stock.slots.end(store):
            return
        self._spilling.stored(store.places)
        writing, came = State.WRITING, list[Column]()
        for column, slot in store.places:
            if column.state is not writing or column.slot != slot:
                continue  # purged or taken away meanwhile
            if failed and column in failed:
                stock.remove(column, failed[column])
                continue
            column.stored_at = column.used_at = now
            column.kept_at = None
            came.append(column)
        stock.arrived(came, now)

    def _take_places_of_window(self, run: _Run, places: list[Place]) -> None:
        """First for its end, and with the room that is left for what is before it, since other prompts
        may go on from there. That goes out first, and is displaced first."""
        first = self._stock.layout.groups[run.home.group].first_needed(run.verified)
        window: list[Place] = []
        self._take_places(run._replace(first=first), window)
        self._take_places(run._replace(verified=first * COLUMN_TOKENS), places)
        places += window

    def _take_places(self, run: _Run, places: list[Place]) -> int:
        """Up to how many tokens its columns are here, or on their way."""
        home, prompt, first, verified, have_from, rules, now = run
        stock = self._stock
        whole, rest = divmod(verified, COLUMN_TOKENS)
        policy = home.account.policy
        born, seen = over(policy, now)
        payers = self._room.payers(home)
        is_unlimited, take = policy.dram_bytes_max is None, stock.slots.pools[home.group].take
        empty, ready = State.EMPTY, State.READY
        parent: Column | None = None
        for depth in range(first, whole + (rest > 0)):
            tokens = rest if depth == whole else COLUMN_TOKENS
            key = prompt.tail(whole, rest) if depth == whole else prompt.keys[depth]
            column = home.columns.get(key)
            if (
                column is not None
                and column.state is ready
                and not (column.stored_at > born and column.used_at > seen and column.ttl is None)
                and column.expires_at <= now
            ):
                stock.remove(column, Reason.EXPIRED)
                column = home.columns.get(key)
            if column is None or column.state is empty:
                if depth < have_from:
                    if home.linked:
                        return depth * COLUMN_TOKENS
                    continue
                # Behind a column that holds nothing there is no tail to take over.
                slot = take() if is_unlimited and home.linked and parent and not parent.holds else None
                if slot is None:
                    slot = self._slot_for(run, depth, tokens, parent, column, payers)
                    if slot is None:
                        return depth * COLUMN_TOKENS
                if column is None and tokens == COLUMN_TOKENS:
                    column = home.add(key, parent, depth)
                elif column is None:
                    column = home.add_tail(key, parent, depth, tokens, key_before(prompt, depth))
                stock.occupy(column, slot, State.WRITING)
                column.ttl = rules.ttl_seconds
                if rules.priority is not None:
                    column.priority = rules.priority
                places.append(Place(column, slot))
            elif column.ttl is not None:  # somebody else has the same, and may keep it for longer
                longer = rules.ttl_seconds is None or rules.ttl_seconds > column.ttl
                column.ttl = rules.ttl_seconds if longer else column.ttl
            parent = column
        return verified

    def _slot_for(
        self,
        run: _Run,
        depth: int,
        tokens: int,
        parent: Column | None,
        place: Column | None,
        payers: Payers,
    ) -> int | None:
        """A slot for a column: that of the tail which it goes on from, a free one, or room is made."""
        account = run.home.account
        limit = account.policy.dram_bytes_max
        may_have_tails = not (run.home.linked and parent and not parent.holds)  # which are behind it
        if may_have_tails and (limit is None or account.bytes <= limit):  # it may have been lowered
            slot = self._take_over(run.home, run.prompt, depth, tokens)
            if slot is not None:
                return slot
        return self._room.take(run.home, parent, place, payers, run.now)

    def _take_over(self, home: PrefixMap, prompt: Prompt, depth: int, tokens: int) -> int | None:
        """The slot of a shorter tail that this column goes on from, if nobody is reading it."""
        for tail in tails_of(home, prompt, depth, tokens - 1):
            if tail.state is State.READY and not tail.holds:
                slot = self._stock.vacate(tail)
                parent = tail.parent
                if parent:
                    parent.holds += 1  # it is about to have another behind it
                prune(tail)
                if parent:
                    parent.holds -= 1
                return slot
        return None
