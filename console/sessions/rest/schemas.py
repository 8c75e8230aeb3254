"""Sessions, plans, streams and jobs as the API shows them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from ninja import Field, Schema

from console.api.fields import Input, Reason
from console.fleet.models import NAME
from console.orgs.models import SLUG
from console.placement.plan import RailsPlan
from console.placement.topology import Tier
from console.sessions.memory import Memory
from console.sessions.models import BOXES_MAX, WAIT_SECONDS_MAX, Job, Session, Stream
from console.sessions.plans.proposals import Proposal
from console.sessions.services import sizes
from console.visibility import Sight

PathName = Literal["require_rail", "prefer_rail", "any"]
Boxes = Annotated[int, Field(ge=1, le=BOXES_MAX)]
WaitSeconds = Annotated[
    int,
    Field(
        ge=0, le=WAIT_SECONDS_MAX, description="How long to wait for capacity that is not available now."
    ),
]
PlanToken = Annotated[
    str | None,
    Field(
        max_length=64,
        pattern=r"^[0-9a-f]*$",
        description="From a dry run: 412 if the plan has changed since.",
    ),
]
Slug = Annotated[str, Field(pattern=SLUG, max_length=48)]
FleetName = Annotated[str, Field(pattern=NAME, max_length=63)]


class SizesOut(Schema):
    desired: int
    granted: int
    actual: int


class WaitingOut(Schema):
    cause: str
    never: bool = Field(description="Whether waiting can't help.")
    sentence: str
    since: datetime


class SessionOut(Schema):
    name: str
    version: int = Field(description="Incremented with each change; the ETag.")
    org: str | None = Field(description="The owner; null for a shared session.")
    boxes: SizesOut
    box_names: list[str]
    waiting: WaitingOut | None
    deleting: bool
    path: PathName | None = Field(description="Stricter than the rules, if set.")
    bytes_per_token: int
    jobs: int
    memory_bytes: int
    spine_streams: int
    operation: UUID | None = Field(description="The running operation.")
    created_at: datetime


class SessionIn(Input):
    name: Annotated[str, Field(pattern=SLUG, max_length=48, examples=["chat"])]
    org: Slug | None = Field(None, description="Null: shared, owned by the platform.")
    boxes: Boxes
    path: PathName | None = None
    bytes_per_token: Annotated[int, Field(ge=1, le=2**31 - 1)] = 64 << 10
    wait_seconds: WaitSeconds = 0
    plan_token: PlanToken = None
    reason: Reason = ""


class ResizeIn(Input):
    boxes: Boxes
    wait_seconds: WaitSeconds = 0
    plan_token: PlanToken = None
    reason: Reason = ""


class JobIn(Input):
    name: Slug
    driver: FleetName
    boxes: Annotated[
        list[FleetName],
        Field(max_length=1000, description="Boxes of the session; empty: as many as the model needs."),
    ] = []
    wait_seconds: WaitSeconds = 0
    plan_token: PlanToken = None
    reason: Reason = ""


class JobOut(Schema):
    name: str
    driver: str
    driver_address: str = Field(description="Address of its control API.")
    boxes: list[str]
    running: bool = Field(description="Whether its driver knows the homes of its streams.")
    created_at: datetime


class MoveIn(Input):
    stream: Annotated[str, Field(max_length=300, examples=["job7.full.0"])]
    node: FleetName
    reason: Reason = ""


class RestoreRailsIn(Input):
    moves_max: Annotated[int, Field(ge=1, le=10_000)] | None = None
    reason: Reason = ""


class PlannedOut(Schema):
    stream: str
    box: str
    domain: int
    wio: int
    node: str = Field(description="Empty if unplaced.")
    path: str
    port_leaf: str
    nic_leaf: str
    memory_bytes: int
    node_before: str
    memory_bytes_before: int
    why: str = Field(description="Why it is not on a rail.")


class WorthOut(Schema):
    job: str
    memory_bytes: int
    tokens: int = Field(description="Tokens of prompts that fit.")
    tokens_equal: int = Field(description="Tokens that would fit with an equal split.")


class PlanOut(Schema):
    """What would be done. Nothing has been."""

    plan_token: str
    boxes: list[str]
    added: list[str]
    removed: list[str]
    is_trial: bool = Field(
        description="The session has no job yet: the plan is for one job on all boxes."
    )
    summary: str
    rail: int
    leaf: int
    spine: int
    cause: str
    never: bool
    sentence: str
    streams: list[PlannedOut]
    worth: list[WorthOut]


class MovePlanOut(Schema):
    stream: str
    source: str
    target: str
    path_before: str
    path_after: str
    memory_bytes: int


class RestoreRailsOut(Schema):
    """What would be moved, and what that gains."""

    moves: list[MovePlanOut]
    spine_wio_before: int
    spine_wio_after: int
    bytes: int
    left: int = Field(description="Streams that remain off rails.")


class StreamOut(Schema):
    name: str
    job: str
    group: str
    index: int
    box: str
    domain: int
    wio: int
    node: str
    path: str
    port_leaf: str
    nic_leaf: str
    memory_bytes: int
    why: str
    next_node: str | None = Field(description="The node to which it moves, or where it is resized.")
    phase: str


class TakenOut(Schema):
    org: str | None = Field(description="Null: all orgs that you may not see, together.")
    bytes: int


class MemoryOut(Schema):
    """What the columns of each org take of a session's memory."""

    at: datetime | None = Field(description="When drivers last reported; null: never.")
    granted_bytes: int
    by_org: list[TakenOut]


