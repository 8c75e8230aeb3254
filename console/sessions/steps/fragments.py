"""Steps of operations that take a node away: its fragments of redundant columns.

Before it is taken away no other fragment may be missing that the code can't do without. A node that is
drained is left by its fragments: other holders take its places, and agents repair what columns lack.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple
from datetime import datetime
from typing import Final

from django.utils import timezone

from console.fleet.models import Node
from console.operations.core import Done, Failed, Outcome, Waiting
from console.operations.models import Operation
from console.placement.rules import Redundancy
from console.placement.topology import State
from console.sessions import endpoints
from console.sessions.fragments import AllFragments, Shard
from console.sessions.holders import Assignment
from console.sessions.models import FragmentHolder, Phase, Stream, StreamRedundancy
from console.sessions.plans.holders import Standing
from console.sessions.plans.margins import Holding, Margin, Report
from telemetry.units import counted, duration, size

LOOK_SECONDS: Final = 5.0
STAYS: Final = (State.READY.value, State.CORDONED.value)
_SWITCH: Final = "`ignore_redundancy` (`--ignore-redundancy`)"
IGNORED: Final = f"Drain it with {_SWITCH} to go on all the same."
NOT_WAITING: Final = f"Cancel this and begin again with {_SWITCH} to wait no longer."

_HELD: Final = "fragments"  # the note of an operation: the shards whose fragments its node has
_REPAIR: Final = "repair"  # and how far their repair was when it was looked at first


def held(node: Node) -> list[Shard]:
    """The shards of which a node has fragments."""
    rows = FragmentHolder.objects.filter(node=node)
    return [Shard(*one) for one in rows.values_list("namespace", "group", "index", "code")]


def note_held(operation: Operation, node: Node) -> None:
    operation.notes[_HELD] = [[*astuple(one)] for one in held(node)]


def why_needed(node: Node) -> str:
    """Why columns could be lost if this node was taken away now; empty if none would be. Whoever calls
    holds the fleet, so that of two nodes the second sees that the first is being taken away."""
    shards, now = held(node), timezone.now()
    if not shards:
        return ""
    found = [why for one in _margins(shards) if (why := one.why_not_without(node.name, now))]
    if not found:
        return ""
    return f"Waits for redundancy: {found[0]}{_others(len(found) - 1)}"


def why_not_replaced(node: str, shards: Collection[Shard]) -> str:
    """Why the node keeps fragments of one of these shards that others should take over; else empty."""
    assignment = Assignment(timezone.now())
    for shard in shards:
        if shard not in assignment.users:
            continue
        choice, agents = assignment.choice(shard), assignment.agents_for(shard)
        leaves = any(one.name == node and one.standing is Standing.LEAVES for one in agents)
        if leaves and node in choice.holders:
            return choice.why
    return ""


def repaired(operation: Operation) -> Outcome:
    """Wait until others have the fragments that the node had, and no column lacks one."""
    shards = [Shard(*one) for one in operation.notes.get(_HELD, ())]
    if not shards:
        return Done()
    name = operation.plan["node"]
    still = set(held(Node.objects.get(name=name))).intersection(shards)
    if still:
        if why := why_not_replaced(name, sorted(still)):
            return Failed("TooFewAgents", f"{why} {IGNORED}")
        return Waiting("Other agents take over its fragments.", seconds=LOOK_SECONDS)
    now = timezone.now()
    left = [one for one in _margins(shards) if not one.is_complete(operation.created_at, now)]
    if not left:
        return Done("Others have all fragments that it had.")
    return _progress(operation, left, now)


def _progress(operation: Operation, left: Collection[Margin], now: datetime) -> Waiting:
    """How many columns lack a fragment, and how fast they are repaired."""
    lacking = [(one, one.report.incomplete) for one in left if one.report and one.report.incomplete]
    if not lacking:
        [first, *others] = left
        said = first.unknown(now)
        if not said:
            at = ", ".join(first.unusable)
            said = f"{first.agent} has not found out yet what {at or 'others'} lack of {first.stream}."
        return Waiting(f"{said}{_others(len(others))}", seconds=LOOK_SECONDS)
    count = sum(its for _, its in lacking)
    todo = sum(its * one.column_bytes for one, its in lacking)
    begun = operation.notes.get(_REPAIR)
    if begun is None or todo > begun["bytes"]:
        begun = operation.notes[_REPAIR] = {"bytes": todo, "at": now.timestamp()}
    done, seconds = begun["bytes"] - todo, now.timestamp() - begun["at"]
    where = lacking[0][0].stream if len(lacking) == 1 else f"{len(lacking)} streams"
    said = f"{counted(count, 'column')} of {where} {'lacks' if count == 1 else 'lack'} a fragment"
    if done and seconds > 0:
        speed = done / seconds
        said += f"; repaired at {size(speed)}/s, {duration(round(todo / speed))} left"
    unreachable = sorted({node for one in left if one.report for node in one.report.unreachable})
    away = f" {unreachable[0]} can't be reached." if unreachable else ""
    return Waiting(f"{said}.{away}", done / begun["bytes"], seconds=LOOK_SECONDS)


def _others(count: int) -> str:
    if not count:
        return ""
    return f" {count:,} more shards wait likewise." if count > 1 else " 1 more shard waits likewise."


def _margins(shards: Collection[Shard]) -> list[Margin]:
    """Of the streams of running jobs that store columns of these shards redundantly."""
    fragments, wanted = AllFragments(), set(shards)
    related = ("job__driver", "node", "next_node", "redundancy")
    streams = Stream.objects.filter(job__running=True).select_related(*related)
    found = []
    for stream in streams.order_by("pk"):
        shard = fragments.shard_of(stream)
        if shard in wanted and (its := fragments.holders.get(shard)):
            margin = _margin(stream, its)
            if not margin.is_unused:
                found.append(margin)
    return found


def _margin(stream: Stream, rows: Collection[FragmentHolder]) -> Margin:
    at = stream.next_node if stream.phase == Phase.MOVING and stream.next_node else stream.node
    said = getattr(stream, "redundancy", None)
    holders = [
        Holding(
            row.node.name,
            row.since,
            row.node.state_since,
            away="" if row.node.state in STAYS else row.node.state,
        )
        for row in rows
    ]
    code = Redundancy(next(iter(rows)).code)
    report = _report(said, rows) if said else None
    return Margin(stream.name, at.name, code, tuple(holders), stream.slot_bytes, report)


def _report(said: StreamRedundancy, rows: Collection[FragmentHolder]) -> Report:
    names = {endpoints.address_for_agents(row.node): row.node.name for row in rows}
    at_places = dict(enumerate(said.incomplete_at))
    return Report(
        said.state,
        said.reason,
        said.incomplete,
        {row.node.name: at_places.get(row.place, 0) for row in rows},
        said.most_lacking,
        frozenset(names.get(address, address) for address in said.unreachable),
        said.holders_since,
        said.has_stored,
        said.seen_at,
    )
