"""All numbers of a brain, for Prometheus and for telemetry. Their names: `metrics`."""

from __future__ import annotations

import time

from inference_brain import metrics
from inference_brain.brain import Brain
from inference_brain.choice import Mode
from inference_brain.maps import CacheMaps
from inference_brain.upstream.health import State
from kvss_agent.metrics import put_http
from swdriver_shim.cache_map.codec import CHUNK
from telemetry.metrics import Sink, put


def collect(brain: Brain, into: Sink) -> None:
    """Collect all metrics. May be called from any thread."""
    told = brain.desired
    generations = {
        "desired": told.generation if told else 0,
        "observed": brain.observed_generation,
    }
    put(into, metrics.UP_SINCE, brain.started_at)
    put(into, metrics.READY, int(brain.is_ready))
    put(into, metrics.GENERATION, generations)
    ages = brain.endpoints.ages(time.monotonic())
    into.put(metrics.ENDPOINTS_AGE, [({"model": model}, age) for model, age in ages.items()])
    put(into, metrics.CONSOLE, brain.membership_status.calls)
    put_http(into, brain.http, metrics.HTTP_CONNECTIONS, metrics.HTTP_REFUSED)
    brain.counts.collect(into)
    put(into, metrics.TOKENIZERS_STOPPED, brain.prompts.stopped)
    _replicas(brain, into)
    brain.router.admission.collect(into)
    _maps(brain.maps, into)
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


def _maps(maps: CacheMaps, into: Sink) -> None:
    now = time.monotonic()  # as the reader's clock
    mirrors = [(name, mirror) for name in list(maps.places) if (mirror := maps.mirror(name))]
    put(into, metrics.MAP_BYTES, maps.table.bytes)
    into.put(
        metrics.MAP_AGE,
        [
            ({"driver": name}, age)
            for name in list(maps.places)
            if (age := maps.seconds_without_news(name, now)) is not None
        ],
    )
    into.put(metrics.MAP_COLUMNS, [({"driver": name}, CHUNK * one.entries) for name, one in mirrors])
    into.put(metrics.MAP_GAPS, [({"driver": name}, one.counts.gaps) for name, one in mirrors])
