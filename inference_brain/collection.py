"""All numbers of a brain, for Prometheus and for telemetry. Their names: `metrics`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from inference_brain import metrics
from inference_brain.choice import Mode
from inference_brain.maps import figures
from inference_brain.upstream.health import State
from kvss_agent.metrics import put_http
from telemetry.metrics import Sink, put

if TYPE_CHECKING:
    from inference_brain.brain import Brain


def collect(brain: Brain, into: Sink) -> None:
    """May be called from any thread."""
    told = brain.desired
    generations = {
        "desired": told.generation if told else 0,
        "observed": brain.observed_generation,
    }
    put(into, metrics.UP_SINCE, brain.started_at)
    put(into, metrics.READY, int(brain.is_ready))
    put(into, metrics.GENERATION, generations)
    put(into, metrics.CONSOLE, brain.membership_status.calls)
    put_http(into, brain.http, metrics.HTTP_CONNECTIONS, metrics.HTTP_REFUSED)
    brain.counts.collect(into)
    _replicas(brain, into)
    _queues(brain, into)
    figures.collect(brain.maps, time.time(), into)
    if brain.reads_maps is not None:
        put(into, metrics.REDIS, int(brain.reads_maps))


def _replicas(brain: Brain, into: Sink) -> None:
    now, replicas = time.monotonic(), list(brain.fleet)
    states = [(one, one.state(now)) for one in replicas]
    into.put(
        metrics.REPLICA_STATE,
        [
            ({"model": one.model, "replica": one.name, "state": state}, int(found is state))
            for one, found in states
            for state in State
        ],
    )
    into.put(
        metrics.REPLICA_REQUESTS,
        [({"model": one.model, "replica": one.name}, one.in_progress) for one in replicas],
    )
    rates = dict(brain.router.rates)
    put(
        into,
        metrics.FALLBACK,
        {model: int(one.mode is Mode.AFFINITY) for model, one in rates.items()},
    )


def _queues(brain: Brain, into: Sink) -> None:
    pools = list(brain.router.admission.pools.values())
    queued: dict[str, int] = {}
    gap = 0.0
    for pool in pools:
        orgs = dict(pool.queue.orgs)
        for org, count in orgs.items():
            queued[org] = queued.get(org, 0) + count
        served = [pool.counters[org] for org in orgs]
        if served:
            gap = max(gap, max(served) - min(served))
    put(into, metrics.QUEUED, queued)
    put(into, metrics.FAIRNESS_GAP, gap)
    flights = [pool.flights for pool in pools]
    put(
        into,
        metrics.SINGLE_FLIGHT,
        {
            "led": sum(one.led for one in flights),
            "waited": sum(one.waited for one in flights),
            "gave_up": sum(one.gave_up for one in flights),
        },
    )
