"""How processes become part of the fleet, and stay it: joining once, then heartbeats.

A process shows a join token and tells where it can be asked, and with which token of its own. It gets no
secret in return: what its heartbeats are known by follows from the token that it has told, on both sides
(`kvss_agent.process.membership`). So a copy of what the console keeps for heartbeats, a hash, forges
none.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.audit.services import Subject, record
from console.fleet.membership import tokens
from console.fleet.membership.facts import BrainFacts, DriverFacts, NicFacts, NodeFacts
from console.fleet.membership.liveness import has_gone_silent
from console.fleet.membership.versions import protocols_meet, skew
from console.fleet.models import (
    Brain,
    Driver,
    JoinToken,
    Leaf,
    Nic,
    Node,
    ProcessKind,
    Removed,
    topic,
)
from console.fleet.nodes import Impossible
from console.placement.topology import State
from kvss_agent.data_plane import wire
from kvss_agent.process.membership import credential
from kvss_agent.security.identity import Unusable, fingerprint, requested_key
from telemetry.events import note
from telemetry.topics import of_source

Process = Node | Driver | Brain
PROTOCOL: Final = (wire.VERSION_MIN, wire.VERSION)
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext(%s))"


class TokenIsUsedUp(Exception):
    """Somebody else had its last use, or it has just expired or been revoked."""


# Joining


@transaction.atomic
def join_node(
    token: JoinToken,
    name: str,
    control_token: str,
    facts: NodeFacts,
    nics: Sequence[NicFacts] = (),
    certificate_request: str = "",
) -> Node:
    """Let an agent in: as the node of this name that waits for it or was lost, or as a new one.

    What the fleet says of NICs holds; those that the agent tells are taken where it says nothing. Raises
    Impossible, and TokenIsUsedUp.
    """
    _check(token, ProcessKind.NODE, facts.software_version)
    if not protocols_meet(PROTOCOL, (facts.protocol_min, facts.protocol_max)):
        raise Impossible(
            f"It speaks protocol {facts.protocol_min} to {facts.protocol_max}, others here "
            f"{PROTOCOL[0]} to {PROTOCOL[1]}. Update it."
        )
    its_topic, key = of_source("agent", name), _key_of(certificate_request)
    _check_not_removed(token, its_topic, control_token, key)
    _one_at_a_time(its_topic)
    node = Node.objects.select_for_update(no_key=True).filter(name=name).first()
    if node is not None:
        _check_not_alive(node, is_gone=_is_gone(node))
    leaves = _leaves_of(nics) if node is None or not node.nics.exists() else {}
    if node is None:
        if not leaves:
            raise Impossible(
                f"The fleet has no node {name}. Import a description that has it, or say where its NICs "
                "are plugged in: --nics eth0=LEAF."
            )
        node = Node(name=name, stamp=next(iter(leaves.values())).stamp)
    if any(leaf.stamp_id != node.stamp_id for leaf in leaves.values()):
        raise Impossible(f"All NICs of {name} have to be on leaves of one stamp.")
    if not tokens.use(token):
        raise TokenIsUsedUp
    before = shown_of(node) if node.pk else None
    _come_in(node, control_token, its_topic, key)
    _follow_node(node, facts)
    _heal(node)
    node.full_clean(exclude=["heartbeat_sha256"])
    node.save()
    Nic.objects.bulk_create(
        [
            Nic(node=node, leaf=leaves[nic.name], name=nic.name, wio=nic.wio, gbits=nic.gbits)
            for nic in nics
            if nic.name in leaves
        ]
    )
    _record(node, token, before, f"{name} has joined.")
    return node


@transaction.atomic
def join_driver(
    token: JoinToken,
    name: str,
    control_token: str,
    facts: DriverFacts,
    model: Mapping[str, Any] | None = None,
    certificate_request: str = "",
) -> Driver:
    """Let a driver in. The model that it tells of is taken where none is known of it."""
    _check(token, ProcessKind.DRIVER, facts.software_version)
    _one_at_a_time(of_source("driver", name))
    driver = Driver.objects.select_for_update(no_key=True).filter(name=name).first()
    driver = driver or Driver(name=name)
    driver.model = driver.model or (dict(model) if model else None)
    _let_in(token, driver, control_token, certificate_request, facts.of(driver))
    return driver


@transaction.atomic
def join_brain(
    token: JoinToken, name: str, control_token: str, facts: BrainFacts, certificate_request: str = ""
) -> Brain:
    """Let a brain in."""
    _check(token, ProcessKind.BRAIN, facts.software_version)
    _one_at_a_time(of_source("brain", name))
    brain = Brain.objects.select_for_update(no_key=True).filter(name=name).first() or Brain(name=name)
    _let_in(token, brain, control_token, certificate_request, asdict(facts))
    return brain


def _let_in(
    token: JoinToken,
    joined: Driver | Brain,
    control_token: str,
    certificate_request: str,
    facts: Mapping[str, Any],
) -> None:
    """As the one of this name that was lost, or as a new one. Raises Impossible, and TokenIsUsedUp."""
    key = _key_of(certificate_request)
    _check_not_removed(token, topic(joined), control_token, key)
    _check_not_alive(joined, is_gone=joined.lost_at is not None)
    if not tokens.use(token):
        raise TokenIsUsedUp
    before = shown_of(joined) if joined.pk else None
    _come_in(joined, control_token, topic(joined), key)
    _follow(joined, facts)
    joined.lost_at = None
    joined.full_clean(exclude=["heartbeat_sha256"])
    joined.save()
    _record(joined, token, before, f"{joined.KIND.capitalize()} {joined.name} has joined.")


def _check_not_removed(token: JoinToken, its_topic: str, control_token: str, key: str) -> None:
    """Who was removed does not come back by itself: it may still have the token that it came with."""
    is_it = Q(heartbeat_sha256=tokens.digest(credential(control_token, its_topic)))
    if key:
        is_it |= Q(public_key=key)
    gone = Removed.objects.filter(is_it, removed_at__gte=token.created_at).first()
    if gone is not None:
        raise Impossible(
            f"{_as_removed(gone)} A join token that was made before that does not let it in again: make "
            "a new one on the console's page “Join”."
        )


def why_unknown(kind: str, name: str, shown: str) -> str:
    """What a process that the fleet does not know is told. Only who was removed hears that."""
    gone = Removed.objects.filter(kind=kind, name=name, heartbeat_sha256=tokens.digest(shown)).first()
    if gone is None:
        return "The fleet does not know this process: it has to join (again)."
    return f"{_as_removed(gone)} It has to join again, with a new join token."


def _as_removed(gone: Removed) -> str:
    return f"{gone.name} was removed from the fleet on {gone.removed_at:%Y-%m-%d at %H:%M} UTC."


def _check(token: JoinToken, kind: ProcessKind, version: str) -> None:
    if token.kind != kind:
        raise Impossible(f"This token lets a {token.kind} join, and not a {kind.value}.")
    found = skew(settings.VERSION, version)
    if not found.fit.works:
        raise Impossible(found.sentence)


def _one_at_a_time(name: str) -> None:
    """Two that join under one name do so one after the other."""
    with connection.cursor() as cursor:
        cursor.execute(_LOCK, [f"join {name}"])


def _is_gone(node: Node) -> bool:
    """Who is in maintenance never counts as lost; and that is when machines are made anew."""
    if node.state == State.MAINTENANCE.value:
        return has_gone_silent(node.last_heartbeat_at, timezone.now())
    return node.state == State.LOST.value


def _check_not_alive(joined: Process, *, is_gone: bool) -> None:
    """Nobody takes the name of somebody who is there, whatever token they have."""
    if joined.joined_at is not None and not is_gone:
        raise Impossible(
            f"{joined.name} is taken, and alive. Choose another name; or, if this machine replaces it, "
            f"try again when the former one has been silent for {lost_after()} s."
        )


def _leaves_of(nics: Sequence[NicFacts]) -> dict[str, Leaf]:
    """The leaf of each NIC. Raises Impossible where there is none."""
    wanted = {nic.leaf for nic in nics}
    known = {leaf.name: leaf for leaf in Leaf.objects.select_related("stamp").filter(name__in=wanted)}
    if missing := sorted(wanted - known.keys()):
        raise Impossible(f"There is no leaf {missing[0]} in the fleet. Import it first.")
    return {nic.name: known[nic.leaf] for nic in nics}


def _key_of(certificate_request: str) -> str:
    """Which key asks; none of a process of an older version. Raises Impossible."""
    try:
        return requested_key(certificate_request) if certificate_request else ""
    except Unusable as error:
        raise Impossible(str(error)) from error


def _come_in(joined: Process, control_token: str, name: str, key: str) -> None:
    joined.control_token, joined.public_key = control_token, key
    joined.heartbeat_sha256 = tokens.digest(credential(control_token, name))
    joined.joined_at = joined.last_heartbeat_at = timezone.now()
    joined.version += 1 if joined.pk else 0


def shown_of(joined: Process) -> dict[str, Any]:
    return {
        "control_url": joined.control_url,
        "software_version": joined.software_version,
        "joined_at": joined.joined_at,
        "key": fingerprint(joined.public_key) if joined.public_key else "",
    }


def _record(joined: Process, token: JoinToken, before: dict[str, Any] | None, sentence: str) -> None:
    action = f"{joined.KIND}.join"
    entry = record(
        SYSTEM,
        action,
        Subject(joined.KIND, joined.name, joined.name),
        before=before,
        after={**shown_of(joined), "join_token": token.prefix},
    )
    note(action, [topic(joined)], sentence, {"audit_entry": entry.pk}, entry.at)


# Heartbeats


def node_beats(name: str, shown: str, facts: NodeFacts) -> bool:
    """A node is alive. False where that is nobody's, who has to join (again)."""
    node = Node.objects.filter(name=name).first()
    if node is None or not _may_say(node, shown, facts):
        return False
    if node.state == State.LOST.value or not _says_the_same(node, asdict(facts), node.reported):
        return _node_changes(node.pk, shown, facts)
    Node.objects.filter(pk=node.pk).update(last_heartbeat_at=timezone.now())
    return True


