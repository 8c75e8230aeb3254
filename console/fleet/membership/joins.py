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
from typing import Any, Final

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.audit.services import Subject, record
from console.fleet.membership import tokens
from console.fleet.membership.facts import BrainFacts, DriverFacts, NicFacts, NodeFacts
from console.fleet.membership.heartbeats import lost_after
from console.fleet.membership.liveness import database_now, has_gone_silent
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
    is_lost,
    topic,
)
from console.fleet.nodes import Impossible
from console.placement.topology import State
from kvss_agent.data_plane import constants
from kvss_agent.process.membership import credential
from kvss_agent.security.identity import Unusable, fingerprint, requested_key
from telemetry.events import note
from telemetry.topics import of_source

Process = Node | Driver | Brain
Facts = NodeFacts | DriverFacts | BrainFacts
PROTOCOL: Final = (constants.VERSION_MIN, constants.VERSION)
REPLACED_MAX: Final = 1_000  # machines of a name of a node
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
    if not protocols_meet(PROTOCOL, (facts.protocol_min, facts.protocol_max)):
        raise Impossible(
            f"It speaks protocol {facts.protocol_min} to {facts.protocol_max}, others here "
            f"{PROTOCOL[0]} to {PROTOCOL[1]}. Update it."
        )
    known = _checked(token, ProcessKind.NODE, name, control_token, facts, certificate_request)
    node = Node.objects.select_for_update(no_key=True).filter(name=name).first()
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
    _let_in(token, node, known, facts)
    Nic.objects.bulk_create(
        [
            Nic(node=node, leaf=leaves[nic.name], name=nic.name, wio=nic.wio, gbits=nic.gbits)
            for nic in nics
            if nic.name in leaves
        ]
    )
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
    known = _checked(token, ProcessKind.DRIVER, name, control_token, facts, certificate_request)
    driver = Driver.objects.select_for_update(no_key=True).filter(name=name).first()
    driver = driver or Driver(name=name, workload=token.workload)
    if driver.workload != token.workload:
        whose = f"of workload {driver.workload}" if driver.workload else "that is no workload's"
        raise Impossible(f"There is a driver {name} {whose}. Choose another name.")
    driver.model = driver.model or (dict(model) if model else None)
    _let_in(token, driver, known, facts)
    return driver


@transaction.atomic
def join_brain(
    token: JoinToken, name: str, control_token: str, facts: BrainFacts, certificate_request: str = ""
) -> Brain:
    """Let a brain in."""
    known = _checked(token, ProcessKind.BRAIN, name, control_token, facts, certificate_request)
    brain = Brain.objects.select_for_update(no_key=True).filter(name=name).first() or Brain(name=name)
    _let_in(token, brain, known, facts)
    return brain


@dataclass(frozen=True, slots=True)
class _Known:
    """What a process is known by once it has joined."""

    control_token: str
    public_key: str
    heartbeat_sha256: bytes


def _checked(
    token: JoinToken,
    kind: ProcessKind,
    name: str,
    control_token: str,
    facts: Facts,
    certificate_request: str,
) -> _Known:
    """Check what the token and the fleet say of who comes, whoever has the name; others that join under
    it wait. Raises Impossible."""
    if token.kind != kind:
        raise Impossible(f"This token lets a {token.kind} join, and not a {kind.value}.")
    if token.name not in ("", name):
        raise Impossible(f"This token lets {token.name} join, and not {name}.")
    found = skew(settings.VERSION, facts.software_version)
    if not found.fit.works:
        raise Impossible(found.sentence)
    its_topic = of_source(kind.value, name)
    digest = tokens.digest(credential(control_token, its_topic))
    known = _Known(control_token, _key_of(certificate_request), digest)
    _check_not_removed(token, known)
    with connection.cursor() as cursor:
        cursor.execute(_LOCK, [f"join {its_topic}"])
    return known


