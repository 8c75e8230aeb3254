"""Join tokens: what a process shows once, to become part of the fleet.

A token is `tgj_<public id>_<secret>`. Of the secret only a SHA-256 is kept, which is enough for 32
random bytes. It opens nothing but joining.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from datetime import datetime
from typing import Final

from django.db import transaction
from django.db.models import F, QuerySet
from django.http import Http404
from django.utils import timezone

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.fleet import services
from console.fleet.models import JoinToken
from telemetry.topics import FLEET

TOKEN: Final = re.compile(r"tgj_([0-9a-z]{12})_([A-Za-z0-9_-]{43})")
PUBLIC_ID: Final = r"^[0-9a-z]{12}$"
ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
ACTIVE_MAX: Final = 100
USES_MAX: Final = 10_000
LIFETIME_HOURS_MAX: Final = 24 * 30


def visible_tokens(principal: Principal) -> QuerySet[JoinToken]:
    services.check_fleet(principal, Role.PLATFORM_ADMIN)
    return JoinToken.objects.all()


@transaction.atomic
def issue(
    principal: Principal,
    *,
    kind: str,
    uses: int,
    expires_at: datetime,
    note: str = "",
    name: str = "",
    workload: str = "",
) -> tuple[JoinToken, str]:
    """Create a join token; its text is returned once and never again. `name`, `workload`: see JoinToken.
    Tokens of workloads are as many as there are instances, and don't count. Raises Refused for one that
    would outlive the API token or JWT that asks for it."""
    principal.check_may_change()
    services.check_fleet(principal, Role.PLATFORM_ADMIN)
    if principal.ends_at is not None and expires_at > principal.ends_at:
        raise Refused("An API token or JWT can't make a join token that outlives it.")
    active = JoinToken.objects.filter(
        revoked_at=None, expires_at__gt=timezone.now(), uses_left__gt=0, workload=""
    )
    if not workload and active.count() >= ACTIVE_MAX:
        raise Refused(f"There are {ACTIVE_MAX} join tokens that still work. Revoke some first.")
    secret = secrets.token_urlsafe(32)
    token = JoinToken(
        public_id="".join(secrets.choice(ALPHABET) for _ in range(12)),
        secret_sha256=digest(secret),
        kind=kind,
        note=note,
        name=name,
        workload=workload,
        uses_max=uses,
        uses_left=uses,
        created_by=principal.name,
        expires_at=expires_at,
    )
    token.full_clean(exclude=["secret_sha256", "last_used_at", "revoked_at"])
    token.save()
    record(principal, "join_token.create", _about(token), after=token.snapshot())
    return token, f"{token.prefix}_{secret}"


@transaction.atomic
def revoke(principal: Principal, public_id: str) -> JoinToken:
    """Make a join token useless from now on. Doing it again changes nothing. Who has joined stays."""
    principal.check_may_change()
    token = visible_tokens(principal).select_for_update(no_key=True).filter(public_id=public_id).first()
    if token is None:
        raise Http404("There is no such join token.")
    if token.revoked_at is None:
        token.revoked_at = timezone.now()
        token.save(update_fields=["revoked_at"])
        record(principal, "join_token.revoke", _about(token), before=token.snapshot())
    return token


def authenticate(text: str) -> JoinToken | None:
    """The token of this text, if it is one and still works."""
    match = TOKEN.fullmatch(text)
    if match is None:
        return None
    public_id, secret = match.groups()
    token = JoinToken.objects.filter(public_id=public_id).first()
    known = bytes(token.secret_sha256) if token else bytes(32)
    if not hmac.compare_digest(known, digest(secret)) or token is None:
        return None
    return token if token.state == "active" else None


def use(token: JoinToken) -> bool:
    """Take one of its uses, in the transaction of what it is for. False where none is left by now."""
    now = timezone.now()
    working = JoinToken.objects.filter(pk=token.pk, uses_left__gt=0, revoked_at=None, expires_at__gt=now)
    return bool(working.update(uses_left=F("uses_left") - 1, last_used_at=now))


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _about(token: JoinToken) -> Subject:
    # One of an instance is no event: that its driver has joined is.
    topics = [] if token.workload else [FLEET]
    return Subject("join_token", token.public_id, token.note or token.prefix, topics=topics)
