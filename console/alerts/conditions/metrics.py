"""Conditions on metrics: a level, a ratio, an error budget, a drop below the usual. Pure.

Each function is a condition or returns one. It reports every instance that has data. An instance it does
not report is OK, or has no data if its process does not report.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Final

from console.alerts.conditions.condition import (
    Condition,
    Finding,
    Snapshot,
    Tables,
    ValuesOf,
    name_of,
    verdict,
)
from console.alerts.state.lifecycle import Verdict
from telemetry.histogram import BOUNDS, BUCKETS, Histogram
from telemetry.queries import TOPIC, ResultSeries
from telemetry.units import duration, shown

Key = tuple[tuple[str, str], ...]
Reduce = Callable[[Sequence[float]], float]

BUDGET_WINDOWS: Final = (("5 min", "1 h", 14.4), ("30 min", "6 h", 6.0))


def level(query: str, threshold: str, sentence: str, *, of: Reduce = max) -> Condition:
    """Breach while a gauge, or the increase of a counter, is above its threshold.

    `of` reduces the window to one value. The sentence may name {value}, {limit}, {name} and any label;
    {s} is the plural's, and {third} the ending of a verb of one thing.
    """

    def condition(tables: Tables, _snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
        for line in tables[query]:
            if known := line.numbers:
                yield _above(line, of(known), values(line.labels[TOPIC])[threshold], sentence)

    return condition


def first_breach(*conditions: Condition) -> Condition:
    """Breach while one of these does, of the same instances. The first that does says why."""

    def condition(tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
        found: dict[tuple[str, Key], Finding] = {}
        for one in conditions:
            for finding in one(tables, snapshot, values):
                key = finding.topic, tuple(sorted(finding.labels.items()))
                if key not in found or found[key].verdict is Verdict.OK:
                    found[key] = finding
        yield from found.values()

    return condition


def flag(query: str, sentence: str) -> Condition:
    """Breach while a gauge that should be 1 was 0 for the whole window."""

    def condition(tables: Tables, _snapshot: Snapshot, _values: ValuesOf) -> Iterator[Finding]:
        for line in tables[query]:
            if known := line.numbers:
                yield _finding(line, max(known) <= 0, max(known), 1.0, sentence)

    return condition


def share(
    part: str, whole: str, threshold: str, sentence: str, *, of: Reduce = max, least: str = ""
) -> Condition:
    """Breach while one metric is more than a share of another.

    `least` names the threshold below which the whole is too small to judge.
    """

    def condition(tables: Tables, _snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
        wholes = _by_labels(tables[whole])
        for line in tables[part]:
            thresholds = values(line.labels[TOPIC])
            known, total = line.numbers, wholes.get(_key(line), [])
            size = of(total) if total else 0.0
            if known and size > (thresholds[least] if least else 0):
                yield _above(line, of(known) / size, thresholds[threshold], sentence)

    return condition


def share_of_means(
    part: str, whole: str, threshold: str, sentence: str, *, least: str, least_count: str
) -> Condition:
    """Breach while the mean of one histogram is more than a share of the mean of another, over all that
    was observed: queries as `mean_and_count` makes them. A minute with one request counts as one.

    `least` and `least_count` name the thresholds below which the whole is too small to judge, and the
    part was observed too seldom.
    """

    def condition(tables: Tables, _snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
        parts, wholes = _means(tables, part), _means(tables, whole)
        for line in tables[part]:
            thresholds, key = values(line.labels[TOPIC]), _key(line)
            mean, count = parts.get(key, (0.0, 0.0))
            size, _ = wholes.get(key, (0.0, 0.0))
            if count >= thresholds[least_count] and size > thresholds[least]:
                yield _above(line, mean / size, thresholds[threshold], sentence)

    return condition


def behind(ahead: str, follower: str, sentence: str) -> Condition:
    """Breach while one gauge is below another with the same labels."""

    def condition(tables: Tables, _snapshot: Snapshot, _values: ValuesOf) -> Iterator[Finding]:
        followers = _by_labels(tables[follower])
        for line in tables[ahead]:
            first, second = line.numbers, followers.get(_key(line), [])
            if first and second:
                late = first[-1] - second[-1]
                yield _finding(line, late > 0, late, 0.0, sentence)

    return condition


# Latency objectives


def burn_rate(sentence: str) -> Condition:
    """Breach while the error budget of a latency objective burns too fast in a long and a short window.

    `objective_share` of requests should take at most `objective_seconds`; the rest is the budget. The
    long window shows that it matters, the short one that it still happens, so the alert starts and ends
    soon. The latency is that of the short window that fires.
    """

    def condition(tables: Tables, _snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
        longer = {_key(line): line for line in tables["six_hours"]}
        for line in tables["hour"]:
            thresholds = values(line.labels[TOPIC])
            maps = {
                "5 min": _newest(line, 5 / 60),
                "1 h": _newest(line, 1),
                "30 min": _newest(longer.get(_key(line)), 1 / 12),
                "6 h": _newest(longer.get(_key(line)), 1),
            }
            if sum(maps["1 h"]) >= thresholds["least_requests"]:
                yield _burn_finding(line, maps, thresholds, sentence)

    return condition


def _burn_finding(
    line: ResultSeries, maps: Mapping[str, list[int]], thresholds: Mapping[str, float], sentence: str
) -> Finding:
    objective, share_of_requests = thresholds["objective_seconds"], thresholds["objective_share"]
    budget = 1 - share_of_requests
    rates = {window: _slow_share(counts, objective) / budget for window, counts in maps.items()}
    hot = [
        (short, long)
        for short, long, factor in BUDGET_WINDOWS
        if min(rates[short], rates[long]) >= factor * thresholds["burn_factor"]
    ]
    window = hot[0][0] if hot else "5 min"
    slowest = Histogram(maps[window] if sum(maps[window]) else maps["1 h"]).quantile(share_of_requests)
    evidence = {
        "burn_rate": {window: round(rate, 2) for window, rate in rates.items()},
        "windows": [f"{short} and {long}" for short, long in hot],
        "latency_seconds": slowest,
    }
    words = {
        "percentile": f"p{100 * share_of_requests:g}",
        "window": window,
        "value": duration(slowest or 0),
        "limit": duration(objective),
    }
    return _finding(line, bool(hot), slowest, objective, sentence, evidence, words)


def _slow_share(counts: Sequence[int], seconds: float) -> float:
    """The share of requests in buckets above the one that contains the objective."""
    total = sum(counts)
    return sum(counts[bisect_left(BOUNDS, seconds) + 1 :]) / total if total else 0.0


def _newest(line: ResultSeries | None, part: float) -> list[int]:
    """The heat map of the last part of a line's time."""
    maps = line.values[-max(1, round(len(line.values) * part)) :] if line else []
    known = [value for value in maps if isinstance(value, list)]
    return [sum(column) for column in zip(*known, strict=True)] if known else [0] * BUCKETS


