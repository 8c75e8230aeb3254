"""Whether the revision that is being rolled out is worse than the last good one. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final, NamedTuple

from console.workloads.leader.world import (
    NEVER,
    CompileState,
    Goal,
    Instance,
    Intent,
    Rules,
    Seen,
    State,
    Traffic,
)

FAILURES_MAX: Final = 3  # instances of the new revision that ended by themselves
ENGINE_RESTARTS_MAX: Final = 5  # of one of its engines
BUSIER_MAX: Final = 1.25  # requests of a replica: with more, times to first token say nothing
Z: Final = 1.96  # 95 %: a few bad requests are no evidence


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
    if is_compared(intent) and (worse := compare(seen.new, seen.old, intent.rules)):
        return Judged(worse)
    return _late(intent, new, now)


def is_compared(intent: Intent) -> bool:
    """Whether there is an older revision to be better than."""
    return intent.stable is not None and intent.stable.digest != intent.revision.digest


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


def compare(new: Traffic, old: Traffic, rules: Rules) -> Verdict | None:
    """Whether requests fare worse with the new revision: by more than chance, load and the bounds
    explain."""
    if new.requests < rules.requests_min or old.requests < rules.requests_min:
        return None
    if _at_least(new.errors, new.requests) > old.error_rate + rules.error_rate_margin:
        return Verdict(
            "ErrorRateWorse",
            f"{new.error_rate:.1%} of its {new.requests} requests failed, {old.error_rate:.1%} before.",
        )
    # More requests take longer with any revision. It may have been growing before the new one served.
    is_busier = new.per_second > old.per_second * BUSIER_MAX
    if (
        not is_busier
        and new.ttft_seconds is not None
        and old.ttft_seconds
        and new.ttft_seconds > old.ttft_seconds * rules.ttft_ratio_max
    ):
        return Verdict(
            "FirstTokenSlower",
            f"Its median time to first token is {new.ttft_seconds:.3g} s; "
            f"it was {old.ttft_seconds:.3g} s.",
        )
    return None


def _at_least(errors: int, requests: int) -> float:
    """The lower end of Wilson's interval of a rate."""
    rate, square = errors / requests, Z * Z
    middle = rate + square / (2 * requests)
    spread = Z * math.sqrt(rate * (1 - rate) / requests + square / (4 * requests * requests))
    return (middle - spread) / (1 + square / requests)
