"""A request with an Idempotency-Key takes effect once, however often and from wherever it is sent.

The answer is stored in the transaction of the effect, so both are there or neither. Two at the same
time meet at an advisory lock, which ends with its transaction: a crash leaves nothing locked and
nothing to clean up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Final

from django.db import connection, transaction
from django.http import HttpResponse
from ninja import Header, Query
from pydantic import BaseModel

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.models import StoredAnswer
from console.api.problems import ApiError
from console.shell.transactions import retried

_KEY: Final[dict[str, Any]] = {
    "alias": "Idempotency-Key",
    "description": "Your name for this one request: a UUID, say. Kept for 24 hours.",
    "min_length": 1,
    "max_length": 255,
    "pattern": r"^[\x21-\x7e]+$",
    "examples": ["5f0f7c0e-6f0c-4a83-9a55-6f2f5d0f7d11"],
}
# A header of its own for each: Ninja notes in it whether it is required.
IdempotencyKey = Annotated[str, Header(**_KEY)]
OptionalKey = Annotated[str | None, Header(**_KEY)]

ValidateOnly = Annotated[
    bool,
    Query(
        description="A dry run: check everything and change nothing. Where there is a plan, it is the "
        "answer. A plan that has a `plan_token` can be applied exactly as it is, by sending that token."
    ),
]


@dataclass(frozen=True)
class Answer:
    """What an effect answers with when it succeeded, and the authority that it took.

    There is no default for `needs`: who has lost the authority must not read the answer again. What one
    makes for oneself takes none (`is_own`). An answer with a secret (`has_secret`) is stored sealed.
    """

    status: int
    needs: Sequence[Authority]
    body: BaseModel | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_own: bool = False
    has_secret: bool = False

    def __post_init__(self) -> None:
        if not self.needs and not self.is_own:
            raise ValueError("an answer that may be repeated says what authority it took")


View = Callable[..., Answer]


def idempotent(
    view: View, *, has_dry_run: bool = False, needs_key: bool = True
) -> Callable[..., HttpResponse]:
    """Run a view in a transaction, once per Idempotency-Key; afterwards repeat its answer.

    It adds the header to the view's parameters. The body of the request is the view's `payload`. A view
    that raises stores nothing, so that the same key may be tried again. A request without a key, where
    none is needed, takes effect each time.

    The key belongs to (principal, credential, method, path): another token of the same person has keys
    of its own. A stored answer is repeated only to somebody who could still get it by a fresh request:
    their credential may change things, and they hold the authority that the answer took.

    Raises 422 where the key was used with another body or query, 409 where the first such request has
    not ended yet.
    """
    own = signature(view, eval_str=True)
    is_told = "validate_only" in own.parameters

    @wraps(view)
    def answer(
        request: SignedInRequest, *, key: str | None, validate_only: bool = False, **values: Any
    ) -> HttpResponse:
        if is_told:
            values["validate_only"] = validate_only
        effect = partial(view, request, **values)
        if key is None:
            return retried(partial(_every_time, effect))
        body = values.get("payload")
        return retried(partial(_once, request, key, body, effect, keep=not validate_only))

    added = [
        Parameter("key", Parameter.KEYWORD_ONLY, annotation=IdempotencyKey)
        if needs_key
        else Parameter("key", Parameter.KEYWORD_ONLY, annotation=OptionalKey, default=None)
    ]
    if has_dry_run and not is_told:
        added.append(
            Parameter("validate_only", Parameter.KEYWORD_ONLY, annotation=ValidateOnly, default=False)
        )
    parameters = [*own.parameters.values(), *added]
    answer.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return answer


def with_dry_run(view: View) -> Callable[..., HttpResponse]:
    """An idempotent view that also takes `validate_only`: it then answers as usual, but without the
    `Location` of what is not kept, and is rolled back.

    A view that answers a dry run with a plan takes the parameter itself.
    """
    return idempotent(view, has_dry_run=True)


def with_optional_key(view: View) -> Callable[..., HttpResponse]:
    """An idempotent view that also takes requests without a key."""
    return idempotent(view, needs_key=False)


def _every_time(effect: Callable[[], Answer]) -> HttpResponse:
    with transaction.atomic():
        answer = effect()
    return _response(answer.status, _text(answer), answer.headers)


def _text(answer: Answer) -> str:
    return answer.body.model_dump_json(by_alias=True) if answer.body else ""


def _once(
    request: SignedInRequest,
    key: str,
    body: BaseModel | None,
    effect: Callable[[], Answer],
    *,
    keep: bool,
) -> HttpResponse:
    request.principal.check_may_change()
    scope = _scope(request, key)
    said = [body.model_dump(mode="json") if body else None, request.META.get("QUERY_STRING", "")]
    body_sha256 = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()
    with transaction.atomic():
        if not _lock(scope):
            raise ApiError(
                "StillRunning",
                "A request with this Idempotency-Key is running now. Ask again in a moment.",
                headers={"Retry-After": "1"},
            )
        stored = StoredAnswer.objects.filter(pk=scope).first()
        if stored is not None:
            for org_id, role in stored.needs:
                request.principal.check(Authority(org_id, Role(role)))
            return _replay(stored, body_sha256)
        answer = effect()
        text = _text(answer)
        if not keep:
            transaction.set_rollback(True)
            kept = {name: said for name, said in answer.headers.items() if name != "Location"}
            return _response(answer.status, text, kept)
        StoredAnswer.objects.create(
            scope_sha256=scope,
            body_sha256=body_sha256,
            status=answer.status,
            headers=dict(answer.headers),
            body="" if answer.has_secret else text,
            secret_body=text if answer.has_secret else None,
            needs=[[one.org_id, one.role] for one in answer.needs],
        )
    return _response(answer.status, text, answer.headers)


def _scope(request: SignedInRequest, key: str) -> bytes:
    principal = request.principal
    parts = [str(principal.user_id), principal.credential, str(request.method), request.path, key]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def _lock(scope: bytes) -> bool:
    """Take the lock of this key until the transaction ends; False where another one has it."""
    number = int.from_bytes(scope[:8], "big", signed=True)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [number])
        return bool(cursor.fetchone()[0])


def _replay(stored: StoredAnswer, body_sha256: bytes) -> HttpResponse:
    if bytes(stored.body_sha256) != body_sha256:
        raise ApiError(
            "IdempotencyKeyReused",
            "This Idempotency-Key was used for a request with another body. Take a new one.",
        )
    text = stored.body if stored.secret_body is None else stored.secret_body
    return _response(stored.status, text, {**stored.headers, "Idempotency-Replayed": "true"})


def _response(status: int, text: str, headers: Mapping[str, str]) -> HttpResponse:
    if not text:
        response = HttpResponse(status=status, headers=dict(headers))
        del response["Content-Type"]
        return response
    return HttpResponse(text, status=status, headers=dict(headers), content_type="application/json")
