"""The thresholds of rules: their defaults, platform-wide values, and values of an org."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import Http404

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.conditions.condition import Values
from console.alerts.models import Thresholds
from console.alerts.rules.catalogue import BY_SLUG, RULES
from console.alerts.rules.rule import Rule
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Subject, record, undoable
from console.orgs.models import SLUG, Org
from console.orgs.services import for_change, get_org
from telemetry.topics import ALERTS, of_org


@dataclass(frozen=True, slots=True)
class RuleThresholds:
    """The thresholds of a rule for each topic, and whether the rule is enabled there."""

    rule: Rule
    for_all: Thresholds | None
    for_orgs: Mapping[str, Thresholds]  # by topic

    def __call__(self, topic: str) -> Values:
        values = dict(self.rule.defaults)
        for one in (self.for_all, self.for_orgs.get(topic)):
            if one:
                # A stored value may belong to a threshold that the rule no longer has.
                values |= {name: value for name, value in one.values.items() if name in values}
        return values

    def enabled(self, topic: str) -> bool:
        """A rule that is disabled for all is disabled for every org."""
        return all(one.enabled for one in (self.for_all, self.for_orgs.get(topic)) if one)


def thresholds_of(rules: Iterable[Rule]) -> dict[str, RuleThresholds]:
    """By rule."""
    by_slug = {rule.slug: rule for rule in rules}
    rows: dict[str, list[Thresholds]] = {slug: [] for slug in by_slug}
    for one in Thresholds.objects.filter(rule__in=by_slug).select_related("org"):
        rows[one.rule].append(one)
    return {
        slug: RuleThresholds(
            by_slug[slug],
            next((one for one in its if one.org is None), None),
            {of_org(one.org.slug): one for one in its if one.org},
        )
        for slug, its in rows.items()
    }


def get_rule(slug: str) -> Rule:
    """Rules are visible to everybody."""
    rule = BY_SLUG.get(slug)
    if rule is None:
        raise Http404("There is no such rule.")
    return rule


def org_of(principal: Principal, rule: Rule, slug: str, at_least: Role = Role.VIEWER) -> Org | None:
    """The org whose thresholds are meant, or None for those of all orgs. Raises as `get_org` does."""
    if not slug:
        return None
    if not re.fullmatch(SLUG, slug):
        raise Http404("There is no such org.")
    org = get_org(principal, slug, at_least)
    if not rule.per_org:
        raise Http404(f"{rule.slug} has scope {rule.scope}: it has no thresholds per org.")
    return org


def get(rule: Rule, org: Org | None) -> Thresholds:
    """What is set, or an empty row that is not stored."""
    found = Thresholds.objects.filter(rule=rule.slug, org=org).first()
    return found or Thresholds(rule=rule.slug, org=org, version=0)


def for_all() -> dict[str, Thresholds]:
    """The platform-wide values of each rule."""
    stored = {one.rule: one for one in Thresholds.objects.filter(org=None)}
    return {rule.slug: stored.get(rule.slug) or Thresholds(rule=rule.slug, version=0) for rule in RULES}


def thresholds_for_change(principal: Principal, rule: Rule, slug: str) -> Thresholds:
    """Locked until the end of the transaction. Org admins may change their org's values, platform admins
    those for all."""
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
    return Thresholds.objects.select_for_update(no_key=True, of=("self",)).get(rule=rule.slug, org=org)


@transaction.atomic
def set_thresholds(
    principal: Principal,
    current: Thresholds,
    *,
    values: Mapping[str, float],
    enabled: bool,
    reason: str = "",
) -> Thresholds:
    """Replace the values in a row from `thresholds_for_change`. A threshold that is not named inherits
    its value. Setting the same values changes nothing. Raises ValidationError."""
    rule = get_rule(current.rule)
    before = current.snapshot()
    current.values, current.enabled = _checked(rule, values), enabled
    if current.snapshot() != before:
        current.version += 1
        current.save()
        after = current.snapshot()
        record(
            principal, "alerts.thresholds", _about(current), before=before, after=after, reason=reason
        )
    return current


def _checked(rule: Rule, values: Mapping[str, float]) -> dict[str, float]:
    known, faults, checked = {one.name: one for one in rule.thresholds}, {}, {}
    for name, value in values.items():
        threshold = known.get(name)
        if threshold is None:
            faults[name] = f"{rule.slug} has no threshold {name}; it has {', '.join(known)}."
        elif not math.isfinite(value) or not threshold.low <= value <= threshold.high:
            faults[name] = f"Must be from {threshold.low:g} to {threshold.high:g}."
        else:
            checked[name] = float(value)
    if faults:
        raise ValidationError(faults)
    return checked


def _about(current: Thresholds) -> Subject:
    org = current.org
    key = f"{current.rule}/{org.slug}" if org else current.rule
    return Subject.of("thresholds", key, str(current), org, ALERTS)


@undoable("alerts.thresholds")
def _undo(principal: Principal, entry: AuditEntry, reason: str) -> None:
    slug, _, org = entry.object_id.partition("/")
    if slug not in BY_SLUG:
        raise CannotUndo("This rule no longer exists.")
    try:
        current = thresholds_for_change(principal, BY_SLUG[slug], org)
    except Http404:
        raise CannotUndo("The org no longer exists.") from None
    if current.snapshot() != entry.after:
        raise CannotUndo("The thresholds were changed again later. Undo the later change first.")
    before = entry.before or {}
    set_thresholds(principal, current, values=before["values"], enabled=before["enabled"], reason=reason)


def may_change(principal: Principal, org: Org | None) -> bool:
    return principal.holds(Role.ORG_ADMIN, org.pk) if org else principal.on_platform(Role.PLATFORM_ADMIN)


@dataclass(frozen=True, slots=True)
class EffectiveThreshold:
    name: str
    unit: str
    value: float
    source: str  # where the value is set: rule, all or org
    text: str


def effective(rule: Rule, current: Thresholds, for_all: Thresholds) -> list[EffectiveThreshold]:
    """The thresholds that apply to `current`, which is either `for_all` or that of an org."""
    for_org = current.values if current.org else {}
    found = []
    for one in rule.thresholds:
        if one.name in for_org:
            value, source = for_org[one.name], "org"
        elif one.name in for_all.values:
            value, source = for_all.values[one.name], "all"
        else:
            value, source = one.default, "rule"
        found.append(EffectiveThreshold(one.name, one.unit, value, source, one.text))
    return found


def inherited(rule: Rule, org: Org | None) -> Values:
    """The values that apply where nothing is set."""
    return {**rule.defaults, **(get(rule, None).values if org else {})}
