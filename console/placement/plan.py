"""What planning says: where each stream goes, on which path, and why not somewhere better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from console.placement.grants import Stream
from console.placement.rules import Cause
from console.placement.topology import Fleet, Node, Tier


class Reason(Enum):
    """Why a node that would have been better was refused."""

    NO_NIC = "no_nic"  # there is no such node: nobody has a NIC there
    FULL_MEMORY = "full_memory"
    CPU_GUARD = "cpu_guard"
    CORDONED = "cordoned"
    DRAINING = "draining"
    MAINTENANCE = "maintenance"
    LOST = "lost"
    RULE = "rule"  # the path is not allowed
    RUNS_ELSEWHERE = "runs_elsewhere"  # it has room, but a running stream stays where it is


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nodes at which a stream would have had a better path, and the one reason against all of them."""

    reason: Reason
    tier: Tier
    nodes: tuple[str, ...] = ()
    missing_bytes: int = 0  # at the node that has most, if it is memory


@dataclass(frozen=True, slots=True)
class Route:
    """The leaf of the domain's port and that of the node's NIC; the spine is between two that differ."""

    tier: Tier
    port_leaf: str
    nic_leaf: str


def route(fleet: Fleet, box: str, domain: int, node: Node) -> Route:
    """From a domain to a node. Of several leaves the first by name that the two have in common."""
    own, leaves = fleet.domain(box, domain).leaves, node.leaves
    match tier := fleet.tier(box, domain, node):
        case Tier.RAIL:
            leaf = min(leaves.intersection(own))
            return Route(tier, leaf, leaf)
        case Tier.LEAF:
            leaf = min(leaves & fleet.box[box].leaves)
            return Route(tier, leaf, leaf)
        case Tier.SPINE:
            return Route(tier, min(own), min(leaves))


@dataclass(frozen=True, slots=True)
class Placed:
    stream: Stream
    node: str
    route: Route
    before: str | None = None  # where it ran
    refused: tuple[Refusal, ...] = ()  # nothing if there is no better path for it in the fleet

    @property
    def tier(self) -> Tier:
        return self.route.tier

    @property
    def moves(self) -> bool:
        return self.before not in (None, self.node)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A stream that found no node, and what it lacked at the one that was nearest to taking it."""

    stream: Stream
    cause: Cause
    missing_bytes: int
    missing_shards: int
    refused: tuple[Refusal, ...]


class Cost(NamedTuple):
    """What a plan is judged by: the first difference decides. Less is better."""

    unplaced_wio: int
    spine_wio: int
    leaf_wio: int
    moves: int  # of streams that ran elsewhere
    load: float  # mean square of the nodes' loads, of WIO and of memory; even is least
    parts: int  # pairs of a session and a node: what happens to one happens to the other


@dataclass(frozen=True, slots=True)
class Plan:
    placed: tuple[Placed, ...]
    unplaced: tuple[Unplaced, ...]
    cost: Cost
    proven: bool  # no plan puts fewer WIO nowhere, over the spine, or over another port's leaf
    stuck: tuple[Placed, ...] = ()  # running ones that can't become so: each waits for another's room

    @property
    def spine(self) -> tuple[Placed, ...]:
        """What to warn of."""
        return tuple(one for one in self.placed if one.tier is Tier.SPINE)


@dataclass(frozen=True, slots=True)
class Move:
    stream: Stream
    source: str
    target: str
    tier_before: Tier
    tier_after: Tier


@dataclass(frozen=True, slots=True)
class RailsPlan:
    """Moves, in an order in which each has room at its time, and what they gain."""

    moves: Sequence[Move]
    before: Cost
    after: Cost
    left: tuple[Placed, ...]  # what still is not on a rail, and why

    @property
    def bytes(self) -> int:
        """What is to be copied, at most: a shard that is not full is less."""
        return sum(move.stream.memory_bytes for move in self.moves)
