"""The authority over REST: for platform admins."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime

from ninja import Field, Schema, Status

from console.accounts.browser import SignedInRequest
from console.api.fields import ReasonIn
from console.api.routes import Router, answers
from console.authority import services

router = Router(tags=["authority"])


class RootOut(Schema):
    fingerprint: str = Field(description="SHA-256 of the certificate, in hex.")
    state: str
    state_since: datetime
    created_at: datetime
    expires_at: datetime


class AuthorityOut(Schema):
    authorities: str = Field(description="PEM: the roots that agents, drivers and engines should trust.")
    digest: str = Field(description="Digest of these roots and of which one signs.")
    roots: list[RootOut] = Field(description="Newest first, including removed ones.")
    alive: int = Field(description="Live processes with a key.")
    behind: list[str] = Field(description="Live processes that do not trust these roots yet.")
    away: list[str] = Field(
        description="Processes that do not trust them and are not waited for: lost or in maintenance."
    )


def _shown(request: SignedInRequest) -> dict[str, object]:
    roots = services.visible_authorities(request.principal)
    return {"roots": roots, **asdict(services.bundle()), **asdict(services.following())}


@router.get("/authority", response=answers(AuthorityOut, 404))
def show_authority(request: SignedInRequest) -> dict[str, object]:
    """The certificate authority."""
    return _shown(request)


@router.post("/authority/rotate", response=answers(AuthorityOut, 404, 409, status=202))
def rotate_authority(request: SignedInRequest, payload: ReasonIn) -> Status[dict[str, object]]:
    """Replace the root certificate."""
    services.begin_rotation(request.principal, payload.reason)
    return Status(202, _shown(request))
