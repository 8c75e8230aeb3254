"""The places that shards have left and that may still hold bytes of them, kept over restarts.

What a shard knows of its former homes is gone with its process. The addresses are written down before it
moves, and struck off once the homes are known to be empty; the next life empties what is left.
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
    """By shard, for any number of threads. Without a path nothing outlives the process."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError for a file that can't be read: purges would be confirmed too early."""
        self._path = path
        self._lock = threading.Lock()
        self._moves = 0
        self._left = {at: dict.fromkeys(places, 0) for at, places in _read(path)} if path else {}

    def left_by(self, at: At) -> list[HomeAddress]:
        """The one that was left first comes first."""
        return list(self.marks(at))

    def marks(self, at: At) -> Marks:
        """What `strike_off` needs to know which places were listed at this moment."""
        with self._lock:
            return self._left.get(at, {})

    def add(self, at: At, place: HomeAddress) -> None:
        """It is about to leave this one. Raises OSError, and has not added it then."""
        with self._lock:
            before = self._left.get(at, {})
            after = {one: number for one, number in before.items() if one != place}
            after[place] = self._moves + 1
            left = {**self._left, at: after}
            if list(after) != list(before):
                self._keep(left)
            self._moves += 1
            self._left = left

    def strike_off(self, at: At, marks: Marks) -> None:
        """Nothing of it is left at any of those that were listed then. What was added since stays."""
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
                log.warning("That former homes are empty can't be written down: %s", error)
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
            f"Where shards of this driver have been can't be read from {path}: {error}. Without it, "
            "purges would be confirmed while former homes hold bytes. Restore the file; or remove it "
            "once no agent has a shard that this driver has left."
        ) from error
