"""Rules of sessions over REST."""

from __future__ import annotations

from typing import Annotated

from django.db import transaction
from django.http import HttpResponse
from ninja import Field, Schema
from pydantic import StrictBool

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Principal
from console.api.etags import matched, tagged
from console.api.fields import IfMatch, Input, Reason
from console.api.routes import Router, answers
from console.orgs.api import Slug
from console.orgs.models import Org
from console.orgs.services import get_org
from console.sessions import rules as services
from console.sessions.models import (
    BOXES_MAX,
    REPLACE_LOST_AFTER_SECONDS,
    REPLACE_LOST_AFTER_SECONDS_MAX,
    WAIT_SECONDS_MAX,
    RuleSet,
)
from console.sessions.rest.schemas import BorrowName, PathName, RedundancyName

router = Router(tags=["sessions"])

Count = Annotated[int, Field(ge=1, le=BOXES_MAX)]
GraceSeconds = Annotated[int, Field(ge=0, le=REPLACE_LOST_AFTER_SECONDS_MAX)]


class RulesBody(Schema):
    path: PathName = Field(description="Paths that streams may take, within the cluster's rules.")
    refuse_spine: StrictBool = Field(description="No stream crosses the spine, whatever sessions want.")
    wait_for_rail_seconds: Annotated[int, Field(ge=0, le=WAIT_SECONDS_MAX)]
    boxes_min: Count
    boxes_increment: Count
    boxes_max: Count | None
    grant_percent: Annotated[int, Field(ge=1, le=100)] = Field(
        description="Percentage of the fair share of memory. A lower grant leaves room for rails."
    )
    boxes_quota: Annotated[int, Field(ge=0, le=BOXES_MAX)] | None = Field(
        description="For all sessions of an org; set by a platform admin."
    )
    replicas_quota: Annotated[int, Field(ge=0, le=BOXES_MAX)] | None = Field(
        description="For all workloads of an org; set by a platform admin."
    )
    replace_lost: StrictBool = Field(
        description="Place streams of a lost node on other nodes. The cluster's switch, or an org's."
    )
    replace_lost_after_seconds: GraceSeconds = Field(
        description="How long a node has to be lost before that."
    )


class RulesOut(RulesBody):
    moves_percent: int = Field(
        description="Percentage of each link for bytes that can wait, together: streams that move, "
        "fragments, and what is written to shared tier 2."
    )
    borrow: BorrowName = Field(
        description="How far drivers may copy columns from the memory of siblings: not at all, within a "
        "node, within a leaf, or across the spine."
    )
    redundancy: RedundancyName = Field(
        description="Of columns in tier 2: fragments with data + with parity, each at another agent. "
        "The loss of as many agents as there are fragments with parity loses nothing."
    )
    version: int = Field(description="Incremented with each change; the ETag.")


class RulesIn(RulesBody, Input):
    boxes_max: Count | None = None
    moves_percent: Annotated[int, Field(ge=1, le=100)] | None = Field(
        None, description="Percentage of each link for bytes that can wait. Without it, it stays."
    )
    borrow: BorrowName | None = Field(
        None, description="How far drivers may copy columns from siblings. Without it, it stays."
    )
    redundancy: RedundancyName | None = Field(
        None, description="Of columns in tier 2. Without it, it stays."
    )
    grant_percent: Annotated[int, Field(ge=1, le=100)] = 100
    boxes_quota: Annotated[int, Field(ge=0, le=BOXES_MAX)] | None = None
    replicas_quota: Annotated[int, Field(ge=0, le=BOXES_MAX)] | None = None
    replace_lost: StrictBool = True
    replace_lost_after_seconds: GraceSeconds = REPLACE_LOST_AFTER_SECONDS
    reason: Reason = ""


@router.get("/session-rules", response=answers(RulesOut, 404))
def get_cluster_rules(request: SignedInRequest, response: HttpResponse) -> RuleSet:
    """Get the session rules of the cluster."""
    return tagged(response, services.get_rules(request.principal, None))


@router.put("/session-rules", response=answers(RulesOut, 404, 409, 412, 428))
def set_cluster_rules(
    request: SignedInRequest, response: HttpResponse, payload: RulesIn, if_match: IfMatch
) -> RuleSet:
    """Set the session rules of the cluster."""
    return tagged(response, _set(request.principal, None, payload, if_match))


@router.get("/orgs/{slug}/session-rules", response=answers(RulesOut, 404))
def get_org_rules(request: SignedInRequest, response: HttpResponse, slug: Slug) -> RuleSet:
    """Get the session rules of an org."""
    return tagged(response, services.get_rules(request.principal, get_org(request.principal, slug)))


@router.put("/orgs/{slug}/session-rules", response=answers(RulesOut, 404, 409, 412, 428))
def set_org_rules(
    request: SignedInRequest, response: HttpResponse, slug: Slug, payload: RulesIn, if_match: IfMatch
) -> RuleSet:
    """Set the session rules of an org."""
    return tagged(response, _set(request.principal, get_org(request.principal, slug), payload, if_match))


@transaction.atomic
def _set(principal: Principal, org: Org | None, payload: RulesIn, if_match: str) -> RuleSet:
    rules = matched(services.for_change(principal, org), if_match)
    values = payload.model_dump()
    reason = values.pop("reason")
    for name in ("moves_percent", "borrow", "redundancy"):
        if values[name] is None:  # of a client that does not know it
            del values[name]
    return services.set_rules(principal, rules, values, reason=reason)
