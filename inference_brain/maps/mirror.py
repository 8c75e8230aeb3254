"""The map of one driver, kept in step with its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from inference_brain.maps.holders import Values
from inference_brain.maps.table import CODE_SHIFT, NEVER_CODE, SPACES_MAX, MapTable, Names, Run
from swdriver_shim.cache_map.codec import (
    NAME_BYTES,
    NEVER_AFTER,
    SPACE_BYTES,
    CachePath,
    Message,
    Section,
    decode,
)
from swdriver_shim.keys import TAG_BYTES
from telemetry.decoder import Malformed

ENTRIES_MAX: Final = 1 << 22  # of one driver: of 32 million columns
SPACES_NEW_MAX: Final = SPACES_MAX >> 3  # that one driver may be the first to name: it may make them up
FORGOTTEN_MAX: Final = 1 << 17  # tags
# Some changes take a look at the whole table. That a driver may cause for so much of the time, and for
# so long at once: its brain serves others meanwhile.
SCAN_SHARE: Final = 0.02
SCAN_SECONDS: Final = 0.25
_DETAIL: Final = np.uint32(0xFF)


Scope = tuple[bytes, bytes | None]  # an isolation tag, and the digest of a namespace or None for all


class Spaces:
    """Numbers of spaces: of one org in one namespace each. Those that were purged have none."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._free: list[int] = []
        self._forgotten: dict[Scope, None] = {}

    def find(self, space: bytes) -> int | None:
        return self._numbers.get(space)

    def number(self, space: bytes) -> int | None:
        """None for one that was purged, or that is too many."""
        found = self._numbers.get(space)
        if found is None and not self._is_forgotten(space):
            if self._free:
                found = self._free.pop()
            elif len(self._numbers) < SPACES_MAX - 1:
                found = len(self._numbers) + 1
            else:
                return None
            self._numbers[space] = found
        return found

    @property
    def has_forgotten(self) -> bool:
        return bool(self._forgotten)

    def is_forgotten(self, tag: bytes, namespace: bytes | None) -> bool:
        """`namespace`: the first bytes of its digest; None: all of them."""
        return (tag, None) in self._forgotten or (tag, namespace) in self._forgotten

    def _is_forgotten(self, space: bytes) -> bool:
        return self.is_forgotten(space[:TAG_BYTES], space[TAG_BYTES:])

    def forget(self, scopes: Iterable[Scope]) -> list[int]:
        """Give these scopes no numbers from here on. Returns the numbers that they had, for
        `release`."""
        for tag, namespace in scopes:
            self._forgotten[tag, namespace and namespace[:SPACE_BYTES]] = None
        while len(self._forgotten) > FORGOTTEN_MAX:
            del self._forgotten[next(iter(self._forgotten))]
        forgotten = [space for space in self._numbers if self._is_forgotten(space)]
        return [self._numbers.pop(space) for space in forgotten]

    def remember(self, spaces: Iterable[bytes]) -> bool:
        """These are served again, if they were forgotten. Returns whether any was."""
        if not self._forgotten:
            return False
        again = [space for space in spaces if self._is_forgotten(space)]
        for space in again:
            self._forgotten.pop((space[:TAG_BYTES], None), None)
            self._forgotten.pop((space[:TAG_BYTES], space[TAG_BYTES:]), None)
        return bool(again)

    def release(self, numbers: Iterable[int]) -> None:
        """Nothing is stored under these numbers any more."""
        self._free += numbers


@dataclass(slots=True)
class MapCounts:
    """Since the start."""

    gaps: int = 0
    left_out: int = 0  # entries of a driver that reports too many, or for which there was no room


class Trust:
    """Counts how often any mirror has changed in whether its entries are to be believed."""

    def __init__(self) -> None:
        self.changes = 0