def _let_in(token: JoinToken, joined: Process, known: _Known, facts: Facts) -> None:
    """As the one of this name that was lost, or as a new one. Raises Impossible, and TokenIsUsedUp."""
    if joined.joined_at is not None and not _is_gone(joined):
        raise Impossible(
            f"{joined.name} is taken, and alive. Choose another name; or, if this machine replaces it, "
            f"try again when the former one has been silent for {lost_after()} s."
        )
    is_take_over = joined.joined_at is not None and not _is_same(joined, known)
    if isinstance(joined, Driver) and is_take_over:
        _check_may_take_over(token, joined)
    if not tokens.use(token):
        raise TokenIsUsedUp
    if is_take_over and not isinstance(joined, Brain):
        _remember(joined)
    before = shown_of(joined) if joined.pk else None
    for name, value in asdict(known).items():
        setattr(joined, name, value)
    joined.joined_at = joined.last_heartbeat_at = timezone.now()
    joined.version += 1 if joined.pk else 0
    _follow(joined, facts)
    joined.full_clean(exclude=["heartbeat_sha256"])
    joined.save()
    _record(joined, token, before, f"{_called(joined)} has joined.")


def _is_same(joined: Process, known: _Known) -> bool:
    """Whether who comes has the key, or else the token, of who has joined under the name."""
    if joined.public_key:
        return joined.public_key == known.public_key
    return bytes(joined.heartbeat_sha256 or b"") == known.heartbeat_sha256


def _check_may_take_over(token: JoinToken, lost: Driver) -> None:
    """Whoever takes over a driver with a job or orgs is told the secrets of orgs at once: only who was
    let in for just that. Raises Impossible."""
    has_job = hasattr(lost, "job")
    if not has_job and not lost.orgs.exists():
        return
    is_for_it = token.name == lost.name
    # Instances have their tokens before those that they replace are lost.
    is_newer = bool(token.workload) or (lost.lost_at is not None and token.created_at >= lost.lost_at)
    if not (is_for_it and is_newer):
        has = "has a job" if has_job else "may serve orgs"
        raise Impossible(
            f"Driver {lost.name} is lost and {has}: a process that takes its place is told the secrets "
            f"of its orgs. If this one replaces it, make a join token for the name {lost.name} now, on "
            "the console's page “Join”, and join with that. Else choose another name."
        )


def _remember(replaced: Driver | Node) -> None:
    """A driver's state directory is still somewhere, with what it was told. And drivers wait for the
    memory of a node until somebody vouches that its machine is gone: who removes the node does, for the
    last REPLACED_MAX. An agent that loses its state directory comes with another key at each start."""
    job = getattr(replaced, "job", None)
    org = job.session.org if job else None
    former = Removed.of(replaced, org.slug if org else "")
    former.was_replaced = True
    former.save()
    if isinstance(replaced, Node):
        same = Removed.objects.filter(kind=ProcessKind.NODE, name=replaced.name, was_replaced=True)
        same.filter(pk__in=[one.pk for one in same[REPLACED_MAX:]]).delete()


def _check_not_removed(token: JoinToken, known: _Known) -> None:
    """Who was removed does not come back by itself: it may still have the token that it came with."""
    is_it = Q(heartbeat_sha256=known.heartbeat_sha256)
    if known.public_key:
        is_it |= Q(public_key=known.public_key)
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


@transaction.atomic
def is_removed_driver(name: str, shown: str, *, erased: bool) -> bool | None:
    """Whether who shows this is a driver that was removed or replaced, and has not come back; None for
    whom nobody knows. `erased`: its machine has deleted what it was told: no receipt has to name it,
    unless a person has removed it. A thief has what it is known by, too."""
    driver = Driver.objects.filter(name=name).first()
    if driver is not None and is_its(driver, shown):
        return False
    gone = Removed.objects.filter(kind="driver", name=name, heartbeat_sha256=tokens.digest(shown))
    if not gone.exists():
        return None
    if erased:
        gone.filter(erased_at=None, by_person=False).update(erased_at=timezone.now())
    return True


def _as_removed(gone: Removed) -> str:
    what = "replaced by another machine" if gone.was_replaced else "removed from the fleet"
    return f"{gone.name} was {what} on {gone.removed_at:%Y-%m-%d at %H:%M} UTC."


