"""Lists by cursor: a stable order over one unique column, whatever is added meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Generic, TypeVar

from django.core import signing
from django.db.models import Model, QuerySet
from ninja import Query, Schema
from pydantic import Field

from console.api.problems import ApiError, FieldError

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


def paginate(
    rows: QuerySet[M],
    by: str,
    cursor: str | None,
    limit: int,
    show: Callable[[M], T],
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
        "items": [show(row) for row in found],
        "next_cursor": signing.dumps(str(getattr(found[-1], column)), salt=salt) if more else None,
    }
