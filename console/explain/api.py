"""Explain hits and misses of a prompt over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from ninja import Field, Schema
from pydantic import StringConstraints

from console.accounts.browser import SignedInRequest
from console.api.fields import NO_NUL, Input
from console.api.problems import ApiError
from console.api.routes import Router, answers
from console.explain.services import Explained, Question, explain, recent_requests
from console.orgs.api import Slug

router = Router(tags=["orgs"])

TOKENS_MAX = 1 << 18
KEYS_MAX = 65_536

Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Key = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, StringConstraints(max_length=200, pattern=NO_NUL)]


class ExplainIn(Input):
    """One of `request`, `tokens` and `keys`. A prompt with images or sound is found by its request or
    its keys only: tokens do not tell them apart."""

    request: Text = Field("", description="The name that the engine gave the request.")
    tokens: list[Token] = Field([], max_length=TOKENS_MAX)
    keys: list[Key] = Field([], max_length=KEYS_MAX, description="Keys of columns, in hex.")
    adapter: Annotated[str, StringConstraints(max_length=500, pattern=NO_NUL)] = ""
    session: Annotated[str, StringConstraints(max_length=48, pattern=r"^[a-z0-9-]*$")] = Field(
        "", description="Ask only the drivers of this session."
    )


class OutcomeOut(Schema):
    outcome: str = Field(description="The tier of a hit, or the reason of a miss.")
    columns: int


class RequestResultOut(Schema):
    request: str
    age_seconds: float
    asked_tokens: int
    hit_tokens: int
    missed_tokens: dict[str, int] = Field(description="Missed tokens by reason.")
    columns: list[OutcomeOut] = Field(
        description="Consecutive columns with the same outcome, in the order of the prompt."
    )
    adapter: str


class RunOut(Schema):
    first: int = Field(description="Index of the first of these columns, which are alike.")
    last: int
    tokens: int
    state: str = Field(description="`ready`, or the reason why they would be a miss now.")
    tier2: bool = Field(description="Whether they are in tier 2.")
    slots: tuple[int, int] | None = Field(description="The lowest and the highest slot number.")
    expires_in_seconds: tuple[float, float] | None = Field(
        description="The earliest and the latest expiry; null for never."
    )
    uses_max: int | None
    priority: int | None
    no_spill: str | None = Field(
        description="Why they are not copied to tier 2: `policy`, `request`, `not_encrypted`, "
        "`no_data_key`, `own_ttl` or `tail`; null if they may be, or are not ready."
    )


class HomeOut(Schema):
    group: str
    index: int
    state: str
    node: str
    tier: str = Field(description="Tier of the path: `rail`, `leaf`, `spine` or `unknown`.")
    link: str


class DriverAnswerOut(Schema):
    driver: str = Field(
        description="Empty, as are `model` and `homes`, for a driver outside your sessions."
    )
    model: str
    result: RequestResultOut | None = Field(
        description="Hits and misses of the request; null for tokens and keys."
    )
    groups: dict[str, list[RunOut]] = Field(description="The columns now, by cache group.")
    homes: list[HomeOut] = Field(description="The homes of the shards.")


class UnreachableOut(Schema):
    driver: str = Field(description="Empty for drivers that you may not see.")
    reason: str


class SilentBrainOut(Schema):
    brain: str = Field(description="Empty without access to the fleet.")
    reason: str


class CandidateOut(Schema):
    """What a replica was expected to need until its first token: the sum of the three parts."""

    replica: str = Field(description="Numbered instead of named without access to the fleet.")
    chosen: bool = Field(validation_alias="is_chosen")
    seconds: float | None = Field(description="Null if it was excluded.")
    waiting_seconds: float = Field(validation_alias="estimate.waiting_seconds")
    fetching_seconds: float = Field(validation_alias="estimate.fetching_seconds")
    computing_seconds: float = Field(validation_alias="estimate.computing_seconds")
    hit_tokens: int = Field(validation_alias="estimate.hit_tokens")
    sibling_tokens: int = Field(
        validation_alias="estimate.sibling_tokens",
        description="Of the hit, what it would borrow from a sibling's memory.",
    )
    sibling: str = Field(
        validation_alias="estimate.sibling",
        description="The driver it would borrow them from. Empty without access to the fleet.",
    )
    tier2_tokens: int = Field(validation_alias="estimate.tier2_tokens")
    guessed: bool = Field(validation_alias="estimate.guessed", description="Its cache was guessed at.")
    path: str = Field(
        validation_alias="estimate.path",
        description="How most bytes of its cache reach it: local, rail, leaf or spine. Empty without "
        "access to the fleet.",
    )
    excluded: str = Field(
        validation_alias="estimate.excluded", description="Why it was no candidate; else empty."
    )


class RouteOutcomeOut(Schema):
    replica: str
    result: str
    attempts: int
    queued_seconds: float
    first_token_seconds: float | None = Field(description="From when it was sent to the replica.")
    total_seconds: float | None
    hit_tokens: int | None
    completion_tokens: int | None


class RouteOut(Schema):
    """Why a request went where it did, and what happened there."""

    brain: str = Field(description="Empty without access to the fleet.")
    at: datetime
    model: str = Field(validation_alias="record.model")
    prompt_tokens: int | None = Field(validation_alias="record.prompt_tokens")
    chosen: str = Field(validation_alias="record.chosen")
    why: str = Field(
        validation_alias="record.why", description="In a sentence; empty without access to the fleet."
    )
    decision_seconds: float | None = Field(validation_alias="record.decision_seconds")
    error_seconds: float | None = Field(
        description="How much later than expected the first token came; negative if sooner."
    )
    candidates: list[CandidateOut] = Field(description="Least estimate first.")
    outcome: RouteOutcomeOut | None = Field(
        validation_alias="record.outcome", description="Null while the request is running."
    )
    regret: dict[str, int] = Field(
        validation_alias="record.regret", description="Tokens that an ideal cache had hit, by cause."
    )


class ExplainedOut(Schema):
    route: RouteOut | None = Field(
        validation_alias="routes.route",
        description="Of a request by the `X-Request-ID` of its answer, while a brain remembers it.",
    )
    answers: list[DriverAnswerOut]
    unmatched: int = Field(description="How many visible drivers have no such request or org.")
    unreachable: list[UnreachableOut] = Field(description="Drivers that did not answer.")
    silent_brains: list[SilentBrainOut] = Field(
        validation_alias="routes.silent",
        description="Brains that did not answer. One of them may have had the request.",
    )
    not_asked: int = Field(
        description="How many more drivers were not asked; 0 without access to the fleet."
    )


class RecentRequestsOut(Schema):
    requests: list[RequestResultOut] = Field(description="Newest first.")
    unreachable: list[UnreachableOut]


@router.post("/orgs/{slug}/explain", response=answers(ExplainedOut, 404))
def explain_prompt(request: SignedInRequest, slug: Slug, payload: ExplainIn) -> Explained:
    """Explain hits and misses of a prompt, column by column.

    Asks the drivers. Changes nothing and stores nothing.
    """
    if sum(map(bool, (payload.request, payload.tokens, payload.keys))) != 1:
        raise ApiError("InvalidRequest", "Give exactly one of `request`, `tokens` and `keys`.")
    return explain(request.principal, slug, Question(**payload.model_dump()))


@router.get("/orgs/{slug}/requests", response=answers(RecentRequestsOut, 404))
def list_requests(request: SignedInRequest, slug: Slug) -> dict[str, Any]:
    """List recent named requests with their hits and misses."""
    found, unreachable = recent_requests(request.principal, slug)
    return {"requests": [result for _, result in found], "unreachable": unreachable}
