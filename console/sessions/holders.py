"""Who stores the fragments of which shard: assigning agents, and replacing those that are lost or leave.

How the columns of a driver are divided, the rules of its session say, and no other org's. Replicas of
one model with the same code share their columns in tier 2, and so their fragments and holders. `keep` is
called every few seconds, and at once when rules, jobs or nodes change.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from fractions import Fraction
from functools import cached_property
from typing import Final

from celery import current_app
from django.contrib.postgres.aggregates import ArrayAgg
from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from kombu.exceptions import OperationalError

from console.control import services as control
from console.control.models import Kind
from console.control.services import Address
from console.fleet.models import Node
from console.fleet.nodes import hears_of_nodes, wanted
from console.fleet.services import lock_fleet
from console.operations.models import Operation
from console.orgs.models import Org
from console.periodic import taking_turns
from console.placement.rules import Redundancy, Rules
from console.placement.topology import State
from console.sessions import endpoints
from console.sessions.fragments import AllFragments, Shard, Stored
from console.sessions.models import FragmentHolder, Job, RuleSet, Stream
from console.sessions.plans.holders import Agent, Choice, Standing, apart, choose, too_few
from console.sessions.plans.losses import Limits
from console.sessions.rules import effective_rules, effective_rules_of_all, follows_rules
from kvss_agent.desired import PART
from kvss_agent.redundancy.layout import fragment_part
from telemetry.units import counted

log = logging.getLogger(__name__)

KEEP: Final = "console.sessions.tasks.keep_holders"  # by its name, for it imports this module
WHY: Final = "Other agents store fragments of columns."
LOST_SHARE_MAX: Final[Fraction] = Limits().share  # if more are lost at once, a person decides
UPGRADE: Final = "node.upgrade"
UPGRADE_SECONDS: Final = 1800.0  # that an upgraded node may be silent, installing and starting again
TAKEN_AWAY: Final = (State.DRAINING.value, State.MAINTENANCE.value)
NO_DISK: Final = "has no tier 2 on a disk"


@dataclass(frozen=True, slots=True)
class Division:
    """How the columns of a stream are divided. `asked`: by its rules; `code`: what they get, empty for
    none. `why`: not as asked, or why a holder that should be replaced is not."""

    asked: Redundancy
    code: str
    why: str


class Assignment:
    """The streams of running jobs, and who should store their fragments. `rules`: by which, where they
    are not those in force."""

    def __init__(self, now: datetime, rules: Callable[[int | None], Rules] | None = None) -> None:
        self._now = now
        self._rules = rules or effective_rules_of_all()
        self.known = AllFragments()
        self._choices: dict[Shard, Choice] = {}
        self._agents: dict[tuple[bool, float], list[Agent]] = {}

    @cached_property
    def streams(self) -> list[Stored]:
        """In the order in which they get holders."""
        found = self.known.streams
        return sorted(found, key=lambda one: (one.namespace, one.group, one.index, one.stream))

    @cached_property
    def users(self) -> dict[Shard, list[Stored]]:
        """By shard that may have holders the streams that it is for."""
        found: dict[Shard, list[Stored]] = defaultdict(list)
        for one in self.streams:
            for code in self._codes(one):
                found[one.divided_by(code.value)].append(one)
        return found

    @cached_property
    def _counts(self) -> Counter[str]:
        """How many fragments each node has, of those that somebody uses."""
        holders = self.known.holders
        return Counter(row.node.name for shard in self.users for row in holders.get(shard, ()))

    def _codes(self, one: Stored) -> list[Redundancy]:
        """That its rules ask for: the strictest first, and then what the cluster promises to all."""
        asked = (self._rules(one.org).redundancy, self._rules(None).redundancy)
        return [code for code in dict.fromkeys(asked) if code is not Redundancy.NONE]

    def division(self, one: Stored) -> Division:
        """By the first code that fits the agents that there are. No code that nobody has asked for is
        taken instead: whenever one changes, what was stored by the former is lost."""
        codes = self._codes(one)
        if not codes:
            return Division(Redundancy.NONE, "", "The session rules ask for none.")
        why = ""
        for code in codes:
            choice = self._choice_of(one, code)
            if choice.holders and code is not codes[0]:
                return Division(
                    codes[0], code.value, f"{why} Columns have {code.value}, as the cluster asks."
                )
            if choice.holders:
                return Division(code, code.value, choice.why)
            why = why or choice.why
        return Division(codes[0], "", why)

    def _choice_of(self, one: Stored, code: Redundancy) -> Choice:
        shard = one.divided_by(code.value)
        # Those that have it keep it, and of others the first: a driver that comes takes it from nobody.
        first = min(self.users[shard], key=lambda user: (user.code != code.value, user.job, user.stream))
        if one.slot_bytes != first.slot_bytes:
            return Choice((), "Another driver of this model and layout has columns of another size.")
        return self.choice(shard)

    def choice(self, shard: Shard) -> Choice:
        """Of one that `users` has."""
        if shard not in self._choices:
            found = self._choices[shard] = self._choose(shard)
            before = {row.place: row.node.name for row in self.known.holders.get(shard, ())}
            new = {place: name for place, name in enumerate(found.holders) if before.get(place) != name}
            self._counts.subtract(before[place] for place in new if place in before)
            self._counts.update(new.values())
        return self._choices[shard]

    def _choose(self, shard: Shard) -> Choice:
        code = Redundancy(shard.code)
        if not re.fullmatch(PART, fragment_part(shard.part, code.holders - 1, code.data, code.parity)):
            return Choice((), f"The name of group {shard.group} is too long to be that of fragments.")
        current = {row.place: row.node.name for row in self.known.holders.get(shard, ())}
        return choose(code, current, self.agents_for(shard), self._counts)

    def agents_for(self, shard: Shard) -> list[Agent]:
        """As the least patient of its sessions sees them: no org's rule may be laxer than the cluster's,
        and none keeps others waiting for a holder."""
        rules = [self._rules(org) for org in {one.org for one in self.users[shard]}]
        replacing = [one for one in rules if one.replace_lost]
        return self.agents(
            replace_lost=bool(replacing),
            after_seconds=min(one.replace_lost_after_seconds for one in replacing or rules),
        )

    def agents(self, *, replace_lost: bool, after_seconds: float) -> list[Agent]:
        """Those that could store fragments, and those that do."""
        key = replace_lost, after_seconds
        if key not in self._agents:
            self._agents[key] = [
                self._agent(node, leaves, replace_lost=replace_lost, after_seconds=after_seconds)
                for node, leaves in self._nodes
            ]
        return self._agents[key]

    @cached_property
    def _nodes(self) -> list[tuple[Node, frozenset[str]]]:
        known = {row.node.pk for rows in self.known.holders.values() for row in rows}
        leaves = ArrayAgg("nics__leaf__name", filter=Q(nics__isnull=False), default=[])
        found = Node.objects.filter(joined_at__isnull=False).annotate(nic_leaves=leaves)
        useful = found.filter(Q(declared__tier2__kind="posix") | Q(pk__in=known)).order_by("name")
        return [(node, frozenset(node.nic_leaves)) for node in useful]

    @cached_property
    def _upgraded(self) -> frozenset[str]:
        """Nodes that are taken away for an upgrade: they come back with their disk."""
        running = Operation.objects.filter(kind=UPGRADE, done=False)
        return frozenset(running.values_list("plan__node", flat=True))

    @cached_property
    def _too_many_lost(self) -> bool:
        """A fault of the console's own network must not have all fragments made anew."""
        nodes = Node.objects.filter(joined_at__isnull=False).exclude(state=State.MAINTENANCE.value)
        states = list(nodes.values_list("state", flat=True))
        return states.count(State.LOST.value) > max(Fraction(1), LOST_SHARE_MAX * len(states))

    def _agent(
        self, node: Node, leaves: frozenset[str], *, replace_lost: bool, after_seconds: float
    ) -> Agent:
        tier2 = node.declared.get("tier2") or {}
        standing, why = Standing.LEAVES, NO_DISK
        if tier2.get("kind") == "posix" and node.data_address:
            # One that somebody takes away is waited for no longer when it is lost as well.
            is_lost = node.state == State.LOST.value and node.held_state not in TAKEN_AWAY
            standing, why = _STANDING[State.LOST.value if is_lost else wanted(node)[0].value]
            is_patient = not replace_lost or self._silent_seconds(node) < after_seconds
            if is_lost and (is_patient or self._too_many_lost):
                standing = Standing.KEEPS
            if standing is Standing.LEAVES and node.name in self._upgraded:
                is_back_soon = self._silent_seconds(node) < max(after_seconds, UPGRADE_SECONDS)
                standing = Standing.KEEPS if is_back_soon or not replace_lost else standing
        return Agent(node.name, standing, leaves, tier2, endpoints.address_for_agents(node), why)

    def _silent_seconds(self, node: Node) -> float:
        since = node.last_heartbeat_at or node.state_since
        return (self._now - since).total_seconds()


