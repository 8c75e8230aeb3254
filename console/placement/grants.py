"""What is asked for: the streams of a session, and how much memory each gets.

A session's fair share is the memory of all nodes times its boxes, divided by all boxes. A job that keeps
to its boxes has the parts of those, so such jobs come and go without changing each other's memory. The
other jobs divide the rest by their boxes. All shards of a job keep the same columns, so a job's share is
split in proportion to the bytes per token: an equal split would be as good as its largest shard allows,
and waste the rest. A state group stores one state for several columns, and gets as many slots fewer. No
shard gets more than the largest node has that may keep streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from console.placement.rules import Limit, Rules
from console.placement.topology import Fleet, Misconfigured
from kvss_agent.shard.arena import slot_bytes_for
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import columns_in


@dataclass(frozen=True, slots=True)
class Shard:
    """What one domain of a box keeps of one cache group of a job: of each token, or of each state."""

    group: str
    box: str
    domain: int
    bytes_per_token: int
    bytes_per_state: int = 0
    columns_per_slot: int = 1

    @property
    def payload_bytes(self) -> int:
        """What a slot is for."""
        return self.bytes_per_state or self.bytes_per_token * COLUMN_TOKENS

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_for(self.payload_bytes)

    def slots_of(self, columns: int) -> int:
        """How many slots so many columns of prompts need."""
        return -(-columns // self.columns_per_slot)


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    shards: tuple[Shard, ...]
    keeps_to_boxes: bool = False

    def __post_init__(self) -> None:
        if not self.shards or min(shard.payload_bytes for shard in self.shards) <= 0:
            raise Misconfigured(f"Job {self.name} needs shards, each with something of every token.")

    @property
    def slot_sizes(self) -> list[tuple[int, int]]:
        """Of each shard: the bytes of a slot, and for how many columns it is."""
        return [(shard.slot_bytes, shard.columns_per_slot) for shard in self.shards]

    def bytes_of(self, columns: int) -> int:
        """What so many columns of prompts need on all shards."""
        return sum(shard.slots_of(columns) * shard.slot_bytes for shard in self.shards)

    @property
    def boxes(self) -> frozenset[str]:
        return frozenset(shard.box for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    jobs: tuple[Job, ...]
    rules: Rules = Rules()  # noqa: RUF009 frozen
    waited_seconds: float = 0  # for a rail, so far
    idle_boxes: frozenset[str] = frozenset()  # that no job runs on: they count for the share

    @property
    def boxes(self) -> frozenset[str]:
        return self.idle_boxes.union(*(job.boxes for job in self.jobs))


@dataclass(frozen=True)
class Stream:
    """One shard, as it is placed: what it needs and what it may get."""

    session: str
    job: str
    group: str
    box: str
    domain: int
    wio: int
    memory_bytes: int
    limit: Limit = Limit()  # noqa: RUF009 frozen

    @cached_property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.session, self.job, self.group, self.box, self.domain

    @property
    def name(self) -> str:
        return f"{self.session}/{self.job}.{self.group} of {self.box}:{self.domain}"


@dataclass(frozen=True, slots=True)
class Effective:
    """What a job's memory is worth, in tokens of prompts, and what an equal split had made of it."""

    job: str
    memory_bytes: int
    tokens: int
    tokens_equal: int

    @property
    def lost_percent(self) -> float:
        """What an equal split would have lost."""
        return 100 * (1 - self.tokens_equal / self.tokens) if self.tokens else 0.0


def spread(fleet: Fleet, boxes: Sequence[str], group: str, bytes_per_token: int) -> tuple[Shard, ...]:
    """A group over all domains of these boxes, in proportion to their WIO, as wafers lay it out."""
    parts = [
        (box, number, domain.wio)
        for box in boxes
        for number, domain in enumerate(fleet.box[box].domains)
    ]
    total = sum(wio for *_, wio in parts)
    return tuple(
        Shard(group, box, number, -(-bytes_per_token * wio // total)) for box, number, wio in parts
    )


def fair_share_bytes(fleet: Fleet, session: Session) -> int:
    """What a session may have of all KVSS memory."""
    return (
        fleet.memory_bytes * len(session.boxes) * session.rules.grant_percent // (100 * len(fleet.boxes))
    )


def job_bytes(fleet: Fleet, session: Session, job: Job) -> int:
    """A job's part of its session's share, by boxes. Boxes that several divide count for each; of jobs
    that keep to a box each has an equal part of it.

    No more than what lets the largest shard fit on the largest node: a few boxes can't use all memory of
    many nodes. Nodes that have to be left don't count for that, as long as there are others.
    """
    keeping = [one for one in session.jobs if one.keeps_to_boxes]
    others = [one for one in session.jobs if not one.keeps_to_boxes]
    jobs_on = Counter(box for one in keeping for box in one.boxes)
    a_box = fair_share_bytes(fleet, session) // len(session.boxes)
    if job.keeps_to_boxes:
        share = sum(a_box // jobs_on[box] for box in job.boxes)
    else:
        left = fair_share_bytes(fleet, session) - a_box * len(jobs_on)
        share = left * len(job.boxes) // sum(len(one.boxes) for one in others)
    able = [node for node in fleet.nodes if node.state.keeps] or fleet.nodes
    largest = max((node.memory_bytes for node in able), default=0)
    return min(share, job.bytes_of(_columns_of_each(job, largest)))


def _columns_of_each(job: Job, memory_bytes: int) -> int:
    """How many columns of prompts fit where each shard has so much memory."""
    return min(memory_bytes // size * each for size, each in job.slot_sizes)


def effective(job: Job, memory_bytes: int) -> Effective:
    columns = columns_in(memory_bytes, job.slot_sizes)
    equal = _columns_of_each(job, memory_bytes // len(job.shards))
    return Effective(job.name, memory_bytes, columns * COLUMN_TOKENS, equal * COLUMN_TOKENS)


def streams(fleet: Fleet, sessions: Iterable[Session]) -> tuple[Stream, ...]:
    """Everything that these sessions want placed. Raises Misconfigured."""
    return tuple(
        stream
        for session in sessions
        for job in session.jobs
        for stream in _streams_of(fleet, session, job)
    )


def _streams_of(fleet: Fleet, session: Session, job: Job) -> Iterable[Stream]:
    limit = session.rules.limit(session.waited_seconds)
    columns = columns_in(job_bytes(fleet, session, job), job.slot_sizes)
    if not columns:
        raise Misconfigured(
            f"The share of job {job.name} is too small for a single column: give the session more "
            "boxes, or the nodes more memory."
        )
    for shard in job.shards:
        yield Stream(
            session.name,
            job.name,
            shard.group,
            shard.box,
            shard.domain,
            fleet.domain(shard.box, shard.domain).wio,
            shard.slots_of(columns) * shard.slot_bytes,
            limit,
        )
