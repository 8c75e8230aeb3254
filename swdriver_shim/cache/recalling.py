"""What is brought back from tier 2: it is asked for what follows a hit, as far as that leads somewhere.

What comes gets slots as a store does. So what is asked for once more is in memory from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from swdriver_shim.cache.matching import Look
from swdriver_shim.cache.prefix_map import Column, PrefixMap, State
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.room import Room
from swdriver_shim.cache.slots import Place, Use
from swdriver_shim.cache.spilling import Dates, Spilling
from swdriver_shim.cache.stock import Stock
from swdriver_shim.cache.trails import Trail
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import Group

ASK_FIRST: Final = 4  # columns; most prompts that miss were never stored
ASK_MOST: Final = 512
RECALL_AT_ONCE: Final = 64  # columns

Question = dict[int, list[int]]  # by group: at which depths are there columns in tier 2?
Answer = Mapping[int, Collection[int]]  # by group: at these
Search = Generator[Question, Answer, list[set[int]]]


@dataclass(slots=True, eq=False)
class Recall(Use):
    """To be brought back, into these slots; of some shards only, where the others have their part."""

    tag: bytes
    encrypted_for: str  # an org; empty for in the clear
    places: list[Place] = field(default_factory=list)
    shards: frozenset[int] | None = None


@dataclass(slots=True)
class Recalled:
    """Columns since the start."""

    columns: int = 0
    bytes: int = 0
    restored: int = 0  # of those: whose part was lost with an agent
    not_recalled: int = 0
    late: int = 0  # expired in tier 2, found out when they came


class Recalling:
    def __init__(self, stock: Stock, room: Room, spilling: Spilling) -> None:
        self._stock = stock
        self._room = room
        self._spilling = spilling
        self.recalled = Recalled()

    def search(self, trail: Trail, start: int, now: float) -> Search | None:
        """Which columns behind the first so many tier 2 has. None if there is nothing to ask.

        It yields questions and is sent the answers; what it returns is for `begin`.
        """
        if start >= len(trail.keys) or not self._may_ask(trail):
            return None
        return _search(self._stock.layout.groups, self._here(trail, now), start)

    def begin(self, trail: Trail, there: Sequence[Collection[int]], now: float) -> list[Recall]:
        """Slots for columns that tier 2 has, as far as they make a longer prefix, and as there is room.

        In pieces, the first columns of the prompt first. For each, `start` and `finish` have to follow
        when its turn has come; or only the latter, if it never comes.
        """
        if not self._may_ask(trail):
            return []
        groups, places = self._stock.layout.groups, list[Place]()
        whole = _longest(groups, [
            [is_here or depth in more for depth, is_here in enumerate(present)]
            for present, more in zip(self._here(trail, now), there, strict=True)
        ])  # fmt: skip
        maps = self._stock.maps_of(trail.maker)
        for home, group, more in zip(maps, groups, there, strict=True):
            first = group.first_needed(whole * COLUMN_TOKENS)
            self._recall_in(home, trail.keys[:whole], first, more, now, places)
        places.sort(key=lambda place: place.column.depth)
        encrypted_for = maps[0].account.encrypted_for
        return [
            Recall(trail.maker.tag, encrypted_for, places[at : at + RECALL_AT_ONCE])
            for at in range(0, len(places), RECALL_AT_ONCE)
        ]

    def start(self, recall: Recall, now: float) -> bool:
        """It is carried out from here on. What was purged or taken away since is left out; whether there
        is anything left."""
        recall.places = [
            place for place in recall.places if is_coming(place) and not place.column.home.purged_by
        ]
        self._stock.slots.begin(recall, now)
        return bool(recall.places)

    def finish(self, recall: Recall, now: float, found: Mapping[Column, Dates | Reason]) -> None:
        """These columns are in their slots, or why not. What is not told of did not come."""
        stock, recalled = self._stock, self.recalled
        if recall.number and not stock.slots.end(recall):
            return
        came: list[Column] = []
        for place in recall.places:
            if not is_coming(place):
                continue  # purged or taken away meanwhile
            column = place.column
            got = found.get(column, Reason.TIER2_LATE)
            if isinstance(got, Reason):
                recalled.not_recalled += 1
                stock.remove(column, got)
                continue
            recalled.columns += 1
            recalled.bytes += column.bytes
            recalled.restored += recall.shards is not None
            if recall.shards is None:
                column.stored_at, column.used_at = min(got.stored_at, now), min(got.used_at, now)
            else:  # its last use is known here
                column.stored_at = min(got.stored_at, column.stored_at)
            column.kept_at = got.used_at
            self._spilling.grown(column.home.account)
            if column.expires_at <= now:
                recalled.late += 1
                stock.remove(column, Reason.EXPIRED)
                continue
            came.append(column)
        stock.arrived(came, now)

    def leave(self, trail: Trail, there: Sequence[Collection[int]]) -> None:
        """It is faster to compute these columns."""
        for depth in set().union(*there):
            self._stock.ghosts.add(trail.keys[depth], Reason.NOT_WORTH_IT)

    def _recall_in(
        self,
        home: PrefixMap,
        keys: Sequence[bytes],
        first: int,
        there: Collection[int],
        now: float,
        places: list[Place],
    ) -> None:
        stock, parent = self._stock, None
        payers = self._room.payers(home)
        for depth in range(first, len(keys)):
            column = home.columns.get(keys[depth])
            if column is None or column.state is State.EMPTY:
                if depth not in there or stock.forgetting.is_forgetting(home.group, keys[depth]):
                    if stock.layout.groups[home.group].alone:
                        continue
                    return
                slot = self._room.take(home, parent, column, payers, now)
                if slot is None:
                    return
                column = column or home.add(keys[depth], parent, depth)
                stock.occupy(column, slot, State.COMING)
                places.append(Place(column, slot))
            parent = column

    def _may_ask(self, trail: Trail) -> bool:
        return self._stock.may_use_tier2(self._stock.account(trail.maker.org))

    def _here(self, trail: Trail, now: float) -> list[list[bool]]:
        """For each group and column: whether it can be used, or is on its way from tier 2."""

        def is_usable(column: Column | None) -> bool:
            return column is not None and (
                column.state is State.COMING or (column.state is State.READY and column.expires_at > now)
            )

        here = []
        for path in Look(self._stock, trail, now).paths:
            if path.map.linked:
                usable = [True] * path.fresh
                usable += map(is_usable, path.found[path.fresh :])
            else:
                usable = [
                    reach > 0 or (column is not None and column.state is State.COMING)
                    for reach, column in zip(path.reach, path.found, strict=True)
                ]
            here.append(usable)
        return here


def is_coming(place: Place) -> bool:
    return place.column.state is State.COMING and place.column.slot == place.slot


def _search(groups: Sequence[Group], here: Sequence[Sequence[bool]], start: int) -> Search:
    """From `start` on in full groups, a few columns first and then more, until one is missing. Then what
    windows need for that."""
    there: list[set[int]] = [set() for _ in groups]
    full = [index for index, group in enumerate(groups) if group.linked]
    reach = end = len(here[0])
    step = ASK_FIRST
    if full:
        reach = start
    while reach < end:
        until = min(reach + step, end)
        depths = range(reach, until)
        question = {index: [depth for depth in depths if not here[index][depth]] for index in full}
        if any(question.values()):
            for index, found in (yield question).items():
                there[index].update(found)
        gap = (
            depth
            for depth in depths
            if not all(here[index][depth] or depth in there[index] for index in full)
        )
        reach = next(gap, until)
        if reach < until:
            break
        step = min(8 * step, ASK_MOST)
    question = {
        index: [
            depth
            for depth in range(group.first_needed((start + 1) * COLUMN_TOKENS), reach)
            if not here[index][depth]
        ]
        for index, group in enumerate(groups)
        if not group.linked and reach > start
    }
    if any(question.values()):
        for index, found in (yield question).items():
            there[index].update(found)
    return there


def _longest(groups: Sequence[Group], present: Sequence[Sequence[bool]]) -> int:
    """The most columns from the start that all groups could give back."""
    whole = len(present[0])
    runs: list[list[int]] = []  # of each group: how many in a row, up to each column
    for group, columns in zip(groups, present, strict=True):
        run, counted = 0, []
        for is_there in columns:
            run = run + 1 if is_there else 0
            counted.append(run)
        runs.append(counted)
        if group.linked:
            whole = min(whole, next((at for at, is_there in enumerate(columns) if not is_there), whole))
    while whole and not all(
        group.alone or counted[whole - 1] >= whole - group.first_needed(whole * COLUMN_TOKENS)
        for group, counted in zip(groups, runs, strict=True)
    ):
        whole -= 1
    return whole
