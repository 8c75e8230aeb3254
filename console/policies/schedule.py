"""Policies that take over at a moment, and give way again after a while."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404
from django.utils import timezone

from console.accounts.principal import SYSTEM, Principal
from console.audit.services import Subject, record
from console.orgs.models import Org
from console.policies import documents, services
from console.policies.models import REASON_MAX, ScheduledPolicy
from swdriver_shim.policy import OrgPolicies

AHEAD_MAX: Final = timedelta(days=366)
OPEN_MAX: Final = 20  # of an org
State = ScheduledPolicy.State


def open_of(org: Org) -> QuerySet[ScheduledPolicy]:
    """What is going to happen, the next first."""
    return ScheduledPolicy.objects.filter(org=org, state__in=[State.WAITING, State.IN_FORCE])


@transaction.atomic
def schedule(
    principal: Principal,
    org: Org,
    policies: OrgPolicies | None,
    *,
    starts_at: datetime,
    lasts: timedelta | None = None,
    reason: str,
) -> ScheduledPolicy:
    """Have a policy take over later, for an org that came from `orgs.services.for_change`.

    Raises ValidationError, by field. What is saved until then is replaced, too; `lasts` restores it.
    """
    now = timezone.now()
    services.check(policies, services.cluster().policies.limits)
    services.check_reason(reason)
    if not now < starts_at <= now + AHEAD_MAX:
        raise ValidationError({"starts_at": ["A moment within the next year. To begin now, save it."]})
    if lasts is not None and not timedelta() < lasts <= AHEAD_MAX:
        raise ValidationError({"lasts": ["At most a year."]})
    if open_of(org).count() >= OPEN_MAX:
        raise ValidationError(f"{OPEN_MAX} policies are scheduled already. Cancel one first.")
    planned = ScheduledPolicy.objects.create(
        org=org,
        document=documents.write(policies),
        starts_at=starts_at,
        ends_at=starts_at + lasts if lasts else None,
        reason=reason,
        author_id=principal.user_id,
        author_name=principal.name,
    )
    _record(principal, planned, "policy.schedule", reason, after=_told(planned))
    return planned


@transaction.atomic
def take_back(principal: Principal, org: Org, number: int, *, reason: str = "") -> ScheduledPolicy:
    """Have it not happen. One that is in force ends now. `org` came from `for_change`."""
    planned = open_of(org).filter(pk=number).first()
    if planned is None:
        raise Http404("No such policy is scheduled: it has ended, or was cancelled.")
    _record(principal, planned, "policy.unschedule", reason, before=_told(planned))
    if planned.state == State.IN_FORCE:
        _end(planned, State.CANCELLED, f"Ended by {principal.name}.")
    else:
        _become(planned, State.WAITING, State.CANCELLED, f"Cancelled by {principal.name}.")
    return planned


def run_due(now: datetime) -> int:
    """Begin and end what is due. How many; safe to call from anywhere, as often as one likes."""
    waiting = ScheduledPolicy.objects.filter(state=State.WAITING, starts_at__lte=now)
    ending = ScheduledPolicy.objects.filter(state=State.IN_FORCE, ends_at__lte=now)
    due = sorted([*waiting.values_list("pk", "org_id"), *ending.values_list("pk", "org_id")])
    return sum(_step(number, org_id, now) for number, org_id in due)


@transaction.atomic
def _step(number: int, org_id: int, now: datetime) -> bool:
    org = Org.objects.select_for_update(no_key=True).filter(pk=org_id).first()
    planned = ScheduledPolicy.objects.filter(pk=number).first()
    if org is None or planned is None:
        return False
    if planned.state == State.WAITING and planned.starts_at <= now:
        if planned.ends_at is not None and planned.ends_at <= now:
            _become(planned, State.WAITING, State.DONE, "Nobody was there in its time to begin it.")
        else:
            _begin(planned)
        return True
    if planned.state == State.IN_FORCE and planned.ends_at is not None and planned.ends_at <= now:
        _end(planned, State.DONE, "")
        return True
    return False


def _begin(planned: ScheduledPolicy) -> None:
    """Whoever calls holds the org's row."""
    before = services.active_policy(planned.org)
    reason = f"as {planned.author_name} scheduled: {planned.reason}"[:REASON_MAX]
    try:
        held = services.set_policy(
            SYSTEM, planned.org, documents.read_org(planned.document), reason=reason
        )
    except ValidationError as error:
        _become(planned, State.WAITING, State.REFUSED, " ".join(error.messages))
        return
    planned.number, planned.back_to = held.number, before.number
    follows = State.IN_FORCE if planned.ends_at and held.number != before.number else State.DONE
    _become(planned, State.WAITING, follows, "")


def _end(planned: ScheduledPolicy, state: State, note: str) -> None:
    """Back to what was there before, unless somebody has saved something else."""
    if services.active_policy(planned.org).number != planned.number or planned.back_to is None:
        _become(planned, State.IN_FORCE, State.OVERTAKEN, "Another policy was saved meanwhile.")
        return
    reason = f"end of what {planned.author_name} scheduled: {planned.reason}"[:REASON_MAX]
    try:
        services.restore(SYSTEM, planned.org, planned.back_to, reason=reason)
    except ValidationError as error:
        _become(planned, State.IN_FORCE, State.REFUSED, " ".join(error.messages))
        return
    _become(planned, State.IN_FORCE, state, note)


def _become(planned: ScheduledPolicy, before: State, after: State, note: str) -> None:
    """Once, however many try."""
    ScheduledPolicy.objects.filter(pk=planned.pk, state=before).update(
        state=after, note=note[:500], number=planned.number, back_to=planned.back_to
    )
    planned.state, planned.note = after, note


def _told(planned: ScheduledPolicy) -> dict[str, object]:
    return {
        "starts_at": planned.starts_at,
        "ends_at": planned.ends_at,
        "policies": documents.spelled_out(documents.read_org(planned.document)),
    }


def _record(
    principal: Principal,
    planned: ScheduledPolicy,
    action: str,
    reason: str,
    *,
    before: dict[str, object] | None = None,
    after: dict[str, object] | None = None,
) -> None:
    record(
        principal,
        action,
        Subject.of("policy", planned.org.slug, planned.org.name, planned.org),
        before=before,
        after=after,
        reason=reason,
    )
