"""Silences: alerts that a silence matches are evaluated and shown, but send no notifications."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.alerts.models import SILENCE_MAX, Alert, Silence
from console.alerts.state.matchers import BadMatcher, match, parse
from console.audit.services import Subject, record
from console.orgs.models import Org
from console.visibility import of_orgs
from telemetry.topics import ALERTS


def visible_silences(principal: Principal) -> QuerySet[Silence]:
    """The silences of their orgs; those for all orgs are visible with a platform role."""
    return Silence.objects.filter(of_orgs(principal)).select_related("org")


def active_silences(now: datetime) -> list[Silence]:
    return list(Silence.objects.filter(starts_at__lte=now, ends_at__gt=now))


def silence_of(alert: Alert, silences: Iterable[Silence]) -> Silence | None:
    """The first silence that matches an alert. A silence of an org matches only alerts of that org."""
    for silence in silences:
        if silence.org_id in (None, alert.org_id) and match(silence.parsed, alert.all_labels):
            return silence
    return None


def get_silence(principal: Principal, silence_id: int, at_least: Role = Role.VIEWER) -> Silence:
    """The one access function."""
    silence = Silence.objects.select_related("org").filter(pk=silence_id).first()
    return principal.checked(silence, at_least, "silence")


def for_change(principal: Principal, silence_id: int) -> Silence:
    """Locked until the end of the transaction. Needs the role on-call."""
    principal.check_may_change()
    get_silence(principal, silence_id, Role.ON_CALL)
    return Silence.objects.select_for_update(no_key=True, of=("self",)).get(pk=silence_id)


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
    """Needs the role on-call in the org, or on the platform for all orgs. Raises ValidationError if it
    would silence nothing, everything or forever."""
    principal.check_may_change()
    if not principal.holds(Role.ON_CALL, org.pk if org else None):
        where = f"in {org.name}" if org else "on the platform. To silence alerts of one org, name it"
        raise Refused(f"This needs the role on-call {where}.")
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
    after = silence.snapshot()
    record(principal, "silence.create", _about(silence), after=after, reason=silence.reason)
    return silence


@transaction.atomic
def end_silence(principal: Principal, silence: Silence) -> Silence:
    """End a silence now; it stays on record. One that has ended does not change."""
    now = timezone.now()
    if silence.ends_at > now:
        before = silence.snapshot()
        silence.starts_at, silence.ends_at = min(silence.starts_at, now), now
        silence.version += 1
        silence.save()
        record(
            principal,
            "silence.end",
            _about(silence),
            before=before,
            after=silence.snapshot(),
            reason=silence.reason,
        )
    return silence


def _checked(matchers: Sequence[str]) -> list[str]:
    if not matchers:
        raise ValidationError({"matchers": "Enter at least one matcher: rule=queue-deep, node=ax-7."})
    try:
        return [str(one) for one in parse(matchers)]
    except BadMatcher as error:
        raise ValidationError({"matchers": str(error)}) from None


def _check_times(silence: Silence, now: datetime) -> None:
    if silence.ends_at <= max(now, silence.starts_at):
        raise ValidationError({"ends_at": "Must be in the future, and after the start."})
    if silence.ends_at - silence.starts_at > SILENCE_MAX:
        raise ValidationError(
            {"ends_at": f"At most {SILENCE_MAX.days} days. To turn a rule off for good, disable it."}
        )
    if not silence.reason:
        raise ValidationError({"reason": "Enter a reason."})


def _about(silence: Silence) -> Subject:
    return Subject.of("silence", silence.pk, str(silence), silence.org, ALERTS)
