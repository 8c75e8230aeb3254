"""The authority over REST: for platform admins."""

from __future__ import annotations

from datetime import datetime

from django.http import HttpRequest
from ninja import Field, Router, Schema, Status

from console.accounts.browser import requester
from console.api.fields import Input, Reason
from console.api.problems import documented
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


class RotationIn(Input):
    reason: Reason = ""


def _shown(request: HttpRequest) -> dict[str, object]:
    roots = services.visible_authorities(requester(request))
    told, following = services.bundle(), services.following()
    return {
        "authorities": told.authorities,
        "digest": told.digest,
        "roots": roots,
        "alive": following.alive,
        "behind": following.behind,
        "away": following.away,
    }


@router.get(
    "/authority", response={200: AuthorityOut, **documented(404)}, summary="The certificate authority"
)
def show_authority(request: HttpRequest) -> dict[str, object]:
    return _shown(request)


@router.post(
    "/authority/rotate",
    response={202: AuthorityOut, **documented(404, 409)},
    summary="Replace the root certificate",
)
def rotate_authority(request: HttpRequest, payload: RotationIn) -> Status[dict[str, object]]:
    services.begin_rotation(requester(request), payload.reason)
    return Status(202, _shown(request))
