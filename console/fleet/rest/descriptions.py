"""The fleet's description over REST."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpResponse
from ninja import Field, Query, Schema
from pydantic import StringConstraints

from console.accounts.browser import SignedInRequest
from console.api.etags import ETAG
from console.api.fields import NO_NUL, IfMatch, Input, Reason
from console.api.problems import ApiError, FieldError
from console.api.routes import Router, answers
from console.fleet.descriptions import changes, document
from console.fleet.descriptions.changes import Difference, Moved
from console.fleet.descriptions.document import Wrong

router = Router(tags=["fleet"])

ValidateOnly = Annotated[bool, Query(description="A dry run: list the changes without applying them.")]


class DescriptionOut(Schema):
    yaml: str


class DescriptionIn(Input):
    yaml: Annotated[str, StringConstraints(max_length=document.CHARACTERS_MAX, pattern=NO_NUL)]
    reason: Reason = ""


class FleetChangeOut(Schema):
    kind: str
    name: str
    what: Literal["added", "changed", "removed"]
    before: Any
    after: Any
    refused: str = Field(description="Why it is blocked and what to do; empty if it is not.")
    follows: str = Field(description="Other consequences, in a sentence; empty if none.")


class DifferenceOut(Schema):
    applied: bool
    changes: list[FleetChangeOut]
    alive_removed: list[str] = Field(
        description="With `validate_only`: nodes that it would remove while their agents are alive."
    )


def _shown(found: Difference, *, applied: bool) -> dict[str, object]:
    alive = [] if applied else changes.alive_but_removed(found)
    return {"applied": applied, "changes": found.changes, "alive_removed": alive}


@router.get("/fleet/description", response=answers(DescriptionOut, 404))
def get_description(request: SignedInRequest, response: HttpResponse) -> DescriptionOut:
    """Export the fleet's description as YAML."""
    yaml = changes.export(request.principal)
    response["ETag"] = f'"{changes.fingerprint(document.parse(yaml))}"'
    return DescriptionOut(yaml=yaml)


@router.put("/fleet/description", response=answers(DifferenceOut, 404, 409, 412, 428))
def set_description(
    request: SignedInRequest,
    payload: DescriptionIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> dict[str, object]:
    """Apply a fleet description, or preview its changes."""
    principal = request.principal
    try:
        if validate_only:
            principal.check_may_change()
            found, _ = changes.preview(principal, payload.yaml)
            return _shown(found, applied=False)
        seen = None if if_match.strip() == "*" else _named(if_match)
        return _shown(
            changes.apply(principal, payload.yaml, seen=seen, reason=payload.reason), applied=True
        )
    except Wrong as error:
        errors = [FieldError(pointer="/body/yaml", detail=problem) for problem in error.problems]
        raise ApiError("InvalidRequest", error.problems[0], errors=errors) from None
    except Moved as error:
        raise ApiError("StaleVersion", str(error)) from None


def _named(if_match: str) -> str:
    """The fingerprint that If-Match names; what is none matches nothing."""
    tags: list[str] = ETAG.findall(if_match)
    return tags[0].strip('"') if len(tags) == 1 else ""
