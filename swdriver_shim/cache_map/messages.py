"""Which messages follow each other in the stream of a cache map: snapshots, deltas and signs of life."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

from swdriver_shim.cache_map.codec import LIFE_BYTES, VERSION, CachePath, Message, Section, in_parts
from swdriver_shim.cache_map.follower import Follower

ALIVE_SECONDS: Final = 5.0  # without a change
DELTAS_MAX: Final = 1000  # messages after a snapshot; then there is another, and these are removed
DELTA_BYTES_MIN: Final = 1 << 18  # of those; or as much as the snapshot has, if that is more


class Written(NamedTuple):
    """Messages to add. The one at `snapshot_at` begins a snapshot, which takes the place of everything
    before it; None if there is none."""

    messages: list[bytes]
    snapshot_at: int | None = None


class MessageLog:
    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.sequence = 0
        self._life = secrets.token_bytes(LIFE_BYTES)
        self._said_at = 0.0
        self._said_serves = False
        self._said_path: CachePath = ""
        self._snapshot_bytes = 0
        self._deltas = 0
        self._delta_bytes = 0

    def write(self, now: float, wall: float) -> Written:
        """What is to be added by now. `now`: by the ledger's clock."""
        follower = self.follower
        follower.follow(now, wall)
        if follower.wants_snapshot:
            return Written(self._snapshot(wall, repeats=False), 0)
        messages = self._delta(wall)
        is_long = self._deltas >= DELTAS_MAX
        if is_long or self._delta_bytes > max(DELTA_BYTES_MIN, self._snapshot_bytes):
            return Written(messages + self._snapshot(wall, repeats=True), len(messages))
        return Written(messages)

    def _delta(self, wall: float) -> list[bytes]:
        sections, dropped = self.follower.take(int(wall))
        is_due = not 0 <= wall - self._said_at < ALIVE_SECONDS
        follower = self.follower
        has_moved = (follower.serves, follower.path) != (self._said_serves, self._said_path)
        if not (sections or dropped or is_due or has_moved):
            return []
        first, *more = in_parts(sections)
        messages = [self._message(wall, first, dropped=tuple(dropped))]
        messages += [self._message(wall, part) for part in more]
        self._deltas += len(messages)
        self._delta_bytes += sum(map(len, messages))
        return messages

    def _snapshot(self, wall: float, *, repeats: bool) -> list[bytes]:
        parts = in_parts(self.follower.everything(int(wall)))
        numbers = range(len(parts))
        messages = [self._message(wall, parts[at], at, len(parts), repeats=repeats) for at in numbers]
        self._deltas = self._delta_bytes = 0
        self._snapshot_bytes = sum(map(len, messages))
        return messages

    def _message(
        self,
        wall: float,
        sections: list[Section],
        part: int = 0,
        parts: int = 0,
        *,
        repeats: bool = False,
        dropped: tuple[bytes, ...] = (),
    ) -> bytes:
        self.sequence += 1
        self._said_at, self._said_serves = wall, self.follower.serves
        self._said_path = self.follower.path
        message = Message(
            version=VERSION,
            life=self._life,
            sequence=self.sequence,
            at=max(0.0, wall),
            base=max(0, int(wall)),
            serves=self.follower.serves,
            part=part,
            parts=parts,
            entries=self.follower.size if parts else 0,
            repeats=repeats,
            sections=tuple(sections),
            dropped=dropped,
            path=self.follower.path,
        )
        return message.encode()
