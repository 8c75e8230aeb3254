"""What a driver asks of an agent's control API: to pull the slots of a shard that moves there."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import httpx

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 10.0
PULL_SECONDS_MAX: Final = 120.0  # for one batch of slots
LOOK_SECONDS: Final = 0.02  # between looks at how far a pull is


class Pulled(NamedTuple):
    """So many bytes came; `done` if that was all that there was."""

    done: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class Control:
    """The control API of one agent."""

    url: str
    token: str = field(repr=False)

    def pull(
        self, shard: str, source: str, source_shard: str, driver: str, after: int, slots: Sequence[int]
    ) -> Pulled:
        """Have these slots fetched from another agent, in this driver's name.

        Slots that could not be had are found out by their seals. Raises nothing.
        """
        asked = {"from": source, "shard": source_shard, "as": driver, "after": after, "slots": slots}
        headers = {"authorization": f"Bearer {self.token}"}
        moved = 0
        try:
            with httpx.Client(base_url=self.url, headers=headers, timeout=ASK_SECONDS) as agent:
                answer = agent.post(f"/v1/shards/{shard}/pull", json=asked)
                pull = answer.raise_for_status().json()
                until = time.monotonic() + PULL_SECONDS_MAX
                while pull["state"] == "running" and time.monotonic() < until:
                    time.sleep(LOOK_SECONDS)
                    pull = agent.get(f"/v1/pulls/{pull['id']}").raise_for_status().json()
                    moved = int(pull["moved_bytes"])
                if pull["state"] != "done":
                    log.warning("A pull of %s is %s: %s", shard, pull["state"], pull["reason"])
                return Pulled(pull["state"] == "done", moved)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            log.warning("A pull of %s by %s has failed: %s", shard, self.url, error)
            return Pulled(False, moved)
