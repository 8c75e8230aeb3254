"""Which orgs a driver may serve: it is told their secrets and data keys, and nothing of other orgs.

An org that is taken off a driver stays noted as leaving until the driver has confirmed that it has
removed what it stored of the org (`console.policies.evidence.withdrawals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import Http404

from console.accounts.principal import SYSTEM, Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.control.models import Kind, Target
from console.control.services import Address, changed, targets_of
from console.fleet.models import Driver
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs.models import Org
from console.orgs.services import get_org
from console.sessions import siblings
from console.sessions.models import DriverOrg, Job, Session
from console.visibility import sees_fleet
from telemetry.topics import of_source
from telemetry.units import counted

ALL: Final = "all"
OWN: Final = "session"  # the org of the driver's session
NAMED_MAX: Final = 1000
LEAVING_MAX: Final = 200  # that are taken off one driver at once: each is an operation with a receipt
WITHDRAW: Final = "driver.remove-org"  # the operation, by its name: sessions know nothing of policies
NOT_OWN: Final = "a driver of another session"
SAY_WHICH: Final = (
    "Session {} has no org of its own. Set orgs to the short names of the orgs that the driver may "
    "serve, or, as a platform admin, to “all”."
)

ALL_WARNING: Final = (
    "The driver is told the secrets and data keys of all orgs: whoever steals it can read what every "
    "org stores."
)

Said: TypeAlias = Literal["all", "session"] | Sequence[str]
Orgs: TypeAlias = Sequence[Org] | None  # None: all


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a driver's orgs. Nothing has. `removed`: it stored something of them."""

    before: Orgs
    after: Orgs
    added: list[Org]
    removed: list[Org]

    @property
    def changes(self) -> bool:
        return slugs(self.before) != slugs(self.after)


@dataclass(frozen=True, slots=True)
class Changed:
    plan: Plan
    operations: list[Operation]  # one for each org that was taken off


# Reading


def orgs_of(driver: Driver) -> Orgs:
    """The orgs that it may serve, by their short names."""
    rows = list(driver.orgs.filter(is_leaving=False).select_related("org").order_by("org__slug"))
    return None if any(row.org is None for row in rows) else [row.org for row in rows if row.org]


def ids_of(name: str) -> frozenset[int] | None:
    """The orgs that the driver of this name may serve; None: all."""
    found = DriverOrg.objects.filter(driver__name=name, is_leaving=False)
    ids: list[int | None] = list(found.values_list("org_id", flat=True))
    return None if None in ids else frozenset(filter(None, ids))


def leaving_of(driver: Driver) -> list[Org]:
    """Those of which it has not confirmed yet that it has removed what it stored."""
    return list(Org.objects.filter(drivers__driver=driver, drivers__is_leaving=True).order_by("slug"))


def slugs(orgs: Orgs) -> list[str] | Literal["all"]:
    return ALL if orgs is None else [org.slug for org in orgs]


def drivers_serving(*orgs: Org) -> QuerySet[Driver]:
    """Those that may serve one of these."""
    served = Q(org__in=orgs) | Q(org=None)
    rows = DriverOrg.objects.filter(served, driver=OuterRef("pk"), is_leaving=False)
    return Driver.objects.filter(Exists(rows))


def drivers_told(org: Org) -> QuerySet[Driver]:
    """Those that may serve it, and those that could and have not confirmed that nothing is left."""
    rows = DriverOrg.objects.filter(Q(org=org) | Q(org=None), driver=OuterRef("pk"))
    return Driver.objects.filter(Exists(rows))


def addresses(org: Org) -> list[Address]:
    """Whose documents name the org."""
    return [(Kind.DRIVER.value, name) for name in drivers_serving(org).values_list("name", flat=True)]


def session_of(driver: Driver) -> Session | None:
    return Session.objects.select_related("org").filter(jobs__driver=driver).first()


# Changing


def resolve(principal: Principal, session: Session | None, said: Said | None) -> Orgs:
    """What somebody has said, as orgs, if they may say so: an org is let onto a driver by its admin, and
    all orgs are by a platform admin. Without a word it is the org of the session.

    Raises ValidationError, and Refused.
    """
    if said is None or said == OWN:
        if session is None:
            raise ValidationError({"orgs": "The driver has no session. Name the orgs."})
        if session.org is None:
            raise ValidationError({"orgs": SAY_WHICH.format(session.name)})
        return [session.org]
    if said == ALL:
        principal.check_platform(Role.PLATFORM_ADMIN)
        return None
    try:
        found = {slug: get_org(principal, slug, Role.ORG_ADMIN) for slug in said}
    except Http404:
        raise ValidationError({"orgs": "There is no org of one of these names."}) from None
    return [found[slug] for slug in sorted(found)]


def from_slugs(said: Sequence[str] | Literal["all"]) -> Orgs:
    """As an operation keeps it. Orgs that were deleted since are left out."""
    return None if said == ALL else list(Org.objects.filter(slug__in=said).order_by("slug"))


