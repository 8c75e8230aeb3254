"""Siblings: drivers of the same model and layout, whose columns a driver may borrow.

A driver that misses a prompt may copy its columns from the memory of a sibling, agent to agent. It may
then read any slot of the sibling's shards. So a sibling stores nothing of an org that the borrower may
not serve: its orgs are among those of the borrower, and those that are leaving count as its orgs still.

Drivers of one model are numbered in the order of their names, and sets of them are integers with a bit
for each. So all of them are compared with all others in a few operations for each stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias, TypeVar

from console.control.models import Kind
from console.control.services import ALL_BRAINS, Address
from console.fleet.models import Driver, Node
from console.placement.rules import Borrow, Rules
from console.placement.topology import Misconfigured
from console.sessions import endpoints
from console.sessions.budgets import Budgets, Link
from console.sessions.models import DriverOrg, Phase, Stream
from console.sessions.plans.model import model_of
from console.sessions.rules import effective_rules_of_all
from swdriver_shim.desired import SIBLINGS_MAX, ModelSpec

FAR: Final = (Borrow.NODE, Borrow.LEAF, Borrow.SPINE)
WORDS: Final = dict(zip(FAR, ("on the same node", "over a leaf", "over the spine"), strict=True))

Orgs: TypeAlias = frozenset[int] | None  # their keys; None: all
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stream of a driver is. `node` and `nic_leaf` are names."""

    group: str
    index: int
    node: str
    nic_leaf: str
    phase: str


_PLACE: Final = ("group", "index", "node__name", "nic_leaf", "phase")


@dataclass(frozen=True, slots=True)
class Member:
    """A driver with a running job. `may_serve`: the orgs that it is told. `stores`: those of which it
    may have columns, also of those that are leaving."""

    driver: Driver
    rules: Rules
    may_serve: Orgs
    stores: Orgs
    places: tuple[Place, ...]

    @property
    def is_moving(self) -> bool:
        """Whether its columns are at two nodes."""
        return any(place.phase == Phase.MOVING for place in self.places)

    @property
    def shards(self) -> tuple[tuple[str, int], ...]:
        return tuple((place.group, place.index) for place in self.places)


@dataclass(frozen=True, slots=True)
class Home:
    """A shard of a sibling. `far`: from the borrower's shard of the same group and index."""

    group: str
    index: int
    address: str
    shard: str
    far: Borrow
    bytes_per_second: int | None


@dataclass(frozen=True, slots=True)
class Sibling:
    driver: Driver
    homes: tuple[Home, ...]

    @property
    def far(self) -> Borrow:
        """Of the shard that is farthest away."""
        return max((home.far for home in self.homes), key=FAR.index)

    @property
    def where(self) -> str:
        return WORDS[self.far]

    @property
    def bytes_per_second(self) -> int | None:
        """Of the shard that takes longest; None without a limit."""
        known = [home.bytes_per_second for home in self.homes if home.bytes_per_second is not None]
        return min(known, default=None)


