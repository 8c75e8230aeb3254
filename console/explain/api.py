"""Why a prompt was hit or missed, over REST."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from django.http import HttpRequest
from ninja import Field, Router, Schema
from pydantic import StringConstraints

from console.accounts.browser import requester
from console.api.fields import NO_NUL, Input
from console.api.problems import ApiError, documented
from console.explain.services import Explained, Question, explain, newest
from console.orgs.api import Slug

router = Router(tags=["orgs"])

TOKENS_MAX = 1 << 18
KEYS_MAX = 65_536

Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Key = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, StringConstraints(max_length=200, pattern=NO_NUL)]


class ExplainIn(Input):
    """One of `request`, `tokens` and `keys`."""

    request: Text = Field("", description="The engine's name of it.")
    tokens: list[Token] = Field([], max_length=TOKENS_MAX)
    keys: list[Key] = Field([], max_length=KEYS_MAX, description="Of columns, in hex.")
    adapter: Annotated[str, StringConstraints(max_length=500, pattern=NO_NUL)] = ""
    session: Annotated[str, StringConstraints(max_length=48, pattern=r"^[a-z0-9-]*$")] = Field(
        "", description="Only its drivers are asked."
    )


class OutcomeOut(Schema):
    outcome: str = Field(description="The tier that it was hit in, or the reason why it was missed.")
    columns: int


class ThenOut(Schema):
    request: str
    age_seconds: float
    asked_tokens: int
    hit_tokens: int
    missed_tokens: dict[str, int] = Field(description="By reason.")
    columns: list[OutcomeOut] = Field(description="In order, of so many in a row.")
    adapter: str


class RunOut(Schema):
    first: int = Field(description="The first of these columns, which are alike.")
    last: int
    tokens: int
    state: str = Field(description="`ready`, or why they would be missed now.")
    tier2: bool = Field(description="They are in tier 2, and would be brought back.")
    slots: tuple[int, int] | None = Field(description="The lowest and the highest of them.")
    expires_in_seconds: tuple[float, float] | None = Field(
        description="The soonest and the latest of them; null for never."
    )
    uses_max: int | None
    priority: int | None


class HomeOut(Schema):
    group: str
    index: int
    state: str
    node: str
    tier: str = Field(description="Of its path: `rail`, `leaf`, `spine`; `unknown` if nobody told it.")
    link: str


class DriverAnswerOut(Schema):
    driver: str = Field(
        description="Empty, as are `model` and `homes`, for one that no session of yours has."
    )
    model: str
    then: ThenOut | None = Field(description="What became of the request; null for tokens and keys.")
    groups: dict[str, list[RunOut]] = Field(description="As it is now, by cache group.")
    homes: list[HomeOut] = Field(description="Where the shards are.")


class SilentOut(Schema):
    driver: str = Field(description="Empty for who may not know what other drivers there are.")
    why: str


class ExplainedOut(Schema):
    answers: list[DriverAnswerOut]
    strangers: int = Field(description="So many drivers that you may know of know nothing of it.")
    silent: list[SilentOut] = Field(description="Drivers that did not answer.")
    left_out: int = Field(
        description="So many more drivers were not asked; 0 for who does not see the fleet."
    )


class NewestOut(Schema):
    requests: list[ThenOut] = Field(description="The newest first.")
    silent: list[SilentOut]


@router.post(
    "/orgs/{slug}/explain",
    response={200: ExplainedOut, **documented(404)},
    summary="Why a prompt was hit or missed, column by column",
)
def explain_prompt(request: HttpRequest, slug: Slug, payload: ExplainIn) -> dict[str, Any]:
    """Changes nothing, and nothing of it is kept: drivers are asked."""
    if sum(map(bool, (payload.request, payload.tokens, payload.keys))) != 1:
        raise ApiError("InvalidRequest", "Say one of: the name of a request, tokens, or keys.")
    return _shown(explain(requester(request), slug, Question(**payload.model_dump())))


@router.get(
    "/orgs/{slug}/requests",
    response={200: NewestOut, **documented(404)},
    summary="The last requests that had a name, and what became of them",
)
def list_requests(request: HttpRequest, slug: Slug) -> dict[str, Any]:
    found, silent = newest(requester(request), slug)
    return {
        "requests": [msgspec.to_builtins(then) for _, then in found],
        "silent": [one._asdict() for one in silent],
    }


def _shown(explained: Explained) -> dict[str, Any]:
    return {
        "answers": [
            {
                "driver": one.driver,
                "model": one.model,
                "then": msgspec.to_builtins(one.then),
                "groups": {group: [asdict(run) for run in its] for group, its in one.groups.items()},
                "homes": msgspec.to_builtins(one.homes),
            }
            for one in explained.answers
        ],
        "strangers": explained.strangers,
        "silent": [one._asdict() for one in explained.silent],
        "left_out": explained.left_out,
    }
