"""Fragments of redundant columns: where they are, and the fragment shards that they pass through.

An agent divides each redundant column of a shard into fragments, and has each stored by another agent,
as a column of a fragment shard of the same driver there. Who stores which is decided in `holders`.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from console.fleet.models import Driver, Node
from console.placement.rules import Redundancy
from console.placement.topology import Misconfigured
from console.sessions import endpoints
from console.sessions.models import FragmentHolder, Phase, Stream
from console.sessions.plans.model import model_of
from kvss_agent.redundancy.layout import SLOTS, fragment_part, fragment_slot_bytes
from swdriver_shim.layout import part_name


@dataclass(frozen=True, order=True, slots=True)
class Shard:
    """Of a model: what those of its replicas store at the same number of the same group that divide
    columns by the same code."""

    namespace: str
    group: str
    index: int
    code: str

    @property
    def part(self) -> str:
        """What agents call it in tier 2."""
        return part_name(self.group, self.index)


@dataclass(frozen=True, slots=True)
class Fragments:
    """Of one stream at one node: a fragment shard."""

    driver: str
    shard: Shard
    holder: FragmentHolder
    column_slot_bytes: int

    @property
    def name(self) -> str:
        return f"{self.driver}.{self.shard.group}.{self.shard.index}.f{self.holder.place}"

    @property
    def slot_bytes(self) -> int:
        return fragment_slot_bytes(self.column_slot_bytes, Redundancy(self.holder.code).data)

    @property
    def memory_bytes(self) -> int:
        return self.slot_bytes * SLOTS

    def spec(self) -> dict[str, Any]:
        """As it stands in the document of the node."""
        code = Redundancy(self.holder.code)
        return {
            "name": self.name,
            "driver": self.driver,
            "slot_bytes": self.slot_bytes,
            "slots": SLOTS,
            "namespace": self.shard.namespace,
            "part": fragment_part(self.shard.part, self.holder.place, code.data, code.parity),
            "is_for_fragments": True,
        }


@dataclass(frozen=True, slots=True)
class Stored:
    """A stream of a driver with a running job, by what is stored."""

    stream: int  # its key
    driver: str
    job: int  # its key: of two the smaller one is of the earlier job
    org: int | None  # the key of that of its session
    namespace: str
    group: str
    index: int
    slot_bytes: int
    code: str  # by which its columns are divided; empty if they are not
    nodes: frozenset[str]  # where it is, and where it moves to

    def divided_by(self, code: str) -> Shard:
        return Shard(self.namespace, self.group, self.index, code)

    @property
    def shard(self) -> Shard:
        return self.divided_by(self.code)


class AllFragments:
    """As things are when it is first asked. In as many queries for many as for few. Documents ask for
    one, where there is no redundancy at all."""

    @property
    def is_any(self) -> bool:
        return bool(self.holders)

    def holders_of(self, shard: Shard) -> list[FragmentHolder]:
        """In the order of their fragments; none where one is missing."""
        found = self.holders.get(shard, [])
        return found if found and len(found) == Redundancy(found[0].code).holders else []

    def holders_of_stream(self, stream: Stream) -> list[FragmentHolder]:
        shard = self.shard_of(stream) if self.is_any else None
        return self.holders_of(shard) if shard else []

    def shard_of(self, stream: Stream) -> Shard | None:
        """None without a running job, or where its columns are not divided."""
        namespace = self.namespaces.get(stream.job.driver.name)
        if namespace is None or not stream.code:
            return None
        return Shard(namespace, stream.group, stream.index, stream.code)

    def told(self, stream: Stream, node: Node) -> Mapping[str, Any]:
        """What the document of this node says of the redundancy of a stream. While a stream moves, the
        one node says it that its driver uses: two agents would write over each other's fragments."""
        uses = stream.next_node_id if stream.phase == Phase.MOVING else stream.node_id
        if uses != node.pk or not (holders := self.holders_of_stream(stream)):
            return {}
        code = Redundancy(holders[0].code)
        found = [
            {
                "address": endpoints.address_for_agents(holder.node),
                "shard": f"{stream.name}.f{holder.place}",
                "since": holder.since.timestamp(),
            }
            for holder in holders
        ]
        return {"redundancy": {"data": code.data, "parity": code.parity, "holders": found}}

    def at(self, node: str) -> list[Fragments]:
        """The fragment shards of a node."""
        return self._by_node.get(node, [])

    @cached_property
    def bytes_by_node(self) -> Counter[str]:
        """The memory that fragment shards take."""
        found: Counter[str] = Counter()
        for node, its in self._by_node.items():
            found[node] = sum(one.memory_bytes for one in its)
        return found

    def nodes_of(self, drivers: set[str]) -> set[str]:
        """Those that have fragment shards of these drivers."""
        return {node for node, its in self._by_node.items() if any(one.driver in drivers for one in its)}

    # Reading

    @cached_property
    def holders(self) -> dict[Shard, list[FragmentHolder]]:
        found: dict[Shard, list[FragmentHolder]] = defaultdict(list)
        for holder in FragmentHolder.objects.select_related("node"):
            found[Shard(holder.namespace, holder.group, holder.index, holder.code)].append(holder)
        return found

    @cached_property
    def namespaces(self) -> dict[str, str]:
        """Of the models of drivers with a running job, by the name of the driver."""
        found = {}
        for driver in Driver.objects.filter(job__running=True).order_by("name"):
            with contextlib.suppress(Misconfigured):
                found[driver.name] = model_of(driver).namespace().digest().hex()
        return found

    @cached_property
    def streams(self) -> list[Stored]:
        """Of all drivers that `namespaces` has."""
        found = Stream.objects.filter(job__driver__name__in=self.namespaces).order_by("pk")
        fields = (
            *("pk", "job__driver__name", "job", "job__session__org", "group", "index"),
            *("slot_bytes", "code", "node__name", "next_node__name"),
        )
        return [
            Stored(
                *(key, driver, job, org, self.namespaces[driver]),
                *(group, index, slot_bytes, code, frozenset(filter(None, nodes))),
            )
            for key, driver, job, org, group, index, slot_bytes, code, *nodes in found.values_list(
                *fields
            )
        ]

    @cached_property
    def _by_node(self) -> dict[str, list[Fragments]]:
        found: dict[str, list[Fragments]] = defaultdict(list)
        for one in self.streams if self.is_any else ():
            for holder in self.holders_of(one.shard):
                found[holder.node.name].append(Fragments(one.driver, one.shard, holder, one.slot_bytes))
        return found
