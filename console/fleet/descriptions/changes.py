"""From a description to the fleet and back: what would change, what is refused, and doing it.

A description is the whole of the fleet's intent: what it does not name is removed. Applying the same one
again changes nothing. What agents report, states, and drivers are no part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.contrib.postgres.aggregates import ArrayAgg
from django.db import IntegrityError, connection, transaction
from django.db.models import ProtectedError, Q

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.diff import changes
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Subject, record, undoable
from console.control import services as control
from console.fleet import boxes, retired_stores, services
from console.fleet.descriptions import document, rows, tier2
from console.fleet.descriptions.document import BOX, KINDS, LEAF, LINK, NODE, STAMP, Thing, Things
from console.fleet.insight import activity
from console.fleet.models import Box, Domain, Leaf, Nic, Node, SpineLink, Stamp
from console.fleet.nodes import Impossible, streams_on, tell_listeners
from console.operations.services import Busy
from console.placement.topology import State
from telemetry.events import note
from telemetry.topics import FLEET, of_source
from telemetry.units import counted, exact_size


@dataclass(frozen=True)
class Change:
    kind: str
    name: str
    before: dict[str, Any] | None  # None: it is new
    after: dict[str, Any] | None  # None: it goes
    refused: str = ""  # why it can't be, and what to do
    follows: str = ""  # what else comes of it, in a sentence

    @property
    def what(self) -> str:
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    @property
    def differences(self) -> list[tuple[str, Any, Any]]:
        return changes(self.before, self.after)


@dataclass(frozen=True)
class Difference:
    """What a description would change, each kind after what it needs."""

    changes: list[Change] = field(default_factory=list)

    @property
    def refused(self) -> list[Change]:
        return [change for change in self.changes if change.refused]

    def to_write(self, kind: str, what: str) -> dict[str, dict[str, Any]]:
        """By name what is to be said of those of a kind that are added, changed or removed."""
        here = [change for change in self.changes if (change.kind, change.what) == (kind, what)]
        return {change.name: change.after or {} for change in here}

    def counted(self) -> dict[str, int]:
        whats = [change.what for change in self.changes]
        counts = {what: whats.count(what) for what in ("added", "changed", "removed")}
        return {**counts, "refused": len(self.refused)}


def export(principal: Principal) -> str:
    """The fleet as a description."""
    services.check_fleet(principal)
    return document.dump(current())


def fingerprint(things: Things) -> str:
    """The same for the same fleet, in whatever order it is said: PostgreSQL keeps the keys of an object
    in its own. Who has seen a difference says with it what it was one to."""
    said = json.dumps([[*thing, things[thing]] for thing in sorted(things)], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def current() -> Things:
    """The fleet as a description would say it, in six queries."""
    nics, domains = _nics(), _domains()
    things: Things = {(STAMP, stamp.name): {} for stamp in Stamp.objects.all()}
    for leaf in Leaf.objects.select_related("stamp"):
        things[LEAF, leaf.name] = {"stamp": leaf.stamp.name}
    for link in SpineLink.objects.select_related("leaf"):
        things[LINK, link.name] = {"leaf": link.leaf.name, "spine": link.spine, "gbits": link.gbits}
    for node in Node.objects.values_list("name", "stamp__name", "declared", "labels", named=True):
        things[NODE, node.name] = _said_of(node, nics.get(node.name, {}))
    for name, stamp, memory in Box.objects.values_list("name", "stamp__name", "memory_bytes"):
        said: dict[str, Any] = {"stamp": stamp, "domains": domains.get(name, [])}
        things[BOX, name] = said if memory is None else {**said, "memory": exact_size(memory)}
    return things


def _nics() -> dict[str, dict[str, dict[str, Any]]]:
    """By node and name."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    rows = Nic.objects.order_by("name").values_list("node__name", "name", "leaf__name", "wio", "gbits")
    for node, name, leaf, wio, gbits in rows:
        found.setdefault(node, {})[name] = {"leaf": leaf, "wio": wio, "gbits": gbits}
    return found


def _domains() -> dict[str, list[dict[str, Any]]]:
    """By box, in the order of their numbers."""
    found: dict[str, list[dict[str, Any]]] = {}
    leaf = "ports__leaf__name"
    leaves = ArrayAgg(leaf, filter=Q(ports__isnull=False), default=[])
    rows = Domain.objects.annotate(leaves=leaves).order_by("index")
    for box, wio, plugged in rows.values_list("box__name", "wio", "leaves"):
        found.setdefault(box, []).append({"wio": wio, "leaves": sorted(plugged)})
    return found


