"""Tell an agent that is a driver's alone what to keep for it. See `granted`."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from kvss_agent.http.blocking_exchange import BlockingExchange
from kvss_agent.http.exchange import Unanswered
from swdriver_shim.data_plane.agent_control import AgentControl
from swdriver_shim.layout import Layout
from telemetry.decoder import Count, excerpt

GRANT_SECONDS_MAX: Final = 300.0  # many gigabytes of memory take a while
PAUSE_SECONDS: Final = 0.05


class NotGranted(Exception):
    """An agent can't be had as it has to be. A sentence."""


class _Shard(Struct, frozen=True):
    name: str
    state: str = ""
    reason: str | None = ""


class _Observed(Struct, frozen=True):
    """As an agent tells of itself."""

    generation: Count
    observed_generation: Count
    shards: list[_Shard]
    ready: bool = False


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
    control: AgentControl,
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
    try:
        with contextlib.closing(control.exchange()) as agent:
            observed = _observed(control, agent)
            for shard in observed.shards:
                if not is_of(driver, shard.name):
                    raise NotGranted(
                        f"The agent at {control.url} keeps {excerpt(shard.name)}, which is not of "
                        f"{driver}. Use an agent of your own, or name the shards that were granted as "
                        "`homes`."
                    )
            generation = max(observed.generation, observed.observed_generation) + 1
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
            control.ask(agent, "PUT", "/v1/desired", told)
            _wait(control, agent, generation)
    except Unanswered as error:
        raise NotGranted(f"The agent at {control.url} has not granted it: {error}") from error
    except ValueError as error:
        raise NotGranted(f"The agent at {control.url} does not answer as agents do: {error}") from error


def _observed(control: AgentControl, agent: BlockingExchange) -> _Observed:
    """Raises Unanswered, and Malformed, which is a ValueError."""
    return control.ask(agent, "GET", "/v1/observed").read(_Observed)


def _wait(control: AgentControl, agent: BlockingExchange, generation: int) -> None:
    until = time.monotonic() + GRANT_SECONDS_MAX
    while time.monotonic() < until:
        observed = _observed(control, agent)
        for shard in observed.shards:
            if shard.state == "refused":
                raise NotGranted(
                    f"The agent can't have {excerpt(shard.name)}: {excerpt(shard.reason or '')}"
                )
        if observed.observed_generation == generation and observed.ready:
            return
        time.sleep(PAUSE_SECONDS)
    raise NotGranted(f"The agent has not made room within {GRANT_SECONDS_MAX:g} s.")
