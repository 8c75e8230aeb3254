"""Writing: files are divided, and each fragment is stored by its holder.

Written first, shown then: fragments lie in slots of the holders before it is asked whether the file is
still intact, and become files after that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from kvss_agent.client import Miss, TierAnswer
from kvss_agent.redundancy.holder import Evicted, Fragment, Holder
from kvss_agent.redundancy.layout import fragment_bytes, fragment_span
from kvss_agent.redundancy.parts.holders import Answers
from kvss_agent.redundancy.parts.memory import cut, note_of
from kvss_agent.redundancy.parts.state import AT_ONCE, State
from kvss_agent.tier2.address import Address, address_of
from kvss_agent.tier2.backend import Failed, Fault, Outgoing


class Writer:
    def __init__(self, state: State) -> None:
        self._state, self._code, self._holders = state, state.code, state.holders
        self._parity = threading.local()

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        """See `Backend`. What another driver has stored stays."""
        answers: list[bool | Failed] = []
        for start in range(0, len(files), AT_ONCE):
            some = files[start : start + AT_ONCE]
            found = self._there_already([address_of(file.name) for file in some])
            left = [file for file, answer in zip(some, found, strict=True) if answer is None]
            with self._state.slots.taken(len(left)) as slots:
                written = iter(self._write(left, slots) if left else [])
            answers += [next(written) if answer is None else answer for answer in found]
        return answers

    def _there_already(self, addresses: Sequence[Address]) -> list[bool | Failed | None]:
        """Of each file: True if another driver of the model has stored it, a failure if nobody can tell,
        and None if it is to be written. So drivers do not replace each other's fragments."""
        having, failures = self._holders.having(addresses)
        found: list[bool | Failed | None] = []
        for address, there in zip(addresses, having, strict=True):
            if len(there) >= self._code.data:
                if lacking := set(range(self._code.fragments)) - there:
                    self._state.incomplete.mark(address, lacking)
                found.append(True)
            elif there and len(there) + len(failures) >= self._code.data:
                found.append(next(iter(failures.values())))
            else:  # too few are left of it
                self._holders.delete([address], [*there])
                found.append(None)
        return found

    def _write(self, files: Sequence[Outgoing], slots: Sequence[int]) -> list[bool | Failed]:
        addresses = [address_of(file.name) for file in files]
        marks = self._state.incomplete.marks  # from here on others may remove what is stored
        notes, fragments = [], []
        for number, (file, address, slot) in enumerate(zip(files, addresses, slots, strict=True)):
            size = sum(map(len, file.parts))
            notes.append(note_of(file.parts, size))
            its = self._fragments_of(file.parts, size, number)
            fragments.append([Fragment(slot, address.key, address.tag, one) for one in its])
        evicted = self._holders.each(
            lambda holder, place: holder.evict([its[place] for its in fragments])
        )
        intact = [place for place, file in enumerate(files) if file.intact()]
        stored = self._holders.each(
            lambda holder, place: self._spill(holder, place, evicted, notes, intact)
        )
        answers: list[bool | Failed] = [False] * len(files)
        for at, its_place in enumerate(intact):
            its_answers = {
                place: answer if isinstance(answer, Failed) else answer[at]
                for place, answer in stored.items()
            }
            answers[its_place] = self._conclude(addresses[its_place], its_answers, marks)
        return answers

    def _spill(
        self,
        holder: Holder,
        place: int,
        evicted: Answers[list[Evicted]],
        notes: Sequence[int],
        intact: Sequence[int],
    ) -> list[TierAnswer | Miss]:
        its = evicted[place]
        if isinstance(its, Failed):
            raise its
        if not intact:
            return []
        return holder.spill([its[file] for file in intact], [notes[file] for file in intact])

    def _conclude(
        self, address: Address, answers: Mapping[int, TierAnswer | Miss | Failed], marks: int
    ) -> bool | Failed:
        """Whether the file is stored, by what each holder says. `marks`: of lacks, before it was."""
        stored = [place for place, answer in answers.items() if answer is TierAnswer.DONE]
        lacking = set(range(self._code.fragments)).difference(stored)
        if not lacking:
            self._state.incomplete.forget([address], marks)
            return True
        others = [place for place, answer in answers.items() if answer is TierAnswer.ALREADY]
        if len(stored) >= self._code.data or len(others) >= self._code.data:
            self._state.incomplete.mark(address, lacking)  # repair finds out whose fragments are enough
            return True
        self._holders.delete([address], stored)
        failed = next((one for one in answers.values() if isinstance(one, Failed)), None)
        if failed:
            return failed
        why = next(answer for answer in answers.values() if answer is not TierAnswer.DONE)
        fault = Fault.NO_SPACE if why is TierAnswer.FULL else Fault.OTHER
        sentence = f"only {len(stored)} of {self._code.fragments} agents could store a fragment"
        return Failed(fault, f"{sentence}: {str(why).lower()}")

    def _fragments_of(self, parts: Sequence[memoryview], size: int, number: int) -> list[memoryview]:
        """All fragments of a file. Parity is in memory of this thread, until it asks for as many files
        once more."""
        if size > self._state.file_bytes_max:
            raise ValueError(f"a file of {size} bytes is larger than the shard's columns")
        its = [cut(parts, *fragment_span(size, self._code.data, at)) for at in range(self._code.data)]
        parity = [memory[: len(its[0])] for memory in self._parity_memory(number)]
        self._code.encode(its, parity)
        return [*its, *parity]

    def _parity_memory(self, number: int) -> list[memoryview]:
        memories: list[list[memoryview]] = self._parity.__dict__.setdefault("memories", [])
        step = fragment_bytes(self._state.file_bytes_max, self._code.data)
        while len(memories) <= number:
            memories.append([memoryview(bytearray(step)) for _ in range(self._code.parity)])
        return memories[number]
