"""Plans in words: one sentence for a plan and for each stream, and a table of all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from console.placement.plan import Placed, Plan, RailsPlan, Reason, Refusal, Unplaced
from console.placement.rules import Cause
from console.placement.topology import Tier
from telemetry.units import counted, size

NAMES_MAX: Final = 3  # of nodes in a sentence; the plan has them all

_PATHS: Final = {
    Tier.RAIL: "on a rail",
    Tier.LEAF: "over the leaf of another port of its box",
    Tier.SPINE: "across the spine",
}
_BETTER: Final = {
    Tier.RAIL: "with a NIC on its leaf",
    Tier.LEAF: "on another leaf of its box",
    Tier.SPINE: "across the spine",
}
_WHY: Final = {
    Reason.CPU_GUARD: "at the CPU guard",
    Reason.CORDONED: "cordoned",
    Reason.DRAINING: "draining",
    Reason.MAINTENANCE: "in maintenance",
    Reason.LOST: "lost, or not joined yet",
    Reason.RULE: "refused by rule",
    Reason.RUNS_ELSEWHERE: "able to take it: Restore rails moves it there",
}
_CAUSES: Final = {
    Cause.EXCEEDS_CLUSTER_CAPACITY: (
        "no node that it may use is large enough: make the grant smaller, or add a larger node"
    ),
    Cause.WAITING_FOR_CAPACITY: "it waits for room on a node that it may use",
    Cause.WAITING_FOR_RAIL: "it waits for a rail, as the rules of its session say",
    Cause.SPINE_REFUSED_BY_RULE: (
        "there is room across the spine, which the rules refuse: add a node on its leaf, or allow it"
    ),
    Cause.NODE_CORDONED: "a cordoned node has room: uncordon it",
    Cause.BOX_CORDONED: "a cordoned box would do: uncordon it",
    Cause.WAITING_FOR_DRAIN: "a node that is being drained has room: it waits for that to end",
}

MOVED: Final = "it was moved there by hand"
_NO_NIC: Final = "no node has a NIC on its leaf"
_OTHERS: Final = "nodes"
_NAMES: Final = rf"other {_OTHERS}|[^\s,]+(?:, [^\s,]+)*(?: and \d+ more)?"
_PATH: Final = "|".join(map(re.escape, _BETTER.values()))
_REASON: Final = "|".join([*map(re.escape, _WHY.values()), r"full \([^()]*\)"])
_PART: Final = re.compile(
    rf"(?:{MOVED}|{_NO_NIC}|"
    rf"(?P<against>{_NAMES}) (?P<path>{_PATH}) (?:is|are) (?P<reason>{_REASON}))(?:, |$)"
)


class Line(NamedTuple):
    """One line of the table."""

    stream: str
    node: str
    path: str
    wio: int
    memory: str
    why: str


def placed(one: Placed, *, named: bool = True) -> str:
    """`s1/chat.full of cs1:0 goes to ax4 on a rail (leaf l1).` Not `named`: without other nodes."""
    verb = "stays on" if one.before == one.node else "goes to"
    source = f" (from {one.before})" if one.moves else ""
    route = one.route
    leaves = f"leaf {route.port_leaf}"
    if route.tier is Tier.SPINE:
        leaves = f"leaf {route.port_leaf} to leaf {route.nic_leaf}"
    sentence = f"{one.stream.name} {verb} {one.node}{source} {_PATHS[one.tier]} ({leaves})"
    because = why(one.refused, one)
    because = because if named else unnamed(because)
    return f"{sentence}: {because}." if because else f"{sentence}."


def unplaced(one: Unplaced) -> str:
    """What it lacks, by how much, and what would help."""
    lacks = [size(one.missing_bytes)] if one.missing_bytes else []
    lacks += ["a shard below the CPU guard"] if one.missing_shards else []
    short = f"; the nearest that it may use lacks {' and '.join(lacks)}" if lacks else ""
    wanted = size(one.stream.memory_bytes)
    return f"{one.stream.name} has no node for {wanted}{short}: {_CAUSES[one.cause]}."


def why(refused: tuple[Refusal, ...], one: Placed | Unplaced) -> str:
    return ", ".join(_refusal(refusal, one) for refusal in refused)


def unnamed(why: str) -> str:
    """A text of `why` without the names of nodes: what speaks against them, and not which they are.

    For who does not see the fleet. Of a text that is none of `why`, or was cut, what can't be read is
    left out: it could be a name.
    """
    parts = []
    at = 0
    while found := _PART.match(why, at):
        if found["against"]:
            parts.append(f"{_OTHERS} {found['path']} are {found['reason']}")
        else:
            parts.append(found[0].removesuffix(", "))
        at = found.end()
    return ", ".join(dict.fromkeys(parts))


def _refusal(refusal: Refusal, one: Placed | Unplaced) -> str:
    if refusal.reason is Reason.NO_NIC:
        return _NO_NIC
    names = ", ".join(refusal.nodes[:NAMES_MAX])
    if (more := len(refusal.nodes) - NAMES_MAX) > 0:
        names += f" and {more} more"
    verb = "is" if len(refusal.nodes) == 1 else "are"
    reason = _WHY.get(refusal.reason) or (
        f"full ({size(refusal.missing_bytes)} of {size(one.stream.memory_bytes)} missing)"
    )
    return f"{names} {_BETTER[refusal.tier]} {verb} {reason}"


def plan(found: Plan) -> str:
    """How many streams got which path, and what to look at."""
    count = Counter(one.tier for one in found.placed)
    total = len(found.placed) + len(found.unplaced)
    parts = [f"{count[tier]} {_PATHS[tier]}" for tier in Tier if count[tier]]
    parts += [f"{len(found.unplaced)} without a node"] if found.unplaced else []
    proof = (
        "; proven: none has better paths while the others stay where they are" if found.proven else ""
    )
    moves = f"; {counted(found.cost.moves, 'moves', 'move')}" if found.cost.moves else ""
    streams = counted(total, "stream")
    return f"Of {streams}, {', '.join(parts)}{moves}{proof}." if total else "Nothing is to be placed."


def stuck(found: Plan) -> str:
    """Why streams can't go where a plan has them. Without names of nodes."""
    names = [one.stream.name for one in found.stuck[:NAMES_MAX]]
    if (more := len(found.stuck) - NAMES_MAX) > 0:
        names.append(f"{more} more")
    return (
        f"{', '.join(names)} wait for each other's memory: a stream takes both places while it moves, "
        "and there is no room for that. Move one of them to a node with room first, or add memory."
    )


def restore_rails(found: RailsPlan) -> str:
    if not found.left and not found.moves:
        return "Everything is on rails."
    if not found.moves:
        left = counted(len(found.left), "stream is", "streams are")
        return f"No move helps; {left} not on a rail."
    moves = counted(len(found.moves), "move")
    return (
        f"{moves} of {size(found.bytes)} at most: WIO across the spine {found.before.spine_wio} → "
        f"{found.after.spine_wio}, over other leaves {found.before.leaf_wio} → {found.after.leaf_wio}."
    )


def table(found: Plan) -> Iterator[Line]:
    """All streams, by name."""
    lines = [
        Line(
            one.stream.name,
            one.node,
            one.tier.name.lower(),
            one.stream.wio,
            size(one.stream.memory_bytes),
            why(one.refused, one),
        )
        for one in found.placed
    ]
    lines += [
        Line(one.stream.name, "", "", one.stream.wio, size(one.stream.memory_bytes), unplaced(one))
        for one in found.unplaced
    ]
    return iter(sorted(lines))
