"""What holds for all orgs, and one change for many, over REST."""

from __future__ import annotations

from typing import Annotated, Any

from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from ninja import Field, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.etags import check_match, etag
from console.api.fields import IfMatch, Input
from console.api.idempotency import Answer, ValidateOnly, with_dry_run
from console.api.routes import Router, answers
from console.api.shown import SlugOf, read
from console.orgs.models import SLUG
from console.policies import bulk, documents, sentences, services
from console.policies.documents import ClusterPolicies
from console.policies.rest.fields import LimitsField, PolicyField
from console.policies.rest.policies import PlanToken, Why
from console.policies.services import Cluster

router = Router(tags=["policies"])

SlugIn = Annotated[str, Field(pattern=SLUG, max_length=48)]


class ClusterOut(Schema):
    version: int = Field(validation_alias="number")
    default: PolicyField = Field(validation_alias="policies.default")
    limits: LimitsField = Field(validation_alias="policies.limits")
    in_words: str

    @staticmethod
    def resolve_in_words(held: Cluster) -> str:
        return sentences.sentence(held.policies.default)


class ClusterPut(Input):
    default: PolicyField
    limits: LimitsField
    reason: Why


class BulkIn(Input):
    orgs: list[SlugIn] = Field(min_length=1, max_length=bulk.ORGS_MAX)
    changes: dict[str, Any] = Field(description="The policy fields to change; others keep their value.")
    reason: Why
    plan_token: PlanToken | None = Field(
        None, description="From a dry run: 412 if anything has changed since."
    )


class BulkOrgOut(Schema):
    org: SlugOf
    version: int = Field(validation_alias="active.number")
    changes: list[tuple[str, str, str]] = Field(
        validation_alias="differences", description="Field, old value, new value."
    )
    refused: list[str]


class BulkOut(Schema):
    plan_token: str
    orgs: list[BulkOrgOut]


@router.get("/policies/cluster", response=answers(ClusterOut))
def get_cluster(request: HttpRequest, response: HttpResponse) -> Cluster:
    """Get the default policy and the limits."""
    del request  # everybody may
    held = services.cluster()
    response["ETag"] = etag(held.number)
    return held


@router.put("/policies/cluster", response=answers(ClusterOut, 409, 412, 428))
@with_dry_run
def put_cluster(request: SignedInRequest, payload: ClusterPut, if_match: IfMatch) -> Answer:
    """Set the default policy and the limits."""
    request.principal.check_may_change(Role.PLATFORM_ADMIN)
    number = services.locked_cluster().number
    check_match(if_match, number)
    wanted = ClusterPolicies(default=payload.default, limits=payload.limits)
    held = services.set_cluster(request.principal, wanted, reason=payload.reason, if_number=number)
    needs = [Authority(None, Role.PLATFORM_ADMIN)]
    return Answer(200, needs, read(ClusterOut, held, request), {"ETag": etag(held.number)})


@router.post("/policies/bulk", response=answers(BulkOut, 404, 409, 412))
@with_dry_run
def change_many(
    request: SignedInRequest, payload: BulkIn, validate_only: ValidateOnly = False
) -> Answer:
    """Change the policies of several orgs, all or none."""
    request.principal.check_may_change()
    try:
        if validate_only:
            planned = bulk.plan(request.principal, payload.orgs, payload.changes)
        else:
            planned = bulk.save(
                request.principal,
                payload.orgs,
                payload.changes,
                reason=payload.reason,
                token=payload.plan_token,
            )
    except documents.Malformed as error:
        raise ValidationError({f"changes/{error.at}".rstrip("/"): [str(error)]}) from None
    needs = [Authority(one.org.pk, Role.ORG_ADMIN) for one in planned]
    shown = {"plan_token": bulk.token_of(planned), "orgs": planned}
    return Answer(200, needs, read(BulkOut, shown, request))
