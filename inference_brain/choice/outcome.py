"""What became of a request, and what its place has cost."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from inference_brain.choice.choice import Choice, Estimate
from swdriver_shim.cache.reasons import Reason

_NOTHING: Final[Mapping[str, int]] = MappingProxyType({})


class Outcome(NamedTuple):
    """`cached_tokens`: of the prompt, as the replica says; None if it does not. `missed`: why tokens
    were missed, by the driver's reasons, where it is asked. `status`: of the answer. None for a time
    that did not come."""

    ttft_seconds: float | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None  # until the answer's end
    status: int = 200
    missed: Mapping[str, int] = _NOTHING


class Regret(StrEnum):
    """Why tokens had to be computed."""

    COLD = "cold"  # nobody had them
    EXPIRED = "expired"
    DISPLACED = "displaced"  # the map promised them, or the driver says so
    NOT_LENT = "not_lent"  # a sibling was to lend them, and they did not come in time
    PURGED = "purged"  # or deleted
    OVERLOADED = "overloaded"  # another replica has them, and was too busy
    SPINE = "spine"  # another replica has them, and would have fetched them for longer than they take
    ELSEWHERE = "elsewhere"  # another replica has them, and was no worse: the choice was not by time


_OF_DRIVER: Final[Mapping[str, Regret]] = {
    Reason.EXPIRED: Regret.EXPIRED,
    Reason.DISPLACED: Regret.DISPLACED,
    Reason.QUOTA: Regret.DISPLACED,
    Reason.AGENT_LOST: Regret.DISPLACED,
    Reason.SEAL_REFUSED: Regret.DISPLACED,
    Reason.TIER2_LATE: Regret.DISPLACED,
    Reason.NOT_WORTH_IT: Regret.SPINE,
    Reason.PURGED: Regret.PURGED,
    Reason.DELETED: Regret.PURGED,
}


def regret(choice: Choice, outcome: Outcome) -> dict[Regret, int]:
    """The prompt's tokens that were not cached where it went, each with one cause.

    First what another candidate had beyond what the chosen one has or borrows: it was too busy, too far
    from its bytes, or as good, where the chosen one was tried or has the prefix. Of the rest what the
    driver knows a reason for; then what was to be borrowed, and what the map had promised, which was
    displaced in between. What is left was cold.
    """
    tokens = choice.asked.tokens
    of = choice.chosen
    promised, borrowed = of.promised_tokens, of.borrowed_tokens
    cached = promised if outcome.cached_tokens is None else outcome.cached_tokens
    left = max(0, tokens - cached)
    found: dict[Regret, int] = {}

    def take(cause: Regret, count: int) -> None:
        nonlocal left
        if (count := min(left, count)) > 0:
            found[cause] = found.get(cause, 0) + count
            left -= count

    other = max(choice.estimates, key=_own)
    if _own(other) > max(promised, cached):
        take(_why_not(other, of), _own(other) - max(promised, cached))
    for reason, count in outcome.missed.items():
        if cause := _OF_DRIVER.get(reason):
            take(cause, count)
    displaced = promised - cached
    if borrowed and displaced > 0:
        not_lent = min(borrowed, max(0, of.candidate.hit_tokens + borrowed - cached))
        take(Regret.NOT_LENT, not_lent)
        displaced -= not_lent
    take(Regret.DISPLACED, displaced)
    take(Regret.COLD, left)
    return found


def _why_not(other: Estimate, chosen: Estimate) -> Regret:
    """Why it was not chosen, though it has more."""
    if other.cost <= chosen.cost:
        return Regret.ELSEWHERE
    later = other.wait_seconds - chosen.wait_seconds
    return Regret.OVERLOADED if later >= other.fetch_seconds - chosen.fetch_seconds else Regret.SPINE


def _own(one: Estimate) -> int:
    return one.candidate.own_tokens
