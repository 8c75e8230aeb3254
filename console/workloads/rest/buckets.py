"""Credentials for buckets over REST. They are taken, and never shown."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpResponse
from ninja import Field, Path, Query, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.etags import etag, matched, tagged
from console.api.fields import IfMatch, Input, Reason
from console.api.idempotency import Answer, with_dry_run
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import OR_NULL, SlugOf, read
from console.orgs.models import SLUG
from console.workloads import buckets
from console.workloads.models import ENDPOINT, ENDPOINT_MAX, REGION, REGION_MAX, Bucket
from workload_manager.weights.sources import BUCKET

router = Router(tags=["workloads"])

Number = Annotated[int, Path(ge=1, le=2**63 - 1, description="The bucket.")]
Slug = Annotated[str, Query(max_length=48, pattern=r"^[a-z0-9-]*$")]


class BucketOut(Schema):
    id: int
    version: int = Field(description="Incremented with each change; the ETag.")
    name: str = Field(description="Of the bucket: `models` of `s3://models/chat`.")
    endpoint: str = Field(description="The S3 server, as `weights.endpoint` names it; empty: Amazon's.")
    org: Annotated[SlugOf | None, OR_NULL] = Field(
        description="Whose workloads use the credentials; null: the platform's."
    )
    shared: bool = Field(description="Whether workloads of all orgs use the platform's credentials.")
    region: str
    author: str = Field(validation_alias="author_name", description="Who set the credentials last.")
    created_at: datetime
    changed_at: datetime = Field(description="When the credentials were set last.")


class BucketPut(Input):
    access_key_id: Annotated[
        str, Field(min_length=1, max_length=buckets.ACCESS_KEY_MAX, pattern=buckets.PRINTED)
    ] = Field(description="Stored sealed, as all of the credentials, and never shown again.")
    secret_access_key: Annotated[
        str, Field(min_length=1, max_length=buckets.SECRET_KEY_MAX, pattern=buckets.PRINTED)
    ]
    session_token: Annotated[
        str, Field(max_length=buckets.SESSION_TOKEN_MAX, pattern=buckets.PRINTED)
    ] = Field("", description="Of temporary credentials.")
    region: Annotated[str, Field(max_length=REGION_MAX, pattern=REGION)] = Field(
        "", description="Empty: us-east-1."
    )
    shared: bool = Field(
        False,
        description="Of the platform's: workloads of all orgs may read everything in the bucket.",
    )
    reason: Reason = ""

    def values(self) -> dict[str, Any]:
        said = self.model_dump(include={"region", "shared", "reason"})
        return {**said, "secrets": self.model_dump(include=set(buckets.SECRETS))}


class BucketIn(BucketPut):
    name: Annotated[str, Field(pattern=rf"^{BUCKET}$", max_length=63, examples=["models"])]
    endpoint: Annotated[str, Field(pattern=ENDPOINT, max_length=ENDPOINT_MAX)] = Field(
        "", description="The S3 server, as `weights.endpoint` names it; empty: Amazon's."
    )
    org: Annotated[str, Field(pattern=SLUG, max_length=48)] | None = Field(
        None, description="Whose workloads use the credentials; null: the platform's."
    )


@listing(router, "/buckets", BucketOut, by="-pk")
def list_buckets(request: SignedInRequest, org: Slug = "") -> Rows:
    """List buckets with stored credentials, the latest first."""
    found = buckets.visible(request.principal)
    return found.filter(org__slug=org) if org else found


@router.post("/buckets", response=answers(BucketOut, 404, status=201))
@with_dry_run
def add_bucket(request: SignedInRequest, payload: BucketIn) -> Answer:
    """Store credentials for a bucket that weights are read from."""
    made = buckets.add(
        request.principal,
        payload.org,
        name=payload.name,
        endpoint=payload.endpoint,
        **payload.values(),
    )
    headers = {"Location": f"/api/v1/buckets/{made.pk}"}
    return _answer(request, made, 201, headers)


@router.get("/buckets/{number}", response=answers(BucketOut, 404))
def get_bucket(request: SignedInRequest, response: HttpResponse, number: Number) -> Bucket:
    """Get a bucket, without its credentials."""
    return tagged(response, buckets.get(request.principal, number))


@router.put("/buckets/{number}", response=answers(BucketOut, 404, 412, 428))
@with_dry_run
def replace_bucket(
    request: SignedInRequest, number: Number, payload: BucketPut, if_match: IfMatch
) -> Answer:
    """Replace the credentials for a bucket.

    Instances that run keep what they have; the next ones get these.
    """
    found = matched(buckets.for_change(request.principal, number), if_match)
    buckets.replace(request.principal, found, **payload.values())
    return _answer(request, found)


@router.delete("/buckets/{number}", response=answers(None, 404, 409, 412, 428, status=204))
@with_dry_run
def delete_bucket(request: SignedInRequest, number: Number, if_match: IfMatch) -> Answer:
    """Delete the credentials for a bucket that no workload uses."""
    found = matched(buckets.for_change(request.principal, number), if_match)
    buckets.delete(request.principal, found)
    return Answer(204, _needs(found))


def _answer(
    request: SignedInRequest, bucket: Bucket, status: int = 200, headers: dict[str, str] | None = None
) -> Answer:
    told = {**(headers or {}), "ETag": etag(bucket.version)}
    return Answer(status, _needs(bucket), read(BucketOut, bucket, request), told)


def _needs(bucket: Bucket) -> list[Authority]:
    return [Authority(bucket.org_id, Role.ORG_ADMIN)]
