"""The parts of desired documents that follow from policies: what drivers and agents are told of orgs.

Agents know an org only by its tags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from console.control.documents import Part, addition, round_part
from console.orgs.models import Org
from console.policies.models import Caller
from console.policies.org_keys import keys_of, secrets_of, tags_by_org
from console.policies.services import active_policies
from console.policies.tier2_limits import tier2_limits_of
from console.sessions.driver_orgs import ids_of
from swdriver_shim.desired import OrgSpec


@round_part("driver")
def orgs() -> Part:
    """The orgs that a driver may serve, with their keys, their policies within the limits, and the
    tokens of their engines; and nothing of any other org."""
    return _Orgs().of_driver


class _Orgs:
    """Each org is encoded once a round, and so is each set of orgs: most drivers serve the same ones."""

    def __init__(self) -> None:
        self._encoded: dict[int, bytes] = {}
        self._joined: dict[frozenset[int] | None, msgspec.Raw] = {}

    def of_driver(self, name: str) -> Mapping[str, Any]:
        ids = ids_of(name)
        if ids not in self._joined:
            self._joined[ids] = self._join(ids)
        return {"orgs": self._joined[ids]}

    def _join(self, ids: frozenset[int] | None) -> msgspec.Raw:
        found = Org.objects.order_by("slug")
        wanted = list(found if ids is None else found.filter(pk__in=ids))
        self._encode([org for org in wanted if org.pk not in self._encoded])
        return msgspec.Raw(b"[" + b",".join(self._encoded[org.pk] for org in wanted) + b"]")

    def _encode(self, wanted: Collection[Org]) -> None:
        if not wanted:
            return
        keys = keys_of(list(wanted))
        callers: dict[int, list[str]] = {}
        theirs = Caller.objects.filter(org__in=wanted).order_by("token_sha256")
        for org_id, token in theirs.values_list("org_id", "token_sha256"):
            callers.setdefault(org_id, []).append(token)
        for held in active_policies(wanted):
            mine = keys[held.org.pk]
            spec = OrgSpec(
                name=held.org.slug,
                secret=bytes(mine.secret),
                policies=held.policies,
                data_key=bytes(mine.data_key) or None,
                tokens=tuple(callers.get(held.org.pk, ())),
                secrets=secrets_of(mine),
            )
            self._encoded[held.org.pk] = msgspec.json.encode(spec)


@addition("node", "orgs")
def tags() -> Mapping[str, Any]:
    """The current tags of all orgs. What carries another tag belongs to no org and is deleted."""
    orgs = list(Org.objects.order_by("slug"))
    return {"tags": sorted(tag for _, tags in tags_by_org(orgs) for tag in tags)}


@addition("node", "retiring")
@addition("node", "tier2")
def tier2_limits() -> Mapping[str, Any]:
    """How much of tier 2 each org may fill, and for how long files without a request stay there."""
    orgs = list(Org.objects.order_by("slug"))
    tags = {org.pk: tags for org, tags in tags_by_org(orgs)}
    told = {
        tag: tier2_limits_of(held.policies)
        for held in active_policies(orgs)
        for tag in tags[held.org.pk]
    }
    return {
        "org_caps": {tag: one.bytes_max for tag, one in told.items() if one.bytes_max is not None},
        "org_ttl_seconds": {
            tag: one.seconds_max for tag, one in told.items() if one.seconds_max is not None
        },
    }
