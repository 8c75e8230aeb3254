"""The authority of this console: who signs, whom processes should believe, and how that changes.

Replacing a root takes three steps, none of which breaks a connection: all are told of the next root;
when all that are alive believe it, it signs, and all renew; when all have renewed, the former one goes.
Who was away meanwhile asks for a certificate with its first heartbeat. `advance` does what is due, any
number of times, from any process.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final, TypeVar

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from console.accounts.principal import SYSTEM, Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.authority.issuing import Signer, make_root
from console.authority.models import Authority, State
from console.fleet import services as fleet
from console.fleet.membership.liveness import database_now, silent_since
from console.fleet.models import Brain, Driver, Node
from console.fleet.nodes import InProgress
from console.placement.topology import State as Health
from kvss_agent.security.certificates import Peer
from kvss_agent.security.certificates import Role as PeerRole
from kvss_agent.security.identity import fingerprint
from telemetry.topics import FLEET

log = logging.getLogger(__name__)

P = TypeVar("P", Node, Driver, Brain)

BELIEVED: Final = (State.NEXT, State.SIGNING, State.SUPERSEDED)
CONSOLE_LIFE: Final = timedelta(days=1)  # of the certificates of our own processes
SETTLE: Final = timedelta(seconds=20)  # for requests of the console that are under way
REPLACE_BEFORE: Final = timedelta(days=365)  # the end of the root that signs
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('tidegate authority'))"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Whom processes should believe. `digest` also names the one that signs: if that changes, so does
    every certificate."""

    authorities: str
    digest: str


@dataclass(frozen=True, slots=True)
class Issued:
    certificate: str
    bundle: Bundle


@dataclass(frozen=True, slots=True)
class Following:
    """Of the processes that have a key: how many are alive, and who does not believe what it should."""

    alive: int
    behind: list[str]  # of those that are alive
    away: list[str]  # of the others, for whom nobody waits


def bundle() -> Bundle:
    """Makes the first root where there is none."""
    believed = _believed()
    if not any(one.state == State.SIGNING for one in believed):
        _make_first()
        believed = _believed()
    said = "\n".join(f"{one.fingerprint} {one.state == State.SIGNING}" for one in believed)
    digest = hashlib.sha256(said.encode()).hexdigest()
    return Bundle("".join(one.certificate for one in believed), digest)


def signer() -> Signer:
    """What signs now. Makes the first root where there is none."""
    row = Authority.objects.filter(state=State.SIGNING).first()
    if row is None:
        _make_first()
        row = Authority.objects.get(state=State.SIGNING)
    return _loaded(row.certificate, str(row.key))


def issue(role: PeerRole, name: str, public_key: str) -> Issued:
    """A certificate for the process that has joined as this with this key."""
    peer = Peer(role, name, fingerprint(public_key))
    life = CONSOLE_LIFE if role is PeerRole.CONSOLE else timedelta(days=settings.CERTIFICATE_DAYS)
    told = bundle()  # before it is signed: by one of these, or a later one that asks again
    return Issued(signer().issue(peer, public_key, life, timezone.now()), told)


def visible_authorities(principal: Principal) -> QuerySet[Authority]:
    fleet.check_fleet(principal, Role.PLATFORM_ADMIN)
    _ = bundle()
    return Authority.objects.defer("key").order_by("-pk")


def following() -> Following:
    """Who believes what it should. A node in maintenance is never lost, but while it is off nobody waits
    for it, either."""
    digest = bundle().digest
    nodes, drivers, brains = _with_key(Node), _with_key(Driver), _with_key(Brain)
    off, since = Q(state=Health.LOST.value), silent_since(database_now())
    if since is not None:
        off |= Q(state=Health.MAINTENANCE.value, last_heartbeat_at__lt=since)
    alive = [
        *_trusts(nodes.exclude(off)),
        *_trusts(drivers.filter(lost_at=None)),
        *_trusts(brains.filter(lost_at=None)),
    ]
    away = [
        *_trusts(nodes.filter(off)),
        *_trusts(drivers.exclude(lost_at=None)),
        *_trusts(brains.exclude(lost_at=None)),
    ]
    return Following(
        len(alive),
        [name for name, trusts in alive if trusts != digest],
        [name for name, trusts in away if trusts != digest],
    )


