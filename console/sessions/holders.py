"""Who stores the fragments of which shard: assigning agents, and replacing those that are lost or leave.

Of the sessions whose drivers run one model, the rule that survives most losses holds for all: replicas
share their columns in tier 2, and so their fragments. `keep` is called every few seconds, and at once
when rules, jobs or nodes change.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
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
from console.placement.rules import Redundancy, Rules
from console.placement.topology import State, Tier
from console.sessions import endpoints
from console.sessions.fragments import AllFragments, Shard
from console.sessions.models import FragmentHolder, Job, RuleSet
from console.sessions.plans.holders import Agent, Choice, Standing, apart, choose, too_few
from console.sessions.plans.losses import Limits
from console.sessions.rules import effective_rules_of_all, follows_rules
from kvss_agent.desired import PART
from kvss_agent.redundancy.layout import fragment_part

log = logging.getLogger(__name__)

KEEP: Final = "console.sessions.tasks.keep_holders"  # by its name, for it imports this module
WHY: Final = "Other agents store fragments of columns."
LOST_SHARE_MAX: Final[Fraction] = Limits().share  # if more are lost at once, a person decides
UPGRADE: Final = "node.upgrade"
UPGRADE_SECONDS: Final = 1800.0  # that an upgraded node may be silent, installing and starting again
TAKEN_AWAY: Final = (State.DRAINING.value, State.MAINTENANCE.value)
NO_DISK: Final = "has no tier 2 on a disk"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the rules of sessions say about a shard."""

    code: Redundancy
    replace_lost: bool
    after_seconds: float

    def stricter(self, rules: Rules) -> Wanted:
        return Wanted(
            max(self.code, rules.redundancy, key=lambda one: one.strictness),
            self.replace_lost and rules.replace_lost,
            max(self.after_seconds, rules.replace_lost_after_seconds),
        )


class Assignment:
    """The shards of running jobs with who stores their fragments, and who should."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self.known = AllFragments()
        self._agents: dict[tuple[bool, float], list[Agent]] = {}

    @cached_property
    def counts(self) -> Counter[str]:
        """How many fragments each node has."""
        return Counter(row.node.name for rows in self.known.holders.values() for row in rows)

    @cached_property
    def wanted(self) -> dict[Shard, Wanted]:
        """Of all shards of running jobs, also those without redundancy."""
        rules = effective_rules_of_all()
        orgs = dict(Job.objects.filter(running=True).values_list("driver__name", "session__org"))
        by_model: dict[str, Wanted] = {}
        for driver, namespace in self.known.namespaces.items():
            its = rules(orgs.get(driver))
            known = by_model.get(namespace, Wanted(Redundancy.NONE, True, 0))
            by_model[namespace] = known.stricter(its)
        return {shard: by_model[shard.namespace] for shard in sorted(self._slot_bytes)}

    @cached_property
    def _slot_bytes(self) -> dict[Shard, set[int]]:
        found: dict[Shard, set[int]] = defaultdict(set)
        for one in self.known.streams:
            found[one.shard].add(one.slot_bytes)
        return found

    def choice(self, shard: Shard) -> Choice:
        wanted = self.wanted.get(shard)
        if wanted is None:
            return Choice((), "No running job uses it.")
        if wanted.code is Redundancy.NONE:
            return Choice((), "The session rules ask for none.")
        code = wanted.code
        if not re.fullmatch(PART, fragment_part(shard.part, code.holders - 1, code.data, code.parity)):
            return Choice((), f"The name of group {shard.group} is too long to be that of fragments.")
        if len(self._slot_bytes[shard]) > 1:
            return Choice((), "Drivers of this model and layout have columns of different sizes.")
        current = {row.place: row.node.name for row in self.known.holders.get(shard, ())}
        agents = self.agents(replace_lost=wanted.replace_lost, after_seconds=wanted.after_seconds)
        return choose(code, current, agents, self.counts)

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
        return Agent(node.name, standing, leaves, tier2, endpoints.address(node, Tier.SPINE), why)

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
    found = Assignment(now)
    changed: set[Address] = set()
    shards = []
    for shard in sorted({*found.wanted, *found.known.holders}):
        before = found.known.holders.get(shard, [])
        if nodes := _assign(found, shard, before):
            changed.update((Kind.NODE.value, name) for name in nodes)
            shards.append(shard)
    return changed | _stream_nodes(found, shards)


def _assign(found: Assignment, shard: Shard, before: list[FragmentHolder]) -> set[str]:
    """The nodes whose part in it is another one now."""
    names = found.choice(shard).holders
    code = found.wanted[shard].code.value if names else ""
    if [(row.place, row.node.name, row.code) for row in before] == [
        (place, name, code) for place, name in enumerate(names)
    ]:
        return set()
    stays = {
        row.place: row
        for row in before
        if row.code == code and names[row.place : row.place + 1] == (row.node.name,)
    }
    gone = [row for row in before if row.place not in stays]
    FragmentHolder.objects.filter(pk__in=[row.pk for row in gone]).delete()
    keys = dict(Node.objects.filter(name__in=names).values_list("name", "pk"))
    FragmentHolder.objects.bulk_create(
        FragmentHolder(**asdict(shard), place=place, code=code, node_id=keys[name])
        for place, name in enumerate(names)
        if place not in stays
    )
    found.counts.subtract(row.node.name for row in gone)
    found.counts.update(name for place, name in enumerate(names) if place not in stays)
    # With their fragments the streams of all others are told: who comes has to let their drivers in.
    return {*names, *(row.node.name for row in before)}


def _stream_nodes(found: Assignment, shards: Iterable[Shard]) -> set[Address]:
    """The nodes of the streams of these shards."""
    changed = set(shards)
    return {
        (Kind.NODE.value, name)
        for one in found.known.streams
        if one.shard in changed
        for name in one.nodes
    }


def _is_in_use() -> bool:
    asks = RuleSet.objects.exclude(redundancy=Redundancy.NONE.value)
    return asks.exists() or FragmentHolder.objects.exists()


def documents_of(*drivers: str) -> set[Address]:
    """Those of the nodes that have fragment shards of these drivers. Whoever starts or ends their jobs
    tells these."""
    return {(Kind.NODE.value, name) for name in AllFragments().nodes_of(set(drivers))}


def missing(now: datetime) -> list[tuple[str, int, str]]:
    """By code, how many shards of running jobs should have holders and have none; and why the first."""
    if not _is_in_use():
        return []
    found, lacking = Assignment(now), defaultdict[Redundancy, list[Shard]](list)
    for shard, asked in found.wanted.items():
        if asked.code is not Redundancy.NONE and shard not in found.known.holders:
            lacking[asked.code].append(shard)
    return [
        (code.value, len(shards), found.choice(shards[0]).why)
        for code, shards in sorted(lacking.items(), key=lambda one: one[0].holders)
    ]


@follows_rules
def _follow_rules() -> set[Address]:
    return reconcile(timezone.now())


@transaction.atomic
def keep(now: datetime) -> int:
    """Reconcile, and tell those whose documents change; how many."""
    told = reconcile(now)
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


def preview(rules: Rules) -> tuple[int, str]:
    """How many agents can store fragments of one shard now; and in a sentence why those are too few for
    these rules, or nothing."""
    found = Assignment(timezone.now())
    agents = found.agents(
        replace_lost=rules.replace_lost, after_seconds=rules.replace_lost_after_seconds
    )
    count = len(apart(agents))
    return count, too_few(rules.redundancy, agents) if count < rules.redundancy.holders else ""