_STANDING: Final = {
    State.READY.value: (Standing.FREE, ""),
    State.CORDONED.value: (Standing.KEEPS, ""),
    State.DRAINING.value: (Standing.LEAVES, "is draining"),
    State.MAINTENANCE.value: (Standing.LEAVES, "is in maintenance"),
    State.LOST.value: (Standing.LEAVES, "is lost"),
}


def reconcile(now: datetime) -> set[Address]:
    """Assign what lacks a holder, replace holders that are lost or leave, and forget those of shards
    that no running job uses. The documents that change so; whoever calls tells.

    In the transaction of the caller. It takes the fleet's lock: who does not have it yet must not have
    locked or noted anything.
    """
    if not _is_in_use():
        return set()
    lock_fleet()
    return _reconcile(now)


def _reconcile(now: datetime) -> set[Address]:
    """While the fleet is held."""
    found = Assignment(now)
    holders, used, recoded = found.known.holders, set[Shard](), dict[Stored, str]()
    for one in found.streams:
        code = found.division(one).code
        if code:
            used.add(one.divided_by(code))
        if code != one.code:
            recoded[one] = code
    changed = {
        shard
        for shard in sorted({*used, *holders})
        if _assign(shard, holders.get(shard, []), found.choice(shard).holders if shard in used else ())
    }
    for code in set(recoded.values()):
        its = [one.stream for one, new in recoded.items() if new == code]
        Stream.objects.filter(pk__in=its).update(code=code)
    return _told(found, changed, recoded)


