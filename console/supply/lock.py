"""The locks of `requirements/` as data. Pure but for reading files; no Django."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from console.environment import PROJECT

LOCKS: Final = PROJECT / "requirements"
_PIN: Final = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(?P<version>[^\s;\\]+)\s*(?:;\s*(?P<marker>[^\\]+?))?\s*\\?$"
)
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_NOT_NORMAL: Final = re.compile(r"[-_.]+")


class NotALock(ValueError):
    """What a line of a lock is that is none, with its number."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One package at one version, where `marker` holds, in the files that these SHA-256 name."""

    name: str
    version: str
    marker: str = ""
    sha256: tuple[str, ...] = field(default=(), repr=False)


def normal(name: str) -> str:
    """A package's name as indexes and advisories compare it (PEP 503)."""
    return _NOT_NORMAL.sub("-", name).lower()


def pins(lock: Path) -> list[Pin]:
    """All of a lock, in its order. Raises NotALock for what is no pinned requirement."""
    return list(_pins(lock.name, lock.read_text()))


def _pins(where: str, text: str) -> Iterator[Pin]:
    begun: re.Match[str] | None = None
    hashes: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if found := _HASH.search(line):
            hashes.append(found[1])
            continue
        if begun:
            yield _pin(begun, hashes)
        begun, hashes = _PIN.match(line), []
        if begun is None:
            raise NotALock(f"{where}:{number} is no pinned requirement: {line.strip()[:80]}")
    if begun:
        yield _pin(begun, hashes)


def _pin(found: re.Match[str], hashes: list[str]) -> Pin:
    return Pin(normal(found["name"]), found["version"], (found["marker"] or "").strip(), tuple(hashes))
