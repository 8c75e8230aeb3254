"""Reading: files are made of their fragments, in the memory that they go to."""

from __future__ import annotations

from collections.abc import Sequence

from kvss_agent.redundancy.parts.gatherer import Gatherer
from kvss_agent.redundancy.parts.memory import fill, window
from kvss_agent.redundancy.parts.readings import Reading
from kvss_agent.redundancy.parts.state import AT_ONCE, State
from kvss_agent.tier2.address import address_of
from kvss_agent.tier2.backend import Failed, Incoming


class Reader:
    def __init__(self, state: State, gatherer: Gatherer) -> None:
        self._state, self._code, self._gatherer = state, state.code, gatherer

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        """See `Backend`. What a file lacks is known from then on."""
        answers: list[int | Failed | None] = []
        for start in range(0, len(files), AT_ONCE):
            some = files[start : start + AT_ONCE]
            self._state.hedges.earn(len(some))
            order = self._state.holders.in_order
            with self._state.slots.taken(len(some), also_late=True) as slots:
                readings = [
                    Reading(address_of(name), slot, self._code, order)
                    for (name, _), slot in zip(some, slots, strict=True)
                ]
                targets = {one: parts for one, (_, parts) in zip(readings, some, strict=True)}
                self._gatherer.gather(readings, targets, may_hedge=True)
                answers += [self._read_verified(one, targets[one]) for one in readings]
                self._gatherer.probe(readings)
            found = [one.address for one in readings if one.note is not None]
            self._state.holders.touch(found, self._state.incomplete.mark)
        return answers

    def _read_verified(self, reading: Reading, parts: Sequence[memoryview]) -> int | Failed | None:
        """A fragment that its seal holds for good may be bad none the less. Then the file is made
        without each of them in turn."""
        size = self._make(reading, parts)
        if not isinstance(size, int) or size < reading.file_bytes:
            return size
        good = reading if reading.is_made_by(parts) else self._without_the_bad(reading, parts)
        if good is None:
            return size  # the column's own seal says what is wrong with it
        if lacking := good.its_own_lacks:
            self._state.incomplete.mark(good.address, lacking)
        return min(good.file_bytes, sum(map(len, parts)))

    def _without_the_bad(self, reading: Reading, parts: Sequence[memoryview]) -> Reading | None:
        for again in self._gatherer.without_each(reading, parts):
            self._make(again, parts)
            if again.is_made_by(parts):
                return again
        return None

    def _make(self, reading: Reading, parts: Sequence[memoryview]) -> int | Failed | None:
        """Bring the parts into order, with the fragments that are there."""
        if failed := reading.why_not:
            return failed
        if reading.note is None:
            return None
        missing = {}
        for place in range(self._code.data):
            if place not in reading.there:
                start, end = reading.span(place)
                missing[place] = window(parts, start, end) or memoryview(bytearray(end - start))
        if missing:
            self._code.rebuild(reading.there, missing)
            self._state.parity_reads.add()
        for place in range(self._code.data):
            start, its = reading.span(place)[0], missing.get(place) or reading.there[place]
            if window(parts, start, start + len(its)) is None:  # else it was read to where it belongs
                fill(parts, start, its)
        return min(reading.file_bytes, sum(map(len, parts)))
