"""REST API of rules and their thresholds."""

from __future__ import annotations

from typing import Annotated, Literal

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Field, Query, Schema
from pydantic import StrictBool

from console.accounts.browser import SignedInRequest
from console.alerts.models import Thresholds
from console.alerts.rules import thresholds
from console.alerts.rules.catalogue import RULES
from console.alerts.rules.rule import Rule
from console.alerts.web.api import SeverityName
from console.api.etags import etag, matched
from console.api.fields import IfMatch, Input, Reason
from console.api.routes import Router, answers
from console.orgs.models import SLUG

router = Router(tags=["alerts"])

ThresholdName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")]
RuleSlug = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")]
OrgQuery = Annotated[
    str, Query(pattern=rf"^$|{SLUG}", max_length=48, description="An org; without it, all orgs.")
]


class ThresholdOut(Schema):
    name: str
    value: float
    source: Literal["rule", "all", "org"] = Field(description="Where the value is set.")
    text: str


class RuleOut(Schema):
    slug: str
    title: str
    severity: SeverityName
    scope: str = Field(description="Kind of object: the first part of the topic.")
    per_org: bool = Field(description="Whether orgs may have their own thresholds.")
    description: str
    suggested_fix: str
    runbook: str
    metrics: list[str]
    enabled: bool
    thresholds: list[ThresholdOut]
    version: int = Field(description="Of the thresholds; also the ETag.")


class ThresholdsIn(Input):
    values: dict[ThresholdName, Annotated[float, Field(strict=True)]] = Field(
        max_length=20, description="By name. A threshold that is left out inherits its value."
    )
    enabled: StrictBool = True
    reason: Reason = Field("", description="Stored in the audit trail.")


def _shown(rule: Rule, current: Thresholds, for_all: Thresholds) -> dict[str, object]:
    return {
        "slug": rule.slug,
        "title": rule.title,
        "severity": rule.severity.value,
        "scope": rule.scope,
        "per_org": rule.per_org,
        "description": rule.description,
        "suggested_fix": rule.suggested_fix,
        "metrics": rule.metrics,
        "runbook": f"docs/runbooks/{rule.runbook}",
        "enabled": current.enabled,
        "thresholds": thresholds.effective(rule, current, for_all),
        "version": current.version,
    }


@router.get("/alert-rules", response=answers(list[RuleOut]))
def list_rules(request: HttpRequest) -> list[dict[str, object]]:
    """List rules."""
    del request  # everybody may
    current = thresholds.for_all()
    return [_shown(rule, current[rule.slug], current[rule.slug]) for rule in RULES]


@router.get("/alert-rules/{rule_slug}", response=answers(RuleOut, 404))
def get_rule(
    request: SignedInRequest, response: HttpResponse, rule_slug: RuleSlug, org: OrgQuery = ""
) -> dict[str, object]:
    """Get a rule."""
    rule = thresholds.get_rule(rule_slug)
    current = thresholds.get(rule, thresholds.org_of(request.principal, rule, org))
    response["ETag"] = etag(current.version)
    return _shown(rule, current, thresholds.get(rule, None))


@router.put("/alert-rules/{rule_slug}/thresholds", response=answers(RuleOut, 404, 412, 428))
def set_thresholds(
    request: SignedInRequest,
    response: HttpResponse,
    rule_slug: RuleSlug,
    payload: ThresholdsIn,
    if_match: IfMatch,
    org: OrgQuery = "",
) -> dict[str, object]:
    """Set the thresholds of a rule, for all or for an org."""
    principal, rule = request.principal, thresholds.get_rule(rule_slug)
    with transaction.atomic():
        current = matched(thresholds.thresholds_for_change(principal, rule, org), if_match)
        current = thresholds.set_thresholds(
            principal, current, values=payload.values, enabled=payload.enabled, reason=payload.reason
        )
    response["ETag"] = etag(current.version)
    return _shown(rule, current, thresholds.get(rule, None))
