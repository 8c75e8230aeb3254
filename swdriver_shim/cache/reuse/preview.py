"""The effect of a policy on an org, before it is saved: hit rate and memory.

    traffics = [Traffic.of(sample) for sample in samples]      # one from each driver
    found = preview(traffics, now=policy, proposed=policy)

Each policy is tried on the samples of drivers (`sample`) in a small cache (`miniature`). Misses are
counted, not hits: a column of everybody's prompt makes most of the hits, may be in the sample or not,
and is hardly ever missed. Results are cached with the traffic, so that the next preview, with a small
change of the policy, is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, sqrt
from statistics import variance
from typing import Final, TypeAlias

from msgspec import Struct, structs

from swdriver_shim.cache.reuse.miniature import FOLDS, Miniature, Outcome
from swdriver_shim.cache.reuse.sample import Event, Kind, Sample, Share, fewer
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.policy import Policy, Tiers, TtlMode
from telemetry.units import duration

FAR_APART: Final = 1.2  # factor between predicted and real misses, up to which they are calibrated
WARM_UP: Final = 1 / 3  # of the log, if it does not begin at the start
COLUMNS: Final = 6000  # of samples, that a policy is tried on at most
CURVE_COLUMNS: Final = 400  # for each point of a curve,
CURVE_USES: Final = 3  # with so many uses each, on average
TTLS_S: Final = (60, 300, 900, 3600, 6 * 3600, 24 * 3600)
ROOMS: Final = (1 / 16, 1 / 4, 1 / 2, 1, 2)  # parts of what the org has now in memory,
ROOMS_BELOW: Final = (1, 2, 4, 8, 16)  # and of tier 2, in parts of that
GAIN_MIN: Final = 0.01  # of the hit rate; a curve that rises by less has no sweet spot
REFERENCES_MIN: Final = 500  # fewer give a warning
RUNS_MAX: Final = 64  # results that are cached for one traffic
INTERVAL: Final = 2.0  # standard errors: 19 of 20 samples are nearer


class Effect(Struct, frozen=True, kw_only=True):
    """The effect of a policy on the sampled traffic. The hit rate is None without traffic."""

    hit_rate: float | None
    tier2_hit_rate: float  # the part of it from tier 2
    bytes: int  # of memory, at most
    error: float  # two standard errors of the hit rate that are due to sampling


class Point(Struct, frozen=True):
    """A point of a curve, at so many seconds or bytes."""

    at: int
    hit_rate: float


class SweetSpot(Struct, frozen=True, kw_only=True):
    """Of a curve over bytes: where it bends most. What is beyond yields less than the average of all."""

    at: int
    hit_rate: float


class Confidence(Struct, frozen=True, kw_only=True):
    """How much traffic a preview is based on."""

    requests: int
    references: int  # to columns of the samples
    share: float  # of all columns; the least of all drivers
    reaches_back_seconds: float  # the least of all drivers
    idle_seconds: float  # since the last request
    warnings: tuple[str, ...] = ()


class Preview(Struct, frozen=True, kw_only=True):
    """`measured_hit_rate` is the real one in the time that `now` is computed for. The two differ by the
    error of the model."""

    now: Effect
    proposed: Effect
    measured_hit_rate: float | None
    freed_bytes: int  # of memory; negative if more is needed
    expiring_columns: int  # as soon as the policy takes effect
    expiring_bytes: int
    by_ttl: tuple[Point, ...]
    by_bytes: tuple[Point, ...]
    by_tier2_bytes: tuple[Point, ...] = ()  # of a policy that uses tier 2
    confidence: Confidence | None  # None: there was no traffic yet


# What a result depends on: the two TTLs, the limit of columns, the room, and the displacement policy.
_Key: TypeAlias = tuple[int | None, int | None, int | None, float | None, str]


@dataclass
class Traffic:
    """The events and counts of a sample."""

    sample: Sample
    share: Share
    events: list[Event]
    count_from: float
    requested: int
    columns: int
    hit: int
    factor: float = 1.0
    missed_now: Sequence[int] | None = None  # see `calibrated`
    runs: dict[_Key, Outcome] = field(default_factory=dict)
    parts: dict[float, Traffic] = field(default_factory=dict)

    @classmethod
    def of(cls, sample: Sample) -> Traffic:
        """Raises ValueError for an invalid sample."""
        events = sample.events()
        count_from, before = -inf, (0, 0, 0)
        if events and not sample.complete:
            count_from = events[0].at + WARM_UP * (events[-1].at - events[0].at)
            for event in events:
                if event.kind is Kind.MATCH:
                    before = event.requested, event.columns, event.hit
                if event.at >= count_from:
                    break
        requested, columns, hit = (
            there - then
            for there, then in zip((sample.requested, sample.columns, sample.hit), before, strict=True)
        )
        return cls(sample, sample.share, events, count_from, requested, columns, hit)

    @cached_property
    def references(self) -> int:
        return sum(len(event.path) for event in self.events)

    @property
    def reaches_back_s(self) -> float:
        return self.sample.now - self.events[0].at if self.events else 0.0

    @cached_property
    def distinct(self) -> int:
        return len({reference.key for event in self.events for reference in event.path})

    def smaller(self, columns: int, uses: float = inf) -> Traffic:
        """A part of the traffic with about so many columns, and so many uses of each."""
        references = max(1, self.references)
        part = min(columns / max(1, self.distinct), uses * columns / references)
        if part >= 1.0:
            return self
        if part not in self.parts:
            share = self.share._replace(threshold=max(1, int(self.share.threshold * part)))
            left = fewer(self.events, share)
            self.parts[part] = replace(
                self, share=share, events=left, factor=1.0, missed_now=None, runs={}, parts={}
            )
        return self.parts[part]

    def run(self, policy: Policy, room_bytes: float) -> Outcome:
        """Try a policy. With room for all columns none is displaced, whatever the policy."""
        limits = policy.ttl_first_use_seconds, policy.ttl_last_use_seconds, policy.columns_max
        room = room_bytes / self.sample.column_bytes * self.share.of_all / self.factor
        found = self._cached((*limits, None, ""), policy, None)
        if found.held_max > room:
            found = self._cached((*limits, room, policy.displacement), policy, room)
        return found

    def _cached(self, key: _Key, policy: Policy, room: float | None) -> Outcome:
        found = self.runs.get(key)
        if found is None:
            if len(self.runs) >= RUNS_MAX:
                self.runs.clear()
            found = self.runs[key] = Miniature(policy, room).run(self.events, self.count_from)
        return found

    def room_bytes(self, policy: Policy) -> float:
        most = self.sample.room_bytes
        return most if policy.dram_bytes_max is None else min(most, policy.dram_bytes_max)

    def calibrated(self, now: Policy) -> Traffic:
        """Scale misses, and the room that they fill, by how many there really were under the current
        policy.

        A sample has by chance more or fewer columns than its share, and most of those missed under one
        policy are missed under any. Nothing is scaled if the two are far apart: then the policy was
        another one for a part of the time, or the model lacks something.
        """
        if now.tiers is Tiers.NONE:
            return self
        found = self.run(now, self.room_bytes(now) if now.tiers is Tiers.DRAM else inf).missed
        expected = sum(found) / self.share.of_all
        really = self.columns - self.hit / COLUMN_TOKENS
        if not expected or not 1 / FAR_APART < really / expected < FAR_APART:
            return self
        return replace(self, factor=really / expected, missed_now=found)

    def hit_tokens(self, outcome: Outcome) -> float:
        return COLUMN_TOKENS * max(0.0, self.columns - self.of_all(sum(outcome.missed)))

    def variance(self, outcome: Outcome) -> float:
        """The variance of the hit tokens, estimated from the differences between parts of the sample."""
        missed = [float(count) for count in outcome.missed]
        if self.missed_now is not None:
            part = sum(missed) / sum(self.missed_now)
            missed = [count - part * was for count, was in zip(missed, self.missed_now, strict=True)]
        return FOLDS * variance(missed) * (COLUMN_TOKENS * self.factor / self.share.of_all) ** 2

    def of_all(self, columns: int) -> float:
        """How many of all columns correspond to so many of the sample."""
        return self.factor * columns / self.share.of_all


@dataclass(slots=True)
class Estimate:
    """The effect of one policy, added up over drivers."""

    requested: int = 0
    hit: float = 0.0  # tokens
    dram_hit: float = 0.0
    variance: float = 0.0
    bytes: int = 0

    def add(self, traffic: Traffic, policy: Policy) -> Outcome:
        """Add a driver; returns the outcome for its memory."""
        self.requested += traffic.requested
        if policy.tiers is Tiers.NONE:
            return Outcome()
        room = traffic.room_bytes(policy)
        in_memory = found = traffic.run(policy, room)
        if policy.tiers is Tiers.TIER2:
            # The oldest files are displaced first; columns that are also in memory count once.
            below = inf if policy.tier2_bytes_max is None else max(room, policy.tier2_bytes_max)
            found = traffic.run(structs.replace(policy, displacement="lru"), below)
        dram_hit = traffic.hit_tokens(in_memory)
        self.dram_hit += dram_hit
        self.hit += max(dram_hit, traffic.hit_tokens(found))
        self.variance += traffic.variance(found)
        self.bytes += round(traffic.of_all(in_memory.held_max)) * traffic.sample.column_bytes
        return in_memory

    @property
    def hit_rate(self) -> float | None:
        return self.hit / self.requested if self.requested else None

    def effect(self) -> Effect:
        asked = max(1, self.requested)
        return Effect(
            hit_rate=self.hit_rate,
            tier2_hit_rate=(self.hit - self.dram_hit) / asked,
            bytes=self.bytes,
            error=INTERVAL * sqrt(self.variance) / asked,
        )


def preview(known: Sequence[Traffic], now: Policy, proposed: Policy) -> Preview:
    """`known`: the traffic of the org at each driver."""
    traffics = [traffic for traffic in known if traffic.events]
    each = max(1, len(traffics))
    traffics = [traffic.smaller(COLUMNS // each).calibrated(now) for traffic in traffics]
    was, will = Estimate(), Estimate()
    expiring_columns = expiring_bytes = 0
    for traffic in traffics:
        in_memory = was.add(traffic, now)
        will.add(traffic, proposed)
        count = round(traffic.of_all(_expiring(traffic, in_memory, now, proposed)))
        expiring_columns += count
        expiring_bytes += count * traffic.sample.column_bytes
    smaller = [
        traffic.smaller(CURVE_COLUMNS // each, CURVE_USES).calibrated(now) for traffic in traffics
    ]
    shift = (will.hit_rate or 0.0) - (_estimate(smaller, proposed).hit_rate or 0.0)
    return Preview(
        now=was.effect(),
        proposed=will.effect(),
        measured_hit_rate=_rate(sum(one.hit for one in traffics), was.requested),
        freed_bytes=was.bytes - will.bytes,
        expiring_columns=expiring_columns,
        expiring_bytes=expiring_bytes,
        by_ttl=_through(by_ttl(smaller, proposed), shift),
        by_bytes=_through(by_bytes(smaller, proposed), shift),
        by_tier2_bytes=_through(by_tier2_bytes(smaller, proposed), shift),
        confidence=_confidence(traffics, now, proposed) if traffics else None,
    )


def by_ttl(
    traffics: Sequence[Traffic], policy: Policy, seconds: Sequence[int] = TTLS_S
) -> tuple[Point, ...]:
    """The hit rate with other TTLs, all else as in the policy. Of a policy with two TTLs the one from
    the last use is varied, and the one from the first use with it where that is shorter."""
    known = max((traffic.reaches_back_s for traffic in traffics), default=0.0)
    beyond = [at for at in seconds if at > known]  # all with the same hit rate
    within = [at for at in seconds if at <= known]
    points = _curve(traffics, [*within, *beyond[:1]], lambda at: with_ttl(policy, at))
    return (*points, *(Point(at, points[-1].hit_rate) for at in beyond[1:] if points))


def with_ttl(policy: Policy, seconds: int) -> Policy:
    """The policy with another TTL: from the first use if its only TTL is that, else from the last
    use."""
    if policy.ttl_mode is TtlMode.FIRST_USE:
        return structs.replace(policy, ttl_first_use_seconds=seconds)
    return structs.replace(policy, ttl_last_use_seconds=seconds)


def by_bytes(
    traffics: Sequence[Traffic], policy: Policy, parts: Sequence[float] = ROOMS
) -> tuple[Point, ...]:
    """The hit rate with other quotas, in parts of what the org has in memory, all else as in the
    policy."""
    in_memory = max((traffic.sample.held_bytes for traffic in traffics), default=0)
    sizes = [round(in_memory * part) for part in parts if in_memory]
    return _curve(traffics, sizes, lambda at: structs.replace(policy, dram_bytes_max=at))


def by_tier2_bytes(
    traffics: Sequence[Traffic], policy: Policy, parts: Sequence[int] = ROOMS_BELOW
) -> tuple[Point, ...]:
    """As `by_bytes`, of quotas in tier 2, where the policy uses it."""
    if policy.tiers is not Tiers.TIER2:
        return ()
    in_memory = max((traffic.sample.held_bytes for traffic in traffics), default=0)
    sizes = [in_memory * part for part in parts if in_memory]
    return _curve(traffics, sizes, lambda at: structs.replace(policy, tier2_bytes_max=at))


def sweet_spot(points: Sequence[Point]) -> SweetSpot | None:
    """The size that lies highest above the straight line between the ends of the curve. None where the
    curve hardly rises, or is as good as straight."""
    if len(points) < 3 or points[-1].hit_rate - points[0].hit_rate < GAIN_MIN:
        return None
    first, last = points[0], points[-1]
    average = (last.hit_rate - first.hit_rate) / (last.at - first.at)

    def above(point: Point) -> float:
        return point.hit_rate - first.hit_rate - average * (point.at - first.at)

    best = max(points[1:-1], key=above)
    if above(best) < GAIN_MIN:
        return None
    return SweetSpot(at=best.at, hit_rate=best.hit_rate)


def _curve(
    traffics: Sequence[Traffic], places: Sequence[int], policy_at: Callable[[int], Policy]
) -> tuple[Point, ...]:
    rates = [(at, _estimate(traffics, policy_at(at)).hit_rate) for at in places]
    return tuple(Point(at, rate) for at, rate in rates if rate is not None)


def _estimate(traffics: Sequence[Traffic], policy: Policy) -> Estimate:
    estimate = Estimate()
    for traffic in traffics:
        estimate.add(traffic, policy)
    return estimate


def _through(points: Sequence[Point], shift: float) -> tuple[Point, ...]:
    """A curve of a small sample, shifted to match a larger sample in one point."""
    return tuple(Point(one.at, min(1.0, max(0.0, one.hit_rate + shift))) for one in points)


def _expiring(traffic: Traffic, in_memory: Outcome, now: Policy, proposed: Policy) -> int:
    """How many of the columns in memory the proposed policy expires."""
    columns = zip(in_memory.depths, in_memory.stored_at, in_memory.used_at, strict=True)
    at = traffic.sample.now
    present = [one for one in columns if now.expires_at(one[1], one[2]) > at]
    if proposed.tiers is Tiers.NONE:
        return len(present)
    most = inf if proposed.columns_max is None else proposed.columns_max
    return sum(
        depth >= most or proposed.expires_at(stored_at, used_at) <= at
        for depth, stored_at, used_at in present
    )


def _confidence(traffics: Sequence[Traffic], now: Policy, proposed: Policy) -> Confidence:
    spans = sorted(one.reaches_back_s for one in traffics)
    least, most = duration(round(spans[0])), duration(round(spans[-1]))
    idle = min(one.sample.now - one.events[-1].at if one.events else 0.0 for one in traffics)
    references = sum(one.references for one in traffics)
    warnings = []
    longest = max(
        policy.ttl_first_use_seconds or policy.ttl_last_use_seconds or 0 for policy in (now, proposed)
    )
    if longest > spans[0]:
        reach = least if least == most else f"{least} to {most}, by driver"
        warnings.append(f"The sample reaches back {reach}: longer TTLs have the same hit rate.")
    if references < REFERENCES_MIN:
        warnings.append(f"The sample has only {references} uses: wait for more traffic.")
    return Confidence(
        requests=sum(one.sample.requests for one in traffics),
        references=references,
        share=min(one.share.of_all for one in traffics),
        reaches_back_seconds=spans[0],
        idle_seconds=idle,
        warnings=tuple(warnings),
    )


def _rate(one: float, other: int) -> float | None:
    return one / other if other else None
