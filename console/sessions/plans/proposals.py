"""Proposals for a session: where each stream is placed, over which path, and why not over a better one.

Pure over a `Snapshot`: equal snapshots and specs give equal proposals, so a token tells whether anything
has changed since.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from console.placement import grants, sentences
from console.placement.grants import Stream
from console.placement.plan import Placed, RailsPlan, Unplaced
from console.placement.rules import Cause, Limit, Refused, Rules
from console.placement.topology import Box, Fleet, State, Tier
from console.sessions import models
from console.sessions.plans.snapshot import Snapshot, key_of, trial_job
from telemetry.units import counted

SENTENCES_MAX: Final = 5  # of streams without a place; the table has them all


class CannotPlan(Exception):
    """Why there is no plan: a cause, which waiting may or may not remove, and a sentence.

    `sentence` may be stored and shown to everybody. `with_names` says the same to people who see the
    fleet, where it names something that others may not know of.
    """

    def __init__(self, cause: Cause, sentence: str, *, with_names: str = "") -> None:
        super().__init__(sentence)
        self.cause = cause
        self.sentence = sentence
        self.with_names = with_names or sentence


class BeingChanged(CannotPlan):
    """An operation changes what the plan needs. That ends by itself: waiting helps."""

    def __init__(self, sentence: str) -> None:
        super().__init__(Cause.WAITING_FOR_DRAIN, sentence)


@dataclass(frozen=True, slots=True)
class Planned:
    """One stream, as it is to be; `node` is empty if there is none for it."""

    job: str
    group: str
    index: int
    box: str
    domain: int
    wio: int
    slot_bytes: int
    slots: int
    node: str = ""
    tier: int = Tier.SPINE
    port_leaf: str = ""
    nic_leaf: str = ""
    why: str = ""
    node_before: str = ""
    slots_before: int = 0

    @property
    def name(self) -> str:
        return f"{self.job}.{self.group}.{self.index}"

    @property
    def memory_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def path(self) -> str:
        return Tier(self.tier).name.lower() if self.node else ""

    @property
    def is_new(self) -> bool:
        return not self.node_before

    @property
    def moves(self) -> bool:
        return bool(self.node_before) and self.node != self.node_before

    @property
    def changes(self) -> bool:
        return self.moves or self.slots != self.slots_before


@dataclass(frozen=True, slots=True)
class Worth:
    """How many tokens fit in a job's memory, compared with an equal split."""

    job: str
    memory_bytes: int
    tokens: int
    tokens_equal: int


