"""Uploaded tokenizers: who may see, add and delete them, and where they are.

A tokenizer is known by the hash of what is in it. The database says whose it is; the files are in the
store, from which brains read them as a folder and managers fetch them as an archive. Files are removed
when they belong to nobody any more, under the lock under which they are added.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.signing import BadSignature, Signer
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import Http404
from django.urls import reverse

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.fleet.nodes import Impossible
from console.fleet.services import lock_fleet
from console.orgs.models import Org
from console.visibility import of_orgs, sees_fleet
from console.workloads import services
from console.workloads.models import Instance, Revision, Tokenizer, Workload
from console.workloads.spec import TokenizerSource
from workload_manager.tokenizers import BadArchive, NotStored, TokenizerStore, family

KIND: Final = "tokenizer"
OF_ORG_MAX: Final = 100  # tokenizers of an org, and of the platform
CHECKS_MAX: Final = 2
NAMED_MAX: Final = 5


def store() -> TokenizerStore:
    return TokenizerStore(settings.TOKENIZERS)


def folder(sha256: str) -> str:
    """Where brains read it."""
    return str(Path(settings.TOKENIZERS) / "sha256" / sha256)


def visible(principal: Principal) -> QuerySet[Tokenizer]:
    """Those of their orgs, and those of the platform, which all orgs may use; for people of the
    platform, all."""
    found = Tokenizer.objects.select_related("org")
    return found if sees_fleet(principal) else found.filter(of_orgs(principal) | Q(org=None))


def get(principal: Principal, number: int) -> Tokenizer:
    found = visible(principal).filter(pk=number).first()
    if found is None:
        raise Http404("There is no such tokenizer, or it is not yours to see.")
    return found


def usable_by(org: Org | None) -> QuerySet[Tokenizer]:
    """Those that a workload of this org, or of the platform, may name."""
    return Tokenizer.objects.filter(Q(org=None) | Q(org=org) if org else Q(org=None))


def families_folder() -> Path:
    return Path(settings.TOKENIZERS) / "families"


def folder_of(source: TokenizerSource) -> str:
    """On the machines of engines and brains; empty for one that was uploaded."""
    return str(families_folder() / source.family) if source.family else source.folder


def check(source: TokenizerSource | None, org: Org | None) -> None:
    """Raises ValidationError for a tokenizer that a workload of this owner can't name."""
    if source is not None and source.family:
        try:
            family(families_folder(), source.family)
        except NotStored as error:
            raise ValidationError({"tokenizer": str(error)}) from None
    sha256 = source.sha256 if source is not None else None
    if sha256 is not None and not usable_by(org).filter(sha256=sha256).exists():
        whose = f"{org.slug} and the platform have" if org else "the platform has"
        sentence = f"There is no tokenizer {sha256[:16]}… that {whose} uploaded. Upload it first."
        raise ValidationError({"tokenizer": sentence})


def users_of(shown: Sequence[Tokenizer], principal: Principal | None = None) -> dict[int, list[str]]:
    """By tokenizer, the names of workloads with a revision that names it and that may have it from
    nowhere else; with a principal, of those that they may see. As many queries for many as for one."""
    hashes = {one.sha256 for one in shown}
    owners: dict[str, set[int | None]] = {}
    for sha256, org in Tokenizer.objects.filter(sha256__in=hashes).values_list("sha256", "org"):
        owners.setdefault(sha256, set()).add(org)
    named = (
        Revision.objects.filter(template__tokenizer__sha256__in=hashes)
        .order_by()
        .values_list("template__tokenizer__sha256", "workload")
        .distinct()
    )
    workloads: dict[str, set[int]] = {}
    for sha256, workload in named:
        workloads.setdefault(sha256, set()).add(workload)
    seen = Workload.objects.filter(of_orgs(principal) if principal else Q())
    by_number = seen.in_bulk({one for found in workloads.values() for one in found})
    return {
        one.pk: sorted(
            by_number[number].name
            for number in workloads.get(one.sha256, ())
            if number in by_number and _needs(by_number[number], one, owners[one.sha256])
        )
        for one in shown
    }


def _needs(workload: Workload, tokenizer: Tokenizer, owners: AbstractSet[int | None]) -> bool:
    """Whether a workload that names its hash has it from there, and from nowhere else."""
    if tokenizer.org_id is not None:
        return workload.org_id == tokenizer.org_id and None not in owners
    return workload.org_id is None or workload.org_id not in owners


class TooManyChecks(Exception):
    """In a sentence."""


class Checks:
    """Uploads that this process checks, each with gigabytes of memory and up to a minute: a few at once,
    and of each owner one."""

    def __init__(self, most: int = CHECKS_MAX) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._owners: set[str] = set()

    @contextmanager
    def one(self, owner: str) -> Iterator[None]:
        """Raises TooManyChecks."""
        with self._lock:
            if owner in self._owners or len(self._owners) >= self._most:
                raise TooManyChecks("Other tokenizers are being checked. Try again in a minute.")
            self._owners.add(owner)
        try:
            yield
        finally:
            with self._lock:
                self._owners.discard(owner)


