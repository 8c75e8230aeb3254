"""Stores of tier 2 that a node had: they stay in its desired document until its agent finds them empty.

A store becomes a retiring one when the description names another place, or none, for a node that has
joined. When the same place is described again it is in use again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from django.db import transaction
from django.http import Http404
from django.utils import timezone

from console.accounts.principal import Principal
from console.audit.services import Subject, record
from console.control.models import Change, Kind, Target
from console.control.sending import Call, Endpoint, ask_all
from console.control.services import changed
from console.fleet.descriptions import tier2
from console.fleet.models import Node, Removed, RetiringStore, topic
from console.fleet.nodes import Impossible
from console.fleet.services import reachable_nodes
from telemetry import decoder
from telemetry.decoder import Count, Malformed

log = logging.getLogger(__name__)

STORES_MAX: Final = 8  # of one node
FORGOTTEN_MAX: Final = 100  # on a receipt
NAMED_MAX: Final = 5  # nodes in a sentence
EMPTY: Final = "empty"  # as agents say it
NO_IDENTITY: Final = (
    "Its agent does not look after a store that is not used any more, so files would stay at the old "
    "place. Update the agent, and let it join again."
)
_URL: Final = "/v1/observed"
_Said = Mapping[str, Any]


def place_of(said: _Said) -> str:
    """Where the files of a described tier 2 lie."""
    return tier2.settings_of(tier2.told(said)).place


def follow(node: Node, before: _Said | None, after: _Said | None) -> None:
    """The description of this node's tier 2 has changed, in this transaction."""
    if after:
        RetiringStore.objects.filter(node=node, place=place_of(after)).delete()
    if before and node.has_joined and _moves(before, after):
        RetiringStore.objects.update_or_create(
            node=node,
            place=place_of(before),
            defaults={"said": dict(before), "since": timezone.now(), "is_drained": False},
        )


def _moves(before: _Said, after: _Said | None) -> bool:
    return after is None or place_of(after) != place_of(before)


def refusals(before: Mapping[str, _Said | None], after: Mapping[str, _Said | None]) -> dict[str, str]:
    """By node why its tier 2 can't become that: both are what is said of it, by the node's name."""
    moving = {name: said for name, said in before.items() if said and _moves(said, after.get(name))}
    found: dict[str, str] = {}
    nodes = Node.objects.filter(name__in={*moving, *after}, joined_at__isnull=False)
    for node in nodes.prefetch_related("retiring_stores"):
        old, new = moving.get(node.name), after.get(node.name)
        stores = list(node.retiring_stores.all())
        retiring = [*(store.said for store in stores), *([old] if old else [])]
        if old and not node.public_key:
            found[node.name] = NO_IDENTITY
        elif old and len(stores) >= STORES_MAX:
            found[node.name] = (
                f"{len(stores)} earlier stores of it are not empty yet. Drain one of them first."
            )
        elif new and (other := _overlap(new, [store.said for store in stores] + [old])):
            found[node.name] = (
                f"{new['path']} and its earlier store {other} lie within each other, so nobody could "
                "tell whose files are whose. Take another path."
            )
        elif new and (other := _at_front(new, retiring)):
            found[node.name] = (
                f"The front {new['front']['path']} is where its earlier store {other} is emptied, and "
                "would be emptied with it. Take another path, or wait until that is empty."
            )
    return {**_being_emptied(before, after), **found}


def _being_emptied(
    before: Mapping[str, _Said | None], after: Mapping[str, _Said | None]
) -> dict[str, str]:
    """By node that would store where the files of another one are being removed: its own would go."""
    arriving = {
        name: said
        for name, said in after.items()
        if said and (not (old := before.get(name)) or _moves(old, said))
    }
    found: dict[str, str] = {}
    if not arriving:
        return found
    drained = RetiringStore.objects.filter(is_drained=True).select_related("node").order_by("pk")
    for store in drained:
        back = arriving.get(store.node.name)
        if back and place_of(back) == store.place:
            continue  # it is in use again
        for name, said in arriving.items():
            if name != store.node.name and tier2.may_share_files(store.said, said):
                found[name] = (
                    f"{store.place} is being emptied for {store.node.name}, and what others store "
                    "there is removed as well. Wait until it is empty, or take another place."
                )
    return found


