"""Brains over REST."""

from __future__ import annotations

from datetime import datetime

from django.http import HttpResponse
from ninja import Field, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.etags import matched, tagged
from console.api.fields import IfMatch, SearchText
from console.api.idempotency import Answer, with_dry_run
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.fleet.models import Brain
from console.fleet.rest.fleet import Name
from console.routing import brains

router = Router(tags=["routing"])


class BrainOut(Schema):
    name: str
    version: int = Field(description="Incremented with each change; the ETag.")
    api_url: str = Field(description="Where clients send requests, as it reports; empty: unknown.")
    software_version: str
    joined_at: datetime | None
    last_heartbeat_at: datetime | None
    lost_at: datetime | None = Field(description="When it was reported lost; null if it is not.")


@listing(router, "/brains", BrainOut, 404, by="name")
def list_brains(request: SignedInRequest, q: SearchText = "") -> Rows:
    """List brains."""
    return brains.visible_brains(request.principal).filter(name__contains=q)


@router.get("/brains/{name}", response=answers(BrainOut, 404))
def get_brain(request: SignedInRequest, response: HttpResponse, name: Name) -> Brain:
    """Get a brain."""
    return tagged(response, brains.get_brain(request.principal, name))


@router.delete("/brains/{name}", response=answers(None, 404, 409, 412, 428, status=204))
@with_dry_run
def remove_brain(request: SignedInRequest, name: Name, if_match: IfMatch) -> Answer:
    """Remove a brain whose process has ended for good.

    Purges continue without its confirmation. To return, it needs a new join token.
    """
    brain = matched(brains.for_change(request.principal, name), if_match)
    brains.remove_brain(request.principal, brain)
    return Answer(204, [Authority(None, Role.PLATFORM_ADMIN)])
