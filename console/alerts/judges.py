"""How rules judge: a level, a growth, a budget that burns, a fall from what was usual. Pure.

Each function here makes a judge. A judge tells of every instance that it has numbers of; what it does
not mention is fine, or unknown where nobody was heard.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Final

from console.alerts.life import Verdict
from console.alerts.rules import Finding, Judge, LimitsOf, Tables, World, name_of
from telemetry.histogram import BOUNDS, BUCKETS, Histogram
from telemetry.queries import TOPIC, ResultSeries, Value

Key = tuple[tuple[str, str], ...]
Part = Callable[[Sequence[float]], float]  # of several values, one

BUDGET_WINDOWS: Final = (("5 m", "1 h", 14.4), ("30 m", "6 h", 6.0))


def level(reading: str, limit: str, sentence: str, *, of: Part = max) -> Judge:
    """A breach while a gauge, or what a counter grew by, is above its limit. Of the values of the
    window `of` makes one. The sentence may name {value}, {limit}, {name} and any label."""

    def judge(tables: Tables, _world: World, limits: LimitsOf) -> Iterator[Finding]:
        for line in tables[reading]:
            known = numbers(line.values)
            if known:
                topic = line.labels[TOPIC]
                yield _finding(line, of(known), limits(topic)[limit], sentence)

    return judge


def flag(reading: str, sentence: str) -> Judge:
    """A breach while a gauge that should be 1 has been 0 for the whole window."""

    def judge(tables: Tables, _world: World, _limits: LimitsOf) -> Iterator[Finding]:
        for line in tables[reading]:
            known = numbers(line.values)
            if known:
                highest = max(known)
                yield _told(
                    line, Verdict.FINE if highest > 0 else Verdict.BREACH, highest, 1.0, sentence
                )

    return judge


def share(part: str, whole: str, limit: str, sentence: str, *, of: Part = max, least: str = "") -> Judge:
    """A breach while one is more than a share of the other. Below `least`, which names a limit, of the
    whole nothing is said: a share of next to nothing means nothing."""

    def judge(tables: Tables, _world: World, limits: LimitsOf) -> Iterator[Finding]:
        wholes = {_key(line): numbers(line.values) for line in tables[whole]}
        for line in tables[part]:
            values = limits(line.labels[TOPIC])
            mine, its = numbers(line.values), wholes.get(_key(line), [])
            held = of(its) if its else 0.0
            if mine and held > (values[least] if least else 0):
                yield _finding(line, of(mine) / held, values[limit], sentence)

    return judge


def behind(ahead: str, follower: str, sentence: str) -> Judge:
    """A breach while one gauge has not reached another of the same place."""

    def judge(tables: Tables, _world: World, _limits: LimitsOf) -> Iterator[Finding]:
        reached = {_key(line): numbers(line.values) for line in tables[follower]}
        for line in tables[ahead]:
            told, done = numbers(line.values), reached.get(_key(line), [])
            if told and done:
                late = told[-1] - done[-1]
                yield _told(line, Verdict.BREACH if late > 0 else Verdict.FINE, late, 0.0, sentence)

    return judge


# Latency as a budget


def burning(recent: str, long: str, sentence: str) -> Judge:
    """A breach while the budget of slow ones is spent too fast, in a long window and in a short one.

    Of all, `objective_share` should take at most `objective_seconds`; the rest is the budget. The long
    window says that it matters, the short one that it goes on: so it fires soon and ends soon. `recent`
    is the heat map of an hour, `long` that of six.
    """

    def judge(tables: Tables, _world: World, limits: LimitsOf) -> Iterator[Finding]:
        longer = {_key(line): line for line in tables[long]}
        for line in tables[recent]:
            values = limits(line.labels[TOPIC])
            maps = {
                "5 m": _last(line, 5 / 60),
                "1 h": _last(line, 1),
                "30 m": _last(longer.get(_key(line)), 1 / 12),
                "6 h": _last(longer.get(_key(line)), 1),
            }
            if sum(maps["1 h"]) >= values["least_requests"]:
                yield _burnt(line, maps, values, sentence)

    return judge


def _burnt(
    line: ResultSeries, maps: Mapping[str, list[int]], values: Mapping[str, float], sentence: str
) -> Finding:
    budget = 1 - values["objective_share"]
    rates = {
        window: _slow_share(counts, values["objective_seconds"]) / budget
        for window, counts in maps.items()
    }
    hot = [
        (short, long)
        for short, long, factor in BUDGET_WINDOWS
        if min(rates[short], rates[long]) >= factor * values["burn_factor"]
    ]
    p99 = Histogram(maps["5 m"] if sum(maps["5 m"]) else maps["1 h"]).quantile(values["objective_share"])
    evidence = {
        "budget_spent_times_too_fast": {window: round(rate, 2) for window, rate in rates.items()},
        "windows": [f"{short} and {long}" for short, long in hot],
        "seconds_of_that_share": p99,
    }
    verdict = Verdict.BREACH if hot else Verdict.FINE
    return _told(line, verdict, p99, values["objective_seconds"], sentence, evidence)


def _slow_share(counts: Sequence[int], seconds: float) -> float:
    """Of the bucket that the objective lies in, all are taken for fast enough."""
    total = sum(counts)
    return sum(counts[bisect_left(BOUNDS, seconds) + 1 :]) / total if total else 0.0


def _last(line: ResultSeries | None, part: float) -> list[int]:
    """The heat map of the last part of a line's time."""
    maps = line.values[-max(1, round(len(line.values) * part)) :] if line else []
    known = [value for value in maps if isinstance(value, list)]
    return [sum(column) for column in zip(*known, strict=True)] if known else [0] * BUCKETS


