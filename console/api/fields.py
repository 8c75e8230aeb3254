"""What the API accepts. PostgreSQL can't store NUL, and nobody means it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin
from uuid import UUID

from ninja import Header, Schema
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    ConfigDict,
    Field,
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
IfMatch = Annotated[
    str,
    Header(
        alias="If-Match",
        description="The ETag of what you read, or `*` for whatever is there.",
        min_length=1,
        max_length=200,
        examples=['"7"', "*"],
    ),
]


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
    """The body of a request. A name it does not know is a typo, and is told. Nothing is taken for what
    it is not: `false` is not 0, `"1"` not 1 and 1 not `true`, at whatever depth.
    """

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _nothing_is_taken_for_another(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name or ""]
        if wrong := _mistaken(value, _kinds(field.annotation)):
            raise ValueError(wrong)
        return value


class ReasonIn(Input):
    reason: Reason = Field("", description="Stored in the audit trail.")


_NUMBER: Final = "write it as a number"
_TRUTH: Final = "write it as true or false"


def _mistaken(value: object, kinds: frozenset[Any]) -> str:
    """What is wrong with a value of a kind that pydantic would turn into another; or nothing."""
    if isinstance(value, bool):
        return _NUMBER if kinds & _NUMBERS and bool not in kinds else ""
    if isinstance(value, int | float):
        return _TRUTH if bool in kinds and not kinds & _NUMBERS else ""
    if isinstance(value, str):
        if kinds & _TEXTS or any(map(_is_text, kinds)):
            return ""
        return _NUMBER if kinds & _NUMBERS else _TRUTH if bool in kinds else ""
    if isinstance(value, list):
        return _mistaken_among(value, [get_args(one)[:1] for one in kinds if get_origin(one) in _LISTS])
    if isinstance(value, dict):
        of_values = [get_args(one)[1:] for one in kinds if get_origin(one) is dict]
        return _mistaken_among(list(value.values()), of_values)
    return ""


def _mistaken_among(values: Sequence[object], inner: Sequence[tuple[Any, ...]]) -> str:
    """The first thing that is wrong with one of them."""
    if not inner or not inner[0]:
        return ""
    kinds = _kinds(inner[0][0])
    return next(filter(None, (_mistaken(one, kinds) for one in values)), "")


_TEXTS: Final[frozenset[Any]] = frozenset((str, datetime, date, UUID, Any))
_NUMBERS: Final = frozenset((int, float))
_LISTS: Final = (list, set, frozenset, tuple)


def _kinds(annotation: Any) -> frozenset[Any]:
    """The kinds that an annotation allows, without what is only said about them."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(inner[0])
    if origin in (Union, UnionType):
        return frozenset().union(*map(_kinds, inner))
    return frozenset([annotation])


def _is_text(kind: Any) -> bool:
    """A choice of texts, or one that is listed by name."""
    if get_origin(kind) is Literal:
        return any(isinstance(one, str) for one in get_args(kind))
    return isinstance(kind, type) and issubclass(kind, str)
