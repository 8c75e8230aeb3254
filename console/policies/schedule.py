"""Policies that take over at a moment, and give way again after a while.

Of all that has been saved by somebody and all that was scheduled, the one that began last is active: a
temporary policy until it ends, then the one before it. So those that overlap need no order to end in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import Http404
from django.utils import timezone

from console.accounts.principal import SYSTEM, Principal
from console.audit.services import Subject, record
from console.orgs.models import Org
from console.policies import documents, services
from console.policies.models import REASON_MAX, ScheduledPolicy
from swdriver_shim.policy import OrgPolicies

log = logging.getLogger(__name__)

OVERTAKEN: Final = "Another policy was saved meanwhile."
TOO_LATE: Final = "Another policy was saved, or began for good, between its start time and now."
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
        ends_at=None if lasts is None else starts_at + lasts,
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
    """Begin and end what is due, in the order of its moments. How many; safe to call from anywhere, as
    often as one likes. A step that fails is logged and left to the next call; it holds up no other."""
    waiting = ScheduledPolicy.objects.filter(state=State.WAITING, starts_at__lte=now)
    ending = ScheduledPolicy.objects.filter(state=State.IN_FORCE, ends_at__lte=now)
    due = [(at, 1, number, org) for at, number, org in waiting.values_list("starts_at", "pk", "org_id")]
    ends = ending.values_list("ends_at", "pk", "org_id")
    due += [(at, 0, number, org) for at, number, org in ends if at is not None]
    of_orgs: dict[int, list[int]] = {}
    for _, _, number, org_id in sorted(due):  # at the same moment, ends come first
        of_orgs.setdefault(org_id, []).append(number)
    return sum(_run(org_id, numbers, now) for org_id, numbers in of_orgs.items())


def _run(org_id: int, numbers: Sequence[int], now: datetime) -> int:
    """All steps of an org in one transaction: drivers are told what is active after the last one, and
    not what was between one policy's end and the next one's begin."""
    done = 0
    with _failing_alone(f"scheduled policies of org {org_id}"):
        org = Org.objects.select_for_update(no_key=True).filter(pk=org_id).first()
        if org is None:
            return done
        services.settled_cluster()  # before what a step locks: a change of the limits has this order
        for number in numbers:
            with _failing_alone(f"scheduled policy {number}"):
                done += _step(number, org, now)
    return done


@contextmanager
def _failing_alone(what: str) -> Iterator[None]:
    try:
        with transaction.atomic():
            yield
    except Exception:
        # Whatever is wrong with one, a document or a lock, is no reason to leave out all others.
        log.exception("A step of %s failed, and is tried again", what)


def _step(number: int, org: Org, now: datetime) -> bool:
    planned = ScheduledPolicy.objects.filter(pk=number, org=org).first()
    if planned is None:
        return False
    planned.org = org
    if planned.state == State.WAITING and planned.starts_at <= now:
        if planned.ends_at is not None and planned.ends_at <= now:
            _become(planned, State.WAITING, State.DONE, "Nobody was there in its time to begin it.")
        elif _is_overtaken(planned):
            _become(planned, State.WAITING, State.OVERTAKEN, TOO_LATE)
        else:
            _begin(planned)
        return True
    if planned.state == State.IN_FORCE and planned.ends_at is not None and planned.ends_at <= now:
        _end(planned, State.DONE, "")
        return True
    return False


def _is_overtaken(planned: ScheduledPolicy) -> bool:
    """Whether it would have been replaced for good by now, had it begun at its moment."""
    permanent = ScheduledPolicy.objects.filter(org=planned.org, state=State.DONE, ends_at=None)
    later = Q(starts_at__gt=planned.starts_at) | Q(starts_at=planned.starts_at, pk__gt=planned.pk)
    return services.is_saved_since(planned.org, planned.starts_at) or permanent.filter(later).exists()


def _begin(planned: ScheduledPolicy) -> None:
    """Put it in force, below those that were to begin later and have begun already.

    One without an end is what all later ones go back to; those below it can't come back. Whoever calls
    holds the org's row.
    """
    base, temporary = _standing(planned.org)
    order = (planned.starts_at, planned.pk)
    above = [one for one in temporary if (one.starts_at, one.pk) > order]
    try:
        held = services.set_policy(
            SYSTEM, planned.org, documents.read_org(planned.document), reason=_begin_of(planned)
        )
    except ValidationError as error:
        _become(planned, State.WAITING, State.REFUSED, " ".join(error.messages))
        return
    planned.number, planned.back_to = held.number, base
    if planned.ends_at is not None:
        _become(planned, State.WAITING, State.IN_FORCE, "")
    else:
        _become(planned, State.WAITING, State.DONE, "")
        for one in temporary:
            if one in above:
                _go_back_to(one, held.number)
            else:
                _become(one, State.IN_FORCE, State.OVERTAKEN, OVERTAKEN)
    if above:
        _put_back(above[-1], _begin_of(above[-1]))


def _end(planned: ScheduledPolicy, state: State, note: str) -> None:
    """Back to the one that began before it and has not ended, or to what was saved before all of them;
    unless somebody has saved something else. Whoever calls holds the org's row."""
    base, temporary = _standing(planned.org)
    if planned not in temporary:
        _become(planned, State.IN_FORCE, State.OVERTAKEN, OVERTAKEN)
        return
    *rest, top = temporary
    if planned == top:
        reason = f"end of what {planned.author_name} scheduled: {planned.reason}"[:REASON_MAX]
        if rest:
            _put_back(rest[-1], reason)
        else:
            services.put_back(SYSTEM, planned.org, base, reason=reason)
    _become(planned, State.IN_FORCE, state, note)


def _standing(org: Org) -> tuple[int, list[ScheduledPolicy]]:
    """The version to go back to when all temporary policies have ended, and these, in the order in which
    they were to begin: the last one is active. Those that somebody has saved over are noted as such."""
    active = services.active_policy(org).number
    found = list(ScheduledPolicy.objects.filter(org=org, state=State.IN_FORCE))
    base, temporary = active, []
    if any(one.number == active for one in found):
        base = _base(active, found)
        temporary = [one for one in found if one.back_to == base or (one.number or 0) > base]
    for one in found:
        one.org = org
        if one not in temporary:
            _become(one, State.IN_FORCE, State.OVERTAKEN, OVERTAKEN)
        elif one.back_to != base:
            _go_back_to(one, base)
    return base, temporary


def _base(active: int, found: Sequence[ScheduledPolicy]) -> int:
    """What the active one goes back to in the end. The release before noted which version it had
    replaced, and that may be another temporary policy's."""
    back_to = {one.number: one.back_to or 0 for one in found}
    base = back_to.pop(active)
    while base in back_to:
        base = back_to.pop(base)
    return base


def _go_back_to(planned: ScheduledPolicy, base: int) -> None:
    planned.back_to = base
    planned.save(update_fields=["back_to"])


def _put_back(planned: ScheduledPolicy, reason: str) -> None:
    """Have a temporary policy be active again, as a new version."""
    held = services.put_back(SYSTEM, planned.org, planned.number or 0, reason=reason)
    planned.number = held.number
    planned.save(update_fields=["number"])


def _begin_of(planned: ScheduledPolicy) -> str:
    return f"as {planned.author_name} scheduled: {planned.reason}"[:REASON_MAX]


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
