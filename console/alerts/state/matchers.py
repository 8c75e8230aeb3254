"""Matchers select alerts by label: `node=ax-7`, `rule=tier2-*`, `severity!=notice`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

MATCHERS_MAX: Final = 8
VALUE_CHARACTERS_MAX: Final = 120
_FORM: Final = re.compile(r"([a-z][a-z0-9_]{0,39})\s*(!?=)\s*([^\s,\x00-\x1f\x7f\[\]?]+)")


class BadMatcher(ValueError):
    """The text is not a matcher. The message says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class Matcher:
    label: str
    negated: bool
    pattern: str  # with * as a wildcard

    def __str__(self) -> str:
        return f"{self.label}{'!=' if self.negated else '='}{self.pattern}"

    def matches(self, labels: Mapping[str, str]) -> bool:
        """A label that an alert does not have is empty."""
        return fnmatchcase(labels.get(self.label, ""), self.pattern) != self.negated


def parse(texts: Iterable[str]) -> tuple[Matcher, ...]:
    """Raises BadMatcher."""
    matchers = []
    for text in texts:
        found = _FORM.fullmatch(text.strip())
        if not found or len(found[3]) > VALUE_CHARACTERS_MAX:
            raise BadMatcher(
                f"“{text.strip()[:60]}” is not a matcher. Write label=value or label!=value, with * as "
                "a wildcard: node=ax-7, rule=tier2-*, severity!=notice."
            )
        matchers.append(Matcher(found[1], found[2] == "!=", found[3]))
    if len(matchers) > MATCHERS_MAX:
        raise BadMatcher(f"At most {MATCHERS_MAX} matchers.")
    return tuple(matchers)


def split(line: str) -> list[str]:
    """The comma-separated matchers of a form field."""
    return [part for part in (one.strip() for one in line.split(",")) if part]


def match(matchers: Sequence[Matcher], labels: Mapping[str, str]) -> bool:
    """Whether all matchers match. No matchers match everything."""
    return all(one.matches(labels) for one in matchers)