def _said_of(node: Any, nics: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "stamp": node.stamp__name,
        "nics": nics,
    }
    if "memory_bytes" in node.declared:
        said["memory"] = exact_size(node.declared["memory_bytes"])
    said |= {what: node.declared[what] for what in rows.DECLARED if what in node.declared}
    if "tier2" in said:  # an earlier version has stored its cap as `2T`
        said["tier2"] = said["tier2"] | {"cap": tier2.memory(said["tier2"]["cap"])}
    if node.labels:
        said["labels"] = node.labels
    return said


def difference(before: Things, after: Things) -> Difference:
    """What is to be done to get from one to the other, and which of it can't be done now."""
    differs = [thing for thing in {**before, **after} if before.get(thing) != after.get(thing)]
    refused = _refused(before, after, differs)
    follows = _follows(before, after, [thing for thing in differs if thing not in refused])
    found = [
        Change(*one, before.get(one), after.get(one), refused.get(one, ""), follows.get(one, ""))
        for one in differs
    ]
    return Difference(sorted(found, key=lambda change: (KINDS.index(change.kind), change.name)))


def _refused(before: Things, after: Things, differs: Iterable[Thing]) -> dict[Thing, str]:
    """What can't be done now, and what to do about it."""
    gone = {thing for thing in differs if thing not in after}
    found = {
        (NODE, name): f"{counted(count, 'stream runs', 'streams run')} there. Drain it first."
        for name, count in _streams(NODE, before, after, differs).items()
    }
    found |= {
        (BOX, name): f"{counted(count, 'stream begins', 'streams begin')} there. End their jobs first."
        for name, count in _streams(BOX, before, after, differs).items()
    }
    for name, session in activity.sessions_of({name for kind, name in gone if kind == BOX}).items():
        found[BOX, name] = f"It is of session {session}. Shrink or delete that first."
    for name, why in retired_stores.refusals(*_tiers2(before, after, differs)).items():
        found[NODE, name] = why
    topics = {of_source("agent", name): (NODE, name) for kind, name in gone if kind == NODE}
    topics |= {boxes.topic(name): (BOX, name) for kind, name in gone if kind == BOX}
    for topic, operation in activity.operations_on(topics).items():
        found[topics[topic]] = str(Busy(operation))
    return found


def _follows(before: Things, after: Things, differs: Iterable[Thing]) -> dict[Thing, str]:
    """What comes of a change that the change itself does not show."""
    told = retired_stores.follows(*_tiers2(before, after, differs))
    losses = activity.fragments_lost_with(told)
    return {(NODE, name): " ".join([said, *losses.get(name, ())]) for name, said in told.items()}


