"""Why this replica: a choice and what became of it, for people."""

from __future__ import annotations

import msgspec

from inference_brain.choice.choice import Choice, Estimate, Why
from inference_brain.choice.outcome import Outcome, regret


class CandidateExplanation(msgspec.Struct, frozen=True):
    """A candidate's estimate, in seconds to the first token."""

    replica: str
    expected_seconds: float
    wait_seconds: float
    fetch_seconds: float
    compute_seconds: float
    noise_seconds: float
    memory_tokens: int
    tier2_tokens: int
    missed_tokens: int
    waiting_tokens: int
    waiting: int
    running: int
    path: str
    observations: float
    is_guess: bool


class OutcomeExplanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What really happened. `error_seconds`: how much later than expected the first token came."""

    status: int
    ttft_seconds: float | None = None
    error_seconds: float | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None
    regret: dict[str, int] = {}


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision. `candidates`: those that were compared exactly, the least first."""

    request: str
    org: str
    at: float
    replica: str
    why: Why
    sentence: str
    prompt_tokens: int
    candidates_total: int
    candidates: list[CandidateExplanation]
    outcome: OutcomeExplanation | None = None


def explain(choice: Choice, outcome: Outcome | None = None) -> Explanation:
    return Explanation(
        request=choice.asked.request,
        org=choice.asked.org,
        at=choice.at,
        replica=choice.replica,
        why=choice.why,
        sentence=sentence(choice),
        prompt_tokens=choice.asked.tokens,
        candidates_total=choice.candidates,
        candidates=[_candidate(one) for one in choice.estimates],
        outcome=None if outcome is None else _outcome(choice, outcome),
    )


def sentence(choice: Choice) -> str:
    """The choice in a sentence."""
    of, name = choice.chosen, choice.replica
    match choice.why:
        case Why.ONLY:
            return f"{name} was the only candidate."
        case Why.LEAST:
            second = next(one for one in choice.estimates if one.name != name)
            return (
                f"The first token was expected after {of.seconds:.3f} s at {name}, and after "
                f"{second.seconds:.3f} s at {second.name}, the next best."
            )
        case Why.AFFINITY:
            return (
                f"Several replicas were expected to take {of.seconds:.3f} s, within "
                f"{of.noise_seconds:.3f} s; the prefix belongs to {name}."
            )
        case Why.TRIAL:
            return f"Little is known of {name} yet, so it was tried."
        case Why.FALLBACK:
            return f"Estimates are off, so prefixes stay where they belong: here {name}."


def _candidate(one: Estimate) -> CandidateExplanation:
    of, load = one.candidate, one.candidate.load
    return CandidateExplanation(
        replica=one.name,
        expected_seconds=one.seconds,
        wait_seconds=one.wait_seconds,
        fetch_seconds=one.fetch_seconds,
        compute_seconds=one.compute_seconds,
        noise_seconds=one.noise_seconds,
        memory_tokens=of.hit_tokens,
        tier2_tokens=of.tier2_tokens,
        missed_tokens=round(one.missed_tokens),
        waiting_tokens=round(load.waiting_tokens),
        waiting=load.waiting,
        running=load.running,
        path=of.path,
        observations=of.rates.observations,
        is_guess=of.is_guess,
    )


def _outcome(choice: Choice, outcome: Outcome) -> OutcomeExplanation:
    ttft = outcome.ttft_seconds
    return OutcomeExplanation(
        status=outcome.status,
        ttft_seconds=ttft,
        error_seconds=None if ttft is None else ttft - choice.chosen.seconds,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens,
        seconds=outcome.seconds,
        regret={str(cause): count for cause, count in regret(choice, outcome).items()},
    )
