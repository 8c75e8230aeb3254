"""How processes become part of the fleet, and stay it: joining once, then heartbeats.

A process shows a join token and tells where it can be asked, and with which token of its own. It gets no
secret in return: what its heartbeats are known by follows from the token that it has told, on both sides
(`kvss_agent.process.membership`). So a copy of what the console keeps for heartbeats, a hash, forges
none.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.audit.services import Subject, record
from console.authority.services import Issued, issue
from console.fleet.membership import tokens
from console.fleet.membership.liveness import has_gone_silent
from console.fleet.membership.versions import protocols_meet, skew
from console.fleet.models import Driver, JoinToken, Leaf, Nic, Node, Removed
from console.fleet.nodes import Impossible, topic
from console.placement.topology import State
from kvss_agent.data_plane import wire
from kvss_agent.process.membership import credential
from kvss_agent.security.certificates import Role
from kvss_agent.security.identity import Unusable, fingerprint, requested_key
from telemetry.events import note
from telemetry.topics import of_source

PROTOCOL: Final = (wire.VERSION_MIN, wire.VERSION)
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext(%s))"


class TokenIsUsedUp(Exception):
    """Somebody else had its last use, or it has just expired or been revoked."""


@dataclass(frozen=True, slots=True)
class NicFacts:
    name: str
    leaf: str
    wio: int
    gbits: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent tells of itself and its node, with each heartbeat."""

    control_url: str
    data_address: str
    software_version: str
    protocol_min: int
    protocol_max: int
    memory_bytes: int
    cpus: int
    trusts: str = ""  # the digest of the authorities that it believes
    mover: str = ""  # "compiled" or "python"


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """`model` of an engine, which may be another one after a restart; None of a daemon."""

    control_url: str
    software_version: str
    trusts: str = ""
    mover: str = ""
    engine: str = ""
    model: Mapping[str, Any] | None = None

    def of(self, driver: Driver) -> dict[str, Any]:
        """What holds of them. The model that a job was planned for stays until the job ends: until then
        the engine refuses its document, and says why."""
        found = asdict(self)
        if self.model is None or hasattr(driver, "job"):
            found["model"] = driver.model
        return found


J = TypeVar("J", Node, Driver)


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
    _check(token, JoinToken.Kind.NODE, facts.software_version)
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
    before = _shown(node) if node.pk else None
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
    _record("node.join", "node", node, topic(node), token, before, f"{name} has joined.")
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
    _check(token, JoinToken.Kind.DRIVER, facts.software_version)
    its_topic, key = of_source("driver", name), _key_of(certificate_request)
    _check_not_removed(token, its_topic, control_token, key)
    _one_at_a_time(its_topic)
    driver = Driver.objects.select_for_update(no_key=True).filter(name=name).first()
    if driver is not None:
        _check_not_alive(driver, is_gone=driver.lost_at is not None)
    if not tokens.use(token):
        raise TokenIsUsedUp
    before = _shown(driver) if driver else None
    driver = driver or Driver(name=name)
    driver.model = driver.model or (dict(model) if model else None)
    _come_in(driver, control_token, its_topic, key)
    _follow(driver, facts.of(driver))
    driver.lost_at = None
    driver.full_clean(exclude=["heartbeat_sha256"])
    driver.save()
    _record("driver.join", "driver", driver, its_topic, token, before, f"Driver {name} has joined.")
    return driver


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


def _check(token: JoinToken, kind: JoinToken.Kind, version: str) -> None:
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


def _check_not_alive(joined: Node | Driver, *, is_gone: bool) -> None:
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


def _come_in(joined: Node | Driver, control_token: str, name: str, key: str) -> None:
    joined.control_token, joined.public_key = control_token, key
    joined.heartbeat_sha256 = tokens.digest(credential(control_token, name))
    joined.joined_at = joined.last_heartbeat_at = timezone.now()
    joined.version += 1 if joined.pk else 0


def _shown(joined: Node | Driver) -> dict[str, Any]:
    return {
        "control_url": joined.control_url,
        "software_version": joined.software_version,
        "joined_at": joined.joined_at,
        "key": fingerprint(joined.public_key) if joined.public_key else "",
    }


