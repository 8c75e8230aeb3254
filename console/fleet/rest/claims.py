"""Claims over REST: what gateways sign them with, and single ones for trying an engine out."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Annotated

from ninja import Field, Schema, Status

from console.accounts.browser import SignedInRequest
from console.api.fields import Input, Reason, ReasonIn
from console.api.routes import Router, answers
from console.fleet import claims
from console.fleet.rest.fleet import Name
from console.orgs.api import Slug
from console.policies.rest.fields import RulesField
from swdriver_shim.adapters.claims import SECONDS, SECONDS_MAX
from swdriver_shim.policy import Rules

router = Router(tags=["joining"])


class ClaimsKeyOut(Schema):
    driver: str = Field(description="The audience of the claims (`aud`).")
    claims_key: str = Field(description="Base64. It signs claims of all orgs of this driver.")


class ClaimIn(Input):
    org: Slug
    seconds: Annotated[int, Field(ge=1, le=SECONDS_MAX)] = SECONDS
    rules: RulesField = Field(
        default_factory=Rules, description="Stricter than the org's policy, never laxer."
    )
    reason: Reason = ""


class ClaimOut(Schema):
    claim: str = Field(description='For `kv_transfer_params`: {"tidegate": claim}.')
    expires_at: datetime


@router.get("/drivers/{name}/claims-key", response=answers(ClaimsKeyOut, 404, 409))
def get_claims_key(request: SignedInRequest, name: Name) -> ClaimsKeyOut:
    """Get the key that gateways sign claims with."""
    key = claims.read_key(request.principal, name)
    return ClaimsKeyOut(driver=name, claims_key=base64.b64encode(key).decode())


@router.post("/drivers/{name}/claims-key/rotate", response=answers(ClaimsKeyOut, 404, 409))
def rotate_claims_key(request: SignedInRequest, name: Name, payload: ReasonIn) -> ClaimsKeyOut:
    """Rotate the key that gateways sign claims with."""
    key = claims.rotate_key(request.principal, name, reason=payload.reason)
    return ClaimsKeyOut(driver=name, claims_key=base64.b64encode(key).decode())


@router.post("/drivers/{name}/claims", response=answers(ClaimOut, 404, 409, status=201))
def sign_claim(request: SignedInRequest, name: Name, payload: ClaimIn) -> Status[ClaimOut]:
    """Sign a claim, as a gateway does for each request."""
    claim = claims.sign(
        request.principal,
        name,
        payload.org,
        seconds=payload.seconds,
        rules=payload.rules,
        reason=payload.reason,
    )
    return Status(201, ClaimOut(claim=claim.text, expires_at=claim.expires_at))
