"""Which columns are recalled from tier 2: those behind a hit, and parts that an agent has lost. Columns
are borrowed from siblings in the same way: where they come from is all that differs.

Recalled columns get slots like stored ones, so they are in memory for the next request as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from swdriver_shim.cache.allocator import SlotAllocator
from swdriver_shim.cache.lookup import Lookup
from swdriver_shim.cache.prefix_map import Column, PrefixMap, State, terms_of
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.request_log import HasKeys
from swdriver_shim.cache.slots import Place, Use
from swdriver_shim.cache.spills import Dates, SpillPlanner
from swdriver_shim.cache.stock import Stock
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import Group
from swdriver_shim.lending import LentColumn
from swdriver_shim.policy import Tier2Rule, Tiers

ASK_FIRST: Final = 4  # columns; most prompts that miss were never stored
ASK_MOST: Final = 512
RECALL_AT_ONCE: Final = 64  # columns
RESTORES_MAX: Final = 256  # columns that wait for their lost part: nobody can use them, or their slots;
RESTORES_PART: Final = 4  # at most this part of the slots

Question = dict[int, list[int]]  # by group: depths of columns that may exist in tier 2
Answer = Mapping[int, Collection[int]]  # by group: those that do
Search = Generator[Question, Answer, list[set[int]]]


@dataclass(slots=True, eq=False)
class Recall(Use):
    """Columns to recall into these slots. `shards`: only those that have lost their part, if not all.
    `lent`: where a sibling has them, if they are borrowed."""

    tag: bytes
    encrypted_for: str  # an org; empty for unencrypted
    places: list[Place] = field(default_factory=list)
    shards: frozenset[int] | None = None
    lent: Mapping[Column, LentColumn] | None = None


@dataclass(slots=True)
class Recalled:
    """Columns since the start."""

    columns: int = 0
    bytes: int = 0
    restored: int = 0  # of those: columns of which an agent had lost its part
    not_recalled: int = 0
    late: int = 0  # had expired when they arrived


class RecallPlanner:
    def __init__(self, stock: Stock, allocator: SlotAllocator, spills: SpillPlanner) -> None:
        self._stock = stock
        self._allocator = allocator
        self._spills = spills
        self.recalled = Recalled()
        self.borrowed = Recalled()

    def has(self, prompt: HasKeys, now: float) -> int:
        """How many columns of the prompt are in memory, or are coming."""
        return _longest(self._stock.layout.groups, self._usable(prompt, now))

    def search(self, prompt: HasKeys, start: int, now: float) -> Search | None:
        """Find the columns from depth `start` on that exist in tier 2. None if there is nothing to ask.

        The generator yields questions and is sent the answers. Its result is for `begin`.
        """
        if start >= len(prompt.keys) or not self._may_ask(prompt):
            return None
        return _search(self._stock.layout.groups, self._usable(prompt, now), start)

    def begin(self, prompt: HasKeys, exists: Sequence[Collection[int]], now: float) -> list[Recall]:
        """Recalls of columns that exist in tier 2, in the prompt's order, as far as there is room.
        `start` and `finish` have to follow for each; or only the latter, to give it up."""
        if not self._may_ask(prompt):
            return []
        return self._begin(prompt, exists, now)

    def removals(self, prompt: HasKeys) -> int:
        """How often something of its org was removed: what a sibling said before may be older."""
        return self._stock.account(prompt.maker.org).removals

    def borrow(
        self,
        prompt: HasKeys,
        lent: Sequence[Mapping[int, LentColumn]],
        asked: tuple[float, int],
        now: float,
    ) -> list[Recall]:
        """The same of columns that a sibling lends, by group and depth. `asked`: when it was, and how
        many `removals` there had been. It may have what was purged here before."""
        account, (asked_at, removals) = self._stock.account(prompt.maker.org), asked
        if account.removals != removals:
            return []
        purged_at = account.purges.of(prompt.maker.namespace)
        lent = [
            {depth: one for depth, one in of.items() if asked_at - one.stored_age > purged_at}
            for of in lent
        ]
        if account.policy.tiers is Tiers.NONE or not self._stock.is_reachable:
            return []
        recalls = self._begin(prompt, lent, now)
        for recall in recalls:
            recall.lent = {column: lent[column.group][column.depth] for column, _ in recall.places}
            for column, its in recall.lent.items():
                self._stock.borrowing.add(column)
                strictest = max(its.tier2_rule, column.tier2_rule, key=attrgetter("strictness"))
                column.terms = column.terms.but(ttl=its.ttl, tier2_rule=strictest)
        return recalls

    def _begin(self, prompt: HasKeys, exists: Sequence[Collection[int]], now: float) -> list[Recall]:
        groups, places = self._stock.layout.groups, list[Place]()
        whole = _longest(groups, _with(self._usable(prompt, now), exists))
        maps = self._stock.maps_of(prompt.maker)
        turn = maps[0].account.turns.of(prompt.keys)
        for prefix_map, group, more in zip(maps, groups, exists, strict=True):
            first = group.first_needed(whole * COLUMN_TOKENS)
            self._take_places(prefix_map, prompt.keys[:whole], first, more, turn, now, places)
        places.sort(key=lambda place: place.column.depth)
        encrypted_for = maps[0].account.encrypted_for
        return [
            Recall(prompt.maker.tag, encrypted_for, places[at : at + RECALL_AT_ONCE])
            for at in range(0, len(places), RECALL_AT_ONCE)
        ]

    def gain(self, prompt: HasKeys, exists: Sequence[Collection[int]], now: float) -> tuple[int, int]:
        """How many tokens more could be served after recalling what exists, and how many bytes that
        takes."""
        groups, usable = self._stock.layout.groups, self._usable(prompt, now)
        whole = _longest(groups, _with(usable, exists))
        size = 0
        for group, more in zip(groups, exists, strict=True):
            first = group.first_needed(whole * COLUMN_TOKENS)
            size += group.column_bytes * sum(first <= depth < whole for depth in more)
        return (whole - _longest(groups, usable)) * COLUMN_TOKENS, size

    def start(self, recall: Recall, now: float) -> bool:
        """Begin to carry the recall out. Whether any of its columns is still wanted."""
        recall.places = [
            place for place in recall.places if is_recalling(place) and not place.column.map.purged_by
        ]
        self._stock.slots.begin(recall, now)
        return any(self._may_exist(recall, place.column) for place in recall.places)

    def finish(self, recall: Recall, now: float, found: Mapping[Column, Dates | Reason]) -> None:
        """Columns with dates in `found` are in their slots. The others did not arrive, and are
        removed."""
        stock, recalled = self._stock, self.recalled if recall.lent is None else self.borrowed
        missed = Reason.TIER2_LATE if recall.lent is None else Reason.NOT_BORROWED
        stock.borrowing.difference_update(recall.lent or ())
        if recall.number and not stock.slots.end(recall):
            return
        arrived: list[Column] = []
        for place in recall.places:
            if not is_recalling(place):
                continue  # removed meanwhile
            column = place.column
            dates = found.get(column, missed)
            if isinstance(dates, Reason):
                recalled.not_recalled += 1
                stock.remove(column, dates)
                continue
            recalled.columns += 1
            recalled.bytes += column.bytes
            recalled.restored += recall.shards is not None
            if recall.shards is None:
                column.stored_at, column.used_at = min(dates.stored_at, now), min(dates.used_at, now)
            else:  # the column knows its last use
                column.stored_at = min(dates.stored_at, column.stored_at)
            if recall.lent is None:
                # Of a column that got a TTL of its own meanwhile the copy is deleted.
                exists = column.ttl is None and self._may_exist(recall, column)
                column.tier2_used_at = dates.used_at if exists else None
            elif column.group == 0:  # hits are counted there
                stock.note_borrowed(column)
            self._spills.grown(column.map.account)
            if column.expires_at <= now:
                recalled.late += 1
                stock.remove(column, Reason.EXPIRED)
            elif recall.lent is None and _was_purged(column):
                recalled.late += 1
                stock.remove(column, Reason.PURGED)
                stock.deletes.delete(column.map, [column.key])
            else:
                arrived.append(column)
        stock.arrived(arrived, now)

    def _may_exist(self, recall: Recall, column: Column) -> bool:
        """Whether no purge is about to remove it from where it comes from: one of another namespace
        empties tier 2 as well."""
        return recall.lent is not None or not self._stock.deletes.is_purging(column.map.account)

    def skip(self, prompt: HasKeys, exists: Sequence[Collection[int]]) -> None:
        """It is faster to compute these columns."""
        for depth in set().union(*exists):
            self._stock.ghosts.add(prompt.keys[depth], Reason.NOT_WORTH_IT)

    def _take_places(
        self,
        prefix_map: PrefixMap,
        keys: Sequence[bytes],
        first: int,
        exists: Collection[int],
        turn: int,
        now: float,
        places: list[Place],
    ) -> None:
        stock, parent = self._stock, None
        policy = prefix_map.account.policy
        # If they are encrypted, it may be for a request that insists on it.
        rule = Tier2Rule.ENCRYPTED if policy.encrypt_tier2 else Tier2Rule.ALLOWED
        terms = terms_of(policy.priority, turn, tier2_rule=rule)
        victims = self._allocator.victims(prefix_map)
        is_alone = stock.layout.groups[prefix_map.group].alone
        for depth in range(first, len(keys)):
            column = prefix_map.columns.get(keys[depth])
            before = parent if prefix_map.linked else None
            if column and not is_alone and (column.depth != depth or column.parent is not before):
                return  # these keys, or earlier ones, were in another order than those of a prompt
            if column is None or column.state is State.EMPTY:
                if depth not in exists or stock.deletes.is_deleting(prefix_map.group, keys[depth]):
                    if is_alone:
                        continue
                    return
                slot = self._allocator.take(prefix_map, parent, column, victims, now)
                if slot is None:
                    return
                column = column or prefix_map.add(keys[depth], parent, depth)
                stock.occupy(column, slot, State.RECALLING, terms)
                places.append(Place(column, slot))
            parent = column

    def _may_ask(self, prompt: HasKeys) -> bool:
        return self._stock.may_use_tier2(self._stock.account(prompt.maker.org))

    def _usable(self, prompt: HasKeys, now: float) -> list[list[bool]]:
        """By group and depth, whether the column can be served, or is being recalled."""

        def is_usable(column: Column | None) -> bool:
            return column is not None and (
                column.state is State.RECALLING
                or (column.state is State.READY and column.expires_at > now)
            )

        all_usable = []
        for path in Lookup(self._stock, prompt, now).paths:
            if path.map.linked:
                usable = [True] * path.fresh
                usable += map(is_usable, path.found[path.fresh :])
            else:
                usable = [
                    reach > 0 or (column is not None and column.state is State.RECALLING)
                    for reach, column in zip(path.reach, path.found, strict=True)
                ]
            all_usable.append(usable)
        return all_usable


class RestorePlanner:
    """Recalls the parts of columns that an agent has lost. Columns that do not exist in tier 2 are
    removed."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._lost: deque[tuple[deque[Column], frozenset[int]]] = deque()
        self._losing: dict[int, frozenset[int]] = {}  # by group: the shards of those
        self._restores: deque[tuple[Place, frozenset[int]]] = deque()

    def lose(self, group: int, shards: frozenset[int]) -> None:
        """These shards have lost all columns of a group. `check_lost` restores or removes the columns;
        until then refills of them are refused."""
        self._losing[group] = self._losing.get(group, frozenset()) | shards
        for account in self._stock.accounts.values():
            self._lost.append((deque(account.columns(group)), shards))

    def refuse(self, column: Column, reason: Reason) -> None:
        """The bytes in the column's slot are not the stored ones, or not available. It is not served
        again, unless an agent has lost it and tier 2 restores it."""
        lost = self._losing.get(column.map.group)
        if column.state is State.READY and not (lost and self._restore(column, lost)):
            self._stock.remove(column, reason)

    def check_lost(self, most: int) -> bool:
        """Restore or remove about so many lost columns. Whether there is more to do now."""
        while self._lost and most > 0 and self._may_restore_more:
            left, shards = self._lost[0]
            while left and most > 0 and self._may_restore_more:
                most -= 1
                column = left.popleft()
                if column.state is State.READY and not self._restore(column, shards):
                    self._stock.remove(column, Reason.AGENT_LOST)
            if not left:
                self._lost.popleft()
        if not self._lost:
            self._losing.clear()
        return bool(self._lost) and self._may_restore_more

    def begin(self, most: int) -> Recall | None:
        """A recall of parts that agents have lost."""
        recall: Recall | None = None
        kind = None
        while self._restores and (recall is None or len(recall.places) < most):
            place, shards = self._restores[0]
            owner = place.column.map
            if recall and kind != (owner, shards):
                break
            self._restores.popleft()
            if is_recalling(place) and not owner.purged_by:
                tag = owner.account.makers[owner.namespace].tag
                recall = recall or Recall(tag, owner.account.encrypted_for, [], shards)
                recall.places.append(place)
                kind = owner, shards
        return recall

    @property
    def _may_restore_more(self) -> bool:
        least = min(pool.limit for pool in self._stock.slots.pools)
        return len(self._restores) < min(RESTORES_MAX, max(1, least // RESTORES_PART))

    def _restore(self, column: Column, shards: frozenset[int]) -> bool:
        """Plan to restore the column, if the lost part may exist in tier 2. Whether it may."""
        exists = column.state is State.READY and column.tier2_used_at is not None
        if not exists or not self._stock.may_use_tier2(column.map.account):
            return False
        self._stock.withdraw(column)
        column.state = State.RECALLING
        self._restores.append((Place(column, column.slot), shards))
        return True


def _was_purged(column: Column) -> bool:
    """Whether the copy in tier 2 is from before a purge."""
    return column.stored_at <= column.map.account.tier2_purges.of(column.map.namespace)


def is_recalling(place: Place) -> bool:
    return place.column.state is State.RECALLING and place.column.slot == place.slot


def _ask(question: Question, exists: Sequence[set[int]]) -> Generator[Question, Answer, None]:
    """Add what exists of what is asked for, if anything is."""
    if any(question.values()):
        for index, found in (yield question).items():
            exists[index].update(found)


def _search(groups: Sequence[Group], usable: Sequence[Sequence[bool]], start: int) -> Search:
    """Ask for columns of full groups from `start` on, a few first and then more, until one does not
    exist. Then ask for what windows need up to there, and for the last column of which all state groups
    have a state."""
    exists: list[set[int]] = [set() for _ in groups]
    full = [index for index, group in enumerate(groups) if group.linked]
    reach = end = len(usable[0])
    step = ASK_FIRST
    if full:
        reach = start
    while reach < end:
        until = min(reach + step, end)
        depths = range(reach, until)
        question = {index: [depth for depth in depths if not usable[index][depth]] for index in full}
        yield from _ask(question, exists)
        gap = (
            depth
            for depth in depths
            if not all(usable[index][depth] or depth in exists[index] for index in full)
        )
        reach = next(gap, until)
        if reach < until:
            break
        step = min(8 * step, ASK_MOST)
    question = {
        index: [
            depth
            for depth in range(group.first_needed((start + 1) * COLUMN_TOKENS), reach)
            if not usable[index][depth]
        ]
        for index, group in enumerate(groups)
        if not group.linked and not group.is_state and reach > start
    }
    yield from _ask(question, exists)
    states = [index for index, group in enumerate(groups) if group.is_state]
    step, is_found = ASK_FIRST, not states
    while start < reach and not is_found:
        depths = range(max(start, reach - step), reach)
        question = {index: [depth for depth in depths if not usable[index][depth]] for index in states}
        yield from _ask(question, exists)
        is_found = any(
            all(usable[index][depth] or depth in exists[index] for index in states) for depth in depths
        )
        reach, step = depths.start, min(8 * step, ASK_MOST)
    return exists


def _with(all_usable: Sequence[Sequence[bool]], exists: Sequence[Collection[int]]) -> list[list[bool]]:
    """By group and depth, whether a column is usable or exists in tier 2."""
    return [
        [is_usable or depth in more for depth, is_usable in enumerate(usable)]
        for usable, more in zip(all_usable, exists, strict=True)
    ]


def _longest(groups: Sequence[Group], usable: Sequence[Sequence[bool]]) -> int:
    """The most columns from the start that all groups could serve."""
    whole = len(usable[0])
    runs: list[list[int]] = []  # of each group: how many in a row, up to each column
    for group, columns in zip(groups, usable, strict=True):
        run, counted = 0, []
        for is_usable in columns:
            run = run + 1 if is_usable else 0
            counted.append(run)
        runs.append(counted)
        if group.linked:
            whole = min(
                whole, next((at for at, is_usable in enumerate(columns) if not is_usable), whole)
            )
    while whole and not all(
        group.alone or counted[whole - 1] >= whole - group.first_needed(whole * COLUMN_TOKENS)
        for group, counted in zip(groups, runs, strict=True)
    ):
        whole -= 1
    return whole
