"""The homes that shards have left and that may still hold bytes of them, stored over restarts.

What a shard knows of its former homes is lost with its process. So an address is stored before the shard
moves, and removed once the home is known to be empty; the next process empties the homes that are left.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvss_agent.process.durable_file import write_durably
from telemetry.decoder import Malformed, decode

log = logging.getLogger(__name__)

At = tuple[str, int]  # of a shard: its group, and which of it


class HomeAddress(NamedTuple):
    address: str
    shard: str


Marks = Mapping[HomeAddress, int]  # each place with the number of the move that left it last

_KEPT: Final = msgspec.json.Decoder(list[tuple[str, int, list[HomeAddress]]])


class LeftHomes:
    """By shard. May be used from any thread. Without a path nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError for a file that can't be read: purges would be confirmed too early."""
        self._path = path
        self._lock = threading.Lock()
        self._moves = 0
        self._left = {at: dict.fromkeys(places, 0) for at, places in _read(path)} if path else {}

    def left_by(self, at: At) -> list[HomeAddress]:
        """The homes that a shard has left, the earliest first."""
        return list(self.marks(at))

    def marks(self, at: At) -> Marks:
        """What `remove` needs, to remove only homes that were listed at this moment."""
        with self._lock:
            return self._left.get(at, {})

    def add(self, at: At, place: HomeAddress) -> None:
        """Store that the shard is about to leave this home. Raises OSError, and adds nothing then."""
        with self._lock:
            before = self._left.get(at, {})
            after = {one: number for one, number in before.items() if one != place}
            after[place] = self._moves + 1
            left = {**self._left, at: after}
            if list(after) != list(before):
                self._keep(left)
            self._moves += 1
            self._left = left

    def remove(self, at: At, marks: Marks) -> None:
        """Remove the homes that were listed then. Homes that were added since stay."""
        with self._lock:
            before = self._left.get(at, {})
            after = {one: number for one, number in before.items() if marks.get(one) != number}
            if after == before:
                return
            left = {other: places for other, places in self._left.items() if other != at}
            if after:
                left[at] = after
            try:
                self._keep(left)
            except OSError as error:  # they are looked into once more
                log.warning("The list of left homes can't be stored: %s", error)
                return
            self._left = left

    def _keep(self, left: Mapping[At, Marks]) -> None:
        if self._path is None:
            return
        kept = [(group, index, list(places)) for (group, index), places in sorted(left.items())]
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(self._path, msgspec.json.encode(kept))


def _read(path: Path) -> list[tuple[At, list[HomeAddress]]]:
    try:
        return [((group, index), places) for group, index, places in decode(path.read_bytes(), _KEPT)]
    except FileNotFoundError:
        return []  # no shard has ever moved
    except (OSError, Malformed) as error:
        raise OSError(
            f"The homes that shards of this driver have left can't be read from {path}: {error}. "
            "Without them, purges would be confirmed while former homes hold bytes. Restore the "
            "file; or remove it once no agent has a shard that was left."
        ) from error
