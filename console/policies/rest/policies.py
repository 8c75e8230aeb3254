"""Policies over REST: of an org, its versions and callers, and of the cluster."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from django.http import HttpResponse
from msgspec import to_builtins
from msgspec.structs import asdict
from ninja import Field, Path, Schema
from pydantic import BeforeValidator

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.etags import check_match, etag
from console.api.fields import NO_NUL, IfMatch, Input
from console.api.idempotency import Answer, ValidateOnly, with_dry_run
from console.api.pagination import Rows, listing
from console.api.problems import ApiError, FieldError
from console.api.routes import Router, answers
from console.api.shown import read
from console.control.services import Reach
from console.orgs.api import Slug
from console.orgs.services import for_change, get_org
from console.policies import documents, sentences, services
from console.policies.models import PolicyVersion, ScheduledPolicy
from console.policies.preview import estimates, tokens
from console.policies.preview.routed import routed_hits
from console.policies.rest.fields import PolicyField
from console.policies.rollout import reach
from console.policies.services import ActivePolicy
from console.visibility import Sight
from swdriver_shim.cache.reuse.preview import sweet_spot
from swdriver_shim.policy import OrgPolicies, Policy

router = Router(tags=["policies"])

Number = Annotated[int, Path(ge=0, le=2**31 - 1, description="Version number.")]
Model = Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NUL)]
Why = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")]
PlanToken = Annotated[str, Field(max_length=400, pattern=r"^[\x21-\x7e]*$")]


class PoliciesIn(Input):
    policy: PolicyField | None = Field(
        description="Null: use the cluster's default. Omitted fields have the software's default."
    )
    models: dict[Model, PolicyField] = Field(
        {}, max_length=documents.MODELS_MAX, description="Per-model policies, each complete in itself."
    )

    def wanted(self) -> OrgPolicies | None:
        if self.policy is None:
            if self.models:
                raise _invalid("/body/models", "Who follows the default has no policies of models.")
            return None
        return OrgPolicies(policy=self.policy, models=dict(self.models))


class PolicyPut(PoliciesIn):
    reason: Why = Field(description="Shown in the history.")
    plan_token: PlanToken | None = Field(
        None, description="From a preview: 412 if anything has changed since."
    )


class PreviewIn(PoliciesIn):
    model: Annotated[str, Field(max_length=200, pattern=NO_NUL)] = Field(
        "", description="Only this model; by default all models without a policy of their own."
    )


class RestoreIn(Input):
    reason: Why


class LaggingOut(Schema):
    driver: str = Field(
        validation_alias="name",
        description="Empty, as is `why`, for drivers of other orgs' sessions.",
    )
    why: str = Field(validation_alias="why_not")
    as_of: datetime | None


class ReachOut(Schema):
    """How far it has come. `seconds` is what it took until the last driver had it; null until then."""

    drivers: Annotated[int, BeforeValidator(len)] = Field(validation_alias="standings")
    has_it: int
    seconds: float | None
    lagging: list[LaggingOut]


class PolicyOut(Schema):
    org: str
    version: int = Field(description="Incremented with each change; the ETag. 0: never said anything.")
    follows_default: bool
    policy: PolicyField = Field(description="The policy as saved.")
    models: dict[str, PolicyField]
    effective: PolicyField = Field(description="The policy within the limits, as drivers apply it.")
    effective_models: dict[str, PolicyField]
    in_words: str
    reason: str
    author: str
    made_at: datetime | None
    applied: ReachOut
    plan_token: str | None = Field(None, description="With validate_only: applies exactly this plan.")


class ReadsDocument(Schema):
    """For what shows the policies of an org from the document that they are stored as."""

    @staticmethod
    def resolve_policy(stored: PolicyVersion | ScheduledPolicy) -> Policy | None:
        said = documents.read_org(stored.document)
        return said.policy if said else None

    @staticmethod
    def resolve_models(stored: PolicyVersion | ScheduledPolicy) -> dict[str, Policy]:
        said = documents.read_org(stored.document)
        return said.models if said else {}

    @staticmethod
    def resolve_in_words(stored: PolicyVersion | ScheduledPolicy) -> str:
        said = documents.read_org(stored.document)
        return sentences.sentence(said.policy) if said else "It follows the cluster's default."


class VersionOut(ReadsDocument):
    number: int
    policy: PolicyField | None
    models: dict[str, PolicyField]
    in_words: str
    author: str = Field(validation_alias="author_name")
    reason: str
    made_at: datetime
    same_as: int | None = Field(description="The version that it restored.")


class EffectOut(Schema):
    hit_rate: float | None = Field(description="Null without traffic.")
    tier2_hit_rate: float
    bytes: int = Field(description="Peak memory.")
    error: float = Field(description="Sampling error of the hit rate: two standard errors.")


class PointOut(Schema):
    at: int
    hit_rate: float


class RoutedHitsOut(Schema):
    """Prompt tokens that brains expected in caches, and the part of them that would be absent: as much
    as the replay of drivers' traffic loses of its hits. Where brains would send requests instead is not
    predicted."""

    seconds: int = Field(description="The time before now that `expected_tokens` are of.")
    expected_tokens: int
    absent_tokens: int = Field(description="Negative if more would be there.")
    error_tokens: int = Field(description="Two standard errors of sampling.")


class SweetSpotsOut(Schema):
    dram_bytes: int | None = Field(description="Null where the curve has none.")
    tier2_bytes: int | None


class StandingOut(Schema):
    policy: str
    hit_rate: float = Field(description="On a sample of the traffic; recent uses count more.")


class DisplacementOut(Schema):
    driver: str | None = Field(description="Null if it is of no session of yours.")
    model: str
    in_use: str
    seconds: float | None = Field(
        description="For so long it has been used; null if no other one has been used before it."
    )
    standings: list[StandingOut] = Field(
        description="Of those that compete; empty if nothing has had to make room yet."
    )


class PreviewOut(Schema):
    plan_token: str
    now: EffectOut
    proposed: EffectOut
    measured_hit_rate: float | None
    freed_bytes: int = Field(description="Freed memory; negative if more is needed.")
    expiring_columns: int
    expiring_bytes: int
    by_ttl: list[PointOut]
    by_bytes: list[PointOut]
    by_tier2_bytes: list[PointOut] = Field(description="Empty unless the policy uses tier 2.")
    sweet_spot: SweetSpotsOut = Field(
        description="Sizes where the curves bend most: a byte beyond pays less than average."
    )
    routed_hits: RoutedHitsOut | None = Field(description="Null without hits, or without brains.")
    drivers_asked: int
    drivers: int
    drivers_silent: int
    displacement: list[DisplacementOut] = Field(
        description="What the traffic has chosen, on each driver asked where policies compete, for the "
        "group and priority with most columns: each of them has a competition of its own."
    )
    as_of: datetime
    traffic: bool = Field(description="False: no traffic yet, so these figures mean nothing.")
    reaches_back_seconds: float | None
    idle_seconds: float | None
    warnings: list[str]


def show(held: ActivePolicy, reached: Reach, plan_token: str | None = None) -> dict[str, object]:
    version = held.version
    return {
        "org": held.org.slug,
        "version": held.number,
        "follows_default": held.own is None,
        "policy": held.said.policy,
        "models": held.said.models,
        "effective": held.policy,
        "effective_models": held.policies.models,
        "in_words": sentences.sentence(held.policy),
        "reason": version.reason if version else "",
        "author": version.author_name if version else "",
        "made_at": version.made_at if version else None,
        "applied": reached,
        "plan_token": plan_token,
    }


@router.get("/orgs/{slug}/policy", response=answers(PolicyOut, 404))
def get_policy(request: SignedInRequest, response: HttpResponse, slug: Slug) -> dict[str, object]:
    """Get the active policy and its rollout."""
    held = services.active_policy(get_org(request.principal, slug))
    response["ETag"] = etag(held.number)
    return show(held, reach(request.principal, held))


@router.put("/orgs/{slug}/policy", response=answers(PolicyOut, 404, 409, 412, 428))
@with_dry_run
def put_policy(
    request: SignedInRequest,
    slug: Slug,
    payload: PolicyPut,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    """Set the policy of an org.

    Drivers are told after the commit; `applied` says who has it.
    """
    org = for_change(request.principal, slug)
    before = services.active_policy(org)
    check_match(if_match, before.number)
    wanted = payload.wanted()
    document = documents.write(wanted)
    if payload.plan_token is not None:
        tokens.check(payload.plan_token, before, document)
    held = services.set_policy(request.principal, org, wanted, reason=payload.reason)
    token = tokens.token_of(before, document) if validate_only else None
    needs = [Authority(org.pk, Role.ORG_ADMIN)]
    shown = read(PolicyOut, show(held, reach(request.principal, held), token), request)
    return Answer(200, needs, shown, {"ETag": etag(held.number)})


@router.post("/orgs/{slug}/policy:preview", response=answers(PreviewOut, 404))
def preview_policy(request: SignedInRequest, slug: Slug, payload: PreviewIn) -> dict[str, object]:
    """Preview a policy on the org's own traffic.

    Changes nothing. `plan_token` applies just this, if nothing has changed until then.
    """
    held = services.active_policy(get_org(request.principal, slug))
    wanted = payload.wanted()
    services.check(wanted, held.cluster.policies.limits)
    proposed = wanted or OrgPolicies(policy=held.cluster.policies.default)
    told = estimates.foretell(held.org, held.policies, proposed, payload.model)
    confidence, known = told.preview.confidence, told.known
    return {
        **asdict(told.preview),
        "sweet_spot": {
            "dram_bytes": (dram := sweet_spot(told.preview.by_bytes)) and dram.at,
            "tier2_bytes": (tier2 := sweet_spot(told.preview.by_tier2_bytes)) and tier2.at,
        },
        "routed_hits": routed_hits(held.org, told, held.policies, proposed, payload.model),
        "plan_token": tokens.token_of(held, documents.write(wanted)),
        "drivers_asked": known.asked,
        "drivers": known.drivers,
        "drivers_silent": known.silent,
        "displacement": [
            {"driver": one.driver or None, "model": one.model, **to_builtins(one.choice)}
            for one in known.contests_for(Sight(request.principal))
        ],
        "as_of": known.at,
        "traffic": confidence is not None,
        "reaches_back_seconds": confidence.reaches_back_seconds if confidence else None,
        "idle_seconds": confidence.idle_seconds if confidence else None,
        "warnings": confidence.warnings if confidence else (),
    }


# Versions


@listing(router, "/orgs/{slug}/policy/versions", VersionOut, 404, by="-number")
def list_versions(request: SignedInRequest, slug: Slug) -> Rows:
    """List policy versions, newest first."""
    org = get_org(request.principal, slug)
    return services.versions_of(org)


@router.get("/orgs/{slug}/policy/versions/{number}", response=answers(VersionOut, 404))
def get_version(request: SignedInRequest, slug: Slug, number: Number) -> PolicyVersion:
    """Get a version."""
    return services.get_version(get_org(request.principal, slug), number)


@router.post(
    "/orgs/{slug}/policy/versions/{number}/restore", response=answers(PolicyOut, 404, 409, 412, 428)
)
@with_dry_run
def restore_version(
    request: SignedInRequest,
    slug: Slug,
    number: Number,
    payload: RestoreIn,
    if_match: IfMatch,
) -> Answer:
    """Restore an earlier version.

    0 is what there was before the first: the cluster's default.
    """
    org = for_change(request.principal, slug)
    check_match(if_match, services.active_policy(org).number)
    held = services.restore(request.principal, org, number, reason=payload.reason)
    needs = [Authority(org.pk, Role.ORG_ADMIN)]
    shown = read(PolicyOut, show(held, reach(request.principal, held)), request)
    return Answer(200, needs, shown, {"ETag": etag(held.number)})


# Inside


def _invalid(pointer: str, detail: str) -> ApiError:
    errors = [FieldError(pointer=pointer, detail=detail)]
    return ApiError("InvalidRequest", detail, errors=errors)