# Less than usual, and uneven


def drop(tables: Tables, _snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach while a hit rate is far below its usual level: the median of hours with traffic.

    Without enough hours or enough traffic nothing is reported.
    """
    wholes = {key: sum(known) for key, known in _by_labels(tables["requested"]).items()}
    parts = {key: sum(known) for key, known in _by_labels(tables["hit"]).items()}
    for line in tables["usual"]:
        thresholds, past = values(line.labels[TOPIC]), line.numbers
        total = wholes.get(_key(line), 0.0)
        if total <= 0 or total < thresholds["least_tokens"] or len(past) < thresholds["least_hours"]:
            continue
        before, now = median(past), parts.get(_key(line), 0.0) / total
        threshold = before * (1 - thresholds["fall_share"])
        evidence = {"usual_share": before, "hours_compared": len(past), "tokens_requested": total}
        sentence = "hit rate of {name} is {percent} (usually {usual})"
        words = {"usual": shown(before, "share")}
        yield _finding(line, now < threshold, now, threshold, sentence, evidence, words)


def uneven(tables: Tables, _snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach while the busiest of several nodes carries far more than their mean."""
    by_topic: dict[str, dict[str, float]] = {}
    for line in tables["carried"]:
        carried = by_topic.setdefault(line.labels[TOPIC], {})
        carried[line.labels["node"]] = sum(line.numbers)
    for topic, carried in by_topic.items():
        thresholds = values(topic)
        if len(carried) < 2 or sum(carried.values()) <= thresholds["least_bytes"]:
            continue
        busiest = max(carried, key=lambda name: (carried[name], name))
        ratio, limit = carried[busiest] / fmean(carried.values()), thresholds["uneven_factor"]
        told = f"{busiest} carries {ratio:.2g} times the average of the nodes of {name_of(topic)}"
        evidence = {"busiest": busiest, "bytes": carried}
        yield Finding(topic, verdict(breach=ratio > limit), told, ratio, limit, evidence=evidence)


# Parts


def newest(values: Sequence[float]) -> float:
    return values[-1]


def _key(line: ResultSeries) -> Key:
    return tuple(sorted(line.labels.items()))


def _by_labels(lines: Iterable[ResultSeries]) -> dict[Key, list[float]]:
    return {_key(line): line.numbers for line in lines}


def _means(tables: Tables, name: str) -> dict[Key, tuple[float, float]]:
    """The mean over all steps, and of how many; of what was observed at all."""
    counts = {_key(line): line.values for line in tables[f"{name}_count"]}
    found = {}
    for line in tables[name]:
        steps = [
            (mean, count)
            for mean, count in zip(line.values, counts.get(_key(line), []), strict=False)
            if isinstance(mean, int | float) and isinstance(count, int | float)
        ]
        if total := sum(count for _, count in steps):
            found[_key(line)] = sum(mean * count for mean, count in steps) / total, total
    return found


def _above(line: ResultSeries, value: float, threshold: float, sentence: str) -> Finding:
    return _finding(line, value > threshold, value, threshold, sentence)


def _finding(
    line: ResultSeries,
    breach: bool,  # noqa: FBT001
    value: float | None,
    threshold: float,
    sentence: str,
    evidence: Mapping[str, object] | None = None,
    words: Mapping[str, object] | None = None,
) -> Finding:
    labels = {name: text for name, text in line.labels.items() if name != TOPIC}
    topic, known = line.labels[TOPIC], evidence or {}
    counted = {"s": "" if value == 1 else "s", "third": "s" if value == 1 else ""}  # 1 column lacks
    filling: dict[str, object] = {"value": value or 0, "limit": threshold, "name": name_of(topic)}
    filling |= {"percent": shown(value or 0, "share"), "limit_percent": shown(threshold, "share")}
    filling |= {**counted, **labels, **known}
    told = sentence.format_map({**filling, **(words or {})})
    return Finding(topic, verdict(breach=breach), told, value, threshold, labels, known)