def _is_gone(joined: Process) -> bool:
    """Who is in maintenance never counts as lost; and that is when machines are made anew."""
    if isinstance(joined, Node) and joined.state == State.MAINTENANCE.value:
        return has_gone_silent(joined.last_heartbeat_at, database_now())
    return is_lost(joined)


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


def beats(name: str, shown: str, facts: Facts) -> bool:
    """A process is alive. False where that is nobody's, who has to join (again)."""
    joined = _of_these(facts).filter(name=name).first()
    if joined is None or not _may_say(joined, shown, facts):
        return False
    if is_lost(joined) or not _says_the_same(joined, facts):
        return _changes(joined.pk, shown, facts)
    type(joined).objects.filter(pk=joined.pk).update(last_heartbeat_at=timezone.now())
    return True


def _of_these(facts: Facts) -> QuerySet[Any]:
    """All processes of the kind that tells this."""
    if isinstance(facts, DriverFacts):
        return Driver.objects.select_related("job")
    return Node.objects.all() if isinstance(facts, NodeFacts) else Brain.objects.all()


@transaction.atomic
def _changes(key: int, shown: str, facts: Facts) -> bool:
    """It is back, or another one than before: updated, say. Unless its name was taken over meanwhile."""
    joined = _of_these(facts).select_for_update(no_key=True, of=("self",)).filter(pk=key).first()
    if joined is None or not _may_say(joined, shown, facts):
        return False
    was_lost, version = is_lost(joined), joined.software_version
    _follow(joined, facts)
    joined.last_heartbeat_at = timezone.now()
    joined.version += 1
    joined.save()
    called, its_topic = _called(joined), [topic(joined)]
    if was_lost:
        state = f", and {joined.state}" if isinstance(joined, Node) else ""
        note(f"{joined.KIND}.back", its_topic, f"{called} is back{state}.")
    if version != joined.software_version:
        note(f"{joined.KIND}.software", its_topic, f"{called} runs {joined.software_version}.")
    return True


# Inside


def is_its(joined: Process, shown: str) -> bool:
    """Whether this is what its heartbeats are known by."""
    known = bytes(joined.heartbeat_sha256 or bytes(32))
    return hmac.compare_digest(known, tokens.digest(shown))


def _may_say(joined: Process, shown: str, facts: Facts) -> bool:
    """Whether this heartbeat is its own. What it is known by travels every few seconds, and is not
    enough to be told in plain text what only its key could read so far: for that it joins again."""
    comes_out = facts.control_url.startswith("http:") and joined.control_url.startswith("https:")
    return is_its(joined, shown) and not (comes_out and joined.public_key)


def _called(joined: Process) -> str:
    return joined.name if isinstance(joined, Node) else f"{joined.KIND.capitalize()} {joined.name}"


def _facts_of(joined: Process, facts: Facts) -> dict[str, Any]:
    if isinstance(joined, Driver) and isinstance(facts, DriverFacts):
        return facts.of(joined)
    return asdict(facts)


def _says_the_same(joined: Process, facts: Facts) -> bool:
    """What follows from what is declared is compared with what was reported before."""
    before = joined.reported if isinstance(joined, Node) else {}
    return all(
        (before[name] if name in before else getattr(joined, name)) == value
        for name, value in _facts_of(joined, facts).items()
    )


def _follow(joined: Process, facts: Facts) -> None:
    """It is as it tells, and not lost any more. A node that was is what it was before, or was told to be
    since."""
    for name, value in _facts_of(joined, facts).items():
        setattr(joined, name, value)
    if not isinstance(joined, Node):
        joined.lost_at = None
        return
    joined.reported = {"memory_bytes": joined.memory_bytes, "cpus": joined.cpus}
    settle(joined)
    if joined.state == State.LOST.value:
        joined.state, joined.state_reason = joined.held_state, joined.held_reason
        joined.held_state, joined.held_reason = "", ""
        joined.state_since = timezone.now()


def settle(node: Node) -> None:
    """What is declared of a node holds; else what its agent reports. A shard for each CPU, else."""
    said = {**node.reported, **node.declared}
    node.memory_bytes = said.get("memory_bytes", 0)
    node.cpus = said.get("cpus", 0)
    node.shards_max = said.get("shards_max", node.cpus)
