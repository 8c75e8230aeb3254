"""Texts as the API accepts them. PostgreSQL can't store NUL, and nobody means it."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

NO_NUL = r"^[^\x00]*$"

Line = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=120, pattern=r"^[^\x00-\x1f]+$"),
]
Reason = Annotated[str, StringConstraints(strip_whitespace=True, max_length=500, pattern=NO_NUL)]
SearchText = Annotated[str, StringConstraints(max_length=120, pattern=NO_NUL)]
