"""What agents and drivers say they are, asked now. No database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import httpx

from console.control.sending import Call, Endpoint, ask_all
from console.fleet.models import Driver, Node

TIMEOUT: Final = httpx.Timeout(3.0, connect=1.5)

Observed: TypeAlias = Mapping[str, Any]


class Facts:
    """What the targets of one step say, by name; None for those that can't be reached."""

    def __init__(self, nodes: set[Node], drivers: set[Driver]) -> None:
        asked: list[Node | Driver] = [*nodes, *drivers]
        calls = [
            Call(Endpoint(one.control_url, str(one.control_token)), "GET", "/v1/observed")
            for one in asked
        ]
        answers = dict(zip(asked, map(_observed, ask_all(calls, TIMEOUT)), strict=True))
        self._nodes = {node.name: answers[node] for node in nodes}
        self._drivers = {driver.name: answers[driver] for driver in drivers}

    def shard_at(self, node: str, name: str) -> Observed | None:
        """A shard as its agent says it is."""
        shards = (self._nodes.get(node) or {}).get("shards", ())
        return next((shard for shard in shards if shard["name"] == name), None)

    def node_answers(self, node: str) -> bool:
        return self._nodes.get(node) is not None

    def shard_of(self, driver: str, group: str, index: int) -> Observed | None:
        """A shard as its driver says it is."""
        shards = (self._drivers.get(driver) or {}).get("shards", ())
        return next((one for one in shards if (one["group"], one["index"]) == (group, index)), None)


def _observed(answer: httpx.Response | str) -> Observed | None:
    if isinstance(answer, str) or not answer.is_success:
        return None
    try:
        found = answer.json()
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
