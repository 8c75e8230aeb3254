"""Policies in force: what holds for whom, and every way to change it.

A change is a new version; the one before stays as it is. What is in force is told to every driver after
the commit (`console.control`), as far as the cluster's limits allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import Max, QuerySet
from django.http import Http404

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Subject, record, undoable
from console.control.services import ALL_DRIVERS, ALL_NODES, changed
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import documents
from console.policies.documents import ClusterPolicies
from console.policies.models import PolicyInForce, PolicyVersion
from console.policies.tier2_limits import tier2_limits_of
from console.sessions import driver_orgs
from swdriver_shim.policy import OrgPolicies, Policy
from telemetry.topics import of_org

NO_REASON: Final = "Say why: it stands in the history, beside your name."


@dataclass(frozen=True, slots=True)
class Cluster:
    """The default and the limits, and which version of them."""

    number: int
    policies: ClusterPolicies
    version: PolicyVersion | None


@dataclass(frozen=True, slots=True)
class ActivePolicy:
    """What holds for an org. `own` is what it has said; None where it follows the default."""

    org: Org
    number: int
    own: OrgPolicies | None
    version: PolicyVersion | None
    cluster: Cluster

    @property
    def said(self) -> OrgPolicies:
        return self.own or OrgPolicies(policy=self.cluster.policies.default)

    @property
    def policies(self) -> OrgPolicies:
        """What drivers are told: what was said, as far as the limits allow."""
        return self.cluster.policies.limits.held_all(self.said)

    @property
    def policy(self) -> Policy:
        return self.policies.policy

    @property
    def document(self) -> str:
        return documents.write(self.own)

    @property
    def is_held_back(self) -> bool:
        return self.policies != self.said


# Reading


def cluster() -> Cluster:
    found = PolicyInForce.objects.select_related("version__change").filter(org=None).first()
    if found is None:
        return Cluster(0, ClusterPolicies(), None)
    return Cluster(found.version.number, documents.read_cluster(found.version.document), found.version)


def active_policy(org: Org, of_cluster: Cluster | None = None) -> ActivePolicy:
    return active_policies([org], of_cluster)[0]


def active_policies(found: Iterable[Org], of_cluster: Cluster | None = None) -> list[ActivePolicy]:
    """Of several orgs, in their order, in two statements."""
    listed, held = list(found), of_cluster or cluster()
    rows = PolicyInForce.objects.select_related("version__change").filter(org__in=listed)
    versions = {row.org_id: row.version for row in rows}
    return [_of(org, versions.get(org.pk), held) for org in listed]


def _of(org: Org, version: PolicyVersion | None, held: Cluster) -> ActivePolicy:
    own = documents.read_org(version.document) if version else None
    return ActivePolicy(org, version.number if version else 0, own, version, held)


def versions_of(org: Org | None) -> QuerySet[PolicyVersion]:
    """The newest first."""
    return PolicyVersion.objects.select_related("change").filter(org=org).order_by("-number")


def get_version(org: Org | None, number: int) -> PolicyVersion:
    version = versions_of(org).filter(number=number).first()
    if version is None:
        raise Http404(f"There is no version {number} of this policy.")
    return version


def is_saved_since(org: Org, moment: datetime) -> bool:
    """Whether somebody has saved a policy then or later; what schedules make does not count."""
    return PolicyVersion.objects.filter(org=org, author_id__isnull=False, made_at__gte=moment).exists()


def document_of(org: Org, number: int) -> str:
    """Of a version, or of version 0, which says nothing."""
    return get_version(org, number).document if number else documents.write(None)


# Changing


def check(policies: OrgPolicies | None, limits: documents.Limits) -> None:
    """Raises ValidationError, by field, for what the cluster's limits refuse."""
    found = list(documents.problems(policies, limits)) if policies else []
    if found:
        raise ValidationError({problem.at: [str(problem)] for problem in found})


def set_policy(
    principal: Principal,
    org: Org,
    policies: OrgPolicies | None,
    *,
    reason: str,
) -> ActivePolicy:
    """Put a new version in force for an org that came from `orgs.services.for_change`.

    None is to follow the cluster's default from now on. The same again changes nothing. Raises
    ValidationError, by field, for what the limits refuse and where there is no reason.
    """
    held = active_policy(org, settled_cluster())
    return replace(principal, held, policies, reason=reason)


def replace(
    principal: Principal,
    held: ActivePolicy,
    policies: OrgPolicies | None,
    *,
    reason: str,
) -> ActivePolicy:
    """As `set_policy`, for who has read what is active, with the org locked and the cluster settled."""
    check(policies, held.cluster.policies.limits)
    return _put(principal, held, documents.write(policies), reason=reason)


def restore(
    principal: Principal,
    org: Org,
    number: int,
    *,
    reason: str,
) -> ActivePolicy:
    """Put an earlier version in force again, as a new one that is equal to it byte for byte.

    0 is what there was before the first. Raises ValidationError where limits forbid it by now.
    """
    check(documents.read_org(document_of(org, number)), settled_cluster().policies.limits)
    return put_back(principal, org, number, reason=reason)


