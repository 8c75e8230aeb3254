"""The fleet over REST: nodes, boxes, leaves, spine links and drivers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Field, Path, Router, Schema

from console.accounts.browser import requester
from console.accounts.roles import Role
from console.api.etags import IfMatch, check_match, etag
from console.api.fields import Input, Reason, SearchText
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.fleet import nodes, retired_stores, services
from console.fleet.filters import NodeFilters
from console.fleet.labels import LABELS_MAX
from console.fleet.models import NAME, Box, Driver, Leaf, Node, SpineLink
from console.placement.topology import State

router = Router(tags=["fleet"])

Name = Annotated[str, Path(pattern=NAME, max_length=63)]
StateName = Literal["ready", "cordoned", "draining", "maintenance", "lost"]
LabelName = Annotated[str, Field(max_length=63)]
LabelValue = Annotated[str, Field(max_length=63)]


class NicOut(Schema):
    name: str
    leaf: str
    wio: int
    gbits: int


class RetiringStoreOut(Schema):
    id: int
    place: str
    since: datetime
    drains: bool = Field(
        description="Whether its files are being deleted; otherwise they expire or are purged."
    )
    state: str = Field(description="As its agent reports: indexing, retiring or refused.")
    reason: str
    files: int | None
    bytes: int | None
    seen_at: datetime | None = Field(description="When its agent reported it.")


class NodeOut(Schema):
    name: str
    version: int = Field(description="Incremented with each change; the ETag.")
    stamp: str
    state: StateName
    state_reason: str
    state_since: datetime
    memory_bytes: int = Field(
        description="Memory for shards, from the description or else as its agent reports."
    )
    cpus: int
    shards_max: int
    nics: list[NicOut]
    tier2: dict[str, Any] | None = Field(description="From the description; null: memory only.")
    retiring_stores: list[RetiringStoreOut] = Field(
        description="Former tier-2 locations that are not empty yet."
    )
    labels: dict[str, str]
    software_version: str
    mover: Literal["compiled", "python"] | None = Field(
        description="What moves bytes: compiled code, or Python, which is slower. Null: not reported."
    )
    protocol_min: int
    protocol_max: int
    data_address: str
    joined_at: datetime | None
    last_heartbeat_at: datetime | None


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


class NodePatch(Input):
    labels: dict[LabelName, LabelValue] = Field(max_length=LABELS_MAX)
    reason: Reason = ""


class DomainOut(Schema):
    index: int
    wio: int
    leaves: list[str]


class BoxOut(Schema):
    name: str
    version: int
    stamp: str
    domains: list[DomainOut]


class LeafOut(Schema):
    name: str
    version: int
    stamp: str


class SpineLinkOut(Schema):
    name: str
    version: int
    leaf: str
    spine: str
    gbits: int


class DriverOut(Schema):
    name: str
    version: int
    model: dict[str, Any] | None
    software_version: str
    mover: Literal["compiled", "python"] | None = Field(
        description="What moves bytes: compiled code, or Python, which is slower. Null: not reported."
    )
    joined_at: datetime | None
    last_heartbeat_at: datetime | None
    lost_at: datetime | None = Field(description="When it was reported lost; null if it is not.")


def show_node(node: Node) -> NodeOut:
    state: Any = node.state
    mover: Any = node.mover or None
    return NodeOut(
        name=node.name,
        version=node.version,
        stamp=node.stamp.name,
        state=state,
        state_reason=node.state_reason,
        state_since=node.state_since,
        memory_bytes=node.memory_bytes,
        cpus=node.cpus,
        shards_max=node.shards_max,
        nics=[
            NicOut(name=nic.name, leaf=nic.leaf.name, wio=nic.wio, gbits=nic.gbits)
            for nic in node.nics.all()
        ],
        tier2=node.declared.get("tier2"),
        retiring_stores=[
            RetiringStoreOut(
                id=store.pk,
                place=store.place,
                since=store.since,
                drains=store.is_drained,
                state=store.state,
                reason=store.reason,
                files=store.files,
                bytes=store.bytes,
                seen_at=store.seen_at,
            )
            for store in node.retiring_stores.all()
        ],
        labels=node.labels,
        software_version=node.software_version,
        mover=mover,
        protocol_min=node.protocol_min,
        protocol_max=node.protocol_max,
        data_address=node.data_address,
        joined_at=node.joined_at,
        last_heartbeat_at=node.last_heartbeat_at,
    )


def show_box(box: Box) -> BoxOut:
    return BoxOut(
        name=box.name,
        version=box.version,
        stamp=box.stamp.name,
        domains=[
            DomainOut(
                index=domain.index,
                wio=domain.wio,
                leaves=[port.leaf.name for port in domain.ports.all()],
            )
            for domain in box.domains.all()
        ],
    )


def show_leaf(leaf: Leaf) -> LeafOut:
    return LeafOut(name=leaf.name, version=leaf.version, stamp=leaf.stamp.name)


def show_spine_link(link: SpineLink) -> SpineLinkOut:
    return SpineLinkOut(
        name=link.name, version=link.version, leaf=link.leaf.name, spine=link.spine, gbits=link.gbits
    )


def show_driver(driver: Driver) -> DriverOut:
    mover: Any = driver.mover or None
    return DriverOut(
        name=driver.name,
        version=driver.version,
        model=driver.model,
        software_version=driver.software_version,
        mover=mover,
        joined_at=driver.joined_at,
        last_heartbeat_at=driver.last_heartbeat_at,
        lost_at=driver.lost_at,
    )


@router.get(
    "/nodes",
    response={200: Page[NodeOut], **documented(404)},
    summary="List nodes",
)
def list_nodes(
    request: HttpRequest,
    q: SearchText = "",
    state: Literal[StateName, "not joined"] | None = None,
    stamp: SearchText = "",
    leaf: SearchText = "",
    label: SearchText = "",
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    filters = NodeFilters(q=q, state=state or "", stamp=stamp, leaf=leaf, label=label)
    found = filters.apply(services.visible_nodes(requester(request)))
    return paginate(found, "name", cursor, limit, show_node)


@router.get("/nodes/{name}", response={200: NodeOut, **documented(404)}, summary="Get a node")
def get_node(request: HttpRequest, response: HttpResponse, name: Name) -> NodeOut:
    node = services.get(services.visible_nodes(requester(request)), name)
    response["ETag"] = etag(node.version)
    return show_node(node)


@router.put(
    "/nodes/{name}/state",
    response={200: NodeOut, **documented(404, 409)},
    summary="Set the state of a node: ready, cordoned or maintenance",
)
def set_state(request: HttpRequest, response: HttpResponse, name: Name, payload: StateIn) -> NodeOut:
    principal = requester(request)
    with transaction.atomic():
        visible = services.visible_nodes(principal)
        node = services.for_change(principal, visible, name, Role.ON_CALL)
        nodes.set_state(principal, node, State(payload.state), reason=payload.reason)
    response["ETag"] = etag(node.version)
    return show_node(node)


@router.put(
    "/nodes/{name}/retiring-stores/{store}/drain",
    response={200: NodeOut, **documented(404, 409)},
    summary="Delete the files in a former tier-2 location",
)
def drain_store(
    request: HttpRequest, response: HttpResponse, name: Name, store: int, payload: DrainStoreIn
) -> NodeOut:
    principal = requester(request)
    with transaction.atomic():
        visible = services.visible_nodes(principal)
        node = services.for_change(principal, visible, name, Role.PLATFORM_ADMIN)
        retired_stores.drain(
            principal, node, store, also_others=payload.also_others, reason=payload.reason
        )
        node = services.get(visible, name)  # with its stores as they are now
    response["ETag"] = etag(node.version)
    return show_node(node)


@router.patch(
    "/nodes/{name}",
    response={200: NodeOut, **documented(404, 409, 412, 428)},
    summary="Set the labels of a node",
)
def update_node(
    request: HttpRequest, response: HttpResponse, name: Name, payload: NodePatch, if_match: IfMatch
) -> NodeOut:
    principal = requester(request)
    with transaction.atomic():
        visible = services.visible_nodes(principal)
        node = services.for_change(principal, visible, name, Role.PLATFORM_ADMIN)
        check_match(if_match, node.version)
        nodes.set_labels(principal, node, payload.labels, reason=payload.reason)
    response["ETag"] = etag(node.version)
    return show_node(node)


@router.get("/boxes", response={200: Page[BoxOut], **documented(404)}, summary="List boxes")
def list_boxes(
    request: HttpRequest,
    q: SearchText = "",
    stamp: SearchText = "",
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    found = services.visible_boxes(requester(request)).filter(name__contains=q)
    if stamp:
        found = found.filter(stamp__name=stamp)
    return paginate(found, "name", cursor, limit, show_box)


@router.get("/boxes/{name}", response={200: BoxOut, **documented(404)}, summary="Get a box")
def get_box(request: HttpRequest, response: HttpResponse, name: Name) -> BoxOut:
    box = services.get(services.visible_boxes(requester(request)), name)
    response["ETag"] = etag(box.version)
    return show_box(box)


@router.get("/leaves", response={200: Page[LeafOut], **documented(404)}, summary="List leaves")
def list_leaves(
    request: HttpRequest,
    stamp: SearchText = "",
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    found = services.visible_leaves(requester(request))
    if stamp:
        found = found.filter(stamp__name=stamp)
    return paginate(found, "name", cursor, limit, show_leaf)


@router.get("/leaves/{name}", response={200: LeafOut, **documented(404)}, summary="Get a leaf")
def get_leaf(request: HttpRequest, name: Name) -> LeafOut:
    return show_leaf(services.get(services.visible_leaves(requester(request)), name))


@router.get(
    "/spine-links",
    response={200: Page[SpineLinkOut], **documented(404)},
    summary="List the links from leaves to the spine",
)
def list_spine_links(
    request: HttpRequest,
    leaf: SearchText = "",
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    found = services.visible_spine_links(requester(request))
    if leaf:
        found = found.filter(leaf__name=leaf)
    return paginate(found, "name", cursor, limit, show_spine_link)


@router.get(
    "/spine-links/{name}", response={200: SpineLinkOut, **documented(404)}, summary="Get a spine link"
)
def get_spine_link(request: HttpRequest, name: Name) -> SpineLinkOut:
    return show_spine_link(services.get(services.visible_spine_links(requester(request)), name))


@router.get("/drivers", response={200: Page[DriverOut], **documented(404)}, summary="List drivers")
def list_drivers(
    request: HttpRequest,
    q: SearchText = "",
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    found = services.visible_drivers(requester(request)).filter(name__contains=q)
    return paginate(found, "name", cursor, limit, show_driver)


@router.get("/drivers/{name}", response={200: DriverOut, **documented(404)}, summary="Get a driver")
def get_driver(request: HttpRequest, response: HttpResponse, name: Name) -> DriverOut:
    driver = services.get(services.visible_drivers(requester(request)), name)
    response["ETag"] = etag(driver.version)
    return show_driver(driver)
