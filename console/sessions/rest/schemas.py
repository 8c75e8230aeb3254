"""Sessions, plans, streams and jobs as the API shows them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from ninja import Field, Schema
from pydantic import BeforeValidator

from console.api.fields import Input, Reason
from console.api.shown import OR_NULL, Context, NameOf, SlugOf
from console.fleet.models import NAME
from console.orgs.models import SLUG
from console.placement.topology import Tier
from console.sessions.driver_orgs import NAMED_MAX
from console.sessions.models import BOXES_MAX, WAIT_SECONDS_MAX, Job, Session, Stream
from console.sessions.plans.proposals import Planned, Proposal
from console.sessions.redundancy import weakest
from console.sessions.services import Sizes, sizes
from console.visibility import Sight

TierName = Annotated[str, BeforeValidator(lambda tier: Tier(tier).name.lower())]
PathName = Literal["require_rail", "prefer_rail", "any"]
BorrowName = Literal["no", "node", "leaf", "spine"]
RedundancyName = Literal["none", "1+1", "2+1", "4+1", "4+2", "8+2"]
ReplacementName = Literal["waiting", "replacing", "blocked", "replaced"]
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
    never: bool = Field(validation_alias="is_never", description="Whether waiting can't help.")
    sentence: str = Field(validation_alias="cause_sentence")
    since: datetime = Field(validation_alias="waiting_since")


class LostNodeOut(Schema):
    node: NameOf
    since: datetime = Field(description="When its drivers were first seen to have lost it.")
    replacement: ReplacementName = Field(
        validation_alias="verdict",
        description="What is done about its streams; `blocked` needs a person.",
    )
    sentence: str
    operation: UUID | None = Field(
        validation_alias="operation_id", description="The operation that places its streams anew."
    )


class SessionOut(Schema):
    name: str
    version: int = Field(description="Incremented with each change; the ETag.")
    org: SlugOf | None = Field(description="The owner; null for a shared session.")
    boxes: SizesOut
    box_names: list[str]
    waiting: WaitingOut | None
    deleting: bool
    path: Annotated[PathName | None, OR_NULL] = Field(description="Stricter than the rules, if set.")
    bytes_per_token: int
    jobs: int = Field(validation_alias="job_count")
    memory_bytes: int
    spine_streams: int = Field(validation_alias="spine_count")
    operation: UUID | None = Field(
        validation_alias="operation_id", description="The running operation on the whole session."
    )
    part_operations: list[UUID] = Field(
        validation_alias="part_operation_ids",
        description="The running operations on its jobs, and on its lost nodes.",
    )
    lost_nodes: list[LostNodeOut] = Field(
        validation_alias="losses", description="Its nodes that are lost."
    )
    redundancy: RedundancyName | None = Field(
        description="Of columns in tier 2, now: less than the rules ask for where there are too few "
        "agents. Of shards with different ones the weakest; null: no job runs."
    )
    created_at: datetime

    @staticmethod
    def resolve_redundancy(session: Any) -> str | None:
        codes = [one or "none" for one in session.codes]
        return weakest(codes) if codes else None

    @staticmethod
    def resolve_boxes(session: Session) -> Sizes:
        return sizes(session)

    @staticmethod
    def resolve_box_names(session: Session) -> list[str]:
        return [one.box.name for one in session.boxes.all()]

    @staticmethod
    def resolve_waiting(session: Session) -> Session | None:
        return session if session.waiting_since else None


class PlannedIn(Input):
    """Something that is planned first, and may wait for its place."""

    wait_seconds: WaitSeconds = 0
    plan_token: PlanToken = None
    reason: Reason = ""

    def asked(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PlannedIn.model_fields}


class SessionIn(PlannedIn):
    name: Annotated[str, Field(pattern=SLUG, max_length=48, examples=["chat"])]
    org: Slug | None = Field(None, description="Null: shared, owned by the platform.")
    boxes: Boxes
    path: PathName | None = None
    bytes_per_token: Annotated[int, Field(ge=1, le=2**31 - 1)] = 64 << 10


class ResizeIn(PlannedIn):
    boxes: Boxes


OrgsIn = Annotated[
    Literal["all", "session"] | Annotated[list[Slug], Field(max_length=NAMED_MAX)],
    Field(
        description="The orgs whose secrets the driver is told: that of its `session`, those named, or "
        "`all`, which takes a platform admin.",
        examples=[["acme"]],
    ),
]
OrgsOut = Literal["all"] | list[str]


class JobIn(PlannedIn):
    name: Slug
    driver: FleetName
    orgs: OrgsIn | None = Field(
        None, description="Null: the org of the session. A session without an org has to say which."
    )
    boxes: Annotated[
        list[FleetName],
        Field(
            max_length=1000,
            description="Boxes of the session: the job has their memory, whatever other jobs there are. "
            "Empty: as many as the model needs, and a part of the memory of the whole session.",
        ),
    ] = []


class JobOut(Schema):
    name: str
    driver: NameOf
    driver_address: str = Field(
        validation_alias="driver.control_url", description="Address of its control API."
    )
    boxes: list[str]
    running: bool = Field(description="Whether its driver knows the homes of its streams.")
    created_at: datetime

    @staticmethod
    def resolve_boxes(job: Job) -> list[str]:
        return [one.session_box.box.name for one in job.boxes.all()]


class MoveIn(Input):
    stream: Annotated[str, Field(max_length=300, examples=["job7.full.0"])]
    node: FleetName
    reason: Reason = ""


class RestoreRailsIn(Input):
    moves_max: Annotated[int, Field(ge=1, le=10_000)] | None = None
    reason: Reason = ""


class _WhyOut(Schema):
    @staticmethod
    def resolve_why(stream: Planned | Stream, context: Context) -> str:
        return Sight(context["request"].principal).why(stream.why)


class PlannedOut(_WhyOut):
    stream: str = Field(validation_alias="name")
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

    @staticmethod
    def resolve_memory_bytes_before(stream: Planned) -> int:
        return stream.slots_before * stream.slot_bytes


class WorthOut(Schema):
    job: str
    memory_bytes: int
    tokens: int = Field(description="Tokens of prompts that fit.")
    tokens_equal: int = Field(description="Tokens that would fit with an equal split.")


class PlanOut(Schema):
    """What would be done. Nothing has been."""

    plan_token: str = Field(validation_alias="token")
    boxes: list[str]
    added: list[str]
    removed: list[str]
    is_trial: bool = Field(
        description="The session has no job yet: the plan is for one job on all boxes."
    )
    summary: str
    rail: int = Field(validation_alias="paths.rail")
    leaf: int = Field(validation_alias="paths.leaf")
    spine: int = Field(validation_alias="paths.spine")
    cause: str
    never: bool
    sentence: str
    streams: list[PlannedOut]
    worth: list[WorthOut]

    @staticmethod
    def resolve_cause(plan: Proposal) -> str:
        return plan.cause.value if plan.cause else ""

    @staticmethod
    def resolve_never(plan: Proposal) -> bool:
        return plan.cause is not None and plan.cause.is_never


class MovePlanOut(Schema):
    stream: NameOf
    source: str
    target: str
    path_before: TierName = Field(validation_alias="tier_before")
    path_after: TierName = Field(validation_alias="tier_after")
    memory_bytes: int = Field(validation_alias="stream.memory_bytes")


class RestoreRailsOut(Schema):
    """What would be moved, and what that gains."""

    moves: list[MovePlanOut]
    spine_wio_before: int = Field(validation_alias="before.spine_wio")
    spine_wio_after: int = Field(validation_alias="after.spine_wio")
    bytes: int
    left: Annotated[int, BeforeValidator(len)] = Field(description="Streams that remain off rails.")


class StreamOut(_WhyOut):
    name: str
    job: NameOf
    group: str
    index: int
    box: NameOf
    domain: int
    wio: int
    node: NameOf
    path: str
    port_leaf: str
    nic_leaf: str
    memory_bytes: int
    why: str
    next_node: NameOf | None = Field(description="The node to which it moves, or where it is resized.")
    phase: str = Field(validation_alias="get_phase_display")


class TakenOut(Schema):
    org: SlugOf | None = Field(description="Null: all orgs that you may not see, together.")
    bytes: int


class MemoryOut(Schema):
    """What the columns of each org take of a session's memory."""

    at: datetime | None = Field(description="When drivers last reported; null: never.")
    complete: bool = Field(
        description="False: a driver has not reported for two minutes, or there are more drivers or "
        "orgs than one query covers. Then less is shown than is stored."
    )
    granted_bytes: int
    by_org: list[TakenOut]
