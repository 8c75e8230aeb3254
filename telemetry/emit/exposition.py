"""Numbers as text that Prometheus reads (exposition format 0.0.4). No Django."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate

from telemetry.histogram import COARSE_BOUNDS, Histogram
from telemetry.metrics import LabelLimits, Labels, Metric, Value

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Page:
    """A sink whose text is one page of metrics."""

    def __init__(self, limits: LabelLimits) -> None:
        """`limits` are the process's, so that what is summed up is the same from page to page."""
        self._limits = limits
        self._lines: list[str] = []

    def put(self, metric: Metric, samples: Iterable[tuple[Labels, Value]]) -> None:
        self._lines += [
            f"# HELP {metric.name} {metric.text}",
            f"# TYPE {metric.name} {'gauge' if metric.corrected else metric.kind.name.lower()}",
        ]
        for values, value in self._limits.shown(metric, samples).items():
            labels = dict(zip(metric.labels, values, strict=True))
            if isinstance(value, Histogram):
                self._histogram(metric.name, labels, value)
            else:
                self._sample(metric.name, labels, value)

    def _histogram(self, name: str, labels: Labels, histogram: Histogram) -> None:
        *seen, count = accumulate(histogram.coarse())
        for bound, up_to in zip(COARSE_BOUNDS, seen, strict=True):
            self._sample(f"{name}_bucket", {**labels, "le": f"{bound:.6g}"}, up_to)
        self._sample(f"{name}_bucket", {**labels, "le": "+Inf"}, count)
        self._sample(f"{name}_sum", labels, histogram.sum)
        self._sample(f"{name}_count", labels, count)

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        inner = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
        number = str(value) if isinstance(value, int) else _number(value)
        self._lines.append(f"{name}{{{inner}}} {number}" if inner else f"{name} {number}")


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value) or f"{value:.9g}"
