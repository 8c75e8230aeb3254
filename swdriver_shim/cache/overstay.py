"""Columns that were removed later than their TTL says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SWEPT_SECONDS: Final = 5.0  # the sweeper comes each second: a column that is removed later overstayed


@dataclass(slots=True)
class Overstay:
    """How long columns stayed in memory past their TTL, never served, before agents were told to empty
    their slots."""

    columns: int = 0  # that were removed too late
    seconds_max: float = 0.0