class Siblings:
    """Of all drivers, as things are when it is first asked. In as many queries for many as for few."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}

    # Asking

    def of(self, name: str) -> list[Sibling]:
        """Those that the driver of this name borrows from, the nearest first."""
        same = self._same_as(name)
        if same is None:
            return []
        me = same.members[same.number_of[name]]
        return [self._sibling(me, one) for one in same.lend_now_to(same.number_of[name])]

    def names_of(self, name: str) -> list[str]:
        """Their names, in order."""
        same = self._same_as(name)
        found = same.lend_now_to(same.number_of[name]) if same else []
        return sorted(one.driver.name for one in found)

    def borrowers_of(self, name: str) -> list[str]:
        """The drivers that may borrow from this one, in order; also while streams move, so that agents
        are told less often."""
        same = self._same_as(name)
        if same is None:
            return []
        found = same.borrowers_of[same.number_of[name]]
        return sorted(same.members[one].driver.name for one in found)

    def documents_of(self, names: Collection[str]) -> set[Address]:
        """Those that say who borrows from or lends to these drivers; where there are more siblings than
        a driver may have, also some that do not."""
        found: set[Address] = set()
        for same in {same.model: same for name in names if (same := self._same_as(name))}.values():
            mine = same.bits(names)
            for number, member in enumerate(same.members):
                lenders = same.may_lend_to(number)
                if not (mine >> number & 1):
                    lenders &= mine
                if lenders:
                    found.add((Kind.DRIVER.value, member.driver.name))
                    places = (place for one in _numbers(lenders) for place in same.members[one].places)
                    found.update((Kind.NODE.value, place.node) for place in places)
        return found | {ALL_BRAINS} if found else found

    def why_none(self, name: str) -> str:
        """Why this driver has no sibling, in a sentence; empty if it has."""
        own = next((one for one in self._running if one.name == name), None)
        if own is None or name not in self._model_of:
            return "It has no running job."
        same = self._same_as(name)
        if same is None:
            return "No other driver runs this model."
        me = same.number_of[name]
        member = same.members[me]
        if member.rules.borrow is Borrow.NO:
            return "The session rules allow no borrowing."
        if member.is_moving:
            return "Its streams are moving: it borrows again when they have arrived."
        others = same.all & ~(1 << me)
        if not (others := others & same.same_shards(me)):
            return "The other drivers of this model have other shards."
        if not (others := others & same.within_orgs(me)):
            return "The other drivers of this model may store columns of orgs that it may not serve."
        if not others & same.near_enough(me):
            near = member.rules.borrow.label
            return f"No other driver of this model is as near as the session rules want it: {near}."
        if not same.lend_now_to(me):
            return "The streams of its siblings are moving: it borrows again when they have arrived."
        return ""

    # Reading

    @cached_property
    def _running(self) -> list[Driver]:
        found = Driver.objects.filter(job__running=True).select_related("job__session").order_by("name")
        # Who has no address over HTTP can't be asked for columns, and its document would be refused.
        return [one for one in found if one.control_url.startswith(("http://", "https://"))]

    @cached_property
    def _model_of(self) -> dict[str, ModelSpec]:
        found = {}
        for driver in self._running:
            try:
                found[driver.name] = model_of(driver)
            except Misconfigured:
                continue
        return found

    @cached_property
    def _by_model(self) -> dict[ModelSpec, _SameModel]:
        """Of the models that several drivers run."""
        by_model: dict[ModelSpec, list[Driver]] = defaultdict(list)
        for driver in self._running:
            if driver.name in self._model_of:
                by_model[self._model_of[driver.name]].append(driver)
        several = {model: drivers for model, drivers in by_model.items() if len(drivers) > 1}
        if not several:
            return {}
        drivers = [driver for some in several.values() for driver in some]
        places, orgs, rules = _places(drivers), _orgs(drivers), effective_rules_of_all()
        members = {
            model: [
                Member(one, rules(one.job.session.org_id), *orgs[one.pk], places[one.pk])
                for one in some
                if places[one.pk]  # else its job has ended since
            ]
            for model, some in several.items()
        }
        leaves = self._budgets.leaves
        return {model: _SameModel(model, some, leaves) for model, some in members.items()}

    @cached_property
    def _budgets(self) -> Budgets:
        return Budgets()

    def _same_as(self, name: str) -> _SameModel | None:
        """With whom it is compared; None where no other driver runs its model."""
        model = self._model_of.get(name)
        same = None if model is None else self._by_model.get(model)
        return same if same is not None and name in same.number_of else None

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return {node.name: node for node in Node.objects.only("name", "data_address", "public_key")}

    # Making

    def _sibling(self, borrower: Member, lender: Member) -> Sibling:
        pairs = zip(borrower.places, lender.places, strict=True)
        name, percent = lender.driver.name, borrower.rules.moves_percent
        return Sibling(lender.driver, tuple(self._home(name, to, at, percent) for to, at in pairs))

    def _home(self, driver: str, to: Place, at: Place, percent: int) -> Home:
        """Of this driver's shard, for the agent at the place `to`."""
        far, bytes_per_second = self._way(to, at, percent)
        shard = f"{driver}.{at.group}.{at.index}"
        return Home(at.group, at.index, self._address(at.node), shard, far, bytes_per_second)

    def _way(self, to: Place, at: Place, percent: int) -> tuple[Borrow, int | None]:
        """How far, and how fast at most: nobody knows which of several common leaves bytes take, and it
        is the fastest that a node is made for."""
        if to.node == at.node:
            return Borrow.NODE, None
        leaves = self._budgets.leaves
        common = leaves.get(to.node, frozenset()) & leaves.get(at.node, frozenset())
        ends = [(leaf, leaf) for leaf in common] or [(to.nic_leaf, at.nic_leaf)]
        found = [
            budget.bytes_per_second
            for here, there in ends
            if (budget := self._budgets.between(Link(to.node, here), Link(at.node, there), percent))
        ]
        return Borrow.LEAF if common else Borrow.SPINE, max(found, default=None)

    def _address(self, node: str) -> str:
        if node not in self._addresses:
            if node not in self._nodes:  # it has left the fleet since
                raise Node.DoesNotExist(f"There is no node {node} any more.")
            self._addresses[node] = endpoints.address_for_agents(self._nodes[node])
        return self._addresses[node]


