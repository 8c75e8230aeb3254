"""The keys of orgs and their epochs: each purge begins an epoch, and nothing can name what is older.

Columns are named and found by keys that are made of the org's secret, and carry an isolation tag made of
it, in memory, in files, and in what drivers note for their next life. A purge replaces the secret. So
whatever comes back from before, a directory that was away, a backup, a node, a note, carries a tag that
is nobody's: no driver can make the keys to it, agents do not serve it, and they remove it. No clock has
to be right for that.

The tags of before are kept until a purge of all has been confirmed: they name what has to be removed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator

from django.db import transaction
from django.utils import timezone

from console.control.services import ALL_BRAINS, ALL_NODES, changed
from console.orgs.models import Org
from console.policies.models import OrgKeys, new_data_key, new_secret
from console.sessions import driver_orgs
from kvss_agent.security.confirmations import Scope
from swdriver_shim.keys import isolation_tag
from telemetry.decoder import decode


def keys_of(orgs: list[Org]) -> dict[int, OrgKeys]:
    """By org. Those that have none yet get theirs."""
    known = {keys.org_id: keys for keys in OrgKeys.objects.filter(org__in=orgs)}
    without = [org for org in orgs if org.pk not in known]
    if without:
        OrgKeys.objects.bulk_create([OrgKeys(org=org) for org in without], ignore_conflicts=True)
        known |= {keys.org_id: keys for keys in OrgKeys.objects.filter(org__in=without)}
    return known


def secrets_of(keys: OrgKeys) -> dict[str, bytes]:
    """In place of its secret, of models of which all was purged."""
    return decode(str(keys.model_secrets), dict[str, bytes])


def tags_of(org: Org, keys: OrgKeys) -> list[str]:
    """All that its columns may carry now, in hex."""
    secrets = [bytes(keys.secret), *secrets_of(keys).values()]
    return [isolation_tag(org.slug, secret).hex() for secret in secrets]


def tags_by_org(orgs: list[Org]) -> Iterator[tuple[Org, list[str]]]:
    keys = keys_of(orgs)
    for org in orgs:
        yield org, tags_of(org, keys[org.pk])


@transaction.atomic
def begin(org: Org, why: str, *, model: str = "", namespaces: Iterable[str] = ()) -> OrgKeys:
    """A new epoch: of all models, or of one, which lies in these namespaces. Drivers and agents are told
    after the commit."""
    keys_of([org])
    keys = OrgKeys.objects.select_for_update(no_key=True).get(org=org)
    if model:
        secrets = secrets_of(keys)
        before = isolation_tag(org.slug, secrets.get(model, bytes(keys.secret))).hex()
        gone = [Scope(before, namespace) for namespace in namespaces]
        secrets[model] = new_secret()
        told = {name: base64.b64encode(secret).decode() for name, secret in secrets.items()}
        keys.model_secrets = json.dumps(told)
    else:
        gone = [Scope(tag) for tag in tags_of(org, keys)]
        keys.secret, keys.data_key, keys.model_secrets = new_secret(), new_data_key(), "{}"
        keys.data_key_at = timezone.now()
    keys.epoch += 1
    keys.retired += [[scope.tag, scope.namespace] for scope in gone]
    keys.save()
    targets = [*driver_orgs.addresses(org), ALL_NODES, ALL_BRAINS]
    changed(targets, f"epoch {keys.epoch} of {org.slug}: {why}")
    return keys


def retired(keys: OrgKeys) -> list[Scope]:
    """What has to be removed, since no purge of it has been confirmed by all."""
    return [Scope(tag, namespace) for tag, namespace in keys.retired]


@transaction.atomic
def confirmed(org_id: int, scopes: Iterable[Scope]) -> None:
    """All have confirmed that nothing of these is left."""
    keys = OrgKeys.objects.select_for_update(no_key=True).filter(org_id=org_id).first()
    if keys is not None:
        gone = set(scopes)
        keys.retired = [one for one in keys.retired if Scope(*one) not in gone]
        keys.save(update_fields=["retired"])
