"""The fleet over REST: nodes, boxes, leaves, spine links and drivers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpResponse
from ninja import Field, Path, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.roles import Role
from console.api.etags import check_match, tagged
from console.api.fields import IfMatch, Input, Reason, SearchText
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import OR_NULL, NameOf
from console.fleet import boxes, nodes, retired_stores, services
from console.fleet.labels import LABELS_MAX
from console.fleet.models import NAME, Box, Domain, Driver, Leaf, Node, SpineLink
from console.placement.topology import State

router = Router(tags=["fleet"])

Name = Annotated[str, Path(pattern=NAME, max_length=63)]
StateName = Literal["ready", "cordoned", "draining", "maintenance", "lost"]
Mover = Annotated[
    Literal["compiled", "python"] | None,
    OR_NULL,
    Field(
        description="What moves bytes: compiled code, or Python, which is slower. Null: not reported."
    ),
]
LabelName = Annotated[str, Field(max_length=63)]
LabelValue = Annotated[str, Field(max_length=63)]


class NicOut(Schema):
    name: str
    leaf: NameOf
    wio: int
    gbits: int


class RetiringStoreOut(Schema):
    id: int
    place: str
    since: datetime
    drains: bool = Field(
        validation_alias="is_drained",
        description="Whether its files are being deleted; otherwise they expire or are purged.",
    )
    state: str = Field(description="As its agent reports: indexing, retiring or refused.")
    reason: str
    files: int | None
    bytes: int | None
    seen_at: datetime | None = Field(description="When its agent reported it.")


class NodeOut(Schema):
    name: str
    version: int = Field(description="Incremented with each change; the ETag.")
    stamp: NameOf
    state: StateName
    state_reason: str
    state_since: datetime
    memory_bytes: int = Field(
        description="Memory for shards, from the description or else as its agent reports."
    )
    cpus: int
    shards_max: int
    cores_used: float | None = Field(
        description="Cores that its shards took in the busiest minute of ten. Null: not measured."
    )
    measured_at: datetime | None
    nics: list[NicOut]
    tier2: dict[str, Any] | None = Field(description="From the description; null: memory only.")
    retiring_stores: list[RetiringStoreOut] = Field(
        description="Former tier-2 locations that are not empty yet."
    )
    labels: dict[str, str]
    software_version: str
    mover: Mover
    protocol_min: int
    protocol_max: int
    data_address: str
    joined_at: datetime | None
    last_heartbeat_at: datetime | None

    @staticmethod
    def resolve_tier2(node: Node) -> object:
        return node.declared.get("tier2")


class StateIn(Input):
    state: Literal["ready", "cordoned", "maintenance"] = Field(
        description="Desired state. A lost node takes it when it rejoins."
    )
    reason: Reason = ""


class DrainStoreIn(Input):
    also_others: bool = Field(
        default=False,
        description="Also delete the files of other nodes that share the location. "
        "Without it that is refused, and the answer names the nodes.",
    )
    reason: Reason = ""


class BoxStateIn(Input):
    state: Literal["ready", "cordoned"]
    reason: Reason = ""


class NodePatch(Input):
    labels: dict[LabelName, LabelValue] = Field(max_length=LABELS_MAX)
    reason: Reason = ""


class DomainOut(Schema):
    index: int
    wio: int
    leaves: list[str]

    @staticmethod
    def resolve_leaves(domain: Domain) -> list[str]:
        return [port.leaf.name for port in domain.ports.all()]


class BoxOut(Schema):
    name: str
    version: int
    stamp: NameOf
    state: Literal["ready", "cordoned", "draining"]
    state_reason: str
    memory_bytes: int | None = Field(description="For weights and KV; null if nobody has said.")
    domains: list[DomainOut]


class LeafOut(Schema):
    name: str
    version: int
    stamp: NameOf


class SpineLinkOut(Schema):
    name: str
    version: int
    leaf: NameOf
    spine: str
    gbits: int


class DriverOut(Schema):
    name: str
    version: int
    model: dict[str, Any] | None
    engine: str = Field(description="The engine that it is part of; empty for a daemon.")
    software_version: str
    mover: Mover
    joined_at: datetime | None
    last_heartbeat_at: datetime | None
    lost_at: datetime | None = Field(description="When it was reported lost; null if it is not.")


@listing(router, "/nodes", NodeOut, 404, by="name")
def list_nodes(
    request: SignedInRequest,
    q: SearchText = "",
    state: Literal[StateName, "not joined"] | None = None,
    stamp: SearchText = "",
    leaf: SearchText = "",
    label: SearchText = "",
) -> Rows:
    """List nodes."""
    filters = services.NodeFilters(q=q, state=state or "", stamp=stamp, leaf=leaf, label=label)
    return filters.apply(services.visible_nodes(request.principal))


@router.get("/nodes/{name}", response=answers(NodeOut, 404))
def get_node(request: SignedInRequest, response: HttpResponse, name: Name) -> Node:
    """Get a node."""
    node = services.get(services.visible_nodes(request.principal), name)
    return tagged(response, node)


@router.put("/nodes/{name}/state", response=answers(NodeOut, 404, 409))
def set_state(request: SignedInRequest, response: HttpResponse, name: Name, payload: StateIn) -> Node:
    """Set the state of a node: ready, cordoned or maintenance."""
    with transaction.atomic():
        node = services.for_change(request.principal, services.visible_nodes, name, Role.ON_CALL)
        nodes.set_state(request.principal, node, State(payload.state), reason=payload.reason)
    return tagged(response, node)


@router.put("/nodes/{name}/retiring-stores/{store}/drain", response=answers(NodeOut, 404, 409))
def drain_store(
    request: SignedInRequest, response: HttpResponse, name: Name, store: int, payload: DrainStoreIn
) -> Node:
    """Delete the files in a former tier-2 location."""
    with transaction.atomic():
        node = services.for_change(request.principal, services.visible_nodes, name, Role.PLATFORM_ADMIN)
        retired_stores.drain(
            request.principal, node, store, also_others=payload.also_others, reason=payload.reason
        )
    return get_node(request, response, name)  # with its stores as they are now


@router.patch("/nodes/{name}", response=answers(NodeOut, 404, 409, 412, 428))
def update_node(
    request: SignedInRequest, response: HttpResponse, name: Name, payload: NodePatch, if_match: IfMatch
) -> Node:
    """Set the labels of a node."""
    with transaction.atomic():
        node = services.for_change(request.principal, services.visible_nodes, name, Role.PLATFORM_ADMIN)
        check_match(if_match, node.version)
        nodes.set_labels(request.principal, node, payload.labels, reason=payload.reason)
    return tagged(response, node)


@listing(router, "/boxes", BoxOut, 404, by="name")
def list_boxes(request: SignedInRequest, q: SearchText = "", stamp: SearchText = "") -> Rows:
    """List boxes."""
    return _narrowed(services.visible_boxes(request.principal), name__contains=q, stamp__name=stamp)


def _narrowed(found: QuerySet[Any], **asked: str) -> QuerySet[Any]:
    """By what was asked for."""
    return found.filter(**{lookup: text for lookup, text in asked.items() if text})


@router.get("/boxes/{name}", response=answers(BoxOut, 404))
def get_box(request: SignedInRequest, response: HttpResponse, name: Name) -> Box:
    """Get a box."""
    box = services.get(services.visible_boxes(request.principal), name)
    return tagged(response, box)


@router.put("/boxes/{name}/state", response=answers(BoxOut, 404, 409))
def set_box_state(
    request: SignedInRequest, response: HttpResponse, name: Name, payload: BoxStateIn
) -> Box:
    """Set the state of a box: ready or cordoned."""
    with transaction.atomic():
        box = services.for_change(request.principal, services.visible_boxes, name, Role.ON_CALL)
        boxes.set_state(request.principal, box, State(payload.state), reason=payload.reason)
    return tagged(response, box)


@listing(router, "/leaves", LeafOut, 404, by="name")
def list_leaves(request: SignedInRequest, stamp: SearchText = "") -> Rows:
    """List leaves."""
    return _narrowed(services.visible_leaves(request.principal), stamp__name=stamp)


@router.get("/leaves/{name}", response=answers(LeafOut, 404))
def get_leaf(request: SignedInRequest, name: Name) -> Leaf:
    """Get a leaf."""
    return services.get(services.visible_leaves(request.principal), name)


@listing(router, "/spine-links", SpineLinkOut, 404, by="name")
def list_spine_links(request: SignedInRequest, leaf: SearchText = "") -> Rows:
    """List the links from leaves to the spine."""
    return _narrowed(services.visible_spine_links(request.principal), leaf__name=leaf)


@router.get("/spine-links/{name}", response=answers(SpineLinkOut, 404))
def get_spine_link(request: SignedInRequest, name: Name) -> SpineLink:
    """Get a spine link."""
    return services.get(services.visible_spine_links(request.principal), name)


@listing(router, "/drivers", DriverOut, 404, by="name")
def list_drivers(request: SignedInRequest, q: SearchText = "") -> Rows:
    """List drivers."""
    return services.visible_drivers(request.principal).filter(name__contains=q)


@router.get("/drivers/{name}", response=answers(DriverOut, 404))
def get_driver(request: SignedInRequest, response: HttpResponse, name: Name) -> Driver:
    """Get a driver."""
    driver = services.get(services.visible_drivers(request.principal), name)
    return tagged(response, driver)
