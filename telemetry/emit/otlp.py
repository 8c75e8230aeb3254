"""Numbers of a process for a collector of OpenTelemetry, over OTLP. Needs the extra `otlp`. No Django.

The SDK's instruments would count a second time what the process counts anyway, so what goes out is made
from its list of numbers: cumulative since its start, with the names and labels of docs/metrics.md. How
they get there is the SDK's: encoding, retries, compression, headers and certificates, by the environment
variables that it has for these (`OTEL_EXPORTER_OTLP_HEADERS` and others).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from telemetry.emit.deltas import Collect
from telemetry.histogram import COARSE_BOUNDS, Histogram
from telemetry.metrics import Kind, LabelLimits, Labels, Metric, Value

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 10.0  # unless OTEL_METRIC_EXPORT_INTERVAL says otherwise, in milliseconds
ANSWER_SECONDS_MAX: Final = 5.0
_UNITS: Final = {"_seconds": "s", "_bytes": "By"}


class Exporter:
    """Exports for one process, from a thread of its own, until `stop`."""

    def __init__(
        self, url: str, kind: str, version: str, *, name: str, collect: Collect, limits: LabelLimits
    ) -> None:
        """`url` of a collector, without the path. `limits` are the process's."""
        # It says at every attempt that nobody is there. We say so once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._collect = collect
        self._limits = limits
        self._started_at = time.time_ns()
        self._scope = InstrumentationScope("tidegate", version)
        self._resource = Resource.create(
            {
                "service.namespace": "tidegate",
                "service.name": f"tidegate-{kind}",
                "service.instance.id": f"{name}-{secrets.token_hex(4)}",
                "service.version": version,
                "tidegate.name": name,
                "host.name": socket.gethostname(),
            }
        )
        self._exporter = OTLPMetricExporter(f"{url}/v1/metrics", timeout=ANSWER_SECONDS_MAX)
        self._is_heard = True
        self._period = _period_seconds(os.environ)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> Exporter:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Tell the last numbers, and end: soon, also where nobody answers."""
        self._stopped.set()
        self._thread.join(timeout=ANSWER_SECONDS_MAX)
        self._exporter.shutdown()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(self._period)
            try:
                is_heard = self._export()
            except Exception:
                log.exception("Could not report these numbers; the next report includes them")
                continue
            if self._is_heard and not is_heard:
                log.warning("The OTLP collector does not accept the numbers; retrying")
            self._is_heard = is_heard

    def _export(self) -> bool:
        taken = _Taken(self._limits, self._started_at)
        self._collect(taken)
        scoped = export.ScopeMetrics(self._scope, taken.metrics, "")
        resource = export.ResourceMetrics(self._resource, [scoped], "")
        result = self._exporter.export(export.MetricsData([resource]))
        return result is MetricExportResult.SUCCESS


class _Taken:
    """A sink for the numbers of one moment."""

    def __init__(self, limits: LabelLimits, started_at: int) -> None:
        self.metrics: list[export.Metric] = []
        self._limits = limits
        self._started_at = started_at
        self._now = time.time_ns()

    def put(self, metric: Metric, samples: Iterable[tuple[Labels, Value]]) -> None:
        if points := self._limits.shown(metric, samples):
            unit = next((unit for end, unit in _UNITS.items() if end in metric.name), "1")
            data = self._data(metric, points)
            self.metrics.append(export.Metric(metric.name, metric.text, unit, data))

    def _data(self, metric: Metric, points: Mapping[tuple[str, ...], Value]) -> export.DataT:
        numbers, histograms = [], []
        for values, value in points.items():
            labels = dict(zip(metric.labels, values, strict=True))
            if isinstance(value, Histogram):
                histograms.append(self._histogram(labels, value))
            else:
                numbers.append(export.NumberDataPoint(labels, self._started_at, self._now, value))
        if metric.kind is Kind.GAUGE:
            return export.Gauge(numbers)
        if metric.kind is Kind.COUNTER:
            return export.Sum(numbers, AggregationTemporality.CUMULATIVE, not metric.corrected)
        return export.Histogram(histograms, AggregationTemporality.CUMULATIVE)

    def _histogram(self, labels: Labels, histogram: Histogram) -> export.HistogramDataPoint:
        counts = histogram.coarse()
        return export.HistogramDataPoint(
            labels,
            self._started_at,
            self._now,
            count=sum(counts),
            sum=histogram.sum,
            bucket_counts=counts,
            explicit_bounds=COARSE_BOUNDS,
            # Not known. The encoder leaves them out then, as the format has it.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )


def _period_seconds(environment: Mapping[str, str]) -> float:
    """As the SDK's own readers have it; what makes no sense is as if it were not set, as there."""
    try:
        return max(0.1, int(environment["OTEL_METRIC_EXPORT_INTERVAL"]) / 1000)
    except (KeyError, ValueError):
        return PERIOD_SECONDS
