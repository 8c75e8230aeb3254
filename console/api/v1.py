"""The API: what all its operations share. The operations themselves stand with what they are about."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from django.core.exceptions import PermissionDenied
from django.core.exceptions import ValidationError as ModelValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.openapi.docs import Swagger
from ninja.openapi.schema import OpenAPISchema, get_schema
from ninja.parser import Parser

from console.accounts.browser import SignedInRequest
from console.accounts.models import NAME, NAME_RULE
from console.api import problems
from console.api.auth import AUTHENTICATION
from console.api.bearer import CHALLENGE
from console.api.etags import etag
from console.api.middleware import ADDRESSES
from console.api.problems import ApiError, FieldError
from console.api.rendering import Renderer
from console.audit.services import CannotUndo
from console.fleet.nodes import Impossible, InProgress
from console.operations.api import busy
from console.operations.services import Busy, CannotCancel, CannotRetry, StalePlan
from console.orgs.models import SLUG, SLUG_RULE
from console.orgs.services import NoSuchUser, StillUsed
from console.placement.topology import Misconfigured
from console.sessions.plans.proposals import BeingChanged, CannotPlan
from console.visibility import sees_fleet
from telemetry.decoder import DOCUMENT, Malformed, decode

DESCRIPTION = """
Everything the console does, for automation.

* **Errors** are problem documents (RFC 9457): `reason` is for machines, `detail` for people.
* **Authentication**: `Authorization: Bearer` with a personal API token (`tgr_…` reads, `tgw_…` also
  writes) or a JWT; or the session of a browser with its CSRF token.
* **Lists** come in pages: ask again with `cursor=next_cursor` until it is null.
* **Changes** name what they change by `If-Match` and what they are by `Idempotency-Key`, where the
  operation says so; sending one again does not do it twice.
