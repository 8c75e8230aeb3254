"""The fleet as others ask for it: what there is, who may see and change it, and what placement reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

from django.contrib.postgres.aggregates import ArrayAgg
from django.db import connection
from django.db.models import Prefetch, Q, QuerySet
from django.http import Http404
from django.utils import timezone

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.fleet import cpu_guard
from console.fleet.models import Box, Domain, Driver, Leaf, Named, Nic, Node, Port, SpineLink
from console.placement import topology as placement
from console.placement.topology import State
from console.search.services import Found, finder, nearest

N = TypeVar("N", bound=Named)

NOT_JOINED = "not joined"
_PORTS = Prefetch("ports", Port.objects.select_related("leaf"))


def check_fleet(principal: Principal, at_least: Role = Role.VIEWER) -> None:
    """The one access function: the fleet is for who has a role on the platform. To others there is none
    (Http404); who has too little of one gets Refused."""
    role = principal.platform_role
    if role is None:
        raise Http404("There is nothing here, or it is not yours to see.")
    if role < at_least:
        raise Refused(f"This needs the role {at_least.label} on the platform; yours is {role.label}.")


def visible_nodes(principal: Principal) -> QuerySet[Node]:
    check_fleet(principal)
    nics = Prefetch("nics", Nic.objects.select_related("leaf"))
    return Node.objects.select_related("stamp").prefetch_related(nics, "retiring_stores")


def visible_boxes(principal: Principal) -> QuerySet[Box]:
    check_fleet(principal)
    domains = Prefetch("domains", Domain.objects.prefetch_related(_PORTS))
    return Box.objects.select_related("stamp").prefetch_related(domains)


def closed_boxes() -> QuerySet[Box]:
    """Those that take nothing new."""
    return Box.objects.exclude(state=State.READY.value)


def visible_leaves(principal: Principal) -> QuerySet[Leaf]:
    check_fleet(principal)
    return Leaf.objects.select_related("stamp")


def visible_spine_links(principal: Principal) -> QuerySet[SpineLink]:
    check_fleet(principal)
    return SpineLink.objects.select_related("leaf__stamp")


def visible_drivers(principal: Principal) -> QuerySet[Driver]:
    check_fleet(principal)
    return Driver.objects.all()


def get(things: QuerySet[N], name: str) -> N:
    """One of what is visible. Raises Http404."""
    found = things.filter(name=name).first()
    if found is None:
        kind = things.model._meta.verbose_name  # noqa: SLF001 - as Django documents it
        raise Http404(f"There is no {kind} “{name}” in the fleet.")
    return found


@dataclass(frozen=True, slots=True)
class NodeFilters:
    """Filters of the page and the API."""

    q: str = ""
    state: str = ""  # of those that have joined; or NOT_JOINED
    stamp: str = ""
    leaf: str = ""
    label: str = ""  # `rack=7`, or `rack` for whatever value

    def apply(self, found: QuerySet[Node]) -> QuerySet[Node]:
        if self.q:
            found = found.filter(Q(name__contains=self.q) | Q(state_reason__icontains=self.q))
        if self.state:
            found = found.filter(joined_at__isnull=self.state == NOT_JOINED)
        if self.state and self.state != NOT_JOINED:
            found = found.filter(state=self.state)
        if self.stamp:
            found = found.filter(stamp__name=self.stamp)
        if self.leaf:
            found = found.filter(nics__leaf__name=self.leaf).distinct()
        if self.label:
            name, separator, value = self.label.partition("=")
            asked = {"labels__contains": {name: value}} if separator else {"labels__has_key": name}
            found = found.filter(**asked)
        return found

    @property
    def are_set(self) -> bool:
        return any((self.q, self.state, self.stamp, self.leaf, self.label))


def lock_fleet() -> None:
    """Until the end of the transaction nobody else changes the fleet, or reserves boxes or memory of it.

    Take it before any row is locked: who has it waits for rows, so who has rows must not wait for it.
    """
    from console.placement import solvers  # with numpy, which most processes never need

    solvers.load()  # who has the fleet is waited for
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('placement'))")


def for_change(
    principal: Principal, visible: Callable[[Principal], QuerySet[N]], name: str, at_least: Role
) -> N:
    """One of what is visible, locked while the fleet is held, for somebody who may change it."""
    things = visible(principal)
    principal.check_may_change()
    check_fleet(principal, at_least)
    lock_fleet()
    return get(things.select_for_update(no_key=True, of=("self",)), name)


def topology() -> placement.Fleet:
    """The fleet as placement reads it. What can take no stream yet is left out: a node whose memory
    nobody has told, a box without ports.

    Plans are made of it while people type, so it takes two queries, and makes no models.
    """
    return placement.Fleet(tuple(_nodes()), tuple(_boxes()))


def _nodes() -> Iterator[placement.Node]:
    nodes = Node.objects.filter(memory_bytes__gt=0, nics__isnull=False).annotate(
        nic_leaves=ArrayAgg("nics__leaf__name", order_by="nics__name"),
        nic_wio=ArrayAgg("nics__wio", order_by="nics__name"),
    )
    fields = ("name", "nic_leaves", "nic_wio", "memory_bytes", "state", "shards_max", "cpus")
    measured = ("cores_used", "shards_measured", "measured_at")
    fresh = timezone.now() - cpu_guard.FRESH
    for name, leaves, wio, memory, state, most, cpus, cores, shards, at in nodes.order_by(
        "name"
    ).values_list(*fields, *measured):
        nics = tuple(map(placement.Nic, leaves, wio))
        if at is not None and at >= fresh:
            most = cpu_guard.shards_max(most, cpus, cores, shards)
        yield placement.Node(name, nics, memory, most, State(state))


def _boxes() -> Iterator[placement.Box]:
    """Their domains in the order of their numbers, which are 0 to 3."""
    leaf = "ports__leaf__name"
    leaves = ArrayAgg(leaf, filter=Q(ports__isnull=False), order_by=leaf, default=[])
    domains = Domain.objects.annotate(leaves=leaves).order_by("box__name", "index")
    for name, of_box in groupby(domains.values_list("box__name", "leaves", "wio"), itemgetter(0)):
        made = [(tuple(leaves), wio) for _, leaves, wio in of_box]
        if all(leaves for leaves, _ in made):
            yield placement.Box(name, tuple(placement.Domain(*one) for one in made))


def reachable_nodes() -> QuerySet[Node]:
    """Those whose agents can be asked now."""
    return Node.objects.filter(joined_at__isnull=False).exclude(state=State.LOST.value)


def reachable_drivers() -> QuerySet[Driver]:
    return Driver.objects.filter(joined_at__isnull=False, lost_at=None)


def _sees(principal: Principal) -> bool:
    return principal.on_platform(Role.VIEWER)


@finder("nodes")
def find_nodes(principal: Principal, text: str, most: int) -> list[Found]:
    found = nearest(visible_nodes(principal), text, "name")[:most] if _sees(principal) else ()
    return [Found(one.name, f"{one.state}, {one.stamp.name}", "fleet-node", one.name) for one in found]


@finder("boxes")
def find_boxes(principal: Principal, text: str, most: int) -> list[Found]:
    found = nearest(visible_boxes(principal), text, "name")[:most] if _sees(principal) else ()
    return [Found(one.name, one.stamp.name, "fleet-box", one.name) for one in found]


@finder("drivers")
def find_drivers(principal: Principal, text: str, most: int) -> list[Found]:
    found = nearest(visible_drivers(principal), text, "name")[:most] if _sees(principal) else ()
    return [Found(one.name, "lost" if one.lost_at else "", "fleet-driver", one.name) for one in found]
