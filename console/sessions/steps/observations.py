"""What agents and drivers say they are, asked now. No database."""

from __future__ import annotations

from typing import Final

from console.control.observed import Observed, Shard
from console.control.sending import Call, Endpoint, ask_all
from console.fleet.models import Driver, Node
from kvss_agent.http.answers import Budget, Reply
from telemetry.decoder import Malformed

BUDGET: Final = Budget(3.0)


class Observations:
    """What the targets of one step say, by name; nothing of those that can't be reached, or whose
    answers are none."""

    def __init__(self, nodes: set[Node], drivers: set[Driver]) -> None:
        asked: list[Node | Driver] = [*nodes, *drivers]
        calls = [Call(Endpoint.of(one), "GET", "/v1/observed") for one in asked]
        answers = dict(zip(asked, map(_observed, ask_all(calls, BUDGET)), strict=True))
        self._nodes = {node.name: answers[node] for node in nodes}
        self._drivers = {driver.name: answers[driver] for driver in drivers}

    def shard_at(self, node: str, name: str) -> Shard | None:
        """A shard as its agent says it is."""
        observed = self._nodes.get(node)
        return next((one for one in observed.shards if one.name == name), None) if observed else None

    def node_answers(self, node: str) -> bool:
        return self._nodes.get(node) is not None

    def shard_of(self, driver: str, group: str, index: int) -> Shard | None:
        """A shard as its driver says it is."""
        observed, wanted = self._drivers.get(driver), (group, index)
        shards = observed.shards if observed else ()
        return next((one for one in shards if (one.group, one.index) == wanted), None)

    def left_by(self, driver: str) -> set[str] | None:
        """The addresses at which it has left homes that may not be empty. None if it does not answer."""
        observed = self._drivers.get(driver)
        return {one for shard in observed.shards for one in shard.former_addresses} if observed else None


def _observed(answer: Reply | str) -> Observed | None:
    if isinstance(answer, str) or not answer.is_success:
        return None
    try:
        return answer.read(Observed)
    except Malformed:
        return None  # what it says is on its page, from the last reconcile
