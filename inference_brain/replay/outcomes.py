"""What came of each request, and what that says of all of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
REASONS_MAX: Final = 20
UNKNOWN: Final = "unknown"


@dataclass(slots=True)
class Outcome:
    """Of one request; times in seconds since the beginning. `due`: when it was to be sent.
    `prompt_tokens` and `cached_tokens`: as the server says, None where it does not. `why`: it failed,
    and why."""

    due: float
    sent: float = 0.0
    first: float | None = None  # when the first token came
    last: float | None = None
    ended: float = 0.0
    pieces: int = 0  # of the answer that had tokens in them
    longest_gap: float = 0.0
    input_tokens: int = 0  # of the trace
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    replica: str = UNKNOWN
    org: int = 0
    status: int | None = None
    why: str | None = None

    @property
    def first_token_seconds(self) -> float | None:
        """From when it was sent."""
        return None if self.first is None else self.first - self.sent

    @property
    def late_seconds(self) -> float:
        """How long after its time it was sent: this tool, or its limit, could not keep up."""
        return max(0.0, self.sent - self.due)

    @property
    def between_tokens_seconds(self) -> float | None:
        """On average; None where all came at once."""
        if self.first is None or self.last is None or self.pieces < 2:
            return None
        tokens = self.output_tokens if self.output_tokens is not None else self.pieces
        return (self.last - self.first) / (tokens - 1) if tokens > 1 else None

    def piece(self, now: float) -> None:
        """Tokens have come."""
        if self.last is None:
            self.first = now
        else:
            self.longest_gap = max(self.longest_gap, now - self.last)
        self.last = now
        self.pieces += 1


@dataclass(slots=True)
class Outcomes:
    """Of all requests so far."""

    all: list[Outcome] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """For `--json`; the tables show parts of it. What is not known is None."""
        done = [one for one in self.all if one.why is None]
        failed = [one for one in self.all if one.why is not None]
        seconds = max((one.ended for one in self.all), default=0.0)
        reasons = Counter(one.why for one in failed).most_common(REASONS_MAX)
        replicas = sorted({one.replica for one in done})
        orgs = sorted({one.org for one in done})
        return {
            "requests": len(self.all),
            "failed": len(failed),
            "failures": dict(reasons),
            "seconds": seconds,
            "requests_per_second": len(self.all) / seconds if seconds else None,
            "input_tokens_per_second": _rate(done, "prompt_tokens", seconds),
            "output_tokens_per_second": _rate(done, "output_tokens", seconds),
            "late_seconds": _spread([one.late_seconds for one in self.all]),
            "all": summary(done),
            "replicas": {name: summary(of(done, "replica", name)) for name in replicas},
            "orgs": {str(org): summary(of(done, "org", org)) for org in orgs},
        }


def of(outcomes: Iterable[Outcome], name: str, value: object) -> list[Outcome]:
    return [one for one in outcomes if getattr(one, name) == value]


def summary(done: Sequence[Outcome]) -> dict[str, Any]:
    """Of requests that were answered."""
    known = [one for one in done if one.cached_tokens is not None and one.prompt_tokens]
    prompts = sum(one.prompt_tokens or 0 for one in known)
    cached = sum(one.cached_tokens or 0 for one in known)
    return {
        "requests": len(done),
        "prompt_tokens": sum(one.prompt_tokens or 0 for one in done),
        "cached_tokens": cached if known else None,
        "hit_rate": cached / prompts if prompts else None,
        "first_token_seconds": _spread(
            [one.first_token_seconds for one in done if one.first_token_seconds is not None]
        ),
        "between_tokens_seconds": _spread(
            [one.between_tokens_seconds for one in done if one.between_tokens_seconds is not None]
        ),
        "longest_gap_seconds": max((one.longest_gap for one in done), default=None),
        "total_seconds": _spread([one.ended - one.sent for one in done]),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    quantiles = {name: ordered[min(last, int(part * len(ordered)))] for name, part in QUANTILES.items()}
    return {"mean": sum(ordered) / len(ordered), **quantiles, "max": ordered[-1]}


def _rate(done: Iterable[Outcome], name: str, seconds: float) -> float | None:
    total = sum(getattr(one, name) or 0 for one in done)
    return total / seconds if seconds and total else None
