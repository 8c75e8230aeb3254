"""Every error of the API is a problem document (RFC 9457), and every kind of it stands here.

Plain classes: also processes that serve no API import this, and need no ninja for it. The API describes
them from their fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from django.http import HttpResponse

from console.shell import request_context

CONTENT_TYPE = "application/problem+json"


def _described(description: str) -> dict[str, str]:
    return {"description": description}


@dataclass(frozen=True, slots=True)
class FieldError:
    pointer: str = field(metadata=_described("Where in the request: `/body/name`, `/header/If-Match`."))
    detail: str


@dataclass(frozen=True, slots=True)
class Problem:
    type: str = field(metadata=_described("Stable name of this kind of problem."))
    title: str
    status: int
    reason: str = field(metadata=_described("The same kind, as one word for machines."))
    detail: str = field(metadata=_described("A sentence for a person."))
    request_id: str
    errors: list[FieldError] = field(
        default_factory=list, metadata={"json_schema_extra": {"default": []}}
    )


# reason → (status, title)
KINDS = {
    "MalformedRequest": (400, "The request can't be read"),
    "IdempotencyKeyMissing": (400, "An Idempotency-Key is required"),
    "Unauthenticated": (401, "Not authenticated"),
    "Forbidden": (403, "Not allowed"),
    "NotFound": (404, "Not found"),
    "MethodNotAllowed": (405, "Method not allowed"),
    "Conflict": (409, "It conflicts with what is there"),
    "OperationRunning": (409, "Another operation works on it"),
    "InProgress": (409, "Something else has to end first"),
    # Why a session waits or is refused: what can't be now, and what can never be.
    "WaitingForCapacity": (409, "There is no room for it now"),
    "WaitingForRail": (409, "There is no rail for it now"),
    "SpineRefusedByRule": (409, "Its only paths cross the spine, which the rules refuse"),
    "NodeCordoned": (409, "The node takes nothing new"),
    "BoxCordoned": (409, "Boxes take nothing new"),
    "WaitingForDrain": (409, "Something has to leave first"),
    "PendingEvaluation": (409, "Nobody has looked for a place yet"),
    "Misconfigured": (422, "It contradicts itself, or the fleet"),
    "BelowMinimumSize": (422, "It is smaller than the rules allow"),
    "NotMultipleOfIncrement": (422, "It is between the sizes that the rules allow"),
    "ExceedsMaximum": (422, "It is larger than the rules allow"),
    "ExceedsOrgQuota": (422, "It is more than the org may have"),
    "ExceedsClusterCapacity": (422, "It is more than the fleet has"),
    "StillRunning": (409, "The same request is still running"),
    "CannotUndo": (409, "This can't be taken back"),
    "StaleVersion": (412, "It has changed since you read it"),
    "StalePlan": (412, "The plan does not hold any more"),
    "TooLarge": (413, "The request is too large"),
    "InvalidRequest": (422, "Some values are not allowed"),
    "IdempotencyKeyReused": (422, "That Idempotency-Key belongs to another request"),
    "PreconditionRequired": (428, "If-Match is required"),
    "TooManyAttempts": (429, "Too many attempts"),
    "InternalError": (500, "Internal error"),
    "Unavailable": (503, "Try again later"),
}
SENTENCES = {
    404: "No resource has this address, or it is not yours to see.",
    405: "This address does not know that method.",
    413: "The body is larger than 1 MiB.",
    500: "The console failed while answering; no change was half saved.",
}


class ApiError(Exception):
    """Raise it anywhere below an operation; the API answers with its problem."""

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.problem = problem(reason, detail, errors)
        self.headers = dict(headers or {})


def problem(reason: str, detail: str, errors: Sequence[FieldError] = ()) -> Problem:
    status, title = KINDS[reason]
    return Problem(
        type=f"urn:tidegate:problem:{reason}",
        title=title,
        status=status,
        reason=reason,
        detail=detail,
        request_id=request_context.current_id(),
        errors=list(errors),
    )


def for_status(status: int) -> Problem:
    """The plainest problem of a status that something outside of the API answered with."""
    reasons = (reason for reason, (known, _) in KINDS.items() if known == status)
    reason = next(reasons, "MalformedRequest" if status < 500 else "InternalError")
    return problem(reason, SENTENCES.get(KINDS[reason][0], "The request was refused."))


def encoded(problem: Problem) -> bytes:
    return json.dumps(asdict(problem)).encode()


def response(problem: Problem, headers: Mapping[str, str] | None = None) -> HttpResponse:
    return HttpResponse(
        encoded(problem),
        status=problem.status,
        content_type=CONTENT_TYPE,
        headers=dict(headers or {}),
    )


def is_problem(response: HttpResponse) -> bool:
    return response.headers.get("Content-Type", "").startswith(CONTENT_TYPE)
