"""The authority over REST: for platform admins."""

from __future__ import annotations

from datetime import datetime

from django.http import HttpRequest
from ninja import Field, Router, Schema, Status

from console.accounts.browser import requester
from console.api.fields import Input, Reason
from console.api.problems import documented
from console.authority import services
from console.authority.models import Authority

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


class RotationIn(Input):
    reason: Reason = ""


def _shown(request: HttpRequest) -> AuthorityOut:
    roots = services.visible_authorities(requester(request))
    told, following = services.bundle(), services.following()
    return AuthorityOut(
        authorities=told.authorities,
        digest=told.digest,
        roots=[_root(one) for one in roots],
        alive=following.alive,
        behind=following.behind,
        away=following.away,
    )


def _root(root: Authority) -> RootOut:
    return RootOut(
        fingerprint=root.fingerprint,
        state=root.state,
        state_since=root.state_since,
        created_at=root.created_at,
        expires_at=root.expires_at,
    )


@router.get(
    "/authority", response={200: AuthorityOut, **documented(404)}, summary="The certificate authority"
)
def show_authority(request: HttpRequest) -> AuthorityOut:
    return _shown(request)


@router.post(
    "/authority/rotate",
    response={202: AuthorityOut, **documented(404, 409)},
    summary="Replace the root certificate",
)
def rotate_authority(request: HttpRequest, payload: RotationIn) -> Status[AuthorityOut]:
    services.begin_rotation(requester(request), payload.reason)
    return Status(202, _shown(request))
