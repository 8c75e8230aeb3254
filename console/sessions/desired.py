"""The parts of desired documents that follow from sessions: a driver's homes and siblings, and a node's
shards."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from django.db.models import Q, QuerySet

from console.control.documents import (
    Idle,
    NotYet,
    Part,
    common_part,
    part,
    round_addition,
    round_part,
)
from console.control.services import secrets_of
from console.fleet.models import Driver, Node, Removed, SpineLink
from console.placement.rules import Rules
from console.placement.topology import Tier
from console.sessions import endpoints
from console.sessions.budgets import Budgets
from console.sessions.fragments import AllFragments
from console.sessions.models import FormerHome, Job, Phase, Stream
from console.sessions.plans.model import model_of
from console.sessions.rules import effective_rules, effective_rules_of_all
from console.sessions.siblings import Sibling, Siblings
from kvss_agent.data_plane.address import Address
from kvss_agent.desired import SHARDS_MAX
from swdriver_shim.desired import AGENTS_REMOVED_MAX, BORROWERS_MAX
from swdriver_shim.layout import part_name
from swdriver_shim.lending import token_for


@part("driver")
def homes(name: str) -> Mapping[str, Any]:
    """Where the streams of its job are: while one moves, where it goes on."""
    related = ("session__org", "driver")
    job = Job.objects.filter(driver__name=name).select_related(*related).first()
    if job is None:
        raise Idle("It has no job: register one in a session.")
    if not job.running:
        raise NotYet("The streams of its job are being made.")
    streams = job.streams.select_related("node", "next_node", "box")
    worst = effective_rules(job.session.org, job.session.path).limit(float("inf")).worst
    return {"homes": [_home(job, stream, worst) for stream in streams]}


@common_part("driver")
def agents_removed() -> Mapping[str, Any]:
    """Where nobody is any more. Left out while there is none: older drivers refuse the field."""
    there = {address for node in Node.objects.all() for address in _addresses(node)}
    gone = Removed.objects.filter(kind="node", was_replaced=False)[:AGENTS_REMOVED_MAX]
    former = (
        Node(name=one.name, data_address=one.data_address, public_key=one.public_key) for one in gone
    )
    # Newest first; each once.
    found = dict.fromkeys(address for node in former for address in _addresses(node))
    left = [address for address in found if address not in there][:AGENTS_REMOVED_MAX]
    return {"agents_removed": sorted(left)} if left else {}


@round_part("driver")
def agents_moved() -> Part:
    """Where agents are now that a driver waits for at an earlier address: only there it can empty what
    it has left. Older drivers refuse the field, and do not say where they wait."""
    found: dict[str, set[str]] = defaultdict(set)
    for home in FormerHome.objects.exclude(address="").select_related("driver", "node"):
        now = endpoints.address(home.node, Tier.LEAF)
        if Address.parse(now).key:
            found[home.driver.name].add(now)

    def of(name: str) -> Mapping[str, Any]:
        its = sorted(found.get(name, ()))[:AGENTS_REMOVED_MAX]
        return {"agents_moved": its} if its else {}

    return of


def _addresses(node: Node) -> set[str]:
    return {endpoints.address(node, tier) for tier in Tier}


def _home(job: Job, stream: Stream, worst: Tier) -> dict[str, Any]:
    stream.job = job
    goes_on = stream.phase == Phase.MOVING
    node = stream.next_node if goes_on and stream.next_node else stream.node
    tier, port_leaf, nic_leaf = (
        (stream.next_tier, stream.next_port_leaf, stream.next_nic_leaf)
        if goes_on
        else (stream.tier, stream.port_leaf, stream.nic_leaf)
    )
    path = Tier(tier or 0)
    return {
        "group": stream.group,
        "index": stream.index,
        "address": endpoints.address(node, path),
        "shard": stream.name,
        **_control(job, stream, node),
        "path": {
            "session": job.session.name,
            "tier": path.name.lower(),
            "box": stream.box.name,
            "domain": stream.domain,
            "port_leaf": port_leaf,
            "nic_leaf": nic_leaf,
            "node": node.name,
            "link": _link(stream.name, port_leaf) if path is Tier.SPINE else "",
            "allowed": path <= worst,
        },
    }


def _control(job: Job, stream: Stream, node: Node) -> dict[str, Any]:
    """While it moves: what its driver may ask of the node where it goes on. Nobody is given a token."""
    if stream.phase != Phase.MOVING or stream.next_node is None:
        return {}
    from console.authority.capabilities import for_move  # with certificates; few documents have a move
    from kvss_agent.security.identity import fingerprint

    source = endpoints.address(stream.node, Tier(stream.tier))
    capability = for_move(
        job.driver,
        node,
        shard=stream.name,
        source=source,
        slots=max(stream.slots, stream.next_slots or 0),
    )
    if capability is None:
        return {}
    key = fingerprint(node.public_key)
    return {"control": {"url": node.control_url, "capability": capability, "key": key}}


def _link(stream: str, leaf: str) -> str:
    """Of a leaf's links to the spine the one that this stream's bytes are booked on: always the same."""
    links = list(
        SpineLink.objects.filter(leaf__name=leaf).order_by("name").values_list("name", flat=True)
    )
    return links[zlib.crc32(stream.encode()) % len(links)] if links else ""


def _on(node: Node) -> QuerySet[Stream]:
    return Stream.objects.filter(
        Q(node=node) & (Q(slots__gt=0) | Q(phase=Phase.SIZING))
        | Q(next_node=node, phase__in=[Phase.MAKING, Phase.MOVING])
    )


def shards_of_node(node: Node) -> set[str]:
    """What its document names: its streams, and the shards that fragments of others pass through."""
    streams = _on(node).select_related("job__driver", "job__session")
    fragments = AllFragments().at(node.name)
    return {stream.name for stream in streams}.union(one.name for one in fragments)


def streams_of_driver(name: str) -> set[tuple[str, int]]:
    """What its document names, by group and number."""
    streams = Stream.objects.filter(job__driver__name=name, job__running=True)
    return set(streams.values_list("group", "index"))


class _Known(NamedTuple):
    secret: bytes
    key: str  # the fingerprint of its public key; empty where it has none


class _Drivers:
    """What others are told of drivers. Each is read once a round: many nodes let the same ones in."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def of(self, names: Collection[str]) -> Mapping[str, _Known]:
        """Of these, and of others. Raises Driver.DoesNotExist."""
        if new := set(names) - self._known.keys():
            from kvss_agent.security.identity import fingerprint  # with certificates: see `endpoints`

            keys = dict(Driver.objects.filter(name__in=new).values_list("name", "public_key"))
            if gone := new - keys.keys():
                raise Driver.DoesNotExist(f"There is no driver {min(gone)} any more.")
            secrets = secrets_of("driver", new)
            for name, key in keys.items():
                self._known[name] = _Known(secrets[name], fingerprint(key) if key else "")
        return self._known


