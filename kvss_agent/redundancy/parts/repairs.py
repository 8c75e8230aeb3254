"""Repair: fragments that files lack are made of the others, and stored again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvss_agent.client import Miss, TierAnswer
from kvss_agent.redundancy.holder import Fragment, Holder
from kvss_agent.redundancy.parts.gatherer import Gatherer
from kvss_agent.redundancy.parts.holders import columns_of
from kvss_agent.redundancy.parts.readings import Reading
from kvss_agent.redundancy.parts.state import AT_ONCE, State
from kvss_agent.tier2.address import Address, address_of
from kvss_agent.tier2.backend import Failed


@dataclass(eq=False, slots=True)
class _Made:
    """A file that is whole again in memory, and the fragments of it that are missing, by place."""

    reading: Reading
    missing: dict[int, memoryview]
    stored: set[int] = field(default_factory=set)  # places

    @property
    def missing_bytes(self) -> int:
        return sum(map(len, self.missing.values()))


class Repairer:
    def __init__(self, state: State, gatherer: Gatherer) -> None:
        self._state, self._code, self._gatherer = state, state.code, gatherer
        self._spare: list[memoryview] = []  # one for each file of a piece, since new memory takes long

    def repair(self, names: Sequence[str], *, one_by_one: bool = False) -> int:
        """Make the fragments that these files lack, where holders can be reached, at most AT_ONCE files.
        How many bytes were moved. Nobody else writes or removes these files meanwhile. `one_by_one`: one
        holder is read from after the other, so that others wait behind one of them at most."""
        some = [address_of(name) for name in names[:AT_ONCE]]
        try:
            return self._repair_some(some, one_by_one=one_by_one)
        except Exception:
            for address in some:  # whatever it is, it must not keep the others from being repaired
                self._state.incomplete.put_off(address)
            raise

    def _repair_some(self, some: Sequence[Address], *, one_by_one: bool) -> int:
        marks = self._state.incomplete.marks  # from here on others may find that more is missing
        with self._state.slots.taken(len(some)) as slots:
            files = {}
            for address, slot in zip(some, slots, strict=True):
                one = Reading(address, slot, self._code, self._state.holders.in_order)
                # What is there may be of a write that others have replaced; and what it lacks is what a
                # recall does not find, so nobody is asked for that before.
                one.looks_at_all = True
                files[one] = [self._memory()]
            self._gatherer.gather([*files], files, one_by_one=one_by_one)
            made = [found for one, [whole] in files.items() if (found := self._made(one, whole, marks))]
            self._store(made)
        for its in made:
            self._conclude(its, marks)
        if self._state.incomplete:
            self._spare += [whole for [whole] in files.values()]
        else:
            self._spare.clear()
        return sum(one.file_bytes for one in files) + sum(its.missing_bytes for its in made)

    def _memory(self) -> memoryview:
        """For a whole file. What is in it may be of another one."""
        try:
            return self._spare.pop()
        except IndexError:
            return memoryview(bytearray(self._state.file_bytes_max))

    def _made(self, reading: Reading, whole: memoryview, marks: int) -> _Made | None:
        """What the file lacks, unless it can't be made. `whole`: the memory that the fragments with data
        have been read to. `marks`: of lacks, when it was looked at."""
        incomplete = self._state.incomplete
        if reading.note is None:
            if reading.why_not is None:
                incomplete.forget([reading.address], marks)  # too little of it is left: nothing to mend
            else:
                incomplete.put_off(reading.address)
            return None
        if not self._is_whole(reading, whole):
            others = self._gatherer.without_each(reading, [whole])
            good = next((again for again in others if self._is_whole(again, whole)), None)
            if good is None:
                self._give_up(reading, marks)
                return None
            reading = good
        return _Made(reading, self._rebuilt(reading, whole, reading.its_own_lacks))

    def _conclude(self, made: _Made, marks: int) -> None:
        """Its fragments have been stored, as far as holders took them."""
        incomplete, reading = self._state.incomplete, made.reading
        if made.stored:
            self._state.repaired.add()
        left = (made.missing.keys() - made.stored) | reading.untold
        if left:
            incomplete.mark(reading.address, left)
            incomplete.put_off(reading.address)
        else:
            incomplete.forget([reading.address], marks)

    def _give_up(self, reading: Reading, marks: int) -> None:
        """Its fragments make nothing that was ever written. If all of them were asked for, it goes."""
        if reading.is_read_in_part:
            self._state.incomplete.put_off(reading.address)
            return
        answers = self._state.holders.delete([reading.address])
        if any(isinstance(one, Failed) for one in answers.values()):
            self._state.incomplete.put_off(reading.address)
        else:
            self._state.incomplete.forget([reading.address], marks)

    def _is_whole(self, reading: Reading, whole: memoryview) -> bool:
        """Whether its fragments make what was written, which is in this memory then."""
        missing = {}
        for place in set(range(self._code.data)) - reading.there.keys():
            start, end = reading.span(place)
            missing[place] = whole[start:end]
        if missing:
            self._code.rebuild(reading.there, missing)
        return reading.is_made_by([whole])

    def _rebuilt(self, reading: Reading, whole: memoryview, places: set[int]) -> dict[int, memoryview]:
        """`whole`: of the file, whose fragments with data it has."""
        made, parity = {}, {}
        for place in places:
            start, end = reading.span(place)
            if place < self._code.data:
                made[place] = whole[start:end]
            else:
                parity[place] = memoryview(bytearray(end - start))
        if parity:
            self._code.rebuild(reading.there, parity)
        return {**made, **parity}

    def _store(self, files: Sequence[_Made]) -> None:
        """Have each holder store what it lacks of all these files."""
        for place in sorted({place for one in files for place in one.missing}):
            holder = self._state.holders[place]
            try:
                its = [one for one in files if place in one.missing and self._is_rid(holder, place, one)]
                if not its:
                    continue
                fragments = [Fragment(*one.reading.place, one.missing[place]) for one in its]
                evicted = holder.evict(fragments)
                answers = holder.spill(evicted, [one.reading.note or 0 for one in its])
                for one, answer in zip(its, answers, strict=True):
                    if answer is TierAnswer.DONE:
                        one.stored.add(place)
            except Failed as failed:
                self._state.holders.count(failed)

    def _is_rid(self, holder: Holder, place: int, made: _Made) -> bool:
        """Whether the holder has nothing in place of this fragment: a bad one, or of another write, is
        removed first."""
        if made.reading.lacks.get(place) is Miss.ABSENT:
            return True
        try:
            holder.delete(columns_of([made.reading.address]))
        except Failed as failed:
            self._state.holders.count(failed)
            return False
        return True
