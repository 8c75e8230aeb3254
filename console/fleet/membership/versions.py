"""Which agents and drivers go with this console. Pure.

The console is updated first. Then it works with processes of its own minor version and the one before,
in one major version; and a process speaks protocol N with those that speak N or the one before.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

_NUMBERS: Final = re.compile(r"(\d{1,6})\.(\d{1,6})")


class Fit(enum.Enum):
    SAME = "same"
    OLDER = "older"  # works; to be updated
    NEWER = "newer"  # works, by luck; the console is to be updated
    APART = "apart"  # does not work

    @property
    def works(self) -> bool:
        return self is not Fit.APART


@dataclass(frozen=True, slots=True)
class Skew:
    fit: Fit
    sentence: str = ""  # what is the matter, and what to do


def skew(console: str, process: str) -> Skew:
    """How a process of this version goes with a console of that. Of a version without numbers nothing
    can be said, and it is let in: it comes from somebody's working copy."""
    ours, theirs = _minor(console), _minor(process)
    if ours is None or theirs is None:
        return Skew(Fit.SAME)
    names = f"It runs {_said(theirs)}, the console {_said(ours)}"
    if ours == theirs:
        return Skew(Fit.SAME)
    if ours[0] != theirs[0] or abs(ours[1] - theirs[1]) > 1:
        older = theirs < ours
        which = "it" if older else "the console"
        return Skew(Fit.APART, f"{names}: they don't go together. Update {which}.")
    if theirs < ours:
        return Skew(Fit.OLDER, f"{names}: update it before the console goes on.")
    return Skew(Fit.NEWER, f"{names}: the console should have been updated first.")


def protocols_meet(ours: tuple[int, int], theirs: tuple[int, int]) -> bool:
    """Whether two ranges of protocol versions have one in common."""
    return max(ours[0], theirs[0]) <= min(ours[1], theirs[1])


def _minor(version: str) -> tuple[int, int] | None:
    found = _NUMBERS.search(version)
    return (int(found[1]), int(found[2])) if found else None


def _said(minor: tuple[int, int]) -> str:
    return f"{minor[0]}.{minor[1]}"