@round_part("driver")
def siblings_of_drivers() -> Part:
    return partial(siblings, found=Siblings(), drivers=_Drivers())


def siblings(name: str, *, found: Siblings, drivers: _Drivers) -> Mapping[str, Any]:
    """Whom it may borrow from, and who from it. Left out where there is none: older drivers refuse these
    fields."""
    its, borrowers = found.of(name), found.borrowers_of(name)[:BORROWERS_MAX]
    known = drivers.of([one.driver.name for one in its])
    return {
        **({"siblings": [_sibling(one, known[one.driver.name], name) for one in its]} if its else {}),
        **({"borrowers": borrowers} if borrowers else {}),
    }


def _sibling(one: Sibling, known: _Known, borrower: str) -> dict[str, Any]:
    said = {
        "driver": one.driver.name,
        "url": one.driver.control_url,
        "token": token_for(known.secret, borrower),
        "homes": [
            {
                "group": home.group,
                "index": home.index,
                "address": home.address,
                "shard": home.shard,
                "path": home.far.value,
                "bytes_per_second": home.bytes_per_second,
            }
            for home in one.homes
        ],
    }
    return {**said, "key": known.key} if known.key else said


@round_part("node")
def streams_of_nodes() -> Part:
    fragments = AllFragments()
    return partial(
        streams,
        siblings=Siblings(),
        drivers=_Drivers(),
        fragments=fragments,
        budgets=Budgets(fragments),
        rules=effective_rules_of_all(),
    )


