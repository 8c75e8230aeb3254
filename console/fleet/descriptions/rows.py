"""What a description says, written to the database: in few queries, however much it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from django.utils import timezone

from console.fleet import retired_stores
from console.fleet.descriptions.document import BOX, LEAF, LINK, NODE, STAMP
from console.fleet.membership.joins import settle
from console.fleet.models import (
    Box,
    Domain,
    Leaf,
    Named,
    Nic,
    Node,
    Port,
    ProcessKind,
    Removed,
    SpineLink,
    Stamp,
)
from telemetry.units import parse_size

_MODELS: Final[dict[str, type[Named]]] = {
    STAMP: Stamp,
    LEAF: Leaf,
    LINK: SpineLink,
    NODE: Node,
    BOX: Box,
}
DECLARED: Final = ("cpus", "shards_max", "tier2")  # of a node, as it is said; memory is kept in bytes
Said = Mapping[str, dict[str, Any]]  # by name


def add(kind: str, said: Said) -> None:
    """Raises IntegrityError where one of the names is taken by now."""
    if not said:
        return
    model, resolve = _MODELS[kind], _Resolve()
    rows = [_filled(model(name=name), one, resolve) for name, one in said.items()]
    _plug_in(model.objects.bulk_create(rows), said, resolve)  # type: ignore[attr-defined]


def change(kind: str, said: Said) -> None:
    """Those that are no more by now are left alone."""
    if not said:
        return
    resolve = _Resolve()
    found = _MODELS[kind].objects.select_for_update(no_key=True).filter(name__in=said)  # type: ignore[attr-defined]
    rows: list[Named] = list(found.order_by("name"))
    for row in rows:
        row.version += 1
        before = row.declared.get("tier2") if isinstance(row, Node) else None
        _filled(row, said[row.name], resolve).save()
        if isinstance(row, Node):
            retired_stores.follow(row, before, row.declared.get("tier2"))
    _plug_in(rows, said, resolve)


def remove(kind: str, names: Collection[str]) -> None:
    """Raises ProtectedError where something else needs one of them."""
    if not names:
        return
    rows = _MODELS[kind].objects.filter(name__in=list(names))  # type: ignore[attr-defined]
    if kind == NODE:
        gone = [node for node in rows if node.has_joined]
        places = {node.name: retired_stores.shared_places(node) for node in gone}
        remembered = [Removed.of(node) for node in gone]
        for one in remembered:
            one.stores = places[one.name]
        Removed.objects.bulk_create(remembered)
        former = Removed.objects.filter(kind=ProcessKind.NODE, name__in=names, was_replaced=True)
        former.update(was_replaced=False, removed_at=timezone.now())
    rows.delete()


class _Resolve:
    """Stamps and leaves by their names, each read once."""

    def __init__(self) -> None:
        self._stamps: dict[str, Stamp] | None = None
        self._leaves: dict[str, Leaf] | None = None

    def stamp(self, name: str) -> Stamp:
        if self._stamps is None:
            self._stamps = {stamp.name: stamp for stamp in Stamp.objects.all()}
        return self._stamps[name]

    def leaf(self, name: str) -> Leaf:
        if self._leaves is None:
            self._leaves = {leaf.name: leaf for leaf in Leaf.objects.all()}
        return self._leaves[name]


def _filled(row: Named, said: dict[str, Any], resolve: _Resolve) -> Named:
    """The row, with what is said of it."""
    if isinstance(row, SpineLink):
        row.leaf, row.spine, row.gbits = resolve.leaf(said["leaf"]), said["spine"], said["gbits"]
    elif isinstance(row, Leaf | Node | Box):
        row.stamp = resolve.stamp(said["stamp"])
    if isinstance(row, Box):
        row.memory_bytes = parse_size(said["memory"]) if "memory" in said else None
    if isinstance(row, Node):
        row.labels = said.get("labels", {})
        row.declared = {what: said[what] for what in DECLARED if what in said}
        if "memory" in said:
            row.declared["memory_bytes"] = parse_size(said["memory"])
        settle(row)
    return row


def _plug_in(rows: Collection[Named], said: Said, resolve: _Resolve) -> None:
    """NICs of nodes, and domains with ports of boxes, in place of those that were."""
    if nodes := [row for row in rows if isinstance(row, Node)]:
        Nic.objects.filter(node__in=nodes).delete()
        Nic.objects.bulk_create(
            Nic(node=row, name=name, leaf=resolve.leaf(nic["leaf"]), wio=nic["wio"], gbits=nic["gbits"])
            for row in nodes
            for name, nic in said[row.name]["nics"].items()
        )
    if boxes := [row for row in rows if isinstance(row, Box)]:
        Domain.objects.filter(box__in=boxes).delete()
        domains = Domain.objects.bulk_create(
            Domain(box=row, index=index, wio=one["wio"])
            for row in boxes
            for index, one in enumerate(said[row.name]["domains"])
        )
        Port.objects.bulk_create(
            Port(domain=domain, leaf=resolve.leaf(leaf))
            for domain in domains
            for leaf in said[domain.box.name]["domains"][domain.index]["leaves"]
        )
