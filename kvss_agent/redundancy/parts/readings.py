"""One file on its way back from its holders. Pure.

The fragments with data are asked for first, and others in place of those that are missing, or late. Only
fragments with the same note make a file; where notes differ, all are looked at before some are chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.client import Miss
from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.holder import Place
from kvss_agent.redundancy.layout import fragment_span
from kvss_agent.redundancy.parts.memory import note_of, noted_bytes
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Fault
from kvss_agent.tier2.column_file import plausible

_UNTOLD: Final = (Miss.LATE, Miss.REFUSED)  # a holder that was busy: it has not looked
_UNREAD: Final = (*_UNTOLD, Miss.LOST)  # its disk may give it another time


@dataclass(eq=False, slots=True)
class Reading:
    """What is there of it, and what has to be asked next."""

    address: Address
    slot: int  # that its fragments pass through, at each holder
    code: ErasureCode
    order: Sequence[int]  # the places, in the order in which they are asked
    note: int | None = None  # of the fragments that make it, once that is known
    there: dict[int, memoryview] = field(default_factory=dict)  # by place
    # By place: the number of the recall, and the note.
    numbers: dict[int, tuple[int, int]] = field(default_factory=dict)
    lacks: dict[int, Miss | Failed] = field(default_factory=dict)  # by place: why not
    asked: set[int] = field(default_factory=set)  # places: for a recall
    refilling: set[int] = field(default_factory=set)  # places
    late: set[int] = field(default_factory=set)  # places that are asked, and in whose place others are
    looks_at_all: bool = False  # since its fragments are, or may be, of several writes

    @property
    def place(self) -> Place:
        return Place(self.slot, self.address.key, self.address.tag)

    @property
    def file_bytes(self) -> int:
        return noted_bytes(self.note or 0)

    def span(self, place: int) -> tuple[int, int]:
        return fragment_span(self.file_bytes, self.code.data, place)

    @property
    def chosen(self) -> list[int]:
        """The places that it is read from, of those that nothing is said against: who has answered
        comes first, and who is late last."""
        return sorted(self._usable, key=self._rank)[: self.code.data]

    @property
    def wanted(self) -> list[int]:
        """The places that have to be asked next."""
        return [place for place in self._needed if place not in self.asked]

    @property
    def is_recalled(self) -> bool:
        """Whether all places have answered that have to, before it is known what makes the file."""
        return all(place in self.numbers for place in self._needed)

    def wait_no_longer(self, place: int) -> bool:
        """This place is late. Whether another one is to be asked; what comes first counts."""
        others = [one for one in self._usable if one != place and one not in self.late]
        is_waiting = place in self._needed and place not in self.there
        if is_waiting and len(others) >= self.code.data:
            self.late.add(place)
            return True
        return False

    @property
    def its_own_lacks(self) -> set[int]:
        """Where it has no good fragment, as far as holders that answer have been asked."""
        return self.lacks.keys() - self.untold

    @property
    def untold(self) -> set[int]:
        """Where nobody could tell whether it has a fragment."""
        return {place for place, why in self.lacks.items() if isinstance(why, Failed) or why in _UNTOLD}

    @property
    def why_not(self) -> Failed | None:
        """The failure, where the file may be there and can't be read now."""
        if self.note is not None:
            return None
        failures = [one for one in self.lacks.values() if isinstance(one, Failed) or one in _UNREAD]
        absent = len(self.lacks) - len(failures)
        if not failures or self.code.fragments - absent < self.code.data:
            return None
        first = failures[0]
        return first if isinstance(first, Failed) else Failed(Fault.IO_ERROR, "a holder can't read it")

    @property
    def is_read_in_part(self) -> bool:
        """Whether somebody may have a fragment of it who could not give it now."""
        return any(isinstance(one, Failed) or one in _UNREAD for one in self.lacks.values())

    def is_made_by(self, parts: Sequence[memoryview]) -> bool:
        """Whether this is what was written."""
        return self.note == note_of(parts, self.file_bytes)

    def agree(self, file_bytes_max: int) -> None:
        """Only fragments of one write make a file. Where there are others, all are looked at before
        those of one write are chosen."""
        for place, (_, its) in self.numbers.items():
            if not plausible(noted_bytes(its)) or noted_bytes(its) > file_bytes_max:
                self.lacks.setdefault(place, Miss.STALE)
        usable = [place for place in self.numbers if place not in self.lacks]
        notes = Counter(self.numbers[place][1] for place in usable)
        before, self.note = self.note, None
        if not notes or len(self.chosen) < self.code.data:
            return
        if len(notes) > 1 and not self.looks_at_all:
            self.looks_at_all = True
            if not self.is_recalled:
                return
        note = max(notes, key=lambda one: notes[one])
        for place in usable:
            if self.numbers[place][1] != note:
                self.lacks[place] = Miss.STALE
        if note != before:
            self.there.clear()
        chosen = self.chosen
        if len(chosen) == self.code.data and all(place in self.numbers for place in chosen):
            self.note = note

    def conclude(self) -> bool:
        """Whether there is nothing more to ask. Without enough fragments it has no note. What is there
        while others are still looked at has none yet."""
        chosen = self.chosen
        if len(chosen) < self.code.data:
            self.note = None
            return True
        return self.note is not None and all(place in self.there for place in chosen)

    def _rank(self, place: int) -> int:
        if place in self.there:
            return 0
        if place in self.late:
            return 4
        if place in self.refilling:
            return 1
        return 2 if place in self.numbers else 3

    @property
    def _usable(self) -> list[int]:
        return [place for place in self.order if place not in self.lacks]

    @property
    def _needed(self) -> list[int]:
        """The places whose recalls it needs."""
        chosen = self.chosen
        if len(chosen) < self.code.data:
            return []
        return self._usable if self.looks_at_all else chosen