def show_memory(session: Session, memory: Memory | None) -> MemoryOut:
    return MemoryOut(
        at=memory.at if memory else None,
        granted_bytes=getattr(session, "memory_bytes", 0),
        by_org=[
            TakenOut(org=taken.org.slug if taken.org else None, bytes=taken.bytes)
            for taken in (memory.by_org if memory else ())
        ],
    )


def show_session(session: Session) -> SessionOut:
    size = sizes(session)
    waiting = None
    if session.waiting_since:
        waiting = WaitingOut(
            cause=session.cause,
            never=session.is_never,
            sentence=session.cause_sentence,
            since=session.waiting_since,
        )
    path: PathName | None = session.path or None  # type: ignore[assignment]
    return SessionOut(
        name=session.name,
        version=session.version,
        org=session.org.slug if session.org else None,
        boxes=SizesOut(desired=size.desired, granted=size.granted, actual=size.actual),
        box_names=[one.box.name for one in session.boxes.all()],
        waiting=waiting,
        deleting=session.deleting,
        path=path,
        bytes_per_token=session.bytes_per_token,
        jobs=getattr(session, "job_count", 0),
        memory_bytes=getattr(session, "memory_bytes", 0),
        spine_streams=getattr(session, "spine_count", 0),
        operation=getattr(session, "operation_id", None),
        created_at=session.created_at,
    )


def show_plan(plan: Proposal, sight: Sight) -> PlanOut:
    return PlanOut(
        plan_token=plan.token,
        boxes=list(plan.boxes),
        added=list(plan.added),
        removed=list(plan.removed),
        is_trial=plan.is_trial,
        summary=plan.summary,
        **plan.paths,
        cause=plan.cause.value if plan.cause else "",
        never=plan.cause is not None and plan.cause.is_never,
        sentence=plan.sentence,
        streams=[
            PlannedOut(
                stream=one.name,
                box=one.box,
                domain=one.domain,
                wio=one.wio,
                node=one.node,
                path=one.path,
                port_leaf=one.port_leaf,
                nic_leaf=one.nic_leaf,
                memory_bytes=one.memory_bytes,
                node_before=one.node_before,
                memory_bytes_before=one.slots_before * one.slot_bytes,
                why=sight.why(one.why),
            )
            for one in plan.streams
        ],
        worth=[
            WorthOut(
                job=one.job,
                memory_bytes=one.memory_bytes,
                tokens=one.tokens,
                tokens_equal=one.tokens_equal,
            )
            for one in plan.worth
        ],
    )


def show_rails_plan(found: RailsPlan) -> RestoreRailsOut:
    return RestoreRailsOut(
        moves=[
            MovePlanOut(
                stream=move.stream.name,
                source=move.source,
                target=move.target,
                path_before=move.tier_before.name.lower(),
                path_after=move.tier_after.name.lower(),
                memory_bytes=move.stream.memory_bytes,
            )
            for move in found.moves
        ],
        spine_wio_before=found.before.spine_wio,
        spine_wio_after=found.after.spine_wio,
        bytes=found.bytes,
        left=len(found.left),
    )


def show_job(job: Job) -> JobOut:
    return JobOut(
        name=job.name,
        driver=job.driver.name,
        driver_address=job.driver.control_url,
        boxes=[one.session_box.box.name for one in job.boxes.all()],
        running=job.running,
        created_at=job.created_at,
    )


def show_stream(stream: Stream, sight: Sight) -> StreamOut:
    return StreamOut(
        name=stream.name,
        job=stream.job.name,
        group=stream.group,
        index=stream.index,
        box=stream.box.name,
        domain=stream.domain,
        wio=stream.wio,
        node=stream.node.name,
        path=Tier(stream.tier).name.lower(),
        port_leaf=stream.port_leaf,
        nic_leaf=stream.nic_leaf,
        memory_bytes=stream.memory_bytes,
        why=sight.why(stream.why),
        next_node=stream.next_node.name if stream.next_node else None,
        phase=stream.get_phase_display(),
    )
