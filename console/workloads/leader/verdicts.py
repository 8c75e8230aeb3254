"""Whether the revision that is being rolled out is worse than the last good one. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Final, NamedTuple

from console.workloads.leader.world import (
    NEVER,
    CompileState,
    Goal,
    Instance,
    Intent,
    Seen,
    State,
    Traffic,
)
from console.workloads.spec import RolloutSpec
from telemetry.units import shown

FAILURES_MAX: Final = 3  # instances of the new revision that ended by themselves
ENGINE_RESTARTS_MAX: Final = 5  # of one of its engines
# So many requests that others then served are enough to compare. A replica that fails all requests is
# ejected after three of them, and gets one now and then. Other failures are no such evidence: a node
# that is lost makes as many at once.
REFUSED_ENOUGH: Final = 10
BUSIER_MAX: Final = 1.25  # requests of a replica: with more, times to first token say nothing
# How far chance reaches, in standard deviations. Both are compared every ten seconds for as long as a
# rollout takes, and one that is no worse must not be undone.
Z: Final = 3.0


class Verdict(NamedTuple):
    """A word for machines, a sentence for people."""

    reason: str
    sentence: str


class Judged(NamedTuple):
    """`look_at`: when it may be another one without any news."""

    verdict: Verdict | None
    look_at: float = NEVER


def judge(intent: Intent, seen: Seen, now: float) -> Judged:
    """What is wrong with the target revision; None as long as nothing is known to be."""
    if seen.compile.state is CompileState.FAILED:
        return Judged(Verdict("CompileFailed", f"It could not be compiled: {seen.compile.sentence}"))
    new = [
        one for one in seen.instances if one.template == intent.template and one.goal is not Goal.DRAIN
    ]
    if failed := _failing(intent, seen, new):
        return Judged(failed)
    if is_compared(intent) and (worse := compare(*_as_comparable(intent, seen), intent.rules)):
        return Judged(worse)
    return _late(intent, new, now)


def is_compared(intent: Intent) -> bool:
    """Whether there is an older revision to be better than."""
    return intent.stable is not None and intent.stable.digest != intent.revision.digest


def _as_comparable(intent: Intent, seen: Seen) -> tuple[Traffic, Traffic]:
    """Of both revisions. One that begins with an empty cache takes longer to first tokens, however good
    it is: they are left out then."""
    stable, target = intent.stable, intent.revision
    if stable and stable.has_cache and target.has_cache and stable.epoch != target.epoch:
        return replace(seen.new, ttft_seconds=None), seen.old
    return seen.new, seen.old


def _failing(intent: Intent, seen: Seen, new: Collection[Instance]) -> Verdict | None:
    ended = [
        one for one in seen.failures if one.template == intent.template and one.at >= intent.begun_at
    ]
    if len(ended) >= FAILURES_MAX:
        last = f" The last one: {ended[-1].sentence}" if ended[-1].sentence else ""
        return Verdict("InstancesFail", f"{len(ended)} instances of it ended by themselves.{last}")
    for one in new:
        if one.restarts >= ENGINE_RESTARTS_MAX and not one.answers:
            why = f" {one.sentence}" if one.sentence else ""
            return Verdict(
                "EngineFails", f"The engine of {one.name} was restarted {one.restarts} times.{why}"
            )
    return None


def _late(intent: Intent, new: Collection[Instance], now: float) -> Judged:
    look_at = NEVER
    for one in new:
        if one.answers or one.state is State.GONE:
            continue
        begun = max(
            one.created_at, intent.begun_at, one.room_at
        )  # it waits for room as long as it takes
        if one.was_ready or (intent.stable == intent.revision and one.restart == 0):
            begun = max(begun, one.since)  # it has served before: a fault, and no roll-out
        late_at = begun + intent.rules.deadline_seconds
        if now >= late_at:
            why = f": {one.sentence}" if one.sentence else "."
            return Judged(
                Verdict(
                    "DeadlineExceeded",
                    f"{one.name} was not ready within {intent.rules.deadline_seconds:g} s{why}",
                )
            )
        look_at = min(look_at, late_at)
    return Judged(None, look_at)


def compare(new: Traffic, old: Traffic, rules: RolloutSpec) -> Verdict | None:
    """Whether requests fare worse with the new revision: by more than chance, load and the bounds
    explain."""
    is_enough = new.requests >= rules.requests_min
    if old.requests < rules.requests_min or not (is_enough or new.refused >= REFUSED_ENOUGH):
        return None
    if _worse_by(new, old) > rules.error_rate_margin:
        return Verdict(
            "ErrorRateWorse",
            f"{shown(new.error_rate, 'share')} of its {new.requests} requests failed, "
            f"{shown(old.error_rate, 'share')} before.",
        )
    # More requests take longer with any revision. It may have been growing before the new one served.
    is_busier = new.per_second > old.per_second * BUSIER_MAX
    if is_enough and not is_busier and _slower_by(new, old) > rules.ttft_ratio_max:
        return Verdict(
            "FirstTokenSlower",
            f"Its median time to first token is {new.ttft_seconds:.3g} s; "
            f"it was {old.ttft_seconds:.3g} s.",
        )
    return None


def _slower_by(new: Traffic, old: Traffic) -> float:
    """How many times as long its first tokens take, at least, as `_worse_by` says it of failures."""
    if not new.ttft_seconds or not old.ttft_seconds:
        return 0.0
    below = math.log(new.ttft_seconds / new.ttft_least)
    above = math.log(old.ttft_most / old.ttft_seconds)
    return new.ttft_seconds / old.ttft_seconds / math.exp(math.hypot(below, above))


def _worse_by(new: Traffic, old: Traffic) -> float:
    """By how much more of its requests fail, at least: the lower end of Newcombe's interval of a
    difference."""
    below = new.error_rate - _wilson(new)[0]
    above = _wilson(old)[1] - old.error_rate
    return new.error_rate - old.error_rate - math.hypot(below, above)


def _wilson(of: Traffic) -> tuple[float, float]:
    """Wilson's interval of its error rate."""
    rate, requests, square = of.error_rate, of.requests, Z * Z
    middle = rate + square / (2 * requests)
    spread = Z * math.sqrt(rate * (1 - rate) / requests + square / (4 * requests * requests))
    whole = 1 + square / requests
    return (middle - spread) / whole, (middle + spread) / whole
