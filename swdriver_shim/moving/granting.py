"""Tell an agent that is a driver's alone what to keep for it. See `granted`."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx

from swdriver_shim.layout import Layout
from swdriver_shim.moving.agents import Control

ASK_SECONDS: Final = 10.0
GRANT_SECONDS_MAX: Final = 300.0  # many gigabytes of memory take a while
PAUSE_SECONDS: Final = 0.05


class NotGranted(Exception):
    """An agent can't be had as it has to be. A sentence."""


def part_name(group: str, index: int) -> str:
    """The same whoever keeps it, so that drivers find each other's columns in tier 2."""
    return f"{group}.{index}"


def shard_name(driver: str, part: str) -> str:
    return f"{driver}.{part}"


def is_of(driver: str, shard: str) -> bool:
    """Whether it is called as this driver's are: `job7.full.0` is not that of a driver `job7.full`, nor
    `job7.b.full.0` one of `job7`."""
    part = shard.removeprefix(f"{driver}.")
    group, _, index = part.partition(".")
    return part != shard and bool(group) and index.isdecimal()


def grant(
    control: Control,
    layout: Layout,
    driver: str,
    secret: bytes,
    slots: int,
    namespace: str,
    tier2: Mapping[str, Any] | None,
) -> None:
    """Have the agent keep all shards of a layout, of so many slots each. Returns when they are there.

    What it kept for this driver before stays if it is of the same size. Raises NotGranted: also where it
    keeps something for somebody else, which would be taken away by this.
    """
    parts = {
        part_name(group.name, index): size
        for group in layout.groups
        for index, size in enumerate(group.slot_bytes)
    }
    headers = {"authorization": f"Bearer {control.token}"}
    try:
        with httpx.Client(base_url=control.url, headers=headers, timeout=ASK_SECONDS) as agent:
            observed = agent.get("/v1/observed").raise_for_status().json()
            for shard in observed["shards"]:
                if not is_of(driver, shard["name"]):
                    raise NotGranted(
                        f"The agent at {control.url} keeps {shard['name']}, which is not of {driver}. "
                        "Use an agent of your own, or name the shards that were granted as `homes`."
                    )
            generation = max(observed["generation"], observed["observed_generation"]) + 1
            told = {
                "generation": generation,
                "shards": [
                    {
                        "name": shard_name(driver, part),
                        "driver": driver,
                        "slot_bytes": size,
                        "slots": slots,
                        "namespace": namespace,
                        "part": part,
                    }
                    for part, size in parts.items()
                ],
                "peers": [{"name": driver, "secret": base64.b64encode(secret).decode()}],
                "tier2": tier2,
            }
            answer = agent.put("/v1/desired", json=told)
            if answer.status_code != httpx.codes.ACCEPTED:
                raise NotGranted(f"The agent at {control.url} refuses: {answer.text}")
            _wait(agent, generation)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise NotGranted(
            f"The agent at {control.url} does not answer as agents do: {error!r}"
        ) from error


def _wait(agent: httpx.Client, generation: int) -> None:
    until = time.monotonic() + GRANT_SECONDS_MAX
    while time.monotonic() < until:
        observed = agent.get("/v1/observed").raise_for_status().json()
        for shard in observed["shards"]:
            if shard["state"] == "refused":
                raise NotGranted(f"The agent can't have {shard['name']}: {shard['reason']}")
        if observed["observed_generation"] == generation and observed["ready"]:
            return
        time.sleep(PAUSE_SECONDS)
    raise NotGranted(f"The agent has not made room within {GRANT_SECONDS_MAX:g} s.")
