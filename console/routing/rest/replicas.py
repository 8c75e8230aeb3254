"""Replicas of served models over REST."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpResponse
from ninja import Field, Path

from console.accounts.browser import SignedInRequest
from console.api.etags import etag, matched, tagged
from console.api.fields import IfMatch, Input, Reason
from console.api.idempotency import Answer, with_dry_run
from console.api.routes import Router, answers
from console.api.shown import read
from console.fleet.models import NAME
from console.routing import services
from console.routing.models import API_KEY_MAX, MODEL_MAX, URL, Replica
from console.routing.rest.models import NEEDS, ModelName, ReplicaOut

router = Router(tags=["routing"])

ReplicaName = Annotated[str, Path(pattern=NAME, max_length=63, description="Name of the replica.")]


class ReplicaPatch(Input):
    """Omitted fields stay as they are."""

    url: Annotated[str, Field(pattern=URL, max_length=500)] | None = None
    engine: Literal["vllm", "sglang", "other"] | None = None
    driver: Annotated[str, Field(max_length=63)] | None = Field(
        None, description="Name of the driver in, or beside, the engine; empty for none."
    )
    draining: bool | None = Field(None, description="True: it gets no new requests.")
    served_as: Annotated[str, Field(max_length=MODEL_MAX, pattern=r"^[^\x00-\x1f\x7f]*$")] | None = None
    api_key: Annotated[str, Field(max_length=API_KEY_MAX, pattern=r"^[\x21-\x7e]*$")] | None = Field(
        None, description="What the engine wants to be shown; empty for none. Never shown again."
    )
    reason: Reason = ""

    def values(self) -> dict[str, Any]:
        """Raises ValidationError for a driver that is not there."""
        said = self.model_dump(exclude_none=True, exclude={"reason", "name"})
        if "driver" in said:
            said["driver"] = services.driver_named(said["driver"])
        return said


class ReplicaIn(ReplicaPatch):
    name: Annotated[str, Field(pattern=NAME, max_length=63, examples=["chat-1"])]
    url: Annotated[str, Field(pattern=URL, max_length=500, examples=["http://10.0.0.21:8000"])]


@router.post("/models/{name}/replicas", response=answers(ReplicaOut, 404, 409, status=201))
@with_dry_run
def add_replica(request: SignedInRequest, name: ModelName, payload: ReplicaIn) -> Answer:
    """Add a replica."""
    model = services.for_change(request.principal, name)
    replica = services.add_replica(
        request.principal, model, name=payload.name, values=payload.values(), reason=payload.reason
    )
    headers = {
        "Location": f"/api/v1/models/{name}/replicas/{replica.name}",
        "ETag": etag(replica.version),
    }
    return Answer(201, NEEDS, read(ReplicaOut, replica, request), headers)


@router.get("/models/{name}/replicas/{replica}", response=answers(ReplicaOut, 404))
def get_replica(
    request: SignedInRequest, response: HttpResponse, name: ModelName, replica: ReplicaName
) -> Replica:
    """Get a replica."""
    model = services.get_model(request.principal, name)
    return tagged(response, services.get_replica(model, replica))


@router.patch("/models/{name}/replicas/{replica}", response=answers(ReplicaOut, 404, 409, 412, 428))
@with_dry_run
def update_replica(
    request: SignedInRequest,
    name: ModelName,
    replica: ReplicaName,
    payload: ReplicaPatch,
    if_match: IfMatch,
) -> Answer:
    """Change a replica, or drain it."""
    model = services.for_change(request.principal, name)
    found = matched(services.get_replica(model, replica), if_match)
    services.update_replica(request.principal, found, values=payload.values(), reason=payload.reason)
    return Answer(200, NEEDS, read(ReplicaOut, found, request), {"ETag": etag(found.version)})


@router.delete(
    "/models/{name}/replicas/{replica}", response=answers(None, 404, 409, 412, 428, status=204)
)
@with_dry_run
def remove_replica(
    request: SignedInRequest, name: ModelName, replica: ReplicaName, if_match: IfMatch
) -> Answer:
    """Remove a replica.

    Answers that are being streamed go on to their end.
    """
    model = services.for_change(request.principal, name)
    found = matched(services.get_replica(model, replica), if_match)
    services.remove_replica(request.principal, found)
    return Answer(204, NEEDS)