def driver_beats(name: str, shown: str, facts: DriverFacts) -> bool:
    driver = Driver.objects.select_related("job").filter(name=name).first()
    if driver is None or not _may_say(driver, shown, facts):
        return False
    return _beats(driver, shown, facts)


def brain_beats(name: str, shown: str, facts: BrainFacts) -> bool:
    brain = Brain.objects.filter(name=name).first()
    return brain is not None and _may_say(brain, shown, facts) and _beats(brain, shown, facts)


def _beats(joined: Driver | Brain, shown: str, facts: DriverFacts | BrainFacts) -> bool:
    if joined.lost_at is not None or not _says_the_same(joined, _facts_of(joined, facts)):
        return _changes(joined, shown, facts)
    type(joined).objects.filter(pk=joined.pk).update(last_heartbeat_at=timezone.now())
    return True


def _facts_of(joined: Driver | Brain, facts: DriverFacts | BrainFacts) -> dict[str, Any]:
    if isinstance(joined, Driver) and isinstance(facts, DriverFacts):
        return facts.of(joined)
    return asdict(facts)


@transaction.atomic
def _node_changes(key: int, shown: str, facts: NodeFacts) -> bool:
    """It is back, or another one than before: updated, say. Unless its name was taken over meanwhile."""
    node = Node.objects.select_for_update(no_key=True).filter(pk=key).first()
    if node is None or not _may_say(node, shown, facts):
        return False
    was_lost, version = node.state == State.LOST.value, node.software_version
    _follow_node(node, facts)
    _heal(node)
    node.last_heartbeat_at = timezone.now()
    node.version += 1
    node.save()
    if was_lost:
        note("node.back", [topic(node)], f"{node.name} is back, and {node.state}.")
    if version != node.software_version:
        note("node.software", [topic(node)], f"{node.name} runs {node.software_version}.")
    return True


