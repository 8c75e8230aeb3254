"""Grant a driver its shards at an agent that serves this driver only. See `grant`."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from kvss_agent.http.answers import Unanswered
from kvss_agent.http.blocking_exchange import BlockingExchange
from swdriver_shim.data_plane.agent_control import AgentControl
from swdriver_shim.layout import Layout, part_name
from telemetry.decoder import Count, excerpt

GRANT_SECONDS_MAX: Final = 300.0  # many gigabytes of memory take a while
PAUSE_SECONDS: Final = 0.05


class NotGranted(Exception):
    """The agent can't grant the shards. A sentence."""


class _Shard(Struct, frozen=True):
    name: str
    state: str = ""
    reason: str | None = ""


class _Observed(Struct, frozen=True):
    """The state of an agent, as it reports it."""

    generation: Count
    observed_generation: Count
    shards: list[_Shard]
    ready: bool = False


def shard_name(driver: str, part: str) -> str:
    return f"{driver}.{part}"


def is_of(driver: str, shard: str) -> bool:
    """Whether this is a name of the driver's shards: `job7.full.0` is not one of a driver `job7.full`,
    nor `job7.b.full.0` one of `job7`."""
    part = shard.removeprefix(f"{driver}.")
    group, _, index = part.partition(".")
    return part != shard and bool(group) and index.isdecimal()


def grant(
    control: AgentControl,
    layout: Layout,
    driver: str,
    secret: bytes,
    slots: Sequence[int],
    namespace: str,
    tier2: Mapping[str, Any] | None,
) -> None:
    """Have the agent create all shards of a layout, with so many slots for each group. Returns when they
    exist.

    Existing shards of this driver stay if their size is the same. Raises NotGranted, also if the agent
    has a shard of another driver, which this would remove.
    """
    parts = {
        part_name(group.name, index): (size, count)
        for group, count in zip(layout.groups, slots, strict=True)
        for index, size in enumerate(group.slot_bytes)
    }
    try:
        with contextlib.closing(control.exchange()) as agent:
            observed = _observed(control, agent)
            for shard in observed.shards:
                if not is_of(driver, shard.name):
                    raise NotGranted(
                        f"The agent at {control.url} has the shard {excerpt(shard.name)}, which is not "
                        f"of {driver}. Use an agent of your own, or name the granted shards as `homes`."
                    )
            generation = max(observed.generation, observed.observed_generation) + 1
            told = {
                "generation": generation,
                "shards": [
                    {
                        "name": shard_name(driver, part),
                        "driver": driver,
                        "slot_bytes": size,
                        "slots": count,
                        "namespace": namespace,
                        "part": part,
                    }
                    for part, (size, count) in parts.items()
                ],
                "peers": [{"name": driver, "secret": base64.b64encode(secret).decode()}],
                "tier2": tier2,
            }
            apply(control, agent, told)
    except Unanswered as error:
        raise NotGranted(f"The agent at {control.url} refused the shards: {error}") from error
    except ValueError as error:
        raise NotGranted(f"The answer of the agent at {control.url} is not valid: {error}") from error


def _observed(control: AgentControl, agent: BlockingExchange) -> _Observed:
    """Raises Unanswered, and Malformed, which is a ValueError."""
    return control.ask(agent, "GET", "/v1/observed").read(_Observed)


def apply(control: AgentControl, agent: BlockingExchange, document: Mapping[str, Any]) -> None:
    """Have the agent apply a document. Returns when all of its shards exist.

    Raises NotGranted, Unanswered also where the agent refuses it, and Malformed, which is a ValueError.
    """
    control.ask(agent, "PUT", "/v1/desired", document)
    until = time.monotonic() + GRANT_SECONDS_MAX
    while time.monotonic() < until:
        observed = _observed(control, agent)
        for shard in observed.shards:
            if shard.state == "refused":
                raise NotGranted(
                    f"The agent refused the shard {excerpt(shard.name)}: {excerpt(shard.reason or '')}"
                )
        if observed.observed_generation == document["generation"] and observed.ready:
            return
        time.sleep(PAUSE_SECONDS)
    raise NotGranted(f"The agent has not made room within {GRANT_SECONDS_MAX:g} s.")
