"""A request as a brain remembers it: which replicas it could have gone to, why it went to one, and what
happened there. It is the answer of `GET /v1/requests/{id}` of the control API. No prompt is in it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from telemetry.decoder import NO_NUL, Count

CANDIDATES_MAX = 64  # that are remembered: those with the least estimates
Text = Annotated[str, Meta(max_length=500, pattern=NO_NUL)]
Seconds = Annotated[float, Meta(ge=0)]


class CandidateEstimate(Struct, frozen=True):
    """What a replica was expected to need until its first token: the sum of the three parts.

    `guessed`: its cache is not known, only what was sent to it. `excluded`: why it was no candidate
    (ejected, draining); it has no estimate then. `path`: how most bytes of its cache reach it: local,
    rail, leaf or spine. `sibling`: the driver that it would borrow tokens from; empty: from none.
    """

    replica: Text
    hit_tokens: Count = 0  # all tiers, and what is borrowed
    tier2_tokens: Count = 0  # of these, in tier 2
    waiting_seconds: Seconds = 0.0
    fetching_seconds: Seconds = 0.0
    computing_seconds: Seconds = 0.0
    guessed: bool = False
    excluded: Text = ""
    path: Text = ""
    sibling_tokens: Count = 0  # of all tokens that are hit, those that are borrowed
    sibling: Text = ""

    @property
    def seconds(self) -> float:
        return self.waiting_seconds + self.fetching_seconds + self.computing_seconds


class Outcome(Struct, frozen=True):
    """What happened. None: not known, or not reported by the engine."""

    replica: Text  # the last one that it was sent to
    result: Text  # as `brain_requests_total` counts it
    attempts: Count = 1
    queued_seconds: Seconds = 0.0
    first_token_seconds: Seconds | None = None  # since it was sent to the replica
    total_seconds: Seconds | None = None
    hit_tokens: Count | None = None
    completion_tokens: Count | None = None


class RequestRecord(Struct, frozen=True):
    """`outcome` is None while the request is running. `regret`: tokens by cause."""

    id: Text
    at: Seconds  # since 1970
    org: Text
    model: Text
    prompt_tokens: Count | None = None  # None: it was not tokenized here
    chosen: Text = ""  # empty: it was sent to none
    why: Text = ""  # in a sentence
    candidates: Annotated[tuple[CandidateEstimate, ...], Meta(max_length=CANDIDATES_MAX)] = ()
    decision_seconds: Seconds | None = None
    outcome: Outcome | None = None
    regret: Annotated[dict[Text, Count], Meta(max_length=16)] = {}
