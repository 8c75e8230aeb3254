"""What the API accepts. PostgreSQL can't store NUL, and nobody means it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from ninja import Schema
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

NO_NUL = r"^[^\x00]*$"

DATE = re.compile(r"\d{4}-\d\d-\d\d")
_CONTROL = r"\x00-\x1f\x7f"

Line = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=120,
        # Something, on one line, with no blanks around it.
        pattern=rf"^[^ {_CONTROL}]([^{_CONTROL}]*[^ {_CONTROL}])?$",
    ),
]
Reason = Annotated[str, StringConstraints(max_length=500, pattern=NO_NUL)]
SearchText = Annotated[str, StringConstraints(max_length=120, pattern=NO_NUL)]


def _not_a_number(value: object) -> object:
    """Pydantic would take `0.5` for half a second after 1970; nobody means that either."""
    if not isinstance(value, str) or not DATE.match(value):
        raise ValueError("write it as 2026-11-21T03:00:00Z")
    return value


def _in_utc(value: datetime) -> datetime:
    """PostgreSQL knows only offsets of less than sixteen hours; we store and compare in UTC."""
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("no calendar reaches that far") from None


Moment = Annotated[AwareDatetime, BeforeValidator(_not_a_number), AfterValidator(_in_utc)]


class Input(Schema):
    """The body of a request. A name it does not know is a typo, and is told. `false` is not 0, nor is
    `"1"` 1."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool | str) and _is_number(field.annotation):
            raise ValueError("write it as a number")
        return value


def _is_number(annotation: object) -> bool:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _is_number(inner[0])
    return any(map(_is_number, inner)) if origin in (Union, UnionType) else annotation in (int, float)