def _record(
    action: str,
    kind: str,
    joined: Node | Driver,
    its_topic: str,
    token: JoinToken,
    before: dict[str, Any] | None,
    sentence: str,
) -> None:
    entry = record(
        SYSTEM,
        action,
        Subject(kind, joined.name, joined.name),
        before=before,
        after={**_shown(joined), "join_token": token.prefix},
    )
    note(action, [its_topic], sentence, {"audit_entry": entry.pk}, entry.at)


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
    if driver.lost_at is not None or not _says_the_same(driver, facts.of(driver)):
        return _driver_changes(driver.pk, shown, facts)
    Driver.objects.filter(pk=driver.pk).update(last_heartbeat_at=timezone.now())
    return True


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
def _driver_changes(key: int, shown: str, facts: DriverFacts) -> bool:
    driver = Driver.objects.select_for_update(no_key=True).filter(pk=key).first()
    if driver is None or not _may_say(driver, shown, facts):
        return False
    was_lost, version = driver.lost_at is not None, driver.software_version
    _follow(driver, facts.of(driver))
    driver.lost_at, driver.last_heartbeat_at = None, timezone.now()
    driver.version += 1
    driver.save()
    its_topic = of_source("driver", driver.name)
    if was_lost:
        note("driver.back", [its_topic], f"Driver {driver.name} is back.")
    if version != driver.software_version:
        note("driver.software", [its_topic], f"Driver {driver.name} runs {driver.software_version}.")
    return True


# Certificates


def certify(kind: Role, name: str, shown: str, certificate_request: str) -> Issued | None:
    """A certificate for a process that has joined, for the key that was bound then. None where that is
    nobody's. Raises Impossible for another key.

    One that joined before there were keys has its key bound by the first request, once.
    """
    model: type[Node | Driver] = Node if kind is Role.NODE else Driver
    joined = model.objects.filter(name=name).first()
    if joined is None or joined.joined_at is None or not _is_its(joined, shown):
        return None
    try:
        key = requested_key(certificate_request)
    except Unusable as error:
        raise Impossible(str(error)) from error
    if not joined.public_key:
        _bind(joined, shown, key)
    elif joined.public_key != key:
        raise Impossible(
            f"{name} has joined with another key. Put the key back into its state directory; or, if it "
            "is lost, stop the process, and join again once it counts as lost."
        )
    return issue(kind, name, key)


@transaction.atomic
def _bind(joined: Node | Driver, shown: str, key: str) -> None:
    found = type(joined).objects.select_for_update(no_key=True).get(pk=joined.pk)
    if not _is_its(found, shown) or found.public_key not in ("", key):
        raise Impossible(f"{found.name} has joined with another key meanwhile.")
    if found.public_key:
        return
    found.public_key = key
    found.version += 1
    found.save()
    kind = "node" if isinstance(found, Node) else "driver"
    its_topic = of_source("agent" if isinstance(found, Node) else "driver", found.name)
    entry = record(SYSTEM, f"{kind}.key", Subject(kind, found.name, found.name), after=_shown(found))
    sentence = f"{found.name} has a key now: it had joined before there were any."
    note(f"{kind}.key", [its_topic], sentence, {"audit_entry": entry.pk}, entry.at)


def _is_its(joined: Node | Driver, shown: str) -> bool:
    known = bytes(joined.heartbeat_sha256 or bytes(32))
    return hmac.compare_digest(known, tokens.digest(shown))


def _may_say(joined: Node | Driver, shown: str, facts: NodeFacts | DriverFacts) -> bool:
    """Whether this heartbeat is its own. What it is known by travels every few seconds, and is not
    enough to be told in plain text what only its key could read so far: for that it joins again."""
    comes_out = facts.control_url.startswith("http:") and joined.control_url.startswith("https:")
    return _is_its(joined, shown) and not (comes_out and joined.public_key)


def _says_the_same(
    joined: Node | Driver, facts: Mapping[str, Any], reported: Mapping[str, Any] | None = None
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


def _follow(joined: Node | Driver, facts: Mapping[str, Any]) -> None:
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
