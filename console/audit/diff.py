"""What changed between two snapshots, as a person reads it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = None


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a JSON value with its dotted path; lists are leaves, since their order tells."""
    if isinstance(value, dict) and value:
        for key in sorted(value):
            yield from flatten(value[key], f"{path}.{key}" if path else key)
    else:
        yield path, value


def changes(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[tuple[str, Any, Any]]:
    """(path, before, after) for every leaf that differs, by path; None where there was nothing."""
    old = dict(flatten(before)) if before else {}
    new = dict(flatten(after)) if after else {}
    return [
        (path, old.get(path, ABSENT), new.get(path, ABSENT))
        for path in sorted(old.keys() | new.keys())
        if old.get(path, ABSENT) != new.get(path, ABSENT)
    ]
