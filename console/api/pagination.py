"""Lists by cursor: a stable order over one unique column, whatever is added meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Generic, TypeVar

from django.core import signing
from django.db.models import Model, QuerySet
from django.http import HttpResponse
from ninja import Query, Schema
from pydantic import BaseModel, Field

from console.accounts.browser import SignedInRequest
from console.api.problems import ApiError, FieldError
from console.api.rendering import MEDIA_TYPE, encoded
from console.api.routes import Router, answers

LIMIT_DEFAULT = 50
LIMIT_MAX = 200

Cursor = Annotated[
    str | None,
    Query(description="`next_cursor` of the page before.", max_length=400),
]
Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Rows on a page.")]

M = TypeVar("M", bound=Model)
T = TypeVar("T")


class Page(Schema, Generic[T]):
    items: list[T]
    next_cursor: str | None = Field(description="Ask with it for the next page; null at the end.")


# The rows of a list, alone or with what shows one of them (or a page of them) to the caller; else its
# schema does.
Rows = QuerySet[Any] | tuple[QuerySet[Any], Callable[[Any], Any]]


def listing(
    router: Router,
    path: str,
    shown: type[BaseModel],
    *problems: int,
    by: str,
    is_plain: bool = False,
    at_once: bool = False,
) -> Callable[[Callable[..., Rows]], Callable[..., object]]:
    """Serve the rows that a view returns by pages, in the order of the unique column `by`.

    It adds `cursor` and `limit` to the view's parameters. `problems`: the statuses of its errors.
    `is_plain`: what shows a row makes the very values of the schema, which are not validated again: for
    rows of so many parts that it would take as long as everything else.
    `at_once`: what shows a row is given all rows of a page, so that it reads more for them at once.
    """

    def serve(view: Callable[..., Rows]) -> Callable[..., object]:
        own = signature(view, eval_str=True)

        @wraps(view)
        def answer(
            request: SignedInRequest, *, cursor: str | None, limit: int, **values: Any
        ) -> dict[str, object] | HttpResponse:
            found = view(request, **values)
            rows, show = found if isinstance(found, tuple) else (found, None)
            page = paginate(rows, by, cursor, limit, None if at_once else show)
            if at_once and show:
                page["items"] = show(page["items"])
            return HttpResponse(encoded(page), content_type=MEDIA_TYPE) if is_plain else page

        added = (
            Parameter("cursor", Parameter.KEYWORD_ONLY, annotation=Cursor, default=None),
            Parameter("limit", Parameter.KEYWORD_ONLY, annotation=Limit, default=LIMIT_DEFAULT),
        )
        parameters = [*own.parameters.values(), *added]
        answer.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        response = answers(Page[shown], *problems)  # type: ignore[valid-type]
        router.get(path, response=response)(answer)
        return answer

    return serve


def paginate(
    rows: QuerySet[M],
    by: str,
    cursor: str | None,
    limit: int,
    show: Callable[[M], object] | None = None,
) -> dict[str, object]:
    """One page of `rows` in the order of the unique column `by` (`-by` for descending).

    The cursor is signed, and good only for the same column: it can't be made up.
    """
    descending, column = by.startswith("-"), by.lstrip("-")
    salt = f"console.api.pagination.{rows.model.__name__}.{by}"
    rows = rows.order_by(by)
    if cursor is not None:
        try:
            last = signing.loads(cursor, salt=salt)
        except signing.BadSignature:
            detail = "The cursor is not one that this list gave out."
            raise ApiError(
                "MalformedRequest",
                detail,
                errors=[FieldError(pointer="/query/cursor", detail=detail)],
            ) from None
        rows = rows.filter(**{f"{column}__{'lt' if descending else 'gt'}": last})
    found = list(rows[: limit + 1])
    more = len(found) > limit
    found = found[:limit]
    return {
        "items": [show(row) for row in found] if show else found,
        "next_cursor": signing.dumps(str(getattr(found[-1], column)), salt=salt) if more else None,
    }