# Less than usual


def fallen(part: str, whole: str, usual: str, sentence: str) -> Judge:
    """A breach while a ratio is far below its own usual level: the median of `usual`, hours that had
    traffic. Without some hours of a past nothing is usual, and nothing is said."""

    def judge(tables: Tables, _world: World, limits: LimitsOf) -> Iterator[Finding]:
        wholes = {_key(line): sum(numbers(line.values)) for line in tables[whole]}
        parts = {_key(line): sum(numbers(line.values)) for line in tables[part]}
        for line in tables[usual]:
            values, past = limits(line.labels[TOPIC]), numbers(line.values)
            asked = wholes.get(_key(line), 0.0)
            if len(past) < values["least_hours"] or asked < values["least_tokens"]:
                continue
            level_then, level_now = median(past), parts.get(_key(line), 0.0) / asked
            threshold = level_then * (1 - values["fall_share"])
            evidence = {"usual": level_then, "hours_it_is_from": len(past), "tokens_asked_for": asked}
            verdict = Verdict.BREACH if level_now < threshold else Verdict.FINE
            yield _told(line, verdict, level_now, threshold, sentence, evidence)

    return judge


def uneven(reading: str, apart_by: str, limit: str, least: str, sentence: str) -> Judge:
    """A breach while the busiest of several carries far more than their mean."""

    def judge(tables: Tables, _world: World, limits: LimitsOf) -> Iterator[Finding]:
        by_topic: dict[str, dict[str, float]] = {}
        for line in tables[reading]:
            carried = by_topic.setdefault(line.labels[TOPIC], {})
            carried[line.labels[apart_by]] = sum(numbers(line.values))
        for topic, carried in by_topic.items():
            values = limits(topic)
            if len(carried) < 2 or sum(carried.values()) <= values[least]:
                continue
            busiest = max(carried, key=lambda name: (carried[name], name))
            ratio = carried[busiest] / fmean(carried.values())
            verdict = Verdict.BREACH if ratio > values[limit] else Verdict.FINE
            said = sentence.format(
                name=name_of(topic), value=ratio, limit=values[limit], busiest=busiest
            )
            evidence = {"busiest": busiest, "bytes": carried}
            yield Finding(topic, verdict, said, ratio, values[limit], evidence=evidence)

    return judge


# Pieces


def numbers(values: Iterable[Value]) -> list[float]:
    """Those that are known."""
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def last(values: Sequence[float]) -> float:
    return values[-1]


def _key(line: ResultSeries) -> Key:
    return tuple(sorted(line.labels.items()))


def _finding(line: ResultSeries, value: float, limit: float, sentence: str) -> Finding:
    verdict = Verdict.BREACH if value > limit else Verdict.FINE
    return _told(line, verdict, value, limit, sentence)


def _told(
    line: ResultSeries,
    verdict: Verdict,
    value: float | None,
    limit: float,
    sentence: str,
    evidence: Mapping[str, object] | None = None,
) -> Finding:
    labels = {name: text for name, text in line.labels.items() if name != TOPIC}
    topic = line.labels[TOPIC]
    said = sentence.format(
        value=value or 0, limit=limit, name=name_of(topic), **labels, **(evidence or {})
    )
    return Finding(topic, verdict, said, value, limit, labels, evidence or {})
