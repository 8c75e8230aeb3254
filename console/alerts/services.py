"""Alerts as users see and change them: access, acknowledgement, assignment, comments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import transaction
from django.db.models import Case, IntegerField, Q, QuerySet, Value, When
from django.utils import timezone

from console.accounts.models import User
from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.models import Alert, Comment, Evaluation
from console.alerts.rules.catalogue import RULES
from console.alerts.rules.rule import TICK_SECONDS, Rule, Severity
from console.alerts.state.lifecycle import OPEN, State
from console.audit.services import Subject, record
from console.fleet.nodes import Impossible
from console.orgs.models import Org
from console.orgs.services import NoSuchUser
from console.search.services import Found, finder
from console.visibility import Sight, of_orgs, sees_fleet
from telemetry.events import events_of
from telemetry.models import Event
from telemetry.topics import ALERTS, FLEET, of_org

CHANGES_BEFORE: Final = timedelta(minutes=30)  # changes so long before an alert are shown with it
RELATED_MAX: Final = 20
WHY_NOT_A_RAIL: Final = "why_not_a_rail"  # in evidence: a sentence of `placement.sentences.why`
EVALUATOR_LATE: Final = timedelta(seconds=6 * TICK_SECONDS)
EVALUATOR_BEHIND: Final = timedelta(seconds=3 * TICK_SECONDS)  # no longer now, and not yet late
_ORDER: Final = (State.FIRING, State.NO_DATA, State.PENDING, State.RESOLVED, State.QUIET)


def visible_alerts(principal: Principal) -> QuerySet[Alert]:
    """The alerts they may see, without those that cleared before they fired."""
    return (
        Alert.objects.filter(of_orgs(principal))
        .exclude(state=State.QUIET)
        .select_related("org", "assignee", "suppressed_by")
    )


def sees_causes(principal: Principal) -> bool:
    """Causes are about the fleet: a leaf, a node, late telemetry."""
    return sees_fleet(principal)


def unsuppressed(principal: Principal) -> Q:
    """The alerts without a cause; all alerts for principals who may not see causes."""
    return Q(suppressed_by=None) if sees_causes(principal) else Q()


def evidence(principal: Principal, alert: Alert) -> dict[str, Any]:
    """The evidence of an alert, without the names of nodes they may not see."""
    found = dict(alert.evidence)
    if isinstance(why := found.get(WHY_NOT_A_RAIL), str):
        found[WHY_NOT_A_RAIL] = Sight(principal).why(why)
    return found


def get_alert(principal: Principal, alert_id: int, at_least: Role = Role.VIEWER) -> Alert:
    """The one access function. Raises Http404 without a role, Refused if the role is too low."""
    alert = Alert.objects.select_related("org", "assignee", "suppressed_by").filter(pk=alert_id).first()
    return principal.checked(alert, at_least, "alert")


@dataclass(frozen=True)
class Filters:
    """Filters of the page and the API."""

    state: str = "open"  # or one state, or "all"
    severity: str = ""
    rule: str = ""
    org: Org | None = None
    topic: str = ""
    q: str = ""
    suppressed: bool = False  # whether to include suppressed alerts

    def apply(self, principal: Principal) -> QuerySet[Alert]:
        alerts = visible_alerts(principal)
        if self.state == "open":
            alerts = alerts.filter(state__in=OPEN)
        elif self.state != "all":
            alerts = alerts.filter(state=self.state)
        if not self.suppressed:
            alerts = alerts.filter(unsuppressed(principal))
        for name in ("severity", "rule", "org", "topic"):
            if value := getattr(self, name):
                alerts = alerts.filter(**{name: value})
        if self.q:
            alerts = alerts.filter(
                Q(sentence__icontains=self.q) | Q(topic__icontains=self.q) | Q(rule__icontains=self.q)
            )
        return alerts


def gravest_first(alerts: QuerySet[Alert]) -> QuerySet[Alert]:
    """Ordered by state (firing first), severity, rule, then the newest first."""
    return alerts.order_by(
        place_in(_ORDER, "state"), place_in(list(Severity), "severity"), "rule", "-state_since", "-pk"
    )


def place_in(values: Sequence[str], field: str) -> Case:
    """To order by: the place of a field in these values, after all of them if it is none."""
    cases = [When(**{field: str(value)}, then=Value(place)) for place, value in enumerate(values)]
    return Case(*cases, default=Value(len(values)), output_field=IntegerField())


def live_topic(principal: Principal, alert: Alert | None = None) -> str:
    """The live topic for this alert, or for all alerts they may see. Empty for a member of several orgs,
    whose pages poll instead."""
    if principal.on_platform(Role.VIEWER):
        return ALERTS
    if alert:
        return alert.topic
    orgs = list(Org.objects.filter(pk__in=principal.orgs_where(Role.VIEWER))[:2])
    return of_org(orgs[0].slug) if len(orgs) == 1 else ""


# Changes


def for_change(principal: Principal, alert_id: int) -> Alert:
    """Locked until the end of the transaction. Needs the role on-call."""
    principal.check_may_change()
    get_alert(principal, alert_id, Role.ON_CALL)
    return Alert.objects.select_for_update(no_key=True, of=("self",)).get(pk=alert_id)


@transaction.atomic
def acknowledge(principal: Principal, alert_id: int, reason: str = "") -> Alert:
    """Acknowledge an alert until its episode ends. Its state does not change. One that is acknowledged
    stays as it is. Raises Impossible for one that is not open."""
    alert = for_change(principal, alert_id)
    if alert.acknowledged_at is None:
        if not alert.is_open:
            ended = "cleared" if alert.state == State.QUIET else "resolved"
            raise Impossible(f"Alert {alert.pk} has {ended}: there is nothing to acknowledge.")
        by = {"acknowledged_at": timezone.now(), "acknowledged_by": principal.name}
        _change(principal, "alert.acknowledge", alert, reason, **by)
    return alert


@transaction.atomic
def unacknowledge(principal: Principal, alert_id: int, reason: str = "") -> Alert:
    """Take an acknowledgement back."""
    alert = for_change(principal, alert_id)
    if alert.acknowledged_at is not None:
        by = {"acknowledged_at": None, "acknowledged_by": ""}
        _change(principal, "alert.unacknowledge", alert, reason, **by)
    return alert


@transaction.atomic
def assign(principal: Principal, alert_id: int, username: str, reason: str = "") -> Alert:
    """Assign an alert to a user who may see it, or to nobody if the name is empty. Raises NoSuchUser."""
    alert = for_change(principal, alert_id)
    user = _assignee(alert, username) if username else None
    if user != alert.assignee:
        _change(principal, "alert.assign", alert, reason, assignee=user)
    return alert


def _assignee(alert: Alert, username: str) -> User:
    may_see = Q(platform_role__isnull=False)
    if alert.org_id:
        may_see |= Q(memberships__org=alert.org_id)
    user = User.objects.filter(may_see, username=username, is_active=True).first()
    if user is None:
        raise NoSuchUser(f"No active user “{username}” may see this alert.")
    return user


@transaction.atomic
def comment(principal: Principal, alert_id: int, text: str) -> Comment:
    """Add a comment to the timeline of an alert."""
    alert = for_change(principal, alert_id)
    made = Comment.objects.create(alert=alert, author=principal.name, text=text)
    record(principal, "alert.comment", _about(alert), after={"text": text})
    return made


def _change(principal: Principal, action: str, alert: Alert, reason: str, **values: Any) -> None:
    before = _snapshot(alert)
    for name, value in values.items():
        setattr(alert, name, value)
    alert.save(update_fields=[*values])
    record(principal, action, _about(alert), before=before, after=_snapshot(alert), reason=reason)


def _about(alert: Alert) -> Subject:
    return Subject("alert", alert.pk, str(alert), alert.org_id, [ALERTS, alert.topic])


def _snapshot(alert: Alert) -> dict[str, Any]:
    return {
        "acknowledged_by": alert.acknowledged_by,
        "assignee": alert.assignee.username if alert.assignee else None,
    }


# Context


def changed_before(principal: Principal, alert: Alert) -> list[Event]:
    """Changes shortly before an alert began, the newest first, without other alerts: those of its topic,
    or of the fleet for principals who may see the fleet."""
    topic = FLEET if principal.on_platform(Role.VIEWER) else alert.topic
    found = events_of(topic, since=alert.begun_at - CHANGES_BEFORE, until=alert.begun_at)
    return list(found.exclude(kind__startswith="alert").order_by("-at", "-pk")[:RELATED_MAX])


@dataclass(frozen=True)
class Evaluator:
    """Whether rules are evaluated. No alert can report a dead evaluator."""

    at: datetime | None  # the moment up to which all rules were; None if one never was
    late: bool
    problems: dict[str, str]  # by rule

    @classmethod
    def now(cls) -> Evaluator:
        found = {one.rule: one for one in Evaluation.objects.all()}
        known = [(rule, found[rule.slug]) for rule in RULES if rule.slug in found]
        is_new = len(known) < len(RULES)
        at = None if is_new else min(one.at + _slack(rule) for rule, one in known)
        problems = {rule.slug: one.problem for rule, one in known if one.problem}
        return cls(at, at is None or abs(timezone.now() - at) > EVALUATOR_LATE, problems)


def _slack(rule: Rule) -> timedelta:
    """How long a rule may have been evaluated before those of each tick."""
    return timedelta(seconds=rule.every_seconds - TICK_SECONDS)


@finder("alerts")
def find_alerts(principal: Principal, text: str, most: int) -> list[Found]:
    """Open alerts first; by summary, topic, rule or number."""
    found = Filters(state="all", q=text, suppressed=True).apply(principal)
    if text.isdecimal() and len(text) < 19:
        found |= visible_alerts(principal).filter(pk=int(text))
    return [
        Found(
            f"{one.title}: {one.subject}",
            f"{one.state.replace('_', ' ')}, {one.sentence}",
            "alert",
            one.pk,
        )
        for one in gravest_first(found)[:most]
    ]
