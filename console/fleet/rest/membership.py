"""Joining over REST: tokens for it, which admins make; and what agents and drivers call themselves."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from django.conf import settings
from django.http import HttpRequest
from django.utils import timezone
from ninja import Field, Path, Schema, Status
from ninja.security import HttpBearer
from pydantic import AfterValidator, StringConstraints

from console.accounts import roles
from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.api.bearer import INVALID
from console.api.fields import Input
from console.api.idempotency import Answer, with_optional_key
from console.api.pagination import Rows, listing
from console.api.problems import ApiError
from console.api.routes import Router, answers
from console.api.shown import read
from console.authority.services import bundle
from console.fleet.membership import heartbeats, joins, tokens
from console.fleet.membership.certification import certify
from console.fleet.membership.facts import BrainFacts, DriverFacts, NicFacts, NodeFacts
from console.fleet.membership.joins import TokenIsUsedUp
from console.fleet.models import NAME, JoinToken
from console.fleet.rest.fleet import Name
from console.placement.topology import NIC_WIO, NODE_MEMORY_BYTES_MAX
from console.shell.request_context import note_known
from kvss_agent.data_plane.address import Address
from kvss_agent.security.certificates import Role
from kvss_agent.security.identity import PEM_BYTES_MAX
from swdriver_shim.desired import ModelSpec

router = Router(tags=["joining"])

TokenId = Annotated[str, Path(pattern=tokens.PUBLIC_ID, max_length=12)]
Kind = Literal["node", "driver", "brain"]


def _web_url(text: str) -> str:
    parts = urlsplit(text)
    _ = parts.port  # raises ValueError where the port is nonsense
    if not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError("a scheme, a host and a port, no more")
    return text.rstrip("/")


def _address(text: str) -> str:
    return str(Address.parse(text))


def _model(value: dict[str, Any]) -> dict[str, Any]:
    """As a desired document has it. Raises ValueError with what is wrong."""
    model = msgspec.convert(value, ModelSpec)
    model.shape()
    return value


PRINTED = r"^[\x21-\x7e]+$"
Url = Annotated[
    str,
    StringConstraints(max_length=500, pattern=r"^https?://[\x21-\x7e]+$"),
    AfterValidator(_web_url),
]
DataAddress = Annotated[
    str, StringConstraints(max_length=500, pattern=PRINTED), AfterValidator(_address)
]
Token = Annotated[str, StringConstraints(min_length=20, max_length=500, pattern=PRINTED)]
Version = Annotated[str, StringConstraints(max_length=60, pattern=r"^[\x20-\x7e]*$")]
Protocol = Annotated[int, Field(ge=0, le=32_000)]
Bytes = Annotated[int, Field(ge=0, le=NODE_MEMORY_BYTES_MAX)]
CertificateRequest = Annotated[
    str,
    StringConstraints(max_length=PEM_BYTES_MAX, pattern=r"^[\x20-\x7e\n]*$"),
    Field(description="PEM: a certificate request for the key of the process. Its subject is ignored."),
]
Digest = Annotated[
    str,
    StringConstraints(pattern=r"^([0-9a-f]{64})?$"),
    Field(description="Digest of the roots that the process trusts."),
]
MoverName = Annotated[
    Literal["", "compiled", "python"],
    Field(description="The implementation that moves bytes; empty if unknown."),
]
Thing = Annotated[str, StringConstraints(pattern=NAME, max_length=63)]


class NodeSays(Input):
    control_url: Url = Field(description="Address of its control API.")
    data_address: DataAddress = Field(description="Address for drivers.", examples=["tcp:10.0.0.7:8411"])
    software_version: Version
    protocol_min: Protocol
    protocol_max: Protocol
    memory_bytes: Bytes
    cpus: Annotated[int, Field(ge=0, le=100_000)]
    trusts: Digest = ""
    mover: MoverName = ""

    def facts(self) -> NodeFacts:
        return NodeFacts(**self.model_dump(include=set(NodeSays.model_fields)))


class NicSays(Input):
    name: Thing
    leaf: Thing
    wio: Annotated[int, Field(ge=1, le=10_000)] = NIC_WIO
    gbits: Annotated[int, Field(ge=1, le=100_000)] = 100


class NodeJoins(NodeSays):
    control_token: Token = Field(description="The console's token for its control API; stored sealed.")
    nics: list[NicSays] = Field(
        [], max_length=64, description="Used if the node is not in the description."
    )
    certificate_request: CertificateRequest = ""


class DriverSays(Input):
    control_url: Url
    software_version: Version
    trusts: Digest = ""
    mover: MoverName = ""
    engine: Version = Field("", description="The engine that it is part of; empty for a daemon.")
    model: Annotated[dict[str, Any], AfterValidator(_model)] | None = Field(
        None, description="Engines report it with each heartbeat; daemons when they join."
    )

    def facts(self) -> DriverFacts:
        return DriverFacts(
            self.control_url,
            self.software_version,
            self.trusts,
            self.mover,
            self.engine,
            self.model if self.engine else None,
        )


class DriverJoins(DriverSays):
    control_token: Token
    certificate_request: CertificateRequest = ""


class BrainSays(Input):
    control_url: Url
    software_version: Version
    trusts: Digest = ""
    mover: MoverName = ""
    api_url: Url | Literal[""] = Field("", description="Where clients send requests.")

    def facts(self) -> BrainFacts:
        return BrainFacts(**self.model_dump(include=set(BrainSays.model_fields)))


class BrainJoins(BrainSays):
    control_token: Token
    certificate_request: CertificateRequest = ""


class HeartbeatOut(Schema):
    heartbeat_seconds: float = Field(description="Interval until the next heartbeat.")
    authorities: str = Field(
        description="Digest of the roots to trust. If it differs, request a certificate."
    )
    telemetry_url: str = Field(
        description="Redis for telemetry of processes without a setting of their own; may be empty."
    )


class RemovedStateIn(Input):
    erased: bool = Field(
        False, description="Everything that the driver was told is deleted from its machine."
    )


class RemovedStateOut(Schema):
    removed: bool = Field(description="The driver was removed or replaced: delete its state directory.")


class CertificateIn(Input):
    certificate_request: CertificateRequest


class CertificateOut(Schema):
    certificate: str = Field(description="PEM, for the key with which the process joined.")
    authorities: str = Field(description="PEM: the roots to trust.")
    digest: str


class JoinTokenIn(Input):
    kind: Kind = Field(description="The kind of process that may join with it.")
    name: Thing | Literal[""] = Field(
        "",
        description="Only a process of this name may join with it; empty: of any name. Needed to "
        "replace a lost driver that has a job or orgs, and created after it was lost.",
    )
    note: Annotated[str, StringConstraints(max_length=120, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    uses: Annotated[int, Field(ge=1, le=tokens.USES_MAX)] = 1
    hours: Annotated[int, Field(ge=1, le=tokens.LIFETIME_HOURS_MAX)] = 24


class JoinTokenOut(Schema):
    public_id: str
    prefix: str
    kind: Kind
    name: str = Field(description="Only a process of this name may join with it; empty: of any name.")
    note: str
    state: str
    uses: int = Field(validation_alias="uses_max")
    uses_left: int
    created_by: str
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None


class JoinTokenMade(JoinTokenOut):
    token: str = Field(description="The token itself; shown only once.")


class JoinBearer(HttpBearer):
    """`Authorization: Bearer tgj_…`."""

    def authenticate(self, request: HttpRequest, token: str) -> JoinToken:
        found = tokens.authenticate(token)
        if found is None:
            raise _unauthenticated("This join token is unknown, expired, revoked or used up.")
        request.join_token = found  # type: ignore[attr-defined]
        return found


class HeartbeatBearer(HttpBearer):
    """`Authorization: Bearer tgh_…`: what follows from the token that it has told when it joined."""

    def authenticate(self, request: HttpRequest, token: str) -> str:
        request.shown = token  # type: ignore[attr-defined]
        return token


def _unauthenticated(sentence: str) -> ApiError:
    return ApiError("Unauthenticated", sentence, headers=INVALID)


def _heard(request: HttpRequest, kind: Kind, name: str) -> HeartbeatOut:
    note_known(request, f"{kind}:{name}")
    return HeartbeatOut(
        heartbeat_seconds=heartbeats.heartbeat_seconds(),
        authorities=bundle().digest,
        telemetry_url=settings.OWN_TELEMETRY_URL or "",
    )


def _unknown(request: HttpRequest, kind: Kind, name: str) -> ApiError:
    return _unauthenticated(joins.why_unknown(kind, name, _shown(request)))


def _joined(request: HttpRequest, kind: Kind, name: str, join: Callable[[], object]) -> HeartbeatOut:
    try:
        join()
    except TokenIsUsedUp:
        raise _unauthenticated("This join token has just been used up.") from None
    return _heard(request, kind, name)


def _beaten(request: HttpRequest, kind: Kind, name: str, facts: joins.Facts) -> HeartbeatOut:
    if not joins.beats(name, _shown(request), facts):
        raise _unknown(request, kind, name)
    return _heard(request, kind, name)


def _certified(request: HttpRequest, kind: Kind, name: str, payload: CertificateIn) -> CertificateOut:
    issued = certify(Role(kind), name, _shown(request), payload.certificate_request)
    if issued is None:
        raise _unknown(request, kind, name)
    told = issued.bundle
    note_known(request, f"{kind}:{name}")
    return CertificateOut(
        certificate=issued.certificate, authorities=told.authorities, digest=told.digest
    )


@listing(router, "/join-tokens", JoinTokenOut, 404, by="-pk")
def list_join_tokens(request: SignedInRequest) -> Rows:
    """Join tokens."""
    return tokens.visible_tokens(request.principal)


@router.post("/join-tokens", response=answers(JoinTokenMade, 404, 409, status=201))
@with_optional_key
def create_join_token(request: SignedInRequest, payload: JoinTokenIn) -> Answer:
    """Create a join token; it is shown once, and again to a retry with the same Idempotency-Key.

    One that an API token or JWT makes expires no later than that.
    """
    expires_at = timezone.now() + timedelta(hours=payload.hours)
    token, text = tokens.issue(
        request.principal,
        kind=payload.kind,
        name=payload.name,
        note=payload.note,
        uses=payload.uses,
        expires_at=min(expires_at, request.principal.ends_at or expires_at),
    )
    token.token = text
    body = read(JoinTokenMade, token, request)
    return Answer(201, [Authority(None, roles.Role.PLATFORM_ADMIN)], body, has_secret=True)


@router.delete("/join-tokens/{public_id}", response=answers(None, 404, status=204))
def revoke_join_token(request: SignedInRequest, public_id: TokenId) -> Status[None]:
    """Revoke a join token."""
    tokens.revoke(request.principal, public_id)
    return Status(204, None)


@router.post("/nodes/{name}/join", auth=JoinBearer(), response=answers(HeartbeatOut, 409))
def join_node(request: HttpRequest, name: Name, payload: NodeJoins) -> HeartbeatOut:
    """Join as an agent."""
    nics = [NicFacts(**nic.model_dump()) for nic in payload.nics]
    told = payload.control_token, payload.facts(), nics, payload.certificate_request
    return _joined(request, "node", name, lambda: joins.join_node(_token(request), name, *told))


@router.post("/drivers/{name}/join", auth=JoinBearer(), response=answers(HeartbeatOut, 409))
def join_driver(request: HttpRequest, name: Name, payload: DriverJoins) -> HeartbeatOut:
    """Join as a driver."""
    told = payload.control_token, payload.facts(), payload.model, payload.certificate_request
    return _joined(request, "driver", name, lambda: joins.join_driver(_token(request), name, *told))


@router.post("/brains/{name}/join", auth=JoinBearer(), response=answers(HeartbeatOut, 409))
def join_brain(request: HttpRequest, name: Name, payload: BrainJoins) -> HeartbeatOut:
    """Join as a brain."""
    told = payload.control_token, payload.facts(), payload.certificate_request
    return _joined(request, "brain", name, lambda: joins.join_brain(_token(request), name, *told))


@router.post("/nodes/{name}/heartbeat", auth=HeartbeatBearer(), response=answers(HeartbeatOut))
def node_beats(request: HttpRequest, name: Name, payload: NodeSays) -> HeartbeatOut:
    """Send an agent's heartbeat."""
    return _beaten(request, "node", name, payload.facts())


