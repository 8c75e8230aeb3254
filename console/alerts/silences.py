"""Silences: who may make and end one. Nobody is told of what they match; it is shown as ever."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404
from django.utils import timezone

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.alerts.matching import BadMatcher, parse
from console.alerts.models import SILENCE_MAX, Silence
from console.alerts.services import role_over
from console.audit.services import record
from console.orgs.models import Org
from console.visibility import of_orgs
from telemetry.topics import ALERTS, of_org


def visible_silences(principal: Principal) -> QuerySet[Silence]:
    """Those of their orgs. One for all is for those to see who have a role on the platform."""
    return Silence.objects.filter(of_orgs(principal)).select_related("org")


def get_silence(principal: Principal, silence_id: int, at_least: Role = Role.VIEWER) -> Silence:
    """The one access function."""
    silence = Silence.objects.select_related("org").filter(pk=silence_id).first()
    role = role_over(principal, silence.org_id) if silence else None
    if silence is None or role is None:
        raise Http404("There is no such silence, or it is not yours to see.")
    if role < at_least:
        raise Refused(f"This needs the role {at_least.label}; yours is {role.label}.")
    return silence


def for_change(principal: Principal, silence_id: int) -> Silence:
    """Locked until the end of the transaction, for somebody who is on call for what it silences."""
    principal.check_may_change()
    get_silence(principal, silence_id, Role.ON_CALL)
    return Silence.objects.select_for_update(of=("self",)).get(pk=silence_id)


@transaction.atomic
def create_silence(
    principal: Principal,
    *,
    org: Org | None,
    matchers: Sequence[str],
    starts_at: datetime | None,
    ends_at: datetime,
    reason: str,
) -> Silence:
    """For an org by who is on call in it, for all by who is on call on the platform. Raises
    ValidationError for what would silence nothing, everything or for ever."""
    principal.check_may_change()
    role = role_over(principal, org.pk if org else None)
    if role is None or role < Role.ON_CALL:
        whose = f"in {org.name}" if org else "on the platform; name an org to silence what is of it"
        raise Refused(f"This needs the role on-call {whose}.")
    now = timezone.now()
    silence = Silence(
        org=org,
        matchers=_checked(matchers),
        starts_at=starts_at or now,
        ends_at=ends_at,
        author=principal.name,
        reason=reason.strip(),
    )
    _check_times(silence, now)
    silence.full_clean()
    silence.save()
    _record(principal, "silence.create", silence)
    return silence


@transaction.atomic
def end_silence(principal: Principal, silence: Silence, reason: str = "") -> Silence:
    """From now on people are told again. It stays on record; of one that is over nothing changes."""
    now = timezone.now()
    if silence.ends_at > now:
        before = silence.snapshot()
        silence.starts_at, silence.ends_at = min(silence.starts_at, now), now
        silence.version += 1
        silence.save()
        _record(principal, "silence.end", silence, before, reason)
    return silence


def _checked(matchers: Sequence[str]) -> list[str]:
    if not matchers:
        raise ValidationError({"matchers": "Say what it silences: rule=queue-deep, node=ax-7."})
    try:
        return [str(one) for one in parse(matchers)]
    except BadMatcher as error:
        raise ValidationError({"matchers": str(error)}) from None


def _check_times(silence: Silence, now: datetime) -> None:
    if silence.ends_at <= max(now, silence.starts_at):
        raise ValidationError({"ends_at": "It has to end after it starts, and after now."})
    if silence.ends_at - silence.starts_at > SILENCE_MAX:
        raise ValidationError(
            {"ends_at": f"At most {SILENCE_MAX.days} days. What is never wanted, switch off."}
        )
    if not silence.reason:
        raise ValidationError({"reason": "Say why: others will wonder."})


def _record(
    principal: Principal,
    action: str,
    silence: Silence,
    before: dict[str, object] | None = None,
    reason: str = "",
) -> None:
    org = silence.org
    record(
        principal,
        action,
        object_type="silence",
        object_id=silence.pk,
        object_name=str(silence),
        org_id=org.pk if org else None,
        before=before,
        after=silence.snapshot(),
        reason=reason or silence.reason,
        topics=[ALERTS, *([of_org(org.slug)] if org else [])],
    )