def _told(found: Assignment, changed: Collection[Shard], recoded: Mapping[Stored, str]) -> set[Address]:
    """The nodes of streams with other holders than before, and of all holders that these have or had:
    who comes has to let the drivers of the others in."""
    shards, names = set(changed), set[str]()
    for one in found.streams:
        if one in recoded:
            shards.update((one.shard, one.divided_by(recoded[one])))
        if one in recoded or one.shard in changed:
            names |= one.nodes
    for shard in shards:
        names.update(row.node.name for row in found.known.holders.get(shard, ()))
        names.update(found.choice(shard).holders if shard in found.users else ())
    return {(Kind.NODE.value, name) for name in names}


def _assign(shard: Shard, before: list[FragmentHolder], names: Sequence[str]) -> bool:
    """Whether its holders are others now."""
    if [(row.place, row.node.name) for row in before] == [*enumerate(names)]:
        return False
    stays = {row.place for row in before if names[row.place : row.place + 1] == (row.node.name,)}
    gone = [row.pk for row in before if row.place not in stays]
    FragmentHolder.objects.filter(pk__in=gone).delete()
    keys = dict(Node.objects.filter(name__in=names).values_list("name", "pk"))
    FragmentHolder.objects.bulk_create(
        FragmentHolder(**asdict(shard), place=place, node_id=keys[name])
        for place, name in enumerate(names)
        if place not in stays
    )
    return True


