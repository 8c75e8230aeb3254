"""Workloads as the API takes and shows them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from django.utils.crypto import salted_hmac
from ninja import Field, Schema
from pydantic import BaseModel, WithJsonSchema

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.api.fields import NO_NUL, Input, Reason
from console.api.problems import ApiError, FieldError
from console.api.shown import OR_NULL, Context, SlugOf
from console.sessions.rest.schemas import PlannedIn, PlanOut
from console.workloads import spec as specs
from console.workloads.models import Instance, Revision, Workload
from console.workloads.services import ready_of
from console.workloads.spec import CHARACTERS_MAX, REPLICAS_MAX, WorkloadSpec, Wrong

ConditionStatus = Literal["True", "False", "Unknown"]
WITH_UNITS = {"description": "A number, or text with a unit.", "maxLength": 100, "type": "string"}


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """msgspec's definition, whole in itself: pydantic keeps references of its own."""
    (top,), parts = msgspec.json.schema_components([kind], ref_template="{name}")

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(parts[value["$ref"]])
        found = {key: inlined(each) for key, each in value.items()}
        for name, one in found.get("properties", {}).items():
            if name.endswith("_seconds") or name in specs.SIZES:
                found["properties"][name] = {"anyOf": [one, WITH_UNITS]}
        return found

    found: dict[str, Any] = inlined(top)
    found["description"] = "See docs/workloads.md."
    return found


SpecField = Annotated[dict[str, Any], WithJsonSchema(_schema(WorkloadSpec))]
TemplateField = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]
Yaml = Annotated[str, Field(max_length=CHARACTERS_MAX, pattern=NO_NUL)]


class SpecIn(PlannedIn):
    """One of `spec` and `yaml`."""

    spec: SpecField | None = Field(None, description="The whole spec.")
    yaml: Yaml | None = Field(
        None, description="The whole spec as text, YAML or JSON: problems are told with their lines."
    )

    def wanted(self) -> WorkloadSpec:
        if (self.spec is None) == (self.yaml is None):
            detail = "Send one of `spec` and `yaml`."
            raise ApiError("InvalidRequest", detail, errors=[FieldError(pointer="/body", detail=detail)])
        try:
            return specs.from_values(self.spec) if self.yaml is None else specs.parse(self.yaml)
        except Wrong as error:
            raise invalid(error, "spec" if self.yaml is None else "yaml") from None


class SpecPatch(PlannedIn):
    patch: Annotated[dict[str, Any], WithJsonSchema({"type": "object"})] = Field(
        description="A merge patch (RFC 7396) of the spec: what it names changes, null is removed.",
        examples=[{"engine": {"arguments": ["--max-num-seqs", "64"]}}],
    )

    def wanted(self, workload: Workload) -> WorkloadSpec:
        try:
            return specs.merged(workload.spec(), self.patch)
        except Wrong as error:
            raise invalid(error, "patch") from None


def invalid(error: Wrong, field: str) -> ApiError:
    """With a pointer to each field that is wrong; of text, to the text, and the line is told."""
    errors = []
    for one in error.problems:
        place = one.at.replace(".", "/").replace("[", "/").replace("]", "") if field != "yaml" else ""
        detail = one.sentence if place else str(one)
        errors.append(FieldError(pointer=f"/body/{field}/{place}".rstrip("/"), detail=detail))
    return ApiError("InvalidRequest", str(error.problems[0]), errors=errors)


class ScaleIn(PlannedIn):
    replicas: Annotated[int, Field(ge=1, le=REPLICAS_MAX)]


class WorkloadReasonIn(Input):
    reason: Reason = ""


class WorkloadUndoIn(WorkloadReasonIn):
    revision: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="The revision to roll back to; null: the one that was rolled out before."
    )


class ConditionOut(BaseModel):
    type: str
    status: ConditionStatus
    reason: str = Field(description="A word for machines.")
    message: str
    since: datetime


class TrafficOut(BaseModel):
    requests: int
    errors: int = Field(description="Requests that failed by a fault of the replica.")
    ttft_seconds: float | None = Field(description="Median time to first token.")
    per_second: float = Field(description="Requests per second of a replica that had some.")


class RolloutTrafficOut(BaseModel):
    """Requests of five minutes. Of the old revision: those beside the new one, or all, if few."""

    new: TrafficOut
    old: TrafficOut


class RolloutOut(BaseModel):  # of what `rollout_shown` says
    from_revision: int | None
    to_revision: int
    phase: Literal["running", "paused", "done", "failed", "undone", "superseded"]
    reason: str
    sentence: str
    switched: int = Field(description="Replicas that are served by the new revision.")
    total: int
    traffic: RolloutTrafficOut | None = Field(
        description="What both revisions were compared by last; null: nothing has been counted yet."
    )
    started_at: datetime
    deadline_at: datetime | None = Field(
        description="Until when the first new instance has to be ready; each later one has as long."
    )
    ended_at: datetime | None


def rollout_shown(read: Mapping[str, Any]) -> dict[str, object]:
    """The values of RolloutOut, of what `services.with_shown` reads."""
    times = {name: _moment(read[name]) for name in ("started_at", "deadline_at", "ended_at")}
    return {**read, "traffic": read["traffic"] or None, **times}


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


class ReplicasOut(BaseModel):
    desired: int
    ready: int = Field(description="Replicas that requests go to.")
    instances: int = Field(description="Instances that have not ended.")


