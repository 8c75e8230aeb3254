"""Rules of sessions: of the cluster and, stricter, of orgs. Reading them, and changing them.

Rules are never stricter than the sessions that there are: whoever wants that resizes those first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Sum
from django.http import Http404

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Subject, record, undoable
from console.control import services as control
from console.fleet.nodes import Impossible
from console.fleet.services import lock_fleet
from console.operations.models import Operation
from console.orgs.models import Org
from console.orgs.services import get_org
from console.placement.rules import Borrow, Path, Rules
from console.placement.topology import Misconfigured
from console.sessions.models import QUOTAS, RuleSet, Session
from telemetry.topics import FLEET
from telemetry.units import counted

CLUSTER: Final = "cluster"
NAMED_MAX: Final = 3


def of_cluster() -> RuleSet:
    return RuleSet.objects.filter(org=None).first() or RuleSet(org=None)


def of_an_org(org: Org) -> RuleSet:
    """Its own ones, which add to those of the cluster."""
    return RuleSet.objects.filter(org=org).first() or RuleSet(
        org=org,
        path=Path.ANY.value,
        moves_percent=100,
        borrow=Borrow.SPINE.value,
        replace_lost_after_seconds=0,
    )


def effective_rules(org: Org | None, path: str = "") -> Rules:
    """For a session of this org that wants at least this path. Raises Misconfigured."""
    rules = of_cluster().rules()
    if org is not None:
        rules = rules.stricter(of_an_org(org).rules())
    return rules.stricter(Rules(path=Path(path))) if path else rules


def effective_rules_of_all(changed: RuleSet | None = None) -> Callable[[int | None], Rules]:
    """The rules of sessions by the key of their org, read at once; with those that are not saved yet.
    Raises Misconfigured."""
    own = {one.org_id: one.rules() for one in RuleSet.objects.all()}
    if changed is not None:
        own[changed.org_id] = changed.rules()
    cluster = own.pop(None, None) or RuleSet(org=None).rules()
    found: dict[int | None, Rules] = {org: cluster.stricter(rules) for org, rules in own.items()}
    return lambda org: found.get(org, cluster)


def get_rules(principal: Principal, org: Org | None) -> RuleSet:
    """The one access function. Those of the cluster are for who has a role on the platform."""
    if org is None:
        if not principal.on_platform(Role.VIEWER):
            raise Http404("There are no such rules, or they are not yours to see.")
        return of_cluster()
    get_org(principal, org.slug)
    return of_an_org(org)


def may_change(principal: Principal, org: Org | None) -> bool:
    if principal.read_only:
        return False
    return principal.holds(Role.ORG_ADMIN, org.pk) if org else principal.on_platform(Role.PLATFORM_ADMIN)


def for_change(principal: Principal, org: Org | None) -> RuleSet:
    """The rules, while nobody else changes rules or sessions, for somebody who may change them."""
    principal.check_may_change()
    get_rules(principal, org)
    if not may_change(principal, org):
        needed = Role.PLATFORM_ADMIN if org is None else Role.ORG_ADMIN
        raise Refused(f"Changing these rules needs the role {needed.label}.")
    lock_fleet()
    return get_rules(principal, org)


@transaction.atomic
def set_rules(
    principal: Principal,
    rules: RuleSet,
    values: Mapping[str, Any],
    *,
    reason: str = "",
) -> RuleSet:
    """Change rules that came from `for_change`. The same again changes nothing.

    Raises Impossible where sessions that there are would break them, or where they contradict those of
    the cluster; Refused for a quota that is not theirs to set.
    """
    before = rules.snapshot()
    for name, value in values.items():
        setattr(rules, name, value)
    after = rules.snapshot()
    if after == before:
        return rules
    for quota in QUOTAS:
        if after[quota] != before[quota]:
            principal.check_platform(Role.PLATFORM_ADMIN)
            if rules.org is None:
                raise ValidationError({quota: "The cluster has no quota: set one for each org."})
    rules.full_clean(validate_constraints=False)
    rules.version += 1
    _check(rules)
    rules.save()
    _tell_sessions(rules)
    _tell_fleet(rules, {name for name in after if after[name] != before[name]})
    org = rules.org
    record(
        principal,
        "rules.update",
        # People of the fleet see it as well: alerts on nodes and tier 2 may have begun by it.
        Subject.of("rules", org.slug if org else CLUSTER, str(rules), org, FLEET),
        before=before,
        after=after,
        reason=reason,
        sentence=f"{rules} were changed: {_differences(before, after)}.",
    )
    return rules


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    changed = (name for name in after if after[name] != before[name])
    return ", ".join(f"{name} {_shown(before[name])} to {_shown(after[name])}" for name in changed)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def held_by(org: Org | None) -> int:
    """The boxes of all sessions of an org, each at the largest of its three sizes."""
    return sum(
        max(session.boxes_desired, session.boxes.count())
        for session in Session.objects.filter(org=org).prefetch_related("boxes")
    )


def replicas_of(org: Org) -> int:
    """Of all its workloads. They are counted from this side, since sessions know no workloads."""
    found = Org.objects.filter(pk=org.pk).aggregate(sum=Sum("workloads__replicas"))
    return found["sum"] or 0


def _check(changed: RuleSet) -> None:
    try:
        cluster = changed.rules() if changed.org is None else of_cluster().rules()
        sets = [*RuleSet.objects.exclude(org=None).exclude(pk=changed.pk).select_related("org")]
        sets += [changed] if changed.org is not None else []
        rules = {one.org_id: cluster.stricter(one.rules()) for one in sets}
    except Misconfigured as error:
        raise Impossible(str(error)) from None
    broken = []
    may_return_to = _may_return_to()
    for session in Session.objects.all():
        for boxes in {session.boxes_desired, may_return_to.get(session.name, session.boxes_desired)}:
            refused = next(iter(rules.get(session.org_id, cluster).refusals(boxes)), None)
            if refused:
                broken.append(f"{session.name} with {counted(boxes, 'box')}. {refused.sentence}")
    if broken:
        more = f" And {len(broken) - NAMED_MAX} more." if len(broken) > NAMED_MAX else ""
        raise Impossible(f"Sessions would break them: {' '.join(broken[:NAMED_MAX])}{more}")
    for one in sets:
        if one.org and one.boxes_quota is not None and held_by(one.org) > one.boxes_quota:
            raise Impossible(
                f"{one.org.name} has {counted(held_by(one.org), 'box')}, more than a quota of "
                f"{one.boxes_quota}: shrink its sessions first."
            )
        if (
            one.org
            and one.replicas_quota is not None
            and (replicas := replicas_of(one.org)) > one.replicas_quota
        ):
            raise Impossible(
                f"{one.org.name} has {counted(replicas, 'replica')}, more than a quota of "
                f"{one.replicas_quota}: scale its workloads down first."
            )


def _may_return_to() -> dict[str, int]:
    """The sizes that sessions go back to if what is being done to them fails."""
    resizes = Operation.objects.filter(kind="session.resize", done=False)
    return {one.plan["session"]: int(one.before["boxes"]) for one in resizes}


Listener = Callable[[], set[control.Address]]
_listeners: Final[list[Listener]] = []


def follows_rules(function: Listener) -> Listener:
    """Register who does by other rules at once: it says whose documents change so."""
    _listeners.append(function)
    return function


def _tell_fleet(rules: RuleSet, names: Collection[str]) -> None:
    """Moves that are under way, drivers that borrow, and agents that store columns elsewhere go on by
    the new rules."""
    more = {one for follow in _listeners for one in follow()}
    if {"borrow", "moves_percent"} & set(names):
        more |= {control.ALL_NODES, control.ALL_DRIVERS}
    if "borrow" in names:
        more.add(control.ALL_BRAINS)
    if more:
        control.changed(more, f"{rules} were changed")


def _tell_sessions(changed: RuleSet) -> None:
    """Sessions hold the limits themselves, so that the database can refuse what breaks them."""
    sessions = Session.objects.select_related("org")
    if changed.org is not None:
        sessions = sessions.filter(org=changed.org)
    limits = {org: effective_rules(org) for org in {session.org for session in sessions}}
    for session in sessions:
        limit_to(session, limits[session.org])
    Session.objects.bulk_update(sessions, ["boxes_min", "boxes_increment", "boxes_max"])


def limit_to(session: Session, rules: Rules) -> None:
    session.boxes_min = rules.boxes_min
    session.boxes_increment = rules.boxes_increment
    session.boxes_max = rules.boxes_max


@undoable("rules.update", Impossible, Misconfigured)
def _undo(principal: Principal, entry: AuditEntry, reason: str) -> None:
    org = Org.objects.filter(pk=entry.org_id).first() if entry.org_id else None
    if entry.org_id and org is None:
        raise CannotUndo("The org no longer exists.")
    rules = for_change(principal, org)
    after = entry.after or {}
    # An entry of an earlier version says nothing of rules that came later.
    if {name: value for name, value in rules.snapshot().items() if name in after} != after:
        raise CannotUndo("The rules were changed again since. Undo the later change first.")
    set_rules(principal, rules, entry.before or {}, reason=reason)
