"""Which messages follow each other in the stream of a cache map: snapshots, deltas and signs of life."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

from swdriver_shim.cache_map.codec import LIFE_BYTES, VERSION, Message, Section, in_parts
from swdriver_shim.cache_map.follower import Follower

ALIVE_SECONDS: Final = 5.0  # without a change
DELTAS_MAX: Final = 1000  # messages after a snapshot; then there is another, and these are removed
DELTA_BYTES_MIN: Final = 1 << 18  # of those; or as much as the snapshot has, if that is more


class Written(NamedTuple):
    """Messages to add. A snapshot takes the place of all that was added before."""

    messages: list[bytes]
    is_snapshot: bool


class MessageLog:
    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.sequence = 0
        self._life = secrets.token_bytes(LIFE_BYTES)
        self._said_at = 0.0
        self._said_serves = False
        self._snapshot_bytes = 0
        self._deltas = 0
        self._delta_bytes = 0

    def write(self, now: float, wall: float) -> Written:
        """What is to be added by now. `now`: by the ledger's clock."""
        follower = self.follower
        follower.follow(now, wall)
        is_long = self._deltas >= DELTAS_MAX
        if is_long or self._delta_bytes > max(DELTA_BYTES_MIN, self._snapshot_bytes):
            follower.wants_snapshot = True
        if follower.wants_snapshot:
            return self._snapshot(wall)
        base = int(wall)
        sections, dropped = follower.take(base)
        is_due = not 0 <= wall - self._said_at < ALIVE_SECONDS
        if not (sections or dropped or is_due or follower.serves is not self._said_serves):
            return Written([], is_snapshot=False)
        first, *more = in_parts(sections)
        messages = [self._message(wall, first, dropped=tuple(dropped))]
        messages += [self._message(wall, part) for part in more]
        self._deltas += len(messages)
        self._delta_bytes += sum(map(len, messages))
        return Written(messages, is_snapshot=False)

    def _snapshot(self, wall: float) -> Written:
        parts = in_parts(self.follower.everything(int(wall)))
        entries = len(self.follower)
        messages = [
            self._message(wall, part, number=number, parts=len(parts), entries=entries)
            for number, part in enumerate(parts)
        ]
        self._deltas = self._delta_bytes = 0
        self._snapshot_bytes = sum(map(len, messages))
        return Written(messages, is_snapshot=True)

    def _message(
        self,
        wall: float,
        sections: list[Section],
        *,
        number: int = 0,
        parts: int = 0,
        entries: int = 0,
        dropped: tuple[bytes, ...] = (),
    ) -> bytes:
        self.sequence += 1
        self._said_at, self._said_serves = wall, self.follower.serves
        message = Message(
            VERSION,
            self._life,
            self.sequence,
            max(0.0, wall),
            max(0, int(wall)),
            self.follower.serves,
            number,
            parts,
            entries,
            tuple(sections),
            dropped,
        )
        return message.encode()