class _SameModel:
    """The drivers of one model, by their numbers."""

    def __init__(
        self, model: ModelSpec, members: list[Member], leaves: Mapping[str, frozenset[str]]
    ) -> None:
        self.model, self.members, self._leaves = model, members, leaves
        self.number_of = {one.driver.name: number for number, one in enumerate(members)}
        self.all = (1 << len(members)) - 1
        self._lets = {far: _bits(_allows(one, far) for one in members) for far in FAR}
        self._may_serve: dict[Orgs, int] = {}

    def bits(self, names: Collection[str]) -> int:
        return _bits(one.driver.name in names for one in self.members)

    @cached_property
    def lenders_of(self) -> list[list[int]]:
        """By borrower, those that are chosen for it, the nearest first."""
        return [self._chosen(number) for number in range(len(self.members))]

    @cached_property
    def borrowers_of(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.members]
        for borrower, lenders in enumerate(self.lenders_of):
            for lender in lenders:
                found[lender].append(borrower)
        return found

    def lend_now_to(self, number: int) -> list[Member]:
        """Those that are chosen for it. A driver whose streams move has columns at two nodes: it neither
        lends nor borrows."""
        if self.members[number].is_moving:
            return []
        found = (self.members[one] for one in self.lenders_of[number])
        return [one for one in found if not one.is_moving]

    def may_lend_to(self, number: int) -> int:
        """All from whom it may borrow."""
        others = self.all & ~(1 << number)
        return others & self.same_shards(number) & self.within_orgs(number) & self.near_enough(number)

    def same_shards(self, number: int) -> int:
        return self._of_shards[self.members[number].shards]

    def within_orgs(self, number: int) -> int:
        """Those that store nothing of an org that this one may not serve."""
        may_serve = self.members[number].may_serve
        if may_serve not in self._may_serve:
            fit = (stores for stores in self._of_orgs if _is_within(stores, may_serve))
            self._may_serve[may_serve] = _union(self._of_orgs[stores] for stores in fit)
        return self._may_serve[may_serve]

    def near_enough(self, number: int) -> int:
        """As the stricter of both rules says."""
        return _union(found for _, found in self._by_distance(number))

    def _chosen(self, number: int) -> list[int]:
        """Of several that are equally near the next ones by name, so that each lends to as many."""
        may = self.may_lend_to(number)
        chosen: dict[int, None] = {}
        for _, found in self._by_distance(number):
            chosen |= dict.fromkeys(_numbers(found & may, after=number))
        return list(chosen)[:SIBLINGS_MAX]

    def _by_distance(self, number: int) -> Iterator[tuple[Borrow, int]]:
        """Those that are no farther away than that, with all of their shards."""
        for far in FAR:
            if _allows(self.members[number], far):
                yield far, self._no_farther(number, far) & self._lets[far]

    def _no_farther(self, number: int, far: Borrow) -> int:
        if far is Borrow.SPINE:
            return self.all
        found = self.all
        for place in self.members[number].places:
            shard = place.group, place.index
            near = self._at_node[*shard, place.node]
            if far is Borrow.LEAF:
                leaves = self._leaves.get(place.node, ())
                near |= _union(self._on_leaf[*shard, leaf] for leaf in leaves)
            found &= near
        return found

    @cached_property
    def _of_shards(self) -> dict[tuple[tuple[str, int], ...], int]:
        return self._grouped(lambda one: [one.shards])

    @cached_property
    def _of_orgs(self) -> dict[Orgs, int]:
        return self._grouped(lambda one: [one.stores])

    @cached_property
    def _at_node(self) -> dict[tuple[str, int, str], int]:
        return self._grouped(lambda one: [(at.group, at.index, at.node) for at in one.places])

    @cached_property
    def _on_leaf(self) -> dict[tuple[str, int, str], int]:
        return self._grouped(
            lambda one: [
                (at.group, at.index, leaf) for at in one.places for leaf in self._leaves.get(at.node, ())
            ]
        )

    def _grouped(self, keys: Callable[[Member], Iterable[K]]) -> dict[K, int]:
        found: dict[K, int] = defaultdict(int)
        for number, one in enumerate(self.members):
            for key in keys(one):
                found[key] |= 1 << number
        return found