class _Scans:
    """How long a driver may still have the whole table looked through."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = SCAN_SECONDS
        self._at = clock()

    @property
    def are_allowed(self) -> bool:
        now = self._clock()
        more = SCAN_SHARE * (now - self._at)
        self._seconds, self._at = min(SCAN_SECONDS, self._seconds + more), now
        return self._seconds > 0

    def __enter__(self) -> None:
        """What is done within is what they take."""
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._seconds -= self._clock() - self._began


class Mirror:
    """`is_known`: whether the map is whole. `wants_all`: whether its stream has to be read from the
    start."""

    def __init__(
        self,
        table: MapTable,
        spaces: Spaces,
        lane: int,
        trust: Trust | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lane = lane
        self.wants_all = True
        self._is_known = False
        self._serves = False
        self._trust = trust or Trust()
        self.path: CachePath = ""  # how most bytes of the cache reach the engine
        self.entries = 0
        self.at = 0.0  # when the driver sent the last message, by a clock of this process
        self.counts = MapCounts()
        self._table = table
        self._spaces = spaces
        self._life = b""
        self._next = 0  # sequence
        self._is_loading = False
        self._spaces_new = 0
        self._scans = _Scans(clock)

    @property
    def is_known(self) -> bool:
        return self._is_known

    @is_known.setter
    def is_known(self, value: bool) -> None:
        if value is not self._is_known:
            self._is_known = value
            self._trust.changes += 1

    @property
    def serves(self) -> bool:
        """Whether the driver serves any of its entries now."""
        return self._serves

    @serves.setter
    def serves(self, value: bool) -> None:
        if value is not self._serves:
            self._serves = value
            self._trust.changes += 1

    def start_over(self) -> None:
        """Its stream is read from the start."""
        self.wants_all = False

    def read_again(self) -> None:
        """What was left out of the map is wanted now."""
        self.wants_all, self._next = True, 0

    def read(self, raw: bytes, at: float) -> bool:
        """Apply a message that was sent at this time, as who reads it says: the driver's own clock may
        be wrong. One that does not continue the last makes the map unknown, until the stream has been
        read from the start. Returns whether it is news."""
        try:
            message = decode(raw)
        except Malformed:
            self._lose()
            return False
        if self.is_known and message.life == self._life and message.sequence < self._next:
            return False  # it has been read
        if message.parts:
            self._read_snapshot(message)
        elif self.is_known and self._continues(message):
            self._next += 1
            self._apply(message)
        elif self.is_known:
            self._lose()
        self.at = at
        self.serves, self.path = message.serves, message.path
        return True

    def clear(self) -> None:
        """Nothing is known of the driver."""
        self._table.remove_lane(self.lane)
        self.entries = 0
        self.is_known = self._is_loading = False

    def _lose(self) -> None:
        if self.is_known or self._is_loading:
            self.counts.gaps += 1
        self.is_known = self._is_loading = False
        self.wants_all = True

    def _continues(self, message: Message) -> bool:
        return message.life == self._life and message.sequence == self._next

    def _read_snapshot(self, message: Message) -> None:
        if self.is_known and message.repeats and self._continues(message):
            self._next += 1
            return
        if message.part == 0:
            if self._table.has(self.lane) and not self._scans.are_allowed:
                self._lose()  # it is read later
                return
            with self._scans:
                self.clear()
            self._is_loading = True
            self._life, self._next = message.life, message.sequence
        elif not (self._is_loading and self._continues(message)):
            self._lose()
            return
        self._next += 1
        self._apply(message)
        if self._is_loading and message.part == message.parts - 1:
            self.is_known, self._is_loading = True, False

    def _apply(self, message: Message) -> None:
        found = (self._spaces.find(one) for one in message.dropped)
        dropped = [number for number in found if number is not None]
        if self._table.has(self.lane, dropped):
            if not self._scans.are_allowed:
                self._lose()
                return
            with self._scans:
                self.entries -= self._table.remove_spaces_of(self.lane, dropped)
        shift = message.base - self._table.epoch
        for sections in _apart(message.sections):
            self._apply_sections(sections, shift)

    def _number(self, space: bytes) -> int | None:
        """Of a space; None for one that was purged, or that is too many."""
        number = self._spaces.find(space)
        if number is None and self._spaces_new < SPACES_NEW_MAX:
            number = self._spaces.number(space)
            self._spaces_new += number is not None
        return number

    def _apply_sections(self, sections: Sequence[Section], shift: int) -> None:
        """All at once: what the table does takes nearly as long for one entry as for a hundred."""
        numbered = [(self._number(section.space), section) for section in sections]
        known = [(number, section) for number, section in numbered if number is not None]
        table = self._table
        names, runs = _joined((number, one.kind, one.removed) for number, one in known)
        if runs:
            self.entries -= table.remove(runs, names, self.lane)
        names, runs = _joined((number, one.kind, one.names) for number, one in known)
        if not runs:
            return
        values = _values(np.frombuffer(b"".join(one.values for _, one in known), "<u4"), shift)
        room = max(0, ENTRIES_MAX - self.entries)
        if names.size > room:
            self.counts.left_out += names.size - room
            names, values, runs = names[:room], values[:room], _first(runs, room)
        before = table.refused
        self.entries += table.put(runs, names, self.lane, values)
        self.counts.left_out += table.refused - before


def _apart(sections: Sequence[Section]) -> Iterator[Sequence[Section]]:
    """These in lists with no two of one space and class: what a section says of a name is in the map
    before the next section about it is read."""
    seen: set[tuple[bytes, int]] = set()
    start = 0
    for at, section in enumerate(sections):
        place = section.space, section.kind
        if place in seen:
            yield sections[start:at]
            start = at
            seen.clear()
        seen.add(place)
    if start < len(sections):
        yield sections[start:]


def _joined(parts: Iterable[tuple[int, int, bytes]]) -> tuple[Names, list[Run]]:
    """Names of several spaces and classes in one array, without those that have none."""
    some = [part for part in parts if part[2]]
    runs = [Run(number, kind, len(names) // NAME_BYTES) for number, kind, names in some]
    return np.frombuffer(b"".join(names for _, _, names in some), np.uint64), runs


def _first(runs: Sequence[Run], count: int) -> list[Run]:
    """What these are of the first names, so many."""
    cut = []
    for run in runs:
        cut.append(run._replace(size=min(run.size, count)))
        count -= cut[-1].size
    return cut


def _values(reported: Values, shift: int) -> Values:
    """Values as the table has them: times count from its epoch, which is so much before the base of the
    message."""
    after = (reported >> CODE_SHIFT).astype(np.int64)
    codes = np.where(after == NEVER_AFTER, NEVER_CODE, np.clip(after + shift, 1, NEVER_CODE - 1))
    values: Values = (codes << CODE_SHIFT).astype(np.uint32)
    values |= reported & _DETAIL
    return values