* **What is not known** is refused by its name, in a query as in a body.
* **`X-Request-ID`** is echoed and stands in logs and in the audit trail.
"""


class BoundedParser(Parser):
    """JSON by the one bounded decoder, so that nobody's body is deeper, longer or larger in its numbers
    than what follows can hold."""

    def parse_body(self, request: HttpRequest) -> Any:
        """Raises Malformed, of which ninja makes an HttpError: see `sentence_of`."""
        return decode(request.body, object, DOCUMENT)


class Api(NinjaAPI):
    def get_root_path(self, path_params: dict[str, Any]) -> str:
        """Also for who asks from elsewhere, where the API has no address."""
        return reverse(f"{self.urls_namespace}:api-root", ADDRESSES, kwargs=path_params)

    def get_openapi_schema(
        self, *, path_prefix: str | None = None, path_params: dict[str, Any] | None = None
    ) -> OpenAPISchema:
        """The description of the API. All callers get the same one, and must not change it."""
        return _describe(self.get_root_path(path_params or {}) if path_prefix is None else path_prefix)


class Documentation(Swagger):
    """From our own files: ninja asks a CDN unless it is an app of Django, which every process loads."""

    def render_page(self, request: HttpRequest, api: NinjaAPI, **values: Any) -> HttpResponse:
        shown = {**self.settings, "url": self.get_openapi_url(api, values)}
        context = {"swagger_settings": json.dumps(shown, indent=1), "api": api, "add_csrf": True}
        return render(request, self.template, context)


@lru_cache(maxsize=1)
def _describe(path_prefix: str) -> OpenAPISchema:
    """Errors are documented with the content type that they have. It takes most of a second, so it is
    made once: operations stay the same as long as a process runs."""
    schema = get_schema(api, path_prefix)
    for path in schema["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                if int(status) >= 400 and "content" in answer:
                    answer["description"] = problems.for_status(int(status)).title
                    content = answer["content"]
                    content[problems.CONTENT_TYPE] = content.pop("application/json")
    return schema


api = Api(
    title="Tidegate",
    version="1",
    description=DESCRIPTION,
    auth=AUTHENTICATION,
    parser=BoundedParser(),
    renderer=Renderer(),
    urls_namespace="api",
    docs=Documentation(),
    docs_url="/docs",
    openapi_url="/openapi.json",
)
for module in (
    *("console.accounts.api", "console.orgs.api", "console.overview.api", "console.search.api"),
    "console.handover.api",
    "console.alerts.web.bulk_api",  # first, or `bulk` would be taken for an alert's number
    *("console.alerts.web.api", "console.alerts.web.silences_api", "console.alerts.web.rules_api"),
    *("console.alerts.web.channels_api", "console.audit.api", "console.metrics.api"),
    *("console.metrics.dead_letters", "console.charts.api", "console.explain.api", "console.saved.api"),
    *("console.policies.rest.policies", "console.policies.rest.callers"),
    *("console.policies.rest.platform", "console.policies.rest.schedule", "console.policies.rest.proof"),
    *("console.operations.api", "console.control.api", "console.fleet.rest.claims"),
    *("console.sessions.rest.sessions", "console.sessions.rest.rules", "console.sessions.rest.drains"),
    *("console.sessions.rest.drivers", "console.live.api", "console.fleet.rest.fleet"),
    *("console.fleet.rest.membership", "console.routing.rest.models", "console.routing.rest.replicas"),
    *("console.routing.rest.limits", "console.routing.rest.brains", "console.authority.api"),
    *("console.fleet.rest.descriptions", "console.workloads.rest.workloads"),
    *("console.workloads.rest.tokenizers", "console.workloads.rest.buckets"),
):
    api.add_router("", f"{module}.router")


@api.exception_handler(ApiError)
def _api_error(_request: HttpRequest, error: ApiError) -> HttpResponse:
    return problems.response(error.problem, error.headers)


@api.exception_handler(AuthenticationError)
def _unauthenticated(_request: HttpRequest, _error: AuthenticationError) -> HttpResponse:
    problem = problems.problem(
        "Unauthenticated", "Send a personal API token or a JWT: Authorization: Bearer …"
    )
    return problems.response(problem, CHALLENGE)


@api.exception_handler(PermissionDenied)
def _forbidden(_request: HttpRequest, error: PermissionDenied) -> HttpResponse:
    return problems.response(problems.problem("Forbidden", str(error) or "You may not do that."))


@api.exception_handler(Http404)
def _not_found(_request: HttpRequest, error: Http404) -> HttpResponse:
    return problems.response(problems.problem("NotFound", str(error) or problems.SENTENCES[404]))


REASONS: dict[type[Exception], str] = {
    CannotCancel: "Conflict",
    CannotRetry: "Conflict",
    CannotUndo: "CannotUndo",
    Impossible: "Conflict",
    InProgress: "InProgress",
    Misconfigured: "Misconfigured",
    NoSuchUser: "NotFound",
    StillUsed: "Conflict",
}


def _answer_with(reason: str) -> Callable[[HttpRequest, Exception], HttpResponse]:
    return lambda _request, error: problems.response(problems.problem(reason, str(error)))


for kind, reason in REASONS.items():
    api.exception_handler(kind)(_answer_with(reason))


@api.exception_handler(StalePlan)
def _stale_plan(_request: HttpRequest, error: StalePlan) -> HttpResponse:
    headers = {} if error.version is None else {"ETag": etag(error.version)}
    return problems.response(problems.problem("StalePlan", str(error)), headers)


@api.exception_handler(CannotPlan)
def _cannot_plan(request: HttpRequest, error: CannotPlan) -> HttpResponse:
    names = sees_fleet(cast("SignedInRequest", request).principal)
    said = error.with_names if names else error.sentence
    reason = "InProgress" if isinstance(error, BeingChanged) else error.cause.value
    return problems.response(problems.problem(reason, said))


@api.exception_handler(Busy)
def _busy(request: HttpRequest, error: Busy) -> HttpResponse:
    return _api_error(request, busy(error))


@api.exception_handler(HttpError)
def _http_error(_request: HttpRequest, error: HttpError) -> HttpResponse:
    problem = problems.for_status(error.status_code)
    return problems.response(replace(problem, detail=sentence_of(error)))


@api.exception_handler(ModelValidationError)
def _invalid_model(_request: HttpRequest, error: ModelValidationError) -> HttpResponse:
    fields = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
    errors = [
        FieldError(pointer=f"/body/{'' if name == '__all__' else name}".rstrip("/"), detail=detail)
        for name, details in fields.items()
        for detail in details
    ]
    return _invalid(errors)


@api.exception_handler(ValidationError)
def _invalid_request(_request: HttpRequest, error: ValidationError) -> HttpResponse:
    errors = [
        FieldError(
            pointer="/" + "/".join(str(part) for part in _location(item["loc"])),
            detail=_RULES.get(item.get("ctx", {}).get("pattern"))
            or item["msg"].removeprefix("Value error, "),
        )
        for item in error.errors
    ]
    absent = {
        item.pointer.lower()
        for item, raw in zip(errors, error.errors, strict=True)
        if raw["type"] == "missing"
    }
    if "/header/idempotency-key" in absent:
        detail = "Send an Idempotency-Key header, so that repeating the request is safe."
        return problems.response(problems.problem("IdempotencyKeyMissing", detail, errors))
    if "/header/if-match" in absent:
        detail = "Send the ETag of what you read as If-Match, so that you overwrite nothing unseen."
        return problems.response(problems.problem("PreconditionRequired", detail, errors))
    return _invalid(errors)


_RULES = {SLUG: SLUG_RULE, NAME: NAME_RULE}  # in place of patterns, which few people read


def _location(parts: tuple[Any, ...]) -> list[Any]:
    """`("body", "payload", "name")` → body, name: the name of our argument means nothing outside."""
    place, *rest = parts
    return [place, *(rest[1:] if place in ("body", "form") else rest)]


def _invalid(errors: list[FieldError]) -> HttpResponse:
    said = "; ".join(f"{item.pointer}: {item.detail.rstrip('.')}" for item in errors[:5])
    return problems.response(problems.problem("InvalidRequest", f"{said}.", errors))


def sentence_of(error: HttpError) -> str:
    """What ninja says, and why a body could not be decoded, which it does not say."""
    if isinstance(error.__cause__, Malformed):
        return f"The body is not the JSON that is expected here: {error.__cause__}."
    return f"{error.message}."
