"""Gathering fragments: enough of each file, and all of one write.

The fragments with data are asked for first, and others in place of those that are missing. Only
fragments with the same note make a file; where notes differ, all are looked at before some are chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.client import Header, Miss
from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.holder import Holder, Place
from kvss_agent.redundancy.layout import fragment_span
from kvss_agent.redundancy.parts.memory import note_of, noted_bytes, window
from kvss_agent.redundancy.parts.state import State
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Fault

_UNREAD: Final = (Miss.LOST, Miss.REFUSED)  # a holder's disk may give it another time
Targets = Mapping["Reading", Sequence[memoryview]]  # the memory that a file goes to


@dataclass(eq=False, slots=True)
class Reading:
    """One file on its way back: what is there of it, and what has to be asked next. Pure."""

    address: Address
    slot: int  # that its fragments pass through, at each holder
    code: ErasureCode
    note: int | None = None  # of the fragments that make it, once that is known
    there: dict[int, memoryview] = field(default_factory=dict)  # by place
    # By place: the number of the recall, and the note.
    numbers: dict[int, tuple[int, int]] = field(default_factory=dict)
    lacks: dict[int, Miss | Failed] = field(default_factory=dict)  # by place: why not
    is_mixed: bool = False  # its fragments are of several writes

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
        """The places that it is read from: the first that nothing is said against."""
        return self._usable[: self.code.data]

    @property
    def wanted(self) -> list[int]:
        """The places that have to be asked next."""
        chosen = self.chosen
        if len(chosen) < self.code.data:
            return []
        return [p for p in (self._usable if self.is_mixed else chosen) if p not in self.numbers]

    @property
    def its_own_lacks(self) -> set[int]:
        """Where it has no good fragment, as far as holders that answer have been asked."""
        return {place for place, why in self.lacks.items() if isinstance(why, Miss)}

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
        usable = [place for place in self.numbers if place not in self.lacks]
        notes = Counter(self.numbers[place][1] for place in usable)
        before, self.note = self.note, None
        if len(self.chosen) < self.code.data:
            return
        if len(notes) > 1 and not self.is_mixed:
            self.is_mixed = True
            return
        note = max(notes, key=lambda one: notes[one])
        for place in usable:
            if self.numbers[place][1] != note or not 0 < noted_bytes(note) <= file_bytes_max:
                self.lacks[place] = Miss.STALE
        if note != before:
            self.there.clear()
        if all(place in self.numbers for place in self.chosen):
            self.note = note

    def conclude(self) -> bool:
        """Whether there is nothing more to ask. Without enough fragments it has no note."""
        chosen = self.chosen
        if len(chosen) < self.code.data:
            self.note = None
            return True
        return all(place in self.there for place in chosen)

    @property
    def _usable(self) -> list[int]:
        return [place for place in range(self.code.fragments) if place not in self.lacks]


class Gatherer:
    """Asks holders for what readings want."""

    def __init__(self, state: State) -> None:
        self._state, self._code, self._holders = state, state.code, state.holders

    def gather(self, readings: Sequence[Reading], targets: Targets | None = None) -> None:
        """Read `data` fragments of each, or fewer where there are not as many. `targets`: where to read
        those with data to, as far as a fragment fits into one piece of it."""
        open_ = [*readings]
        while open_:
            self._recall([one for one in open_ if one.wanted])
            ready = [one for one in open_ if not one.wanted]
            for one in ready:
                one.agree(self._state.file_bytes_max)
            self._refill([one for one in ready if one.note is not None], targets or {})
            open_ = [one for one in open_ if not one.conclude()]

    def without_each(
        self, reading: Reading, parts: Sequence[memoryview] | None = None
    ) -> Iterator[Reading]:
        """The file read anew, each time without another one of the fragments that made it: the one that
        is bad behind a good seal, if its holder lies or the memory there does."""
        for place in reading.chosen:
            again = Reading(reading.address, reading.slot, self._code)
            again.lacks = {**reading.lacks, place: Miss.CORRUPT}
            self.gather([again], None if parts is None else {again: parts})
            if again.note is not None:
                yield again

    # Inside

    def _recall(self, readings: Sequence[Reading]) -> None:
        asked: dict[int, list[Reading]] = {}
        for one in readings:
            for place in one.wanted:
                asked.setdefault(place, []).append(one)
        answers = self._holders.each(
            lambda holder, place: holder.recall([one.place for one in asked[place]]), [*asked]
        )
        for place, answer in answers.items():
            for at, one in enumerate(asked[place]):
                found = answer if isinstance(answer, Failed) else answer[at]
                if isinstance(found, Miss | Failed):
                    one.lacks[place] = found
                else:
                    one.numbers[place] = found.number, found.note

    def _refill(self, readings: Sequence[Reading], targets: Targets) -> None:
        asked: dict[int, list[tuple[Reading, memoryview]]] = {}
        for one in readings:
            for place in one.chosen:
                if place in one.there:
                    continue
                start, end = one.span(place)
                target = None
                if place < self._code.data and one in targets:
                    target = window(targets[one], start, end)
                into = memoryview(bytearray(end - start)) if target is None else target
                asked.setdefault(place, []).append((one, into))

        def ask(holder: Holder, place: int) -> list[Header | Miss]:
            its = asked[place]
            numbers = [one.numbers[place][0] for one, _ in its]
            return holder.refill([one.place for one, _ in its], numbers, [into for _, into in its])

        for place, answer in self._holders.each(ask, [*asked]).items():
            for at, (one, into) in enumerate(asked[place]):
                found = answer if isinstance(answer, Failed) else answer[at]
                if isinstance(found, Header) and found.length == len(into):
                    one.there[place] = into
                else:
                    one.lacks[place] = Miss.CORRUPT if isinstance(found, Header) else found