def documents_of(*names: str) -> set[Address]:
    """The documents that say who borrows from or lends to these drivers, as things are. Whoever changes
    a driver asks before and after, and tells both."""
    return Siblings().documents_of(names)


def _places(drivers: Collection[Driver]) -> dict[int, tuple[Place, ...]]:
    """By driver, in the order of their groups and numbers."""
    found: dict[int, list[Place]] = {driver.pk: [] for driver in drivers}
    streams = Stream.objects.filter(job__driver__in=found).order_by("group", "index")
    for driver, *place in streams.values_list("job__driver", *_PLACE):
        found[driver].append(Place(*place))
    return {driver: tuple(places) for driver, places in found.items()}


def _orgs(drivers: Collection[Driver]) -> dict[int, tuple[Orgs, Orgs]]:
    """By driver, the orgs that it may serve, and those of which it may store something."""
    may_serve: dict[int, set[int | None]] = {driver.pk: set() for driver in drivers}
    stores: dict[int, set[int | None]] = {driver.pk: set() for driver in drivers}
    rows = DriverOrg.objects.filter(driver__in=may_serve)
    for driver, org, is_leaving in rows.values_list("driver", "org", "is_leaving"):
        stores[driver].add(org)
        if not is_leaving:
            may_serve[driver].add(org)
    return {driver: (_all_or(may_serve[driver]), _all_or(stores[driver])) for driver in stores}


def _all_or(keys: Collection[int | None]) -> Orgs:
    return None if None in keys else frozenset(key for key in keys if key is not None)


def _allows(member: Member, far: Borrow) -> bool:
    return member.rules.borrow.strictness <= far.strictness


def _is_within(orgs: Orgs, others: Orgs) -> bool:
    return others is None or (orgs is not None and orgs <= others)


def _bits(are: Iterable[bool]) -> int:
    return sum(1 << number for number, is_one in enumerate(are) if is_one)


def _union(sets: Iterable[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


def _numbers(bits: int, after: int = -1) -> Iterator[int]:
    """In order, beginning behind `after`."""
    behind = bits >> (after + 1) << (after + 1)
    for some in (behind, bits ^ behind):
        while some:
            lowest = some & -some
            yield lowest.bit_length() - 1
            some ^= lowest