class WorkloadOut(BaseModel):  # of what `workload_shown` says
    name: str
    version: int = Field(description="Incremented with each change; the ETag.")
    org: SlugOf | None = Field(description="The owner; null for one of the platform.")
    model: str = Field(description="What clients send as `model`.")
    ready: ConditionStatus = Field(description="Status of the condition `Ready`.")
    replicas: ReplicasOut
    revision: int = Field(description="What its instances are to run.")
    stable_revision: int | None = Field(description="The last one whose rollout is complete.")
    generation: int = Field(description="Incremented with each change that has to be acted upon.")
    observed_generation: int = Field(description="How far the orchestrator has seen them.")
    paused: bool
    deleting: bool
    restarts: int
    session: str | None
    conditions: list[ConditionOut]
    rollout: RolloutOut | None = Field(description="The rollout that has not ended.")
    spec: SpecField
    created_at: datetime


def workload_shown(row: Any, principal: Principal) -> dict[str, object]:
    """The values of WorkloadOut, of a row of `services.shown`."""
    ready = ready_of(row.conditions_read)
    spec = specs.shown_whole(
        *(row.name, row.model, row.org__slug, row.replicas, row.boxes_per_replica),
        *(row.settings_text, row.template_text),
    )
    return {
        "name": row.name,
        "version": row.version,
        "org": row.org__slug,
        "model": row.model,
        "ready": ready["status"] if ready else "Unknown",
        "replicas": {
            "desired": row.replicas,
            "ready": row.ready_count,
            "instances": row.instance_count,
        },
        "revision": row.revision__number,
        "stable_revision": row.stable_number,
        "generation": row.generation,
        "observed_generation": row.observed_generation,
        "paused": row.paused,
        "deleting": row.deleting,
        "restarts": row.restarts,
        "session": row.session__name,
        "conditions": [{**one, "since": _moment(one["since"])} for one in row.conditions_read],
        "rollout": rollout_shown(row.rollout_read) if row.rollout_read else None,
        "spec": spec if principal.holds(Role.ORG_ADMIN, row.org_id) else specs.masked(spec),
        "created_at": row.created_at,
    }


class WorkloadDifferenceOut(Schema):
    field: str
    before: Any
    after: Any
    rollout: bool = Field(description="Whether it makes new instances.")


class WorkloadPlanOut(Schema):
    """What would be done. Nothing has been."""

    plan_token: str = Field(validation_alias="token")
    summary: str
    differences: list[WorkloadDifferenceOut]
    makes_revision: bool
    revision: int = Field(description="What instances would run.")
    boxes: int
    boxes_before: int
    boxes_free: int | None = Field(description="Boxes that would stay free; null: no boxes are taken.")
    quota_left: int | None = Field(description="Of the owner, in boxes; null: it has no quota.")
    replicas_left: int | None = Field(
        description="Of the owner's quota, in replicas; null: it has no quota."
    )
    weights: str = Field(
        description="Whose credentials they are read with, or that the bucket has to be public; empty: "
        "they are in no bucket."
    )
    placement: PlanOut | None = Field(description="Its streams, and the memory of its replicas.")


class RevisionOut(Schema):
    number: int
    template: TemplateField = Field(description="What its instances are started with.")
    digest: str = Field(description="Equal templates have equal digests, at one console.")
    same_as: int | None = Field(description="The revision that it restores.")
    author: str = Field(validation_alias="author_name")
    note: str
    made_at: datetime
    artifact: str | None = Field(description="SHA-256 of what it was compiled to.")
    epoch: int | None = Field(description="Revisions of one epoch share their cache.")
    compiled_at: datetime | None

    @staticmethod
    def resolve_digest(revision: Revision) -> str:
        """Keyed: it follows from variables of engines as well, which could be guessed by it."""
        return salted_hmac("tidegate.revision", revision.digest, algorithm="sha256").hexdigest()

    @staticmethod
    def resolve_template(revision: Revision, context: Context) -> Mapping[str, Any]:
        found = revision.template_shown()
        org_id = revision.workload.org_id
        may_see = context["request"].principal.holds(Role.ORG_ADMIN, org_id)
        return found if may_see else specs.masked(found)


class InstanceProgressOut(Schema):
    done: int
    total: int
    unit: str
    seconds: float


class InstanceOut(Schema):
    name: str
    replica: str
    ordinal: int
    revision: int = Field(validation_alias="revision.number")
    goal: str
    state: str
    reason: str = Field(description="Why it is not ready, as a word for machines.")
    sentence: str
    since: datetime
    serving: bool = Field(description="Whether requests of its replica go to it.")
    cache: str = Field(description="Empty, `none`, `waiting`, `attached` or `released`.")
    url: str
    driver: str
    host: str
    boxes: list[str]
    progress: Annotated[InstanceProgressOut | None, OR_NULL]
    engine_restarts: int
    running_requests: int
    created_at: datetime
    ready_at: datetime | None
    seen_at: datetime | None = Field(description="When its manager last reported.")
    ended_at: datetime | None
    end_reason: str

    @staticmethod
    def resolve_progress(instance: Instance) -> dict[str, Any] | None:
        if not instance.progress_total:
            return None
        return {
            name: getattr(instance, f"progress_{name}") for name in ("done", "total", "unit", "seconds")
        }


class WorkloadEventOut(Schema):
    at: datetime
    kind: str
    sentence: str