CHECKS: Final = Checks()


def add(principal: Principal, org_slug: str | None, name: str, archive: bytes) -> tuple[Tokenizer, bool]:
    """Check an archive and store it. Returns it, and whether it is new to its owner.

    Raises ValidationError for what is no tokenizer, and for one too many, TooManyChecks, Refused and
    Http404. Of one that is refused no files are left.
    """
    org = services.owner_of(principal, org_slug)
    _check_room(org)  # of who has none nothing is checked, and nothing stored
    try:
        with CHECKS.one(org_slug or ""):
            sha256 = store().add(archive)  # takes seconds, so before anything is locked
    except BadArchive as error:
        raise ValidationError({"archive": str(error)}) from None
    try:
        return _add_checked(principal, org, name, sha256, archive)
    except BaseException:
        _remove_unowned()
        raise


def _check_room(org: Org | None) -> None:
    """Raises ValidationError."""
    if Tokenizer.objects.filter(org=org).count() >= OF_ORG_MAX:
        raise ValidationError({"archive": f"There are {OF_ORG_MAX} tokenizers already. Delete one."})


def _add_checked(
    principal: Principal, org: Org | None, name: str, sha256: str, archive: bytes
) -> tuple[Tokenizer, bool]:
    """What is in the store, unless who removed what nobody owned was faster."""
    with transaction.atomic():
        lock_fleet()
        if found := Tokenizer.objects.filter(org=org, sha256=sha256).first():
            return found, False
        _check_room(org)
        store().add_again(archive)
        size_bytes = sum(path.stat().st_size for path in store().folder(sha256).iterdir())
        made = Tokenizer.objects.create(
            sha256=sha256,
            org=org,
            name=name,
            size_bytes=size_bytes,
            author_id=principal.user_id,
            author_name=principal.name,
        )
        _record(principal, "tokenizer.upload", made, after=_snapshot(made))
    return made, True


@transaction.atomic
def delete(principal: Principal, number: int) -> Tokenizer:
    """Raises Impossible for one that a revision of a workload names, Refused and Http404."""
    principal.check_may_change()
    found = get(principal, number)
    services.owner_of(principal, found.org.slug if found.org else None)
    lock_fleet()
    if users := users_of([found])[found.pk]:
        more = f" and {len(users) - NAMED_MAX} more" if len(users) > NAMED_MAX else ""
        raise Impossible(
            f"{found.name} is used by revisions of {', '.join(users[:NAMED_MAX])}{more}: they may be "
            "rolled back to. Delete these workloads first."
        )
    _record(principal, "tokenizer.delete", found, before=_snapshot(found))
    Tokenizer.objects.filter(pk=found.pk).delete()
    transaction.on_commit(_remove_unowned)
    return found


@transaction.atomic
def _remove_unowned() -> None:
    """All of it, also what a process that was killed has left. What is being added comes back with
    `add_again`."""
    lock_fleet()
    owned = set(Tokenizer.objects.values_list("sha256", flat=True).distinct())
    for sha256 in set(store()) - owned:
        store().remove(sha256)


def _snapshot(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "name": tokenizer.name,
        "org": tokenizer.org.slug if tokenizer.org else None,
        "sha256": tokenizer.sha256,
    }


def _record(principal: Principal, action: str, tokenizer: Tokenizer, **more: Any) -> None:
    subject = Subject.of(KIND, tokenizer.pk, tokenizer.name, tokenizer.org)
    record(principal, action, subject, **more)


def may_delete(principal: Principal, tokenizer: Tokenizer) -> bool:
    """Its owner's admin, whether or not something uses it."""
    needed = Role.ORG_ADMIN if tokenizer.org_id is not None else Role.PLATFORM_ADMIN
    return principal.holds(needed, tokenizer.org_id) and not principal.read_only


# For managers, which have no token: who knows the address was told it by the orchestrator. It is good
# for as long as the instance runs that it was made for.


def _signer() -> Signer:
    return Signer(salt="tidegate.tokenizer")


def url(sha256: str, instance: str) -> str:
    """Where the manager of an instance fetches it."""
    signature = _signer().signature(f"{sha256}:{instance}")
    return settings.PUBLIC_URL + reverse("tokenizer-archive", args=[sha256, instance, signature])


def archive(sha256: str, instance: str, signature: str) -> bytes:
    """Raises Http404 also where the signature is not the console's, or the instance has ended."""
    try:
        _signer().unsign(f"{sha256}:{instance}:{signature}")
        if Instance.objects.filter(name=instance, ended_at=None).exists():
            return store().archive(sha256)
    except (BadSignature, NotStored):
        """As for an instance that has ended."""
    raise Http404("There is no such tokenizer.")
