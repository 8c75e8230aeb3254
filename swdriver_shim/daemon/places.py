"""The places that shards have left and that may still hold bytes of them, kept over restarts.

What a shard knows of its former homes is gone with its process. The addresses are written down before it
moves, and struck off once the homes are known to be empty; the next life empties what is left.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvss_agent.keeping import keep
from telemetry.decoding import Malformed, decode

log = logging.getLogger(__name__)

At = tuple[str, int]  # of a shard: its group, and which of it


class Place(NamedTuple):
    address: str
    shard: str


_KEPT: Final = msgspec.json.Decoder(list[tuple[str, int, list[Place]]])


class Places:
    """By shard. Without a path nothing outlives the process."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._left: dict[At, list[Place]] = {}
        if path is None:
            return
        try:
            kept = decode(path.read_bytes(), _KEPT)
            self._left = {(group, index): places for group, index, places in kept}
        except FileNotFoundError:
            pass  # no shard has ever moved
        except (OSError, Malformed) as error:
            log.warning("Where shards have been can't be read from %s: %s", path, error)

    def left_by(self, at: At) -> list[Place]:
        return list(self._left.get(at, ()))

    def add(self, at: At, place: Place) -> None:
        """It is about to leave this one."""
        if place not in self._left.get(at, ()):
            self._left.setdefault(at, []).append(place)
            self._keep()

    def strike_off(self, at: At) -> None:
        """Nothing of it is left at any of them."""
        if self._left.pop(at, None):
            self._keep()

    def _keep(self) -> None:
        if self._path is None:
            return
        kept = [(group, index, places) for (group, index), places in sorted(self._left.items())]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            keep(self._path, msgspec.json.encode(kept))
        except OSError as error:
            log.warning("Where shards have been can't be written down: %s", error)
