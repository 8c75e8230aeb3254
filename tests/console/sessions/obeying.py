"""Agents and drivers that are at once whatever their documents say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from console.control.observed import Shard
from console.fleet.models import Driver, Node
from console.placement.topology import State, Tier
from console.sessions import desired, endpoints
from console.sessions.budgets import Budgets
from console.sessions.models import Phase, Stream
from console.sessions.steps import machines, relocation
from console.sessions.steps.observations import Observations


class Obeying(Observations):
    def __init__(self, nodes: set[Node], drivers: set[Driver]) -> None:
        self._asked = {node.name for node in nodes}, {driver.name for driver in drivers}

    def node_answers(self, node: str) -> bool:
        found = Node.objects.exclude(state=State.LOST.value).filter(name=node)
        return node in self._asked[0] and found.exists()

    def shard_at(self, node: str, name: str) -> Shard | None:
        if not self.node_answers(node):
            return None
        there = Node.objects.get(name=node)
        specs = [
            desired._spec(stream, there, Budgets())
            for stream in desired._on(there).select_related("job__driver", "job__session")
            if stream.name == name
        ]
        return next((Shard(name=name, slots=one["slots"], state="ready") for one in specs), None)

    def shard_of(self, driver: str, group: str, index: int) -> Shard | None:
        if driver not in self._asked[1]:
            return None
        found = Stream.objects.filter(
            job__driver__name=driver, job__running=True, group=group, index=index
        )
        stream = found.select_related("node", "next_node").first()
        if stream is None:
            return None
        goes_on = stream.phase == Phase.MOVING and stream.next_node is not None
        node = stream.next_node if goes_on and stream.next_node else stream.node
        tier = Tier((stream.next_tier if goes_on else stream.tier) or 0)
        is_lost = node.state == State.LOST.value
        return Shard(
            group=group,
            index=index,
            address=endpoints.address(node, tier),
            state="lost" if is_lost else "here",
        )


@contextmanager
def obeying() -> Iterator[None]:
    with (
        mock.patch.object(relocation, "Observations", Obeying),
        mock.patch.object(machines, "Observations", Obeying),
    ):
        yield