def others_at(node: Node, stores: Collection[RetiringStore]) -> dict[int, list[str]]:
    """By key of a store of this node, the nodes whose tier 2 is described to be in the same place: what
    they have there would be removed like the node's own. Joined or not: they may be about to. The node
    itself is one of them if it uses a bucket of the same name at another endpoint, which may be another
    name of the same server."""
    found: dict[int, list[str]] = {store.pk: [] for store in stores}
    if not found:
        return found
    nodes = Node.objects.filter(declared__has_key="tier2").order_by("name")
    for pk, name, declared in nodes.values_list("pk", "name", "declared"):
        said = declared["tier2"]
        if pk == node.pk and said.get("kind") != "s3":
            continue
        for store in stores:
            if tier2.may_share_files(store.said, said, by_any_endpoint=True):
                found[store.pk].append(name)
    return found


def named(names: Sequence[str]) -> str:
    """Some of them, in a sentence."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def follows(before: Mapping[str, _Said | None], after: Mapping[str, _Said | None]) -> dict[str, str]:
    """By node what becomes of the store that it has, where its tier 2 becomes another one."""
    moving = {name: said for name, said in before.items() if said and _moves(said, after.get(name))}
    joined = Node.objects.filter(name__in=moving, joined_at__isnull=False).values_list("name", flat=True)
    return {
        name: (
            f"{place_of(moving[name])} is retiring then: nothing is served from it. Its files expire "
            "and are purged as before, or are removed from the node's page."
        )
        for name in joined
    }


def _overlap(new: _Said, others: Collection[_Said | None]) -> str:
    """The path of a store that this one lies in, or the other way; not of itself."""
    path = f"{new.get('path', '').rstrip('/')}/"
    known = [f"{other.get('path', '').rstrip('/')}/" for other in others if other]
    near = [one for one in known if one != path and (one.startswith(path) or path.startswith(one))]
    return next((one.rstrip("/") for one in near if "/" not in (one, path)), "")


def _at_front(new: _Said, others: Iterable[_Said]) -> str:
    """The path of a store that the front of this one is in, or the other way."""
    front = new.get("front")
    paths = [one["path"].rstrip("/") for one in others if front and one.get("path")]
    here = f"{front['path'].rstrip('/')}/" if front else ""
    return next((one for one in paths if here.startswith(f"{one}/") or f"{one}/".startswith(here)), "")


def shared_places(node: Node) -> list[str]:
    """Its stores where others can write, too: they stay when it goes. A disk of its own goes with it."""
    said = [store.said for store in node.retiring_stores.all()]
    if in_use := node.declared.get("tier2"):
        said.append(in_use)
    return sorted({place_of(one) for one in said if one.get("shared", True)})


def forgotten(since: datetime) -> list[tuple[str, datetime]]:
    """Stores of nodes that were removed since then, and that no node of now looks after: by the name of
    the node, and when it was removed."""
    nodes = Node.objects.prefetch_related("retiring_stores")
    covered = {place for node in nodes for place in shared_places(node)}
    gone = Removed.objects.filter(kind="node", removed_at__gte=since).exclude(stores=[])
    found = [(one.name, one.removed_at) for one in gone for place in one.stores if place not in covered]
    return found[:FORGOTTEN_MAX]


def _found_empty(store: RetiringStore) -> None:
    """Forget that removed nodes have files there, unless it is a disk that only has the same path.

    The word of an agent is enough for its own files only: a node that joined again with its key. It is
    enough for files of others where an admin had them removed by this agent (`drain`).
    """
    if not store.said.get("shared", True):
        return
    place = store.place
    removed = Removed.objects.select_for_update(no_key=True).filter(stores__contains=[place])
    if not store.is_drained:
        removed = removed.filter(public_key=store.node.public_key).exclude(public_key="")
    for one in removed:
        one.stores.remove(place)
        one.save(update_fields=["stores"])


def told(name: str) -> list[dict[str, Any]]:
    """As they stand in the node's desired document."""
    found = []
    for store in RetiringStore.objects.filter(node__name=name):
        said = tier2.told(store.said)
        found.append({**said, "cap_bytes": 0} if store.is_drained else said)
    return found


