"""Numbers as text that Prometheus reads (exposition format 0.0.4). No Django."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from telemetry.histogram import BOUNDS, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


class Page:
    """One page of metrics. Name each metric once, with all of its samples."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def counter(self, name: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """`name` ends in _total."""
        self._plain(name, "counter", text, samples)

    def gauge(self, name: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        self._plain(name, "gauge", text, samples)

    def histogram(self, name: str, text: str, samples: Iterable[tuple[Labels, Histogram]]) -> None:
        """`name` ends in _seconds. Every fourth bound is shown: a factor of two from one to the next."""
        self._head(name, "histogram", text)
        for labels, histogram in samples:
            seen = 0
            for index, count in enumerate(histogram.counts[: len(BOUNDS)]):
                seen += count
                if index % 4 == 0:
                    self._sample(f"{name}_bucket", {**labels, "le": f"{BOUNDS[index]:.6g}"}, seen)
            self._sample(f"{name}_bucket", {**labels, "le": "+Inf"}, histogram.count)
            self._sample(f"{name}_sum", labels, histogram.sum)
            self._sample(f"{name}_count", labels, histogram.count)

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _plain(self, name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        self._head(name, kind, text)
        for labels, value in samples:
            self._sample(name, labels, value)

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def _sample(self, name: str, labels: Labels, value: float) -> None:
        inner = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
        number = str(value) if isinstance(value, int) else f"{value:.9g}"
        self._lines.append(f"{name}{{{inner}}} {number}" if inner else f"{name} {number}")


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
