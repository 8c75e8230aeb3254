"""What rules judge by: the limits they begin with, what is set for all, and what is set for an org."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import Http404

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.catalogue import BY_SLUG, RULES
from console.alerts.models import Thresholds
from console.alerts.rules import Rule, Values
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, record, undoable
from console.orgs.models import SLUG, Org
from console.orgs.services import for_change, get_org
from telemetry.topics import ALERTS, of_org


@dataclass(frozen=True, slots=True)
class LimitsOfRule:
    """By topic: what holds for it, and whether it is judged at all."""

    rule: Rule
    for_all: Thresholds | None
    for_orgs: Mapping[str, Thresholds]  # by topic

    def __call__(self, topic: str) -> Values:
        values = dict(self.rule.defaults)
        for one in (self.for_all, self.for_orgs.get(topic)):
            if one:
                # What was set before a limit was taken out means nothing any more.
                values |= {name: value for name, value in one.values.items() if name in values}
        return values

    def enabled(self, topic: str) -> bool:
        """What is off for all is off."""
        told = (self.for_all, self.for_orgs.get(topic))
        return all(one.enabled for one in told if one)


def limits_of(rule: Rule) -> LimitsOfRule:
    rows = list(Thresholds.objects.filter(rule=rule.slug).select_related("org"))
    return LimitsOfRule(
        rule,
        next((one for one in rows if one.org is None), None),
        {of_org(one.org.slug): one for one in rows if one.org},
    )


def get_rule(slug: str) -> Rule:
    """What rules there are, everybody may know."""
    rule = BY_SLUG.get(slug)
    if rule is None:
        raise Http404("There is no such rule.")
    return rule


def org_of(principal: Principal, rule: Rule, slug: str, at_least: Role = Role.VIEWER) -> Org | None:
    """The org whose thresholds are meant, or None for those of all. Raises as `get_org` does."""
    if not slug:
        return None
    if not re.fullmatch(SLUG, slug):
        raise Http404("There is no such org.")
    org = get_org(principal, slug, at_least)
    if not rule.per_org:
        raise Http404(
            f"{rule.slug} is about a {rule.scope}: it has thresholds for all, and none of an org."
        )
    return org


def get(rule: Rule, org: Org | None) -> Thresholds:
    """What is set; an empty one, which is not stored, where nothing is."""
    found = Thresholds.objects.filter(rule=rule.slug, org=org).first()
    return found or Thresholds(rule=rule.slug, org=org, version=0)


def for_all() -> dict[str, Thresholds]:
    """What is set for all, of each rule."""
    stored = {one.rule: one for one in Thresholds.objects.filter(org=None)}
    return {rule.slug: stored.get(rule.slug) or Thresholds(rule=rule.slug, version=0) for rule in RULES}


def thresholds_for_change(principal: Principal, rule: Rule, slug: str) -> Thresholds:
    """Locked until the end of the transaction: an org's for its admins, those of all for platform
    admins."""
    principal.check_may_change()
    if slug:
        org = org_of(principal, rule, slug, Role.ORG_ADMIN)
        if org:
            for_change(principal, slug)
    else:
        principal.check_platform(Role.PLATFORM_ADMIN)
        org = None
    Thresholds.objects.bulk_create(
        [Thresholds(rule=rule.slug, org=org, version=0)], ignore_conflicts=True
    )
    return Thresholds.objects.select_for_update(of=("self",)).get(rule=rule.slug, org=org)


@transaction.atomic
def set_thresholds(
    principal: Principal,
    current: Thresholds,
    *,
    values: Mapping[str, float],
    enabled: bool,
    reason: str = "",
    undoes: AuditEntry | None = None,
) -> Thresholds:
    """Replace what came from `thresholds_for_change`. What is not named is as the rule has it, or as it
    is for all. The same again changes nothing. Raises ValidationError."""
    rule = get_rule(current.rule)
    before = current.snapshot()
    current.values, current.enabled = _checked(rule, values), enabled
    if current.snapshot() != before:
        current.version += 1
        current.save()
        _record(principal, current, before, reason, undoes)
    return current


def _checked(rule: Rule, values: Mapping[str, float]) -> dict[str, float]:
    known, faults, checked = {limit.name: limit for limit in rule.limits}, {}, {}
    for name, value in values.items():
        limit = known.get(name)
        if limit is None:
            faults[name] = f"{rule.slug} has no limit {name}; it has {', '.join(known)}."
        elif not math.isfinite(value) or not limit.low <= value <= limit.high:
            faults[name] = f"It has to be from {limit.low:g} to {limit.high:g}."
        else:
            checked[name] = float(value)
    if faults:
        raise ValidationError(faults)
    return checked


def _record(
    principal: Principal,
    current: Thresholds,
    before: dict[str, Any],
    reason: str,
    undoes: AuditEntry | None,
) -> None:
    org = current.org
    record(
        principal,
        "alerts.thresholds",
        object_type="thresholds",
        object_id=f"{current.rule}/{org.slug}" if org else current.rule,
        object_name=str(current),
        org_id=org.pk if org else None,
        before=before,
        after=current.snapshot(),
        reason=reason,
        undoes=undoes,
        topics=[ALERTS, *([of_org(org.slug)] if org else [])],
    )


@undoable("alerts.thresholds")
def _undo(principal: Principal, entry: AuditEntry, reason: str) -> None:
    slug, _, org = entry.object_id.partition("/")
    if slug not in BY_SLUG:
        raise CannotUndo("There is no such rule any more.")
    try:
        current = thresholds_for_change(principal, BY_SLUG[slug], org)
    except Http404:
        raise CannotUndo("The org is no more.") from None
    if current.snapshot() != entry.after:
        raise CannotUndo("The thresholds were changed again since. Undo the later change first.")
    before = entry.before or {}
    set_thresholds(
        principal,
        current,
        values=before["values"],
        enabled=before["enabled"],
        reason=reason,
        undoes=entry,
    )


def may_change(principal: Principal, org: Org | None) -> bool:
    if org is None:
        return principal.on_platform(Role.PLATFORM_ADMIN)
    role = principal.role_in(org.pk)
    return role is not None and role >= Role.ORG_ADMIN


@dataclass(frozen=True, slots=True)
class Told:
    """A limit as it holds, and where that comes from."""

    name: str
    value: float
    source: str  # the rule itself, all or org
    text: str


def told(rule: Rule, current: Thresholds, for_all: Thresholds) -> list[Told]:
    """The limits of `current`, which is that for all itself or of an org."""
    for_org = current.values if current.org else {}
    made = []
    for limit in rule.limits:
        if limit.name in for_org:
            made.append(Told(limit.name, for_org[limit.name], "org", limit.text))
        elif limit.name in for_all.values:
            made.append(Told(limit.name, for_all.values[limit.name], "all", limit.text))
        else:
            made.append(Told(limit.name, limit.default, "rule", limit.text))
    return made


def inherited(rule: Rule, org: Org | None) -> Values:
    """What holds where nothing of its own is set."""
    return {**rule.defaults, **(get(rule, None).values if org else {})}
