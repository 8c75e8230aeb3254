"""What there is: boxes with their ports, nodes with their NICs, and the leaves between them.

    Fleet(
        nodes=(Node("ax1", nics=(Nic("leaf1"),), memory_bytes=1 << 40, shards_max=6),),
        boxes=(Box("cs1", domains=(Domain(("leaf1",), wio=8), ...)),),
    )

Plain frozen values, so that a database, a YAML file or a test can make them. What can't be true is
refused where it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import Final

NIC_WIO: Final = 16  # the WIO streams that a NIC is made for, unless it says otherwise
# No machine has as much. Who says more errs or lies, and plans count in numbers of 64 bits.
NODE_MEMORY_BYTES_MAX: Final = 1 << 50


class Misconfigured(ValueError):
    """The fleet or a request contradicts itself. The text says where, and what to change."""


class Tier(IntEnum):
    """How far apart a stream's domain and its node are. Less is better."""

    RAIL = 0  # the node has a NIC on a leaf of the domain's own ports
    LEAF = 1  # … on a leaf of another domain of the box: the box carries it to that port
    SPINE = 2  # anything else: from leaf to leaf over the spine


class State(Enum):
    """Only what is ready takes new streams. What is cordoned keeps those it has."""

    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"
    MAINTENANCE = "maintenance"
    LOST = "lost"

    @property
    def keeps(self) -> bool:
        return self in (State.READY, State.CORDONED)


@dataclass(frozen=True, slots=True)
class Nic:
    leaf: str
    wio: int = NIC_WIO


@dataclass(frozen=True)
class Node:
    """An AX node. `shards_max` is its CPU guard: each shard costs cores that others need."""

    name: str
    nics: tuple[Nic, ...]
    memory_bytes: int  # for KVSS
    shards_max: int
    state: State = State.READY

    def __post_init__(self) -> None:
        if not self.nics or min(nic.wio for nic in self.nics) <= 0:
            raise Misconfigured(
                f"Node {self.name} needs a NIC on a leaf, made for at least one WIO stream."
            )
        if self.memory_bytes <= 0 or self.shards_max < 0:
            raise Misconfigured(f"Node {self.name} needs memory, and a CPU guard that is not negative.")

    @cached_property
    def leaves(self) -> frozenset[str]:
        return frozenset(nic.leaf for nic in self.nics)

    @cached_property
    def wio(self) -> int:
        """The WIO streams that its NICs are made for. A measure of evenness, not a limit."""
        return sum(nic.wio for nic in self.nics)


@dataclass(frozen=True, slots=True)
class Domain:
    leaves: tuple[str, ...]  # of its ports
    wio: int

    def __post_init__(self) -> None:
        if not self.leaves or self.wio <= 0:
            raise Misconfigured("A domain needs a port on a leaf and at least one WIO stream.")


@dataclass(frozen=True)
class Box:
    name: str
    domains: tuple[Domain, ...]

    def __post_init__(self) -> None:
        if not self.domains:
            raise Misconfigured(f"Box {self.name} needs at least one domain.")

    @cached_property
    def leaves(self) -> frozenset[str]:
        return frozenset(leaf for domain in self.domains for leaf in domain.leaves)


@dataclass(frozen=True)
class Fleet:
    nodes: tuple[Node, ...]
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        for what, named in (("nodes", self.nodes), ("boxes", self.boxes)):
            names = [one.name for one in named]
            if twice := sorted(name for name, count in Counter(names).items() if count > 1):
                raise Misconfigured(f"These {what} are there twice: {', '.join(twice)}.")

    @cached_property
    def box(self) -> Mapping[str, Box]:
        return {box.name: box for box in self.boxes}

    @cached_property
    def node(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @property
    def memory_bytes(self) -> int:
        return sum(node.memory_bytes for node in self.nodes)

    def domain(self, box: str, domain: int) -> Domain:
        """Raises Misconfigured if there is none."""
        found = self.box.get(box)
        if found is None or not 0 <= domain < len(found.domains):
            raise Misconfigured(f"There is no domain {domain} of a box {box} in the fleet.")
        return found.domains[domain]

    def tier(self, box: str, domain: int, node: Node) -> Tier:
        if not node.leaves.isdisjoint(self.domain(box, domain).leaves):
            return Tier.RAIL
        return Tier.SPINE if node.leaves.isdisjoint(self.box[box].leaves) else Tier.LEAF
