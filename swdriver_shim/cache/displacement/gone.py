"""Which columns were displaced not long ago."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Final

from swdriver_shim import loops

# Of a key, by its length: samples and parts of sets are taken by the bytes before. A preview has the
# first half of each key, of those that begin with little: their last bytes select the slot.
_NUMBER: Final = {16: Struct("<8xQ"), 8: Struct(">Q")}
_FEW: Final = 1024  # slots that there may be for however few columns,
_SPARE: Final = 4  # and else for each
_NONE: Final = array("Q", [0])  # a number that one key in 2**64 has


class Gone:
    """A table of numbers made from their keys. Each overwrites the one in its slot, so one of them is
    found again less and less likely: one in e is after as many others as there are slots. They are a
    power of two, and one to four for each column that is stored, or a few.

    Eight bytes a slot, however many were displaced. They are half of a key, which nobody can ask with.
    """

    __slots__ = ("_mask", "_slots")

    def __init__(self) -> None:
        self._mask = 0
        self._slots = _NONE  # not to be written to: one for all orgs that have displaced nothing

    def add(self, key: bytes, stored: int) -> None:
        """It is displaced; so many columns are stored, with it."""
        self._fit(stored)
        number = _NUMBER[len(key)].unpack(key)[0]
        self._slots[number & self._mask] = number

    def add_all(self, keys: list[bytes], stored: int) -> None:
        """The same as `add` for each, one after the other: whole keys, or a single one."""
        if len(keys) == 1 or self._has_spare(stored - len(keys) + 1):
            for place, key in enumerate(keys):
                self.add(key, stored - place)
        else:
            self._fit(stored)
            loops.current.note(keys, self._slots)

    def _fit(self, stored: int) -> None:
        self.shrink(stored)
        while self._mask < stored:
            # What is in a slot belongs in one of two now, by a further bit of it. The other is no use.
            self._slots = self._slots + self._slots
            self._mask = 2 * self._mask + 1

    def shrink(self, stored: int) -> None:
        """Only so many columns are stored by now: slots that are too many for them are freed. Else each
        org would keep those for the most columns that it ever had."""
        while self._has_spare(stored):
            self._mask >>= 1
            self._slots = self._slots[: self._mask + 1]

    def _has_spare(self, stored: int) -> bool:
        return self._mask >= _FEW and self._mask >= _SPARE * stored

    def __contains__(self, key: bytes) -> bool:
        number: int = _NUMBER[len(key)].unpack(key)[0]
        return self._slots[number & self._mask] == number

    def which(self, keys: list[bytes]) -> list[bool]:
        """Of each whole key, whether it is in it."""
        return loops.current.noted(keys, self._slots)
