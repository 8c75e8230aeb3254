"""What the API accepts. PostgreSQL can't store NUL, and nobody means it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from ninja import Schema
from pydantic import AfterValidator, AwareDatetime, BeforeValidator, ConfigDict, StringConstraints

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


def _a_number(value: object) -> object:
    """Nor is `false` 0, or `"1"` 1."""
    if isinstance(value, bool | str):
        raise ValueError("write it as a number")  # noqa: TRY004 - what pydantic tells on
    return value


def _in_utc(value: datetime) -> datetime:
    """PostgreSQL knows only offsets of less than sixteen hours; we store and compare in UTC."""
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("no calendar reaches that far") from None


Whole = Annotated[int, BeforeValidator(_a_number)]
Moment = Annotated[AwareDatetime, BeforeValidator(_not_a_number), AfterValidator(_in_utc)]


class Input(Schema):
    """The body of a request. A name it does not know is a typo, and is told."""

    model_config = ConfigDict(extra="forbid")