@round_addition("node", "tier2")
def writes_of_nodes() -> Part:
    return partial(writes, budgets=Budgets(), percent=effective_rules_of_all()(None).moves_percent)


def writes(name: str, *, budgets: Budgets, percent: int) -> Mapping[str, Any]:
    """How fast it may write to a bucket or a shared directory."""
    found = budgets.of_writes(name, percent)
    return {"write_bytes_per_second": found} if found else {}


def streams(
    name: str,
    *,
    siblings: Siblings | None = None,
    drivers: _Drivers | None = None,
    fragments: AllFragments | None = None,
    budgets: Budgets | None = None,
    rules: Callable[[int | None], Rules] | None = None,
) -> Mapping[str, Any]:
    """All that it has or is about to have, and the drivers that may connect: those whose streams these
    are, those whose fragments it stores, those that may borrow from them, and those that have left."""
    node = Node.objects.get(name=name)
    found, siblings, drivers = _on(node), siblings or Siblings(), drivers or _Drivers()
    fragments = fragments or AllFragments()
    related = ("job__driver", "job__session__org", "node", "next_node")
    budgets, rules = budgets or Budgets(fragments), rules or effective_rules_of_all()
    specs = [
        # Without redundancy documents are what they were before: older agents refuse the field.
        {**_spec(stream, node, budgets), **_redundancy(stream, node, fragments, budgets, rules)}
        for stream in found.select_related(*related).order_by("pk")
    ]
    small = [one.spec() for one in fragments.at(name)][: max(0, SHARDS_MAX - len(specs))]
    former = FormerHome.objects.filter(node=node).values_list("driver__name", flat=True)
    own = {spec["driver"] for spec in (*specs, *small)}.union(former)
    readers = {one: siblings.borrowers_of(one) for one in {spec["driver"] for spec in specs}}
    others = sorted({one for some in readers.values() for one in some} - own)
    let_in = own.union(others[: max(0, SHARDS_MAX - len(own))])
    known = drivers.of(let_in)
    return {
        "shards": [*(_with_readers(spec, readers, let_in) for spec in specs), *small],
        "peers": [_peer(driver, known[driver], node) for driver in sorted(let_in)],
    }


def _with_readers(
    spec: Mapping[str, Any], readers: Mapping[str, Collection[str]], let_in: Collection[str]
) -> Mapping[str, Any]:
    """Left out while there is none, so that documents are what they were before drivers lent."""
    found = [one for one in readers[spec["driver"]] if one in let_in]
    return {**spec, "readers": found} if found else spec


def _peer(driver: str, known: _Known, node: Node) -> dict[str, Any]:
    """An agent that has no key itself is of a version that knows of none."""
    said = {"name": driver, "secret": known.secret}
    return {**said, "key": known.key} if known.key and node.public_key else said


def _redundancy(
    stream: Stream,
    node: Node,
    fragments: AllFragments,
    budgets: Budgets,
    rules: Callable[[int | None], Rules],
) -> Mapping[str, Any]:
    told = fragments.told(stream, node)
    if not told:
        return {}
    budget = budgets.of_fragments(stream, rules(stream.job.session.org_id).moves_percent)
    more = {"bytes_per_second": budget.bytes_per_second} if budget else {}
    return {"redundancy": {**told["redundancy"], **more}}


def _spec(stream: Stream, node: Node, budgets: Budgets) -> dict[str, Any]:
    comes = stream.node_id != node.pk
    percent = effective_rules(stream.job.session.org).moves_percent if comes else 0
    budget = budgets.of(stream, percent) if comes else None
    sizing = stream.phase == Phase.SIZING
    return {
        "name": stream.name,
        "driver": stream.job.driver.name,
        "slot_bytes": stream.slot_bytes,
        "slots": stream.next_slots if comes or sizing else stream.slots,
        "applied": stream.next_count_from if comes else stream.count_from,
        "namespace": model_of(stream.job.driver).namespace().digest().hex(),
        "part": part_name(stream.group, stream.index),
        **({"pull_bytes_per_second": budget.bytes_per_second} if budget else {}),
    }
