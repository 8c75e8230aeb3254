"""The proof over REST: retention reports, purges, and the keys that both are signed with."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal
from uuid import UUID

from django.http import HttpRequest
from ninja import Field, Query, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import NO_NUL, Input
from console.api.idempotency import Answer, with_dry_run
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.operations.api import OperationOut, accepted
from console.orgs.api import Slug
from console.orgs.services import for_change, get_org
from console.policies.evidence import purges, receipts, reports, signatures
from console.policies.models import PurgeConfirmation, PurgeReceipt
from console.policies.rest.policies import Why
from telemetry.decoder import decode

router = Router(tags=["policies"])

Days = Annotated[Literal["1", "7", "30", "90"], Query(description="Period in days.")]


class PurgeIn(Input):
    model: Annotated[str, Field(max_length=200, pattern=NO_NUL)] = Field(
        "", description="Only this model."
    )
    reason: Why


class ReceiptOut(Schema):
    id: int
    org: str
    model: str | None
    driver: str | None = Field(
        None, description="The driver that the org was taken off; null: of all drivers."
    )
    operation: UUID
    asked_by: str
    asked_at: datetime
    done_at: datetime
    data_key_destroyed_at: datetime | None = Field(
        description="When all drivers that were told it had confirmed that they dropped it: from here "
        "on nobody can read files that were encrypted before. Null: of one model; or a driver that was "
        "told it was removed or replaced without confirming: its state directory may still have it."
    )
    reason: str
    columns: int
    bytes: int
    tier2_files: int
    tier2_bytes: int
    epoch: int | None = Field(description="Which the purge began: what is of before has no name now.")
    places: dict[str, Any] = Field(
        description="By driver and node: what each has confirmed; and under `removed`, who was removed "
        "from the fleet before it did, also before the purge began; one with `replaced`: another "
        "machine has its name since then."
    )
    confirmations: dict[str, Any] | None = Field(
        description="The signed confirmations of drivers and agents; only with a platform role."
    )
    jws: str = Field(description="The receipt without the confirmations, signed.")


class ReportOut(Schema):
    report: dict[str, Any] = Field(description="Null, not 0, where nothing was reported.")
    jws: str = Field(description="The report, signed with one of `GET /signing-keys`.")


class KeysOut(Schema):
    keys: list[dict[str, str]]


@router.get("/orgs/{slug}/retention", response=answers(ReportOut, 404))
def get_retention(request: SignedInRequest, slug: Slug, days: Days = "30") -> ReportOut:
    """Get the signed retention report."""
    org = get_org(request.principal, slug, Role.ON_CALL)
    statement = reports.report(org, int(days)).statement()
    return ReportOut(report=statement, jws=signatures.sign(statement))


@router.get("/signing-keys", response=KeysOut, auth=None)
def list_keys(request: HttpRequest) -> KeysOut:
    """List the signing keys as a JWK set."""
    del request  # anyone may
    return KeysOut(keys=signatures.public_keys())


@router.post("/orgs/{slug}/purge", response=answers(OperationOut, 404, 409, status=202))
@with_dry_run
def purge_org(request: SignedInRequest, slug: Slug, payload: PurgeIn) -> Answer:
    """Purge an org, with a receipt."""
    org = for_change(request.principal, slug)
    operation = purges.purge(request.principal, org, model=payload.model, reason=payload.reason)
    return accepted(operation, Authority(org.pk, Role.ORG_ADMIN))


@listing(router, "/orgs/{slug}/purges", ReceiptOut, 404, by="-pk", at_once=True)
def list_purges(request: SignedInRequest, slug: Slug) -> Rows:
    """List purge receipts, newest first."""
    org = get_org(request.principal, slug, Role.ON_CALL)
    is_staff = request.principal.on_platform(Role.VIEWER)
    return receipts.receipts_of(org), partial(_shown, is_staff=is_staff)


def _shown(page: Sequence[PurgeReceipt], *, is_staff: bool) -> list[ReceiptOut]:
    found = _confirmations(page) if is_staff else None
    return [_receipt(one, found[one.operation_id] if found else None) for one in page]


def _receipt(receipt: PurgeReceipt, confirmations: dict[str, Any] | None) -> ReceiptOut:
    statement = receipt.statement()
    jws = signatures.sign(statement)
    return ReceiptOut(id=receipt.pk, **statement, confirmations=confirmations, jws=jws)


def _confirmations(page: Sequence[PurgeReceipt]) -> dict[UUID, dict[str, Any]]:
    """Of each receipt by its operation: by identity, as they were signed."""
    found: dict[UUID, dict[str, Any]] = {receipt.operation_id: {} for receipt in page}
    for one in PurgeConfirmation.objects.filter(operation_id__in=found):
        found[one.operation_id][one.identity] = {
            "statement": decode(bytes(one.payload), object),
            "payload": base64.b64encode(bytes(one.payload)).decode(),
            "signature": base64.b64encode(bytes(one.signature)).decode(),
            "public_key": one.public_key,
        }
    return found