def plan_orgs(driver: Driver, after: Orgs) -> Plan:
    """What letting it serve these orgs, and no others, changes. Raises ValidationError where more would
    be taken off than can be at once."""
    before = orgs_of(driver)
    here = set(Org.objects.all() if before is None else before)
    wanted = set(Org.objects.all() if after is None else after)
    removed = sorted(here - wanted, key=lambda org: org.slug) if _was_told(driver) else []
    if len(removed) > LEAVING_MAX:
        raise ValidationError(
            {
                "orgs": f"This takes {len(removed)} orgs off the driver, and at most {LEAVING_MAX} can "
                "be taken off at once. Do it in steps, or start another driver for the orgs that stay."
            }
        )
    return Plan(before, after, sorted(wanted - here, key=lambda org: org.slug), removed)


def _was_told(driver: Driver) -> bool:
    """Whoever was never told anything stores nothing of anybody."""
    return Target.objects.filter(kind=Kind.DRIVER, name=driver.name, generation__gt=0).exists()


@transaction.atomic
def set_orgs(principal: Principal, driver: Driver, orgs: Orgs, *, reason: str = "") -> Changed:
    """Let a driver serve these orgs, and no others. The fleet is held.

    What it stores of an org that is taken off is removed there, and an operation waits for the receipt.
    The same orgs again change nothing. Raises ValidationError as `plan_orgs` does.
    """
    # Until the end of the transaction no document is made of it: one may name an org that is new.
    target = targets_of(Kind.DRIVER, [driver.name]).select_for_update(no_key=True).get()
    plan = plan_orgs(driver, orgs)
    if not plan.changes:
        return Changed(plan, [])
    named = siblings.documents_of(driver.name)
    _write(driver, plan)
    named |= siblings.documents_of(driver.name)
    # A driver without a job leaves out by itself what is taken off. Its next document is a new one, also
    # where it says what the last one said.
    target.digest = b""
    target.save(update_fields=["digest"])
    driver.version += 1
    driver.save(update_fields=["version"])
    _record(principal, driver, plan, reason)
    changed({(Kind.DRIVER.value, driver.name), *named}, f"orgs of driver {driver.name}: {reason}")
    shown = principal if sees_fleet(principal) else SYSTEM  # an operation is its org's to see
    return Changed(plan, [_withdraw(shown, driver, org, reason) for org in plan.removed])


def _write(driver: Driver, plan: Plan) -> None:
    rows = DriverOrg.objects.filter(driver=driver)
    if plan.after is None:
        rows.delete()
        DriverOrg.objects.create(driver=driver)
        return
    kept = [] if plan.before is None else [org for org in plan.before if org in plan.after]
    rows.filter(is_leaving=False).exclude(org__in=kept).delete()
    rows.filter(org__in=plan.after, is_leaving=True).delete()
    new = [DriverOrg(driver=driver, org=org) for org in plan.after if org not in kept]
    leaving = [DriverOrg(driver=driver, org=org, is_leaving=True) for org in plan.removed]
    DriverOrg.objects.bulk_create([*new, *leaving])


def _withdraw(principal: Principal, driver: Driver, org: Org, reason: str) -> Operation:
    """Its people see it, and which driver it is may be none of their business. One that runs already
    goes on: the org came back meanwhile, and left again."""
    target = f"driver-org:{driver.pk}/{org.pk}"
    return operations.running_on(target) or operations.start(
        principal,
        WITHDRAW,
        target,
        f"Remove {org.name} from a driver",
        plan={"org": org.slug, "model": "", "driver": driver.name, "reason": reason},
        org_id=org.pk,
        role=Role.ORG_ADMIN,
    )


def _record(principal: Principal, driver: Driver, plan: Plan, reason: str) -> None:
    """For the platform with all orgs; and for each org that somebody has named, what is its own."""
    record(
        principal,
        "driver.orgs",
        Subject("driver", driver.name, driver.name, topics=[of_source("driver", driver.name)]),
        before={"orgs": slugs(plan.before)},
        after={"orgs": slugs(plan.after)},
        reason=reason,
        sentence=f"Driver {driver.name} may serve {_said(plan.after)}.",
    )
    own = Job.objects.filter(driver=driver).values_list("session__org_id", flat=True).first()
    shown = principal if sees_fleet(principal) else SYSTEM
    named = [] if plan.after is None else plan.added
    for orgs, action, sentence in (
        (named, "org.driver_add", "A driver may serve {}."),
        (plan.removed, "org.driver_remove", "A driver may not serve {} any more."),
    ):
        for org in orgs:
            told = {"driver": driver.name if org.pk == own else NOT_OWN}
            is_added = action == "org.driver_add"
            record(
                shown,
                action,
                Subject.of("org", org.slug, org.name, org),
                before=None if is_added else told,
                after=told if is_added else None,
                sentence=sentence.format(org.name),
            )


def _said(orgs: Orgs) -> str:
    if orgs is None:
        return "all orgs"
    return counted(len(orgs), "org")
