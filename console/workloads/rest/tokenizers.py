"""Uploaded tokenizers over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from django.conf import settings
from ninja import Field, Path, Query, Schema, Status

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Line
from console.api.idempotency import Answer, idempotent
from console.api.pagination import Rows, listing
from console.api.problems import ApiError
from console.api.routes import Router, answers, documented
from console.api.shown import OR_NULL, SlugOf
from console.workloads import tokenizers
from console.workloads.models import Tokenizer

router = Router(tags=["workloads"])

Number = Annotated[int, Path(ge=1, le=2**63 - 1, description="The tokenizer.")]
Slug = Annotated[str, Query(max_length=48, pattern=r"^[a-z0-9-]*$")]


class TokenizerOut(Schema):
    id: int
    sha256: str = Field(description="Of what is in it: what a workload's `tokenizer.sha256` names.")
    name: str
    org: Annotated[SlugOf | None, OR_NULL] = Field(
        description="Whose it is; null: the platform's, which all orgs may use."
    )
    size_bytes: int
    author: str = Field(validation_alias="author_name")
    created_at: datetime


@listing(router, "/tokenizers", TokenizerOut, by="-pk")
def list_tokenizers(request: SignedInRequest, org: Slug = "") -> Rows:
    """List uploaded tokenizers, the latest first."""
    found = tokenizers.visible(request.principal)
    return found.filter(org__slug=org) if org else found


@router.post(
    "/tokenizers",
    response={200: TokenizerOut, 201: TokenizerOut, **documented(404, 413, 429)},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
def upload_tokenizer(
    request: SignedInRequest,
    name: Annotated[Line, Query(description="What people call it.")],
    org: Annotated[
        str,
        Query(
            max_length=48,
            pattern=r"^[a-z0-9-]*$",
            description="Whose it is to be; empty: the platform's.",
        ),
    ] = "",
) -> Status[Tokenizer]:
    """Upload a tokenizer: a tar, a gzipped tar or a zip with `tokenizer.json`.

    An archive with the same contents is the same tokenizer: the answer is 200, and nothing changes.
    """
    archive = request.read(settings.TOKENIZER_BYTES_MAX + 1)
    if len(archive) > settings.TOKENIZER_BYTES_MAX:
        raise ApiError("TooLarge", f"An archive has at most {settings.TOKENIZER_BYTES_MAX >> 20} MiB.")
    try:
        found, is_new = tokenizers.add(request.principal, org or None, name, archive)
    except tokenizers.TooManyChecks as error:
        raise ApiError("TooManyAttempts", str(error), headers={"Retry-After": "30"}) from error
    return Status(201 if is_new else 200, found)


@router.get("/tokenizers/{number}", response=answers(TokenizerOut, 404))
def get_tokenizer(request: SignedInRequest, number: Number) -> Tokenizer:
    """Get a tokenizer."""
    return tokenizers.get(request.principal, number)


@router.delete("/tokenizers/{number}", response={204: None, **documented(404, 409)})
@idempotent
def delete_tokenizer(request: SignedInRequest, number: Number) -> Answer:
    """Delete a tokenizer that no revision of a workload names."""
    found = tokenizers.delete(request.principal, number)
    return Answer(204, [Authority(found.org_id, Role.ORG_ADMIN)])