def _with_key(kind: type[P]) -> QuerySet[P]:
    return kind.objects.filter(joined_at__isnull=False).exclude(public_key="").order_by("name")


def _trusts(rows: QuerySet[Any]) -> list[tuple[str, str]]:
    kind = rows.model.KIND
    return [(f"{kind} {name}", trusts) for name, trusts in rows.values_list("name", "trusts")]


def replaced_since() -> datetime | None:
    """Since when the step lasts in which a root is being replaced; None while none is."""
    changing = Authority.objects.filter(state__in=[State.NEXT, State.SUPERSEDED])
    latest = changing.order_by("-state_since").first()
    return latest.state_since if latest else None


@transaction.atomic
def begin_rotation(principal: Principal, reason: str = "") -> Authority:
    """Make the next root. Raises InProgress while one is being replaced."""
    principal.check_may_change()
    fleet.check_fleet(principal, Role.PLATFORM_ADMIN)
    return _begin(principal, reason)


@transaction.atomic
def advance() -> None:
    """The next step of a replacement, if all have followed the one before."""
    _lock()
    rows = {one.state: one for one in Authority.objects.exclude(state=State.REMOVED)}
    now = timezone.now()
    upcoming, signing = rows.get(State.NEXT), rows.get(State.SIGNING)
    superseded = rows.get(State.SUPERSEDED)
    if upcoming is None and superseded is None:
        if signing is not None and signing.expires_at - now < REPLACE_BEFORE:
            _begin(SYSTEM, "The root that signs ends within a year.")
        return
    if following().behind:
        return
    if upcoming is not None and signing is not None and now - upcoming.state_since >= SETTLE:
        _become(signing, State.SUPERSEDED)
        _become(upcoming, State.SIGNING)
        _record(SYSTEM, "authority.sign", upcoming, f"Authority {upcoming} signs.")
    elif superseded is not None and now - superseded.state_since >= SETTLE:
        superseded.key = ""
        _become(superseded, State.REMOVED)
        _record(SYSTEM, "authority.remove", superseded, f"Authority {superseded} is believed no more.")


def _begin(principal: Principal, reason: str) -> Authority:
    _lock()
    if Authority.objects.filter(state__in=[State.NEXT, State.SUPERSEDED]).exists():
        raise InProgress("The authority is being replaced already. Wait until that is done.")
    _make_first()
    made = _make(State.NEXT)
    sentence = f"Authority {made} is to replace the one that signs."
    _record(principal, "authority.rotate", made, sentence, reason)
    return made


def _become(row: Authority, state: State) -> None:
    row.state, row.state_since = state, timezone.now()
    row.save()


def _believed() -> list[Authority]:
    return list(Authority.objects.filter(state__in=BELIEVED).defer("key"))


@transaction.atomic
def _make_first() -> None:
    """Of two that need it at once, one makes it."""
    _lock()
    if not Authority.objects.filter(state=State.SIGNING).exists():
        made = _make(State.SIGNING)
        _record(SYSTEM, "authority.create", made, f"Authority {made} signs.")


def _make(state: State) -> Authority:
    now = timezone.now()
    root = make_root(f"Tidegate authority {now:%Y-%m-%d %H:%M:%S.%f}", now)
    return Authority.objects.create(
        fingerprint=root.fingerprint,
        certificate=root.certificate,
        key=root.key,
        state=state,
        expires_at=root.expires_at,
    )


def _lock() -> None:
    with connection.cursor() as cursor:
        cursor.execute(_LOCK)


def _record(principal: Principal, action: str, row: Authority, sentence: str, reason: str = "") -> None:
    record(
        principal,
        action,
        Subject("authority", str(row), str(row), topics=[FLEET]),
        after={"fingerprint": row.fingerprint, "state": str(row.state), "expires_at": row.expires_at},
        reason=reason,
        sentence=sentence,
    )


@lru_cache(maxsize=4)
def _loaded(certificate: str, key: str) -> Signer:
    return Signer(certificate, key)
