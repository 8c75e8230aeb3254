"""What each part has to do at full size, as a share of what it can: what is above 1 does not work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from benchmarks.scale import sizes
from benchmarks.scale.brains import EXCHANGE_SECONDS
from benchmarks.scale.costs import Curve, Ledgers, Memory, Planned
from benchmarks.scale.sizes import FULL, MODELS, NODES
from inference_brain.maps.table import ROWS_MAX
from swdriver_shim.cache_map.publisher import PERIOD_SECONDS

# Measured elsewhere, and said in docs/benchmarks.md with how: they are not measured in this run.
HTTP_SECONDS: Final = 201e-6  # of a processor for a request: `proxy.cpu.2k`
RECORDS: Final = 5_897.0  # a second that one process of ingest takes: `ingest.records`
POSTGRES_CORES: Final = 0.02 / 1_000  # for each agent's numbers: `ingest.cpu`
# Assumed.
REDIS_GBITS: Final = 25.0  # out of the server that has the maps
REDIS_COMMANDS: Final = 100_000.0  # a second
POSTGRES_CPUS: Final = 16.0
PLANS_A_MINUTE: Final = 10.0  # replicas that come, go or move
BRAIN_SHARE: Final = 0.7  # of a processor that a brain may use, so that requests do not wait for it
BRAINS_MAX: Final = 2_000


@dataclass(frozen=True, slots=True)
class Measured:
    """Of the simulation and the costs. `update_cpu`: seconds of a processor; `message_bytes`: of the
    maps of one stamp, a second; `busiest`: shares of links; `prefill`: of an engine's time."""

    decide: Curve
    learn: Curve
    exchange: Curve
    report_bytes: int
    update_cpu: float  # of maps, by one brain, for one stamp, a second
    memory: Memory
    planned: Planned
    ledgers: Ledgers
    message_bytes: float
    busiest: dict[str, float]
    prefill: float


@dataclass(frozen=True, slots=True)
class Part:
    """`helps`: what makes it fit, if there is something that needs no change of the code."""

    name: str
    load: float  # of what it can do
    what: str
    helps: str = ""


@dataclass(frozen=True, slots=True)
class Brains:
    """`load`: of one brain's processor, where it is least; NaN brains where no number is enough."""

    count: int
    load: float
    maps: float
    exchange: float
    requests: float


def brains(found: Measured) -> Brains:
    """As many as it takes, or the number at which each has least to do."""
    every = [_with(found, count) for count in (*range(1, 100), *range(100, BRAINS_MAX, 10))]
    enough = (one for one in every if one.load <= BRAIN_SHARE)
    return next(enough, min(every, key=lambda one: one.load))


def _with(found: Measured, count: int) -> Brains:
    maps = found.update_cpu * FULL
    reports = found.exchange.at(count) if count > 1 else 0.0
    exchange = reports / EXCHANGE_SECONDS
    among = [(model.replicas * FULL, model.replicas * FULL * model.rate) for model in MODELS]
    total = sum(rate for _, rate in among)
    each = sum(rate / total * (found.decide.at(size) + found.learn.at(size)) for size, rate in among)
    requests = sizes.rate(FULL) / count * (HTTP_SECONDS + each)
    return Brains(count, maps + exchange + requests, maps, exchange, requests)


def parts(found: Measured) -> list[Part]:
    """The most loaded first."""
    of_brains, replicas, nodes = brains(found), sizes.replicas(FULL), NODES * FULL
    redis = REDIS_GBITS * sizes.GBIT
    messages = replicas / PERIOD_SECONDS
    read = found.message_bytes * FULL * of_brains.count
    told = of_brains.count**2 * found.report_bytes / EXCHANGE_SECONDS
    commands = messages + of_brains.count * (2 / EXCHANGE_SECONDS + messages / 2)
    requests = max(model.rate for model in MODELS)
    driver = requests * (found.ledgers.store.last + found.ledgers.messages)
    made = [
        Part("brain.maps.processor", of_brains.maps, "of a processor, in every brain"),
        Part("brain.maps.rows", found.memory.wanted / ROWS_MAX, f"of {ROWS_MAX:,} rows, in every brain"),
        Part("brain.exchange", of_brains.exchange, f"of a processor, with {of_brains.count:,} brains"),
        Part(
            "brain.requests",
            of_brains.requests / BRAIN_SHARE,
            f"of {BRAIN_SHARE:g} processors, with {of_brains.count:,} brains",
            "more brains",
        ),
        Part(
            "redis.maps.read",
            read / redis,
            f"of {REDIS_GBITS:g} Gbit/s, with {of_brains.count:,} brains",
        ),
        Part("redis.exchange.read", told / redis, f"of {REDIS_GBITS:g} Gbit/s"),
        Part("redis.commands", commands / REDIS_COMMANDS, f"of {REDIS_COMMANDS:,.0f} commands/s"),
        Part("driver.processor", driver, f"of a processor, at {requests:g} requests/s of all orgs"),
        Part(
            "ingest",
            (nodes + replicas + of_brains.count) / RECORDS,
            f"of one process, {RECORDS:,.0f} records/s",
            "more processes",
        ),
        Part(
            "postgres.processor",
            nodes * POSTGRES_CORES / POSTGRES_CPUS,
            f"of {POSTGRES_CPUS:g} processors",
        ),
        Part(
            "planner",
            PLANS_A_MINUTE * found.planned.one_more.last / 60,
            f"of a processor, at {PLANS_A_MINUTE:g} plans a minute",
        ),
        Part("links.nic", found.busiest["nic"], "of the fullest NIC of a node"),
        Part("links.port", found.busiest["port"], "of the fullest port of a box"),
        Part("links.spine", found.busiest["spine"], "of a leaf's links to the spine"),
        Part("engines", found.prefill, "of the busiest one's time", "more replicas"),
    ]
    return sorted(made, key=lambda one: -one.load if math.isfinite(one.load) else -math.inf)


def sentence(found: list[Part]) -> str:
    """What breaks first, in words."""
    over = [one for one in found if one.load > 1 and not one.helps]
    if not over:
        return f"Nothing breaks; {found[0].name} is nearest, at {found[0].load:.2f} {found[0].what}."
    first = over[0]
    size = sizes.replicas(FULL) / first.load
    return (
        f"{first.name} breaks first: at full size it would need {first.load:.1f} {first.what}, so it is "
        f"full at some {size:,.0f} replicas. {len(over) - 1} more parts cannot do their share either."
    )
