"""Buckets that weights are read from: who may see, add, replace and delete credentials for them, and who
is told them.

Credentials go in and never come out, but to managers and compile jobs of a workload: those of its owner
for exactly this bucket of exactly this server, else the platform's if they are shared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import Http404
from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.fleet.nodes import Impossible
from console.fleet.services import lock_fleet
from console.orgs.models import Org
from console.visibility import of_orgs, sees_fleet
from console.workloads import services
from console.workloads.models import Bucket, Workload
from console.workloads.spec import Place, place_of, plain_endpoint, read
from telemetry.decoder import decode
from workload_manager.spec import WeightsSpec

KIND: Final = "bucket"
OF_ORG_MAX: Final = 100  # of an org, and of the platform
NAMED_MAX: Final = 5
ACCESS_KEY_MAX: Final = 128
SECRET_KEY_MAX: Final = 512
SESSION_TOKEN_MAX: Final = 8192
PRINTED: Final = r"^[\x21-\x7e]*$"
SECRETS: Final = {
    "access_key_id": ACCESS_KEY_MAX,
    "secret_access_key": SECRET_KEY_MAX,
    "session_token": SESSION_TOKEN_MAX,
}
_NEEDED: Final = ("access_key_id", "secret_access_key")


# Which are used


def chosen(known: Iterable[Bucket], org_id: int | None, place: Place) -> Bucket | None:
    """Whose credentials a workload of this owner reads a bucket with: its own, else the platform's if
    they are shared. None: it has to be public. Pure."""
    here = [one for one in known if one.place == place]
    own = (one for one in here if one.org_id == org_id)
    shared = (one for one in here if one.org_id is None and one.shared)
    return next(own, None) or next(shared, None)


def bucket_for(org_id: int | None, weights: WeightsSpec | None) -> Bucket | None:
    """As `chosen`, of all that there are."""
    place = place_of(weights)
    if place is None:
        return None
    known = _known().filter(name=place.bucket, endpoint=place.endpoint)
    return chosen(known, org_id, place)


def credentials_for(org_id: int | None, weights: WeightsSpec | None) -> dict[str, str]:
    """For the manager or the compile job of a workload of this owner; empty: the bucket is public."""
    used = bucket_for(org_id, weights)
    found = Bucket.objects.filter(pk=used.pk).first() if used is not None else None
    if found is None:
        return {}
    credentials = decode(str(found.credentials), dict[str, str])
    return credentials | ({"region": found.region} if found.region else {})


def sentence(org: Org | None, weights: WeightsSpec | None) -> str:
    """Whose credentials a workload of this owner would use; empty for weights of no bucket."""
    place, found = place_of(weights), bucket_for(org.pk if org else None, weights)
    if place is None:
        return ""
    if found is not None:
        whose = f"{found.org.slug}'s" if found.org else "the platform's"
        return f"Weights are read with {whose} credentials for {place}."
    whose = f"a workload of {org.slug}" if org else "a workload of the platform"
    return f"There are no credentials for {place} that {whose} may use: the bucket has to be public."


def users_of(shown: Sequence[Bucket], principal: Principal | None = None) -> dict[int, list[str]]:
    """By bucket, the names of workloads that are started with its credentials, by their current revision
    or the last that was rolled out; with a principal, of those that they may see. As many queries for
    many as for one."""
    known = list(_known().filter(name__in={one.name for one in shown}))
    found: dict[int, list[str]] = {one.pk: [] for one in shown}
    workloads = Workload.objects.filter(of_orgs(principal) if principal else Q(), deleting=False)
    for name, org_id, *told in workloads.order_by("name").values_list(
        "name", "org_id", "revision__template__weights", "stable__template__weights"
    ):
        places = {place_of(read(WeightsSpec, one)) for one in told if one} - {None}
        used = {one.pk for place in places if place and (one := chosen(known, org_id, place))}
        for number in used & found.keys():
            found[number].append(name)
    return found


# Who sees and changes them


def _known() -> QuerySet[Bucket]:
    """What is sealed is opened only when it is asked for."""
    return Bucket.objects.select_related("org").defer("credentials")


def visible(principal: Principal) -> QuerySet[Bucket]:
    """Those of their orgs, and those that the platform shares; for people of the platform, all."""
    if sees_fleet(principal):
        return _known()
    return _known().filter(of_orgs(principal) | Q(org=None, shared=True))


def get(principal: Principal, number: int) -> Bucket:
    found = visible(principal).filter(pk=number).first()
    if found is None:
        raise Http404("There is no such bucket, or it is not yours to see.")
    return found


def for_change(principal: Principal, number: int) -> Bucket:
    """The bucket, while nobody else changes it, for its owner's admin. Raises Refused and Http404."""
    principal.check_may_change()
    found = get(principal, number)
    services.owner_of(principal, found.org.slug if found.org else None)
    lock_fleet()
    return get(principal, number)


