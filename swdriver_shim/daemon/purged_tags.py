"""Tags that were purged. No document may bring them back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Final

from msgspec import structs

from kvss_agent.process.durable_file import write_durably
from swdriver_shim.desired import Desired
from swdriver_shim.keys import isolation_tag

TAGS_MAX: Final = 1 << 16  # the newest; purges that are longer ago have been confirmed, or given up


class PurgedTags:
    """Stored in a file, if one is given, so that they outlive a restart. Not thread-safe."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._tags: dict[str, None] = {}
        if file:
            with contextlib.suppress(FileNotFoundError):
                self._tags = dict.fromkeys(file.read_text().split())

    def add(self, tags: Collection[str]) -> None:
        """Add tags in hex. Raises OSError."""
        if set(tags) <= self._tags.keys():
            return
        wanted = dict.fromkeys([*self._tags, *tags])
        kept = dict.fromkeys(list(wanted)[-TAGS_MAX:])
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(self._file, "\n".join(kept).encode())
        self._tags = kept

    def without_purged(self, document: Desired) -> Desired:
        """The document without the orgs whose tag was purged."""
        orgs = tuple(
            org for org in document.orgs if isolation_tag(org.name, org.secret).hex() not in self._tags
        )
        return document if len(orgs) == len(document.orgs) else structs.replace(document, orgs=orgs)