@transaction.atomic
def _changes(joined: Driver | Brain, shown: str, facts: DriverFacts | BrainFacts) -> bool:
    """As `_node_changes`."""
    found = type(joined).objects.select_for_update(no_key=True).filter(pk=joined.pk).first()
    if found is None or not _may_say(found, shown, facts):
        return False
    was_lost, version = found.lost_at is not None, found.software_version
    _follow(found, _facts_of(found, facts))
    found.lost_at, found.last_heartbeat_at = None, timezone.now()
    found.version += 1
    found.save()
    called = f"{found.KIND.capitalize()} {found.name}"
    if was_lost:
        note(f"{found.KIND}.back", [topic(found)], f"{called} is back.")
    if version != found.software_version:
        note(f"{found.KIND}.software", [topic(found)], f"{called} runs {found.software_version}.")
    return True


# Inside


def is_its(joined: Process, shown: str) -> bool:
    """Whether this is what its heartbeats are known by."""
    known = bytes(joined.heartbeat_sha256 or bytes(32))
    return hmac.compare_digest(known, tokens.digest(shown))


def _may_say(joined: Process, shown: str, facts: NodeFacts | DriverFacts | BrainFacts) -> bool:
    """Whether this heartbeat is its own. What it is known by travels every few seconds, and is not
    enough to be told in plain text what only its key could read so far: for that it joins again."""
    comes_out = facts.control_url.startswith("http:") and joined.control_url.startswith("https:")
    return is_its(joined, shown) and not (comes_out and joined.public_key)


def _says_the_same(
    joined: Process, facts: Mapping[str, Any], reported: Mapping[str, Any] | None = None
) -> bool:
    """What follows from what is declared is compared with what was reported before."""
    before = reported or {}
    return all(
        (before[name] if name in before else getattr(joined, name)) == value
        for name, value in facts.items()
    )


def _follow_node(node: Node, facts: NodeFacts) -> None:
    _follow(node, asdict(facts))
    node.reported = {"memory_bytes": facts.memory_bytes, "cpus": facts.cpus}
    settle(node)


def _follow(joined: Process, facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        setattr(joined, name, value)


def settle(node: Node) -> None:
    """What is declared of a node holds; else what its agent reports. A shard for each CPU, else."""
    said = {**node.reported, **node.declared}
    node.memory_bytes = said.get("memory_bytes", 0)
    node.cpus = said.get("cpus", 0)
    node.shards_max = said.get("shards_max", node.cpus)


def _heal(node: Node) -> None:
    """A node that was lost is what it was before, or was told to be since."""
    if node.state == State.LOST.value:
        node.state, node.state_reason = node.held_state, node.held_reason
        node.held_state, node.held_reason = "", ""
        node.state_since = timezone.now()


def heartbeat_seconds() -> float:
    """How often we want to hear of everybody: several times before one counts as lost."""
    return min(10.0, lost_after() / 4)


def lost_after() -> int:
    return int(settings.LOST_AFTER_SECONDS)