def _is_in_use() -> bool:
    asks = RuleSet.objects.exclude(redundancy=Redundancy.NONE.value)
    return asks.exists() or FragmentHolder.objects.exists()


def documents_of(*drivers: str) -> set[Address]:
    """Those of the nodes that have fragment shards of these drivers. Whoever starts or ends their jobs
    tells these."""
    return {(Kind.NODE.value, name) for name in AllFragments().nodes_of(set(drivers))}


def missing(now: datetime) -> list[tuple[str, str, int, str]]:
    """By code, and by what they have instead, how many shards of running jobs are not stored as their
    rules ask; and why the first."""
    if not _is_in_use():
        return []
    found = Assignment(now)
    lacking: dict[tuple[Redundancy, str], list[str]] = defaultdict(list)
    shards: dict[tuple[Redundancy, str], set[Shard]] = defaultdict(set)
    for one in found.streams:
        its = found.division(one)
        # What it should have it has only once holders are assigned.
        has = one.code if found.known.holders_of(one.shard) else ""
        if its.asked is not Redundancy.NONE and has != its.asked.value:
            lacking[its.asked, has].append(its.why)
            shards[its.asked, has].add(one.divided_by(its.asked.value))
    return [
        (code.value, instead, len(shards[code, instead]), whys[0])
        for (code, instead), whys in sorted(
            lacking.items(), key=lambda one: (one[0][0].holders, one[0][1])
        )
    ]


@follows_rules
def _follow_rules() -> set[Address]:
    return reconcile(timezone.now())


@transaction.atomic
def keep(now: datetime) -> int:
    """Reconcile, and tell those whose documents change; how many."""
    if not _is_in_use():
        return 0
    with taking_turns():
        lock_fleet()
    told = _reconcile(now)
    if told:
        control.changed(told, WHY)
    return len(told)


@hears_of_nodes
def soon() -> None:
    """Have it done after the commit; should that be lost, the next look does it."""
    transaction.on_commit(_send)


def _send() -> None:
    try:
        current_app.send_task(KEEP, retry=False)
    except OperationalError as error:
        log.warning("No task could be sent, so the next look assigns holders of fragments: %s", error)


def preview(org: Org | None) -> tuple[int, str]:
    """How many agents can store fragments of one shard now; and in sentences why those are too few for
    the rules of this org, or of the cluster, and what columns have instead; or nothing."""
    cluster = effective_rules(None)
    rules = effective_rules(org)
    found = Assignment(timezone.now())
    agents = found.agents(
        replace_lost=rules.replace_lost, after_seconds=rules.replace_lost_after_seconds
    )
    count = len(apart(agents))
    if count >= rules.redundancy.holders:
        return count, ""
    instead = cluster.redundancy if count >= cluster.redundancy.holders else Redundancy.NONE
    has = "no redundancy" if instead is Redundancy.NONE else f"{instead.value}, as the cluster asks"
    return count, f"{too_few(rules.redundancy, agents)} Columns have {has}."


@dataclass(frozen=True, slots=True)
class Recoding:
    """Shards of a session whose redundant columns would be computed again."""

    session: str
    shards: int
    before: str
    after: str

    def __str__(self) -> str:
        shards = counted(self.shards, "shard")
        return (
            f"{shards} of session {self.session} would have {self.after or 'no redundancy'} in place of "
            f"{self.before}. What is stored redundantly there becomes a miss."
        )


def recodings(changed: RuleSet) -> list[Recoding]:
    """What rules that are not saved yet would do. Raises Misconfigured."""
    if not _is_in_use():
        return []
    found = Assignment(timezone.now(), effective_rules_of_all(changed))
    sessions = dict(Job.objects.filter(running=True).values_list("pk", "session__name"))
    counts = Counter(
        (sessions[one.job], one.code, code)
        for one in found.streams
        if one.code and one.job in sessions and (code := found.division(one).code) != one.code
    )
    return [Recoding(name, count, *codes) for (name, *codes), count in sorted(counts.items())]