@router.post("/drivers/{name}/heartbeat", auth=HeartbeatBearer(), response=answers(HeartbeatOut))
def driver_beats(request: HttpRequest, name: Name, payload: DriverSays) -> HeartbeatOut:
    """Send a driver's heartbeat."""
    return _beaten(request, "driver", name, payload.facts())


@router.post("/drivers/{name}/erased", auth=HeartbeatBearer(), response=answers(RemovedStateOut))
def driver_erased(request: HttpRequest, name: Name, payload: RemovedStateIn) -> RemovedStateOut:
    """Ask whether a driver was removed, or report that its state directory is deleted."""
    removed = joins.is_removed_driver(name, _shown(request), erased=payload.erased)
    if removed is None:
        raise _unauthenticated("The fleet does not know this process.")
    note_known(request, f"driver:{name}")
    return RemovedStateOut(removed=removed)


@router.post("/brains/{name}/heartbeat", auth=HeartbeatBearer(), response=answers(HeartbeatOut))
def brain_beats(request: HttpRequest, name: Name, payload: BrainSays) -> HeartbeatOut:
    """Send a brain's heartbeat."""
    return _beaten(request, "brain", name, payload.facts())


@router.post("/nodes/{name}/certificate", auth=HeartbeatBearer(), response=answers(CertificateOut, 409))
def certify_node(request: HttpRequest, name: Name, payload: CertificateIn) -> CertificateOut:
    """Issue a certificate for an agent."""
    return _certified(request, "node", name, payload)


@router.post(
    "/drivers/{name}/certificate", auth=HeartbeatBearer(), response=answers(CertificateOut, 409)
)
def certify_driver(request: HttpRequest, name: Name, payload: CertificateIn) -> CertificateOut:
    """Issue a certificate for a driver."""
    return _certified(request, "driver", name, payload)


@router.post("/brains/{name}/certificate", auth=HeartbeatBearer(), response=answers(CertificateOut, 409))
def certify_brain(request: HttpRequest, name: Name, payload: CertificateIn) -> CertificateOut:
    """Issue a certificate for a brain."""
    return _certified(request, "brain", name, payload)


def _token(request: HttpRequest) -> JoinToken:
    token: JoinToken = request.join_token  # type: ignore[attr-defined]
    return token


def _shown(request: HttpRequest) -> str:
    shown: str = request.shown  # type: ignore[attr-defined]
    return shown
