"""Which columns were displaced not long ago."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Final

from swdriver_shim import loops

# Of a key, by its length: samples and parts of sets are taken by the bytes before. A preview has the
# first half of each key, of those that begin with little: their last bytes select the slot.
_NUMBER: Final = {16: Struct("<8xQ"), 8: Struct(">Q")}
_WHOLE: Final = 16
_FEW: Final = 1024  # slots that there may be for however few columns,
_SPARE: Final = 4  # and else for each
_PART: Final = 1 << 14  # slots that are added at once, at most: in some 20 microseconds
_NONE: Final = array("Q", [0])  # a number that one key in 2**64 has


class Gone:
    """A table of numbers made from their keys. Each overwrites the one in its slot, so one of them is
    found again less and less likely: one in e is after as many others as there are slots. They are a
    power of two, but while some are added, and one to four for each column that is stored, or a few.

    Eight bytes a slot, however many were displaced. They are half of a key, which nobody can ask with.
    """

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots = _NONE  # not to be written to: one for all orgs that have displaced nothing

    def add(self, key: bytes, stored: int) -> None:
        """It is displaced; so many columns are stored, with it."""
        self._fit(stored)
        number = _NUMBER[len(key)].unpack(key)[0]
        self._slots[loops.slot_of(number, len(self._slots))] = number

    def add_all(self, keys: list[bytes], stored: int) -> None:
        """Add these keys, one after the other, as `add` does. A large table which lacks slots gets fewer
        of them than by `add`."""
        if self._has_spare(stored - len(keys) + 1) or (keys and len(keys[0]) != _WHOLE):
            for place, key in enumerate(keys):
                self.add(key, stored - place)
        else:
            self._fit(stored)
            loops.current.note(keys, self._slots)

    def _fit(self, stored: int) -> None:
        self.shrink(stored)
        # What is in a slot belongs in one of two now, by a further bit of it. The other is no use.
        while (slots := len(self._slots)) <= stored and slots < _PART:
            self._slots = self._slots + self._slots
        if slots >= _PART and (slots <= stored or slots & slots - 1):
            begin = slots - (1 << slots.bit_length() - 1)
            self._slots.extend(self._slots[begin : begin + _PART])

    def shrink(self, stored: int) -> None:
        """Only so many columns are stored by now: slots that are too many for them are freed. Else each
        org would keep those for the most columns that it ever had."""
        while self._has_spare(stored):
            del self._slots[1 << (len(self._slots) - 1).bit_length() - 1 :]

    def _has_spare(self, stored: int) -> bool:
        return len(self._slots) > _FEW and len(self._slots) > _SPARE * stored

    def __contains__(self, key: bytes) -> bool:
        number: int = _NUMBER[len(key)].unpack(key)[0]
        return self._slots[loops.slot_of(number, len(self._slots))] == number

    def which(self, keys: list[bytes]) -> list[bool]:
        """Of each whole key, whether it is in it."""
        return loops.current.noted(keys, self._slots)
