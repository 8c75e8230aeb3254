"""Figures of cache maps, for metrics."""

from __future__ import annotations

from inference_brain import metrics
from inference_brain.maps.cache_maps import CacheMaps
from swdriver_shim.cache_map.codec import CHUNK
from telemetry.metrics import Sink, put


def collect(maps: CacheMaps, now: float, into: Sink) -> None:
    """Collect them at this time of the reader's clock. May be called from any thread."""
    mirrors = [(name, mirror) for name in list(maps.places) if (mirror := maps.mirror(name))]
    put(into, metrics.MAP_BYTES, maps.table.bytes)
    into.put(
        metrics.MAP_AGE,
        [({"driver": name}, max(0.0, now - one.at)) for name, one in mirrors if one.is_known],
    )
    into.put(metrics.MAP_COLUMNS, [({"driver": name}, CHUNK * one.entries) for name, one in mirrors])
    into.put(metrics.MAP_GAPS, [({"driver": name}, one.counts.gaps) for name, one in mirrors])