@dataclass(frozen=True)
class Proposal:
    """`is_trial`: the session has no job yet, so this is what one over all its boxes would get."""

    session: str
    boxes: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    streams: tuple[Planned, ...]
    worth: tuple[Worth, ...]
    is_trial: bool
    summary: str
    cause: Cause | None = None  # why some streams have no place
    sentence: str = ""

    @property
    def token(self) -> str:
        """Of another snapshot, another token."""
        text = json.dumps(self.shown(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def paths(self) -> dict[str, int]:
        count = Counter(one.path for one in self.streams)
        return {tier.name.lower(): count[tier.name.lower()] for tier in Tier}

    def shown(self) -> dict[str, Any]:
        found = asdict(self)
        found["cause"] = self.cause.value if self.cause else ""
        return found

    def require_whole(self) -> Proposal:
        """Raises CannotPlan if some streams have no place."""
        if self.cause:
            raise CannotPlan(self.cause, self.sentence)
        return self


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The desired state of a session."""

    name: str
    rules: Rules
    boxes: tuple[str, ...]
    jobs: tuple[grants.Job, ...] = ()
    bytes_per_token: int = 1
    waited_seconds: float = 0.0
    had: tuple[str, ...] = ()
    moved_by: Mapping[str, str] = field(default_factory=dict)  # by job: who changes streams of it now


def refusals(rules: Rules, boxes: int, fleet: Fleet) -> list[Refused]:
    """Every rule that this size breaks, and whether the fleet could ever have it."""
    found = list(rules.refusals(boxes))
    if boxes > (there := len(fleet.boxes)):
        sentence = f"The fleet has {counted(there, 'box')}: request {boxes - there} fewer, or add boxes."
        found.append(Refused(Cause.EXCEEDS_CLUSTER_CAPACITY, sentence))
    return found


def propose(snapshot: Snapshot, spec: SessionSpec) -> Proposal:
    """Where the streams of its jobs go; those that run stay where they may.

    Jobs whose streams somebody else changes are left out: they become what that one wants. Raises
    Misconfigured; and CannotPlan while there is no memory at all, where such a job would have to become
    something else, or where streams would wait for each other's room for ever.
    """
    if not snapshot.fleet.memory_bytes:
        raise CannotPlan(
            Cause.WAITING_FOR_CAPACITY,
            "No node has reported memory yet: waiting for an agent to join.",
        )
    from console.placement.planner import plan  # with numpy, which most processes never need

    is_trial = not spec.jobs
    jobs = spec.jobs or (trial_job(snapshot.fleet, spec.boxes, spec.bytes_per_token),)
    session = grants.Session(spec.name, jobs, spec.rules, spec.waited_seconds, frozenset(spec.boxes))
    wanted = [
        one
        for one in grants.streams(snapshot.fleet, [session])
        if not _is_left_to_others(snapshot, spec, one)
    ]
    found = plan(snapshot.fleet, wanted, snapshot.running)
    if found.stuck:
        raise CannotPlan(Cause.WAITING_FOR_CAPACITY, sentences.stuck(found))
    streams = _Streams(snapshot, session)
    rows = [streams.planned(one.stream, one) for one in found.placed]
    rows += [streams.planned(one.stream, one) for one in found.unplaced]
    worst = max(found.unplaced, key=lambda one: (one.cause.is_never, one.missing_bytes), default=None)
    return Proposal(
        session=spec.name,
        boxes=spec.boxes,
        added=tuple(box for box in spec.boxes if box not in spec.had),
        removed=tuple(box for box in spec.had if box not in spec.boxes),
        streams=tuple(sorted(rows, key=lambda one: (one.job, one.group, one.index))),
        worth=tuple(_worth(snapshot.fleet, session, job) for job in jobs),
        is_trial=is_trial,
        summary=sentences.plan(found),
        cause=worst.cause if worst else None,
        sentence=" ".join(sentences.unplaced(one) for one in found.unplaced[:SENTENCES_MAX]),
    )


def _is_left_to_others(snapshot: Snapshot, spec: SessionSpec, stream: Stream) -> bool:
    """Whether somebody else changes streams of its job. Raises BeingChanged where that has to end."""
    by = spec.moved_by.get(stream.job)
    if by is None:
        return False
    here = snapshot.by_key.get(stream.key)
    if here is None or here.memory_bytes_soon != stream.memory_bytes:
        raise BeingChanged(f"{by} is moving streams of job {stream.job}: waiting for it to finish.")
    return True


class _Streams:
    """What a plan's streams are as shards: their numbers, their slots, and what they were before."""

    def __init__(self, snapshot: Snapshot, session: grants.Session) -> None:
        self._facts: dict[tuple[str, str, str, int], tuple[int, int]] = {}
        for job in session.jobs:
            numbers: Counter[str] = Counter()
            for shard in job.shards:
                at = job.name, shard.group, shard.box, shard.domain
                self._facts[at] = numbers[shard.group], shard.slot_bytes
                numbers[shard.group] += 1
        self._here = snapshot.by_key

    def planned(self, stream: Stream, one: Placed | Unplaced) -> Planned:
        index, slot_bytes = self._facts[stream.key[1:]]
        before = self._here.get(stream.key)
        found = Planned(
            job=stream.job,
            group=stream.group,
            index=index,
            box=stream.box,
            domain=stream.domain,
            wio=stream.wio,
            slot_bytes=slot_bytes,
            slots=stream.memory_bytes // slot_bytes,
            node_before=before.node if before else "",
            slots_before=before.slots if before else 0,
            why=sentences.why(one.refused, one),
        )
        if isinstance(one, Unplaced):
            return found
        return replace(
            found,
            node=one.node,
            tier=int(one.tier),
            port_leaf=one.route.port_leaf,
            nic_leaf=one.route.nic_leaf,
        )


def _worth(fleet: Fleet, session: grants.Session, job: grants.Job) -> Worth:
    found = grants.effective(job, grants.job_bytes(fleet, session, job))
    return Worth(job.name, found.memory_bytes, found.tokens, found.tokens_equal)


# Boxes


def more_boxes(snapshot: Snapshot, had: Sequence[str], count: int) -> tuple[str, ...]:
    """These boxes and free ones, as many as `count`: near nodes with room first, then by name.

    Raises CannotPlan while too few are free.
    """
    free = snapshot.free_boxes
    wanted = count - len(had)
    if closed := wanted > len(free) and sorted(snapshot.closed - snapshot.taken):
        short = f"{wanted} more needed and {len(free) or 'none'} free"
        raise CannotPlan(
            Cause.BOX_CORDONED,
            f"{short}; {counted(len(closed), 'other takes', 'others take')} nothing new. Wait for "
            "another session to release boxes, or for a box to be uncordoned.",
            with_names=f"{short}; these take nothing new: {', '.join(closed)}. Uncordon one, or wait "
            "for another session to release boxes.",
        )
    if wanted > len(free):
        raise CannotPlan(
            Cause.WAITING_FOR_CAPACITY,
            f"{counted(wanted, 'more box is', 'more boxes are')} needed and {len(free) or 'none'} "
            f"{'is' if len(free) < 2 else 'are'} free. Wait for another session to release boxes.",
        )
    rooms = _rooms(snapshot)
    free.sort(key=lambda box: (-_wio_on_rails(box, rooms), box.name))
    return (*had, *(box.name for box in free[:wanted]))


def _rooms(snapshot: Snapshot) -> dict[str, int]:
    """How much memory is free on ready nodes of each leaf."""
    free = {node.name: node.memory_bytes for node in snapshot.fleet.nodes if node.state is State.READY}
    for stream, node in snapshot.running.items():
        if node in free:
            free[node] -= stream.memory_bytes
    rooms: dict[str, int] = {}
    for node, room in free.items():
        for leaf in snapshot.fleet.node[node].leaves:
            rooms[leaf] = rooms.get(leaf, 0) + max(0, room)
    return rooms


def _wio_on_rails(box: Box, rooms: dict[str, int]) -> int:
    """The WIO of the domains that have a leaf with some room."""
    return sum(
        domain.wio for domain in box.domains if any(rooms.get(leaf, 0) > 0 for leaf in domain.leaves)
    )


def fewer_boxes(
    snapshot: Snapshot, had: Sequence[str], busy: Collection[str], count: int
) -> tuple[str, ...]:
    """So many of these boxes: those that jobs or instances run on, and of the others those that take
    jobs and are near nodes with room.

    Raises CannotPlan where more than `count` are `busy`.
    """
    if len(busy) > count:
        raise CannotPlan(
            Cause.WAITING_FOR_DRAIN,
            f"{len(busy)} of its boxes are in use, more than the new size of {count}: end a job first.",
        )
    rooms = _rooms(snapshot)
    idle = [snapshot.fleet.box[box] for box in had if box not in busy]
    idle.sort(key=lambda box: (box.name in snapshot.closed, -_wio_on_rails(box, rooms), box.name))
    kept = {*busy, *(box.name for box in idle[: count - len(busy)])}
    return tuple(box for box in had if box in kept)


# Moves of placed streams


def plan_rails(snapshot: Snapshot, session: str, moves_max: int | None = None) -> RailsPlan:
    """Which streams of a session to move to get off the spine.

    What others have is not touched, nor is what some operation is changing.
    """
    from console.placement.rails import restore_rails  # with numpy

    movable = {shard.key for shard in snapshot.settled if shard.session == session}
    own = {stream: node for stream, node in snapshot.running.items() if stream.key in movable}
    others = [(stream, node) for stream, node in snapshot.running.items() if stream.key not in movable]
    return restore_rails(_less(snapshot.fleet, others), own, moves_max)


def _less(fleet: Fleet, taken: Sequence[tuple[Stream, str]]) -> Fleet:
    """The fleet with so much less room."""
    bytes_taken: Counter[str] = Counter()
    shards_taken: Counter[str] = Counter()
    for stream, node in taken:
        bytes_taken[node] += stream.memory_bytes
        shards_taken[node] += 1
    nodes = tuple(
        replace(
            node,
            memory_bytes=max(1, node.memory_bytes - bytes_taken[node.name]),
            shards_max=max(0, node.shards_max - shards_taken[node.name]),
        )
        for node in fleet.nodes
    )
    return Fleet(nodes, fleet.boxes)


def away_from(
    snapshot: Snapshot,
    closed: Mapping[str, State],
    streams: Sequence[models.Stream],
    limits: Mapping[str, Limit],
    part: float = 1,
) -> tuple[list[tuple[models.Stream, Placed]], list[Unplaced]]:
    """Where these streams go, within the limits of their sessions, and those without a place.

    `closed` are nodes that take nothing new, by the state that they are taken to have. `part`: how much
    of its slots a stream gets.
    """
    from console.placement.planner import plan  # with numpy

    wanted = {
        replace(
            snapshot.by_key[key_of(stream)].stream(fewer_slots(stream.slots, part)),
            limit=limits[stream.job.session.name],
        ): stream
        for stream in streams
    }
    nodes = tuple(replace(one, state=closed.get(one.name, one.state)) for one in snapshot.fleet.nodes)
    found = plan(Fleet(nodes, snapshot.fleet.boxes), wanted, snapshot.running)
    return [(wanted[one.stream], one) for one in found.placed], list(found.unplaced)


def fewer_slots(slots: int, part: float) -> int:
    return max(1, int(slots * part))