def may_change(principal: Principal, bucket: Bucket) -> bool:
    """Its owner's admin."""
    return principal.holds(Role.ORG_ADMIN, bucket.org_id) and not principal.read_only


@transaction.atomic
def add(
    principal: Principal,
    org_slug: str | None,
    *,
    name: str,
    endpoint: str = "",
    region: str = "",
    shared: bool = False,
    secrets: Mapping[str, str],
    reason: str = "",
) -> Bucket:
    """Store credentials for a bucket. Raises ValidationError by field, Refused and Http404."""
    org = services.owner_of(principal, org_slug)
    lock_fleet()
    made = Bucket(org=org, name=name, endpoint=plain_endpoint(endpoint))
    own = Bucket.objects.filter(org=org)
    if own.filter(name=made.name, endpoint=made.endpoint).exists():
        raise ValidationError({"name": f"There are credentials for {made} already: replace them."})
    if own.count() >= OF_ORG_MAX:
        raise ValidationError({"name": f"There are {OF_ORG_MAX} buckets already. Delete one."})
    _set(principal, made, region=region, shared=shared, secrets=secrets)
    made.save()
    _record(principal, "bucket.add", made, after=made.snapshot(), reason=reason)
    return made


@transaction.atomic
def replace(
    principal: Principal,
    bucket: Bucket,
    *,
    region: str = "",
    shared: bool = False,
    secrets: Mapping[str, str],
    reason: str = "",
) -> Bucket:
    """Replace the credentials of a bucket that came from `for_change`. Instances that run keep what they
    were told; the next ones, and the next compile job, get these. Raises ValidationError by field."""
    before = bucket.snapshot()
    _set(principal, bucket, region=region, shared=shared, secrets=secrets)
    bucket.version += 1
    bucket.changed_at = timezone.now()
    bucket.save()
    after = {**bucket.snapshot(), "credentials": "replaced"}
    _record(principal, "bucket.replace", bucket, before=before, after=after, reason=reason)
    return bucket


@transaction.atomic
def delete(principal: Principal, bucket: Bucket, *, reason: str = "") -> None:
    """Delete a bucket that came from `for_change`. Raises Impossible while workloads use it.

    No org can keep the platform from it: what is no longer shared is used by no workload of an org.
    """
    if users := users_of([bucket])[bucket.pk]:
        more = f" and {len(users) - NAMED_MAX} more" if len(users) > NAMED_MAX else ""
        named = f"{', '.join(users[:NAMED_MAX])}{more}"
        way = "Stop sharing it, or change these workloads" if bucket.shared else "Change these workloads"
        raise Impossible(f"The credentials for {bucket} are used by {named}. {way} first.")
    _record(principal, "bucket.delete", bucket, before=bucket.snapshot(), reason=reason)
    Bucket.objects.filter(pk=bucket.pk).delete()


def _set(
    principal: Principal, bucket: Bucket, *, region: str, shared: bool, secrets: Mapping[str, str]
) -> None:
    """Raises ValidationError by field; no sentence has what was sent."""
    wrong = {
        name: f"It has at most {most} printed characters, without blanks."
        for name, most in SECRETS.items()
        if len(secrets.get(name, "")) > most or not re.fullmatch(PRINTED, secrets.get(name, ""))
    }
    wrong |= {name: "It is missing." for name in _NEEDED if not secrets.get(name)}
    if shared and bucket.org_id is not None:
        wrong["shared"] = "Only credentials of the platform are shared with all orgs."
    if wrong:
        raise ValidationError(wrong)
    said = {name: secrets[name] for name in SECRETS if secrets.get(name)}
    bucket.region, bucket.shared = region, shared
    bucket.credentials = msgspec.json.encode(said).decode()
    bucket.author_id, bucket.author_name = principal.user_id, principal.name
    bucket.full_clean(validate_unique=False, validate_constraints=False)


def _record(principal: Principal, action: str, bucket: Bucket, **more: Any) -> None:
    subject = Subject.of(KIND, bucket.pk, str(bucket), bucket.org)
    record(principal, action, subject, **more)