@transaction.atomic
def drain(
    principal: Principal, node: Node, key: int, *, also_others: bool = False, reason: str = ""
) -> RetiringStore:
    """Have the files of a retiring store removed. `node` came from `for_change`. Raises Http404, and
    Impossible where other nodes store in the same place, unless their files are to go as well."""
    store = RetiringStore.objects.select_for_update(no_key=True).filter(node=node, pk=key).first()
    if store is None:
        raise Http404(f"{node.name} has no such store.")
    if store.is_drained:
        return store
    others = others_at(node, [store])[store.pk]
    if others and not also_others:
        raise Impossible(
            f"{store.place} is also tier 2 of {named(others)}, or one lies within the other: files of "
            "those nodes would be removed, too. Give them another place first, or say that their files "
            "go as well."
        )
    store.is_drained = True
    store.save(update_fields=["is_drained"])
    record(
        principal,
        "node.drain_store",
        Subject("node", node.name, node.name, topics=[topic(node)]),
        after={"place": store.place, **({"also_of": others} if others else {})},
        reason=reason,
    )
    changed([(Kind.NODE.value, node.name)], f"a store of {node.name} is drained")
    return store


# How far they are


class _Store(msgspec.Struct, frozen=True):
    place: str
    state: str
    reason: str = ""
    files: Count | None = None
    bytes: Count | None = None


class _Tier2(msgspec.Struct, frozen=True):
    retiring: Annotated[list[_Store], msgspec.Meta(max_length=1000)] = []


class _Observed(msgspec.Struct, frozen=True):
    generation: Count
    observed_generation: Count
    tier2: _Tier2


_OBSERVED: Final = msgspec.json.Decoder(_Observed)


def look() -> int:
    """Ask the agents that have retiring stores how far they are; how many stores are left."""
    nodes = list(reachable_nodes().filter(retiring_stores__isnull=False).distinct().order_by("name"))
    asked_at = timezone.now()
    calls = [Call(Endpoint.of(one), "GET", _URL) for one in nodes]
    for node, answer in zip(nodes, ask_all(calls) if calls else [], strict=True):
        if isinstance(answer, str) or not answer.is_success:
            continue
        try:
            observed = decoder.decode(answer.content, _OBSERVED)
        except Malformed as error:
            log.warning("What %s says of its stores makes no sense: %s", node.name, error)
            continue
        _note(node, observed, asked_at)
    return RetiringStore.objects.count()


@transaction.atomic
def _note(node: Node, observed: _Observed, asked_at: datetime) -> None:
    """A store is done with if the agent follows what is intended now, and found it empty: it may have
    been used again since."""
    said = {one.place: one for one in observed.tier2.retiring}
    target = Target.objects.filter(kind=Kind.NODE, name=node.name).first()
    last = Change.objects.filter(targets__contains=[[Kind.NODE.value, node.name]]).first()
    is_current = (
        target is not None
        and observed.observed_generation == observed.generation == target.generation
        and target.change >= (last.pk if last else 0)
    )
    gone = False
    for store in RetiringStore.objects.select_for_update(no_key=True).filter(node=node).order_by("pk"):
        one = said.get(store.place)
        if one is None:
            continue
        if one.state == EMPTY and is_current:
            store.delete()
            _found_empty(store)
            gone = True
            continue
        store.state = decoder.excerpt(one.state, 16)
        store.reason = decoder.excerpt(one.reason, 500)
        store.files, store.bytes, store.seen_at = one.files, one.bytes, asked_at
        store.save(update_fields=["state", "reason", "files", "bytes", "seen_at"])
    if gone:
        changed([(Kind.NODE.value, node.name)], f"a store of {node.name} is empty")