def put_back(
    principal: Principal,
    org: Org,
    number: int,
    *,
    reason: str,
) -> ActivePolicy:
    """As `restore`, whatever the limits are by now: drivers are told it as far as they allow, as if it
    had never been replaced. The database allows it for what a temporary policy has replaced."""
    document = document_of(org, number)
    return _put(principal, active_policy(org), document, reason=reason, same_as=number or None)


@transaction.atomic
def _put(
    principal: Principal,
    before: ActivePolicy,
    document: str,
    *,
    reason: str,
    same_as: int | None = None,
) -> ActivePolicy:
    check_reason(reason)
    org, held = before.org, before.cluster
    if document == before.document:
        return before
    number, own = _next_number(org), documents.read_org(document)
    record(
        principal,
        "policy.set",
        Subject.of("policy", org.slug, org.name, org),
        before={"version": before.number, "policies": documents.spelled_out(before.own)},
        after={"version": number, "policies": documents.spelled_out(own)},
        reason=reason,
    )
    version = _store(principal, org, number, document, reason, same_as, f"policy of {org.slug}")
    after = ActivePolicy(org, number, own, version, held)
    if tier2_limits_of(after.policies) != tier2_limits_of(before.policies):
        changed([ALL_NODES], f"tier 2 of {org.slug}: {reason}")
    return after


@transaction.atomic
def set_cluster(
    principal: Principal,
    policies: ClusterPolicies,
    *,
    reason: str,
    if_number: int | None = None,
) -> Cluster:
    """Set the default policy and the limits. What orgs have said stays, and is held to the new limits.

    `if_number` is the version that this was decided on: StaleCluster if another one is in force.
    """
    principal.check_may_change(Role.PLATFORM_ADMIN)
    check_reason(reason)
    if crossed := dict(policies.limits.crossed_by(policies.default)):
        raise ValidationError({f"default/{field}": [said] for field, said in crossed.items()})
    before = locked_cluster()
    if if_number is not None and if_number != before.number:
        raise StaleCluster(before.number)
    document = documents.write(policies)
    if before.version is not None and document == before.version.document:
        return before
    if before.version is None and policies == before.policies:
        return before
    number = _next_number(None)
    record(
        principal,
        "policy.cluster",
        Subject("policy", "cluster", "Default and limits", topics=["fleet"]),
        before={"version": before.number, "policies": documents.spelled_out(before.policies)},
        after={"version": number, "policies": documents.spelled_out(policies)},
        reason=reason,
    )
    _store(principal, None, number, document, reason, None, "default and limits of policies")
    changed([ALL_NODES], f"tier 2 by default and limits: {reason}")
    return cluster()


class StaleCluster(Exception):
    """Somebody has changed the default or the limits meanwhile; `number` is the version now."""

    def __init__(self, number: int) -> None:
        super().__init__("The default or the limits were changed since you read them. Read them again.")
        self.number = number


def _store(
    principal: Principal,
    org: Org | None,
    number: int,
    document: str,
    reason: str,
    same_as: int | None,
    what: str,
) -> PolicyVersion:
    version = PolicyVersion.objects.create(
        org=org,
        number=number,
        document=document,
        author_id=principal.user_id,
        author_name=principal.name,
        reason=reason,
        same_as=same_as,
        change=changed(
            driver_orgs.addresses(org) if org else [ALL_DRIVERS],
            f"{what}: {reason}",
            topic=of_org(org.slug) if org else "fleet",
        ),
    )
    if not PolicyInForce.objects.filter(org=org).update(version=version):
        PolicyInForce.objects.create(org=org, version=version)
    return version


def _next_number(org: Org | None) -> int:
    """Whoever asks holds the org's row, or the cluster's lock."""
    found = PolicyVersion.objects.filter(org=org).aggregate(last=Max("number"))["last"]
    return int(found or 0) + 1


def locked_cluster() -> Cluster:
    """Nobody else changes it until the end of the transaction. There may be no row yet to hold."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('policies of the cluster'))")
    return cluster()


def settled_cluster() -> Cluster:
    """As `locked_cluster`, beside others who save what these limits allow."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock_shared(hashtext('policies of the cluster'))")
    return cluster()


def check_reason(reason: str) -> None:
    if not reason.strip():
        raise ValidationError({"reason": [NO_REASON]})


# Taking back


@undoable("policy.set", documents.Malformed)
def _undo_policy(principal: Principal, entry: AuditEntry, reason: str) -> None:
    org = orgs.for_undo(principal, entry)
    before, after = _numbers(entry)
    if active_policy(org).number != after:
        raise CannotUndo("The policy was changed again since. Undo the later change first.")
    restore(principal, org, before, reason=reason)


@undoable("policy.cluster", documents.Malformed)
def _undo_cluster(principal: Principal, entry: AuditEntry, reason: str) -> None:
    before, after = _numbers(entry)
    policies = ClusterPolicies()
    if before:
        policies = documents.read_cluster(get_version(None, before).document)
    try:
        set_cluster(principal, policies, reason=reason, if_number=after)
    except StaleCluster:
        raise CannotUndo("They were changed again since. Undo the later change first.") from None


def _numbers(entry: AuditEntry) -> tuple[int, int]:
    """Of the versions before and after."""
    told: list[dict[str, Any]] = [entry.before or {}, entry.after or {}]
    return int(told[0]["version"]), int(told[1]["version"])