def _tiers2(
    before: Things, after: Things, differs: Iterable[Thing]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the nodes that stay or come what is said of their tier 2, before and after; None where nothing
    is."""
    names = [name for kind, name in differs if kind == NODE and (NODE, name) in after]
    return (
        {name: before.get((NODE, name), {}).get("tier2") for name in names},
        {name: after[NODE, name].get("tier2") for name in names},
    )


def _streams(kind: Any, before: Things, after: Things, differs: Iterable[Thing]) -> dict[str, int]:
    """Of those whose streams would lose their path."""
    paths = {NODE: ("stamp", "nics"), BOX: ("stamp", "domains")}[kind]
    touched = [
        name
        for one, name in differs
        if one == kind
        and (old := before.get((one, name))) is not None
        and ((new := after.get((one, name))) is None or any(old[part] != new[part] for part in paths))
    ]
    return streams_on(kind, touched) if touched else {}


def preview(principal: Principal, text: str) -> tuple[Difference, str]:
    """What a description would change, and the fingerprint of what it would change. Raises Wrong."""
    services.check_fleet(principal, Role.PLATFORM_ADMIN)
    before = current()
    return difference(before, document.parse(text)), fingerprint(before)


@transaction.atomic
def apply(
    principal: Principal,
    text: str,
    *,
    seen: str | None = None,
    reason: str = "",
) -> Difference:
    """Make the fleet what the description says; all of it or, where something is refused, nothing.

    With `seen`, a fingerprint, only if the fleet is still that. Raises Wrong, Moved and Impossible.
    """
    principal.check_may_change()
    services.check_fleet(principal, Role.PLATFORM_ADMIN)
    wanted = document.parse(text)
    services.lock_fleet()
    before = current()
    if seen is not None and seen != fingerprint(before):
        raise Moved
    return _become(principal, before, wanted, reason)


class Moved(Exception):
    """The fleet is no longer what somebody has seen."""

    def __init__(self) -> None:
        super().__init__("The fleet has changed since you looked. Look at the difference again.")


def _become(
    principal: Principal,
    before: Things,
    wanted: Things,
    reason: str,
) -> Difference:
    found = difference(before, wanted)
    if refused := found.refused:
        named = "; ".join(f"{one.kind} {one.name}: {one.refused}" for one in refused[:5])
        raise Impossible(f"Nothing was changed. {named}")
    if not found.changes:
        return found
    try:
        with transaction.atomic():
            for kind in KINDS:
                rows.add(kind, found.to_write(kind, "added"))
                rows.change(kind, found.to_write(kind, "changed"))
            for kind in reversed(KINDS):
                rows.remove(kind, found.to_write(kind, "removed"))
            connection.check_constraints()  # here, where it can be told, and not at the commit
    except ProtectedError as error:
        held = next(iter(error.protected_objects))
        raise Impossible(f"Nothing was changed: {held} still needs what would be removed.") from None
    except IntegrityError:  # somebody has joined under a name that was to be added, say
        raise Moved from None
    _record(principal, found, reason)
    _tell(found)
    return found


def _tell(found: Difference) -> None:
    """Agents whose tier 2 is another one now; and of nodes that are removed, all drivers."""
    nodes = [one for one in found.changes if one.kind == NODE and one.before and one.after]
    told = [one for one in nodes if any(path.startswith("tier2") for path, *_ in one.differences)]
    if told:
        control.changed([(NODE, one.name) for one in told], "Their tier 2 is described anew.")
    if any(one.kind == NODE for one in found.changes):
        tell_listeners()
    if any(one.kind == NODE and one.after is None for one in found.changes):
        control.changed([control.ALL_DRIVERS], "Nodes were removed from the fleet.")


# The trail


def _record(principal: Principal, found: Difference, reason: str) -> None:
    counts = found.counted()
    said = ", ".join(
        f"{counts[what]} {what}" for what in ("added", "changed", "removed") if counts[what]
    )
    entry = record(
        principal,
        "fleet.import",
        Subject("fleet", "fleet", said),
        before={f"{one.kind} {one.name}": one.before for one in found.changes if one.before is not None},
        after={f"{one.kind} {one.name}": one.after for one in found.changes if one.after is not None},
        reason=reason,
    )
    touched = [f"node:{one.name}" for one in found.changes if one.kind == NODE]
    note("fleet.import", [FLEET, *touched], f"The fleet was changed: {said}.", {"audit_entry": entry.pk})


@undoable("fleet.import", Impossible, Moved)
def _undo_import(principal: Principal, entry: AuditEntry, reason: str) -> None:
    """What it added goes, what it removed comes back (as what has to join again), the rest as it was."""
    services.check_fleet(principal, Role.PLATFORM_ADMIN)
    services.lock_fleet()
    before, was, became = current(), _things(entry.before), _things(entry.after)
    if moved := [thing for thing in {**was, **became} if before.get(thing) != became.get(thing)]:
        raise CannotUndo(f"{' '.join(moved[0])} has changed since.")
    wanted = {thing: said for thing, said in before.items() if thing not in became} | was
    _become(principal, before, wanted, reason)


def _things(said: dict[str, Any] | None) -> Things:
    """`node ax-1` back to a thing."""
    found: Things = {}
    for key, value in (said or {}).items():
        kind, _, name = key.rpartition(" ")
        found[kind, name] = value
    return found


def alive_but_removed(found: Difference) -> list[str]:
    """Nodes that would go although their agents are alive: worth a second look."""
    names = [one.name for one in found.changes if one.kind == NODE and one.after is None]
    alive = Node.objects.filter(name__in=names).exclude(state=State.LOST.value)
    return sorted(alive.values_list("name", flat=True))
