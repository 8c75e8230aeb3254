"""What agents and drivers say they are, asked now. No database."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

import httpx

from console.fleet.models import Driver, Node

AT_ONCE_MAX: Final = 16
TIMEOUT: Final = httpx.Timeout(3.0, connect=1.5)

Observed: TypeAlias = Mapping[str, Any]


class Facts:
    """What the targets of one step say, by name; None for those that can't be reached."""

    def __init__(self, nodes: set[Node], drivers: set[Driver]) -> None:
        asked: list[Node | Driver] = [*nodes, *drivers]
        with ThreadPoolExecutor(max_workers=min(AT_ONCE_MAX, len(asked) or 1)) as pool:
            found = list(pool.map(_ask, ((one.control_url, str(one.control_token)) for one in asked)))
        answers = dict(zip(asked, found, strict=True))
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


def _ask(endpoint: tuple[str, str]) -> Observed | None:
    url, token = endpoint
    if not url:
        return None
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/v1/observed",
            headers={"authorization": f"Bearer {token}"},
            timeout=TIMEOUT,
        )
        found = answer.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
    return found if isinstance(found, dict) else None
