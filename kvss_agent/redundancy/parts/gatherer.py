"""Gathering fragments: enough of each file, and all of one write.

A read touches the fragments with data, as long as none is missing or late. Where a holder has not
answered within its `Patience`, parity is asked for beside it, within the budget of `Hedges`, and what
makes the file first counts. A holder that was late is asked last until a probe has been answered.

A call that nobody waits for any more goes on: its slot is not asked for anything else there before it
has ended (`Slots.keep_late`), and the memory of its refill is withdrawn before anybody else uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from kvss_agent.client import Header, Miss, Recalled
from kvss_agent.client.withdrawal import Withdrawal
from kvss_agent.redundancy.holder import Holder
from kvss_agent.redundancy.layout import fragment_bytes
from kvss_agent.redundancy.parts.holders import answer_of
from kvss_agent.redundancy.parts.memory import window
from kvss_agent.redundancy.parts.readings import Reading
from kvss_agent.redundancy.parts.state import State
from kvss_agent.tier2.backend import Failed

Targets = Mapping[Reading, Sequence[memoryview]]  # the memory that a file goes to
Answer = Sequence[Recalled | Header | Miss] | Failed


@dataclass(eq=False, slots=True)
class _Call:
    """What one holder is asked for some files."""

    place: int
    readings: Sequence[Reading]
    future: Future[Answer]
    due: float  # by the monotonic clock; after that it is late
    into: Sequence[memoryview] = ()  # of a refill
    withdrawal: Withdrawal = field(default_factory=Withdrawal)
    is_late: bool = False

    def leave(self) -> None:
        """Nobody waits for it. Nothing is written to the memory of its files from here on."""
        if not self.future.cancel() and self.into:
            self.withdrawal.withdraw()


def _begun(
    asked: Mapping[int, list[Reading]], calls: Sequence[_Call], *, one_by_one: bool
) -> list[tuple[int, list[Reading]]]:
    """What to ask for now, of all that has to be: everything, or one holder's part after the other's."""
    return [*islice(asked.items(), 0 if calls else 1)] if one_by_one else [*asked.items()]


class Gatherer:
    """Asks holders for what readings want."""

    def __init__(self, state: State) -> None:
        self._state, self._code, self._holders = state, state.code, state.holders

    def gather(
        self,
        readings: Sequence[Reading],
        targets: Targets | None = None,
        *,
        may_hedge: bool = False,
        one_by_one: bool = False,
    ) -> None:
        """Read `data` fragments of each, or fewer where there are not as many. `targets`: where to read
        those with data to, as far as a fragment fits into one piece of it. `may_hedge`: somebody waits
        for it, so parity is asked for in place of what is late. `one_by_one`: nobody does; one holder
        is asked after the other, so that others wait behind one of them at most, and in this thread,
        since each hop to another one and back takes as long as a small fragment."""
        calls: list[_Call] = []
        open_ = [*readings]
        try:
            while True:
                for one in open_:
                    if one.is_recalled:
                        one.agree(self._state.file_bytes_max)
                self._begin_recalls(open_, calls, one_by_one=one_by_one)
                self._begin_refills(open_, targets or {}, calls, one_by_one=one_by_one)
                open_ = [one for one in open_ if not one.conclude()]
                if not open_:
                    return
                self._wait(calls, may_hedge=may_hedge)
                for call in [call for call in calls if call.future.done()]:
                    calls.remove(call)
                    self._take(call)
        finally:
            for call in calls:
                call.leave()
                if not call.into:
                    call.future.add_done_callback(partial(self._note_late, call.place, call.readings))
                for one in call.readings:
                    self._state.slots.keep_late(one.slot, call.place, call.future)

    def without_each(
        self, reading: Reading, parts: Sequence[memoryview] | None = None
    ) -> Iterator[Reading]:
        """The file read anew, each time without another one of the fragments that made it: the one that
        is bad behind a good seal, if its holder lies or the memory there does."""
        for place in reading.chosen:
            again = Reading(reading.address, reading.slot, self._code, self._holders.in_order)
            again.lacks = {**reading.lacks, place: Miss.CORRUPT}
            self.gather([again], None if parts is None else {again: parts})
            if again.note is not None:
                yield again

    def probe(self, readings: Sequence[Reading]) -> None:
        """Find out whether holders that were late answer now, by files that have been read without them.
        Nobody waits for it."""
        for place, promptness in enumerate(self._holders.promptness):
            free = (
                one
                for one in readings
                if place not in one.asked and not self._state.slots.late_calls(one.slot, place)
            )
            if promptness.is_late and (one := next(free, None)) and promptness.begin_probe():
                self._begin_probe(place, one)

    # Inside

    def _begin_probe(self, place: int, reading: Reading) -> None:
        promptness, recall = self._holders.promptness[place], self._recall(place, [reading])

        def ask(holder: Holder) -> Answer:
            try:
                return recall(holder)
            finally:
                promptness.end_probe()

        try:
            call = self._holders.begin(place, ask)
        except Failed:  # it is closed
            promptness.end_probe()
        else:
            call.add_done_callback(partial(self._note_late, place, [reading]))
            self._state.slots.keep_late(reading.slot, place, call)

    def _note_late(self, place: int, readings: Sequence[Reading], call: Future[Answer]) -> None:
        """A recall that nobody waited for has ended. What the holder lacks is known from then on, as if
        somebody had: it may have lacked it before, or just removed what is damaged."""
        if call.cancelled() or isinstance(answer := answer_of(call), Failed):
            return
        for one, found in zip(readings, answer, strict=True):
            if isinstance(found, Miss) and one.note is not None:
                self._state.incomplete.mark(one.address, {place})

    def _recall(self, place: int, readings: Sequence[Reading]) -> Callable[[Holder], Answer]:
        promptness, size = self._holders.promptness[place], self._fragment_bytes * len(readings)

        def ask(holder: Holder) -> Answer:
            began = time.monotonic()
            answer = holder.recall([one.place for one in readings])
            if any(isinstance(one, Recalled) for one in answer):
                promptness.note_recalled(size, time.monotonic() - began)
            return answer

        return ask

    def _refill(
        self,
        place: int,
        readings: Sequence[Reading],
        into: Sequence[memoryview],
        withdrawal: Withdrawal,
    ) -> Callable[[Holder], Answer]:
        promptness, size = self._holders.promptness[place], sum(map(len, into))
        numbers = [one.numbers[place][0] for one in readings]

        def ask(holder: Holder) -> Answer:
            began = time.monotonic()
            answer = holder.refill([one.place for one in readings], numbers, into, withdrawal)
            if any(isinstance(one, Header) for one in answer):
                promptness.note_refilled(size, time.monotonic() - began)
            return answer

        return ask

    def _begin_recalls(
        self, readings: Sequence[Reading], calls: list[_Call], *, one_by_one: bool
    ) -> None:
        asked: dict[int, list[Reading]] = {}
        for one in readings:
            for place in one.wanted:
                asked.setdefault(place, []).append(one)
        for place, its in _begun(asked, calls, one_by_one=one_by_one):
            for one in its:
                one.asked.add(place)
            patience = self._holders.promptness[place].recalls
            due = time.monotonic() + patience.seconds(self._fragment_bytes * len(its))
            future = self._begin(place, its, self._recall(place, its), here=one_by_one)
            calls.append(_Call(place, its, future, due))

    def _begin_refills(
        self,
        readings: Sequence[Reading],
        targets: Targets,
        calls: list[_Call],
        *,
        one_by_one: bool,
    ) -> None:
        asked: dict[int, list[Reading]] = {}
        for one in readings:
            if one.note is None or not one.is_recalled:
                continue
            for place in one.chosen:
                if place not in one.there and place not in one.refilling:
                    asked.setdefault(place, []).append(one)
        for place, its in _begun(asked, calls, one_by_one=one_by_one):
            for one in its:
                one.refilling.add(place)
            withdrawal, into = Withdrawal(), [self._place_of(one, place, targets) for one in its]
            patience = self._holders.promptness[place].refills
            due = time.monotonic() + patience.seconds(sum(map(len, into)))
            refill = self._refill(place, its, into, withdrawal)
            future = self._begin(place, its, refill, here=one_by_one)
            calls.append(_Call(place, its, future, due, into, withdrawal))

    def _begin(
        self,
        place: int,
        readings: Sequence[Reading],
        call: Callable[[Holder], Answer],
        *,
        here: bool,
    ) -> Future[Answer]:
        """Once what is late in their slots there has ended. `here`: it is done when this returns."""
        slots = self._state.slots
        before = [late for one in readings for late in slots.late_calls(one.slot, place)]

        def ask(holder: Holder) -> Answer:
            wait(before)
            return call(holder)

        if not here:
            return self._holders.begin(place, ask)
        done = Future[Answer]()
        done.set_result(self._holders.ask(place, ask))
        return done

    def _wait(self, calls: Sequence[_Call], *, may_hedge: bool) -> None:
        """Until something has come, or parity is to be asked for in place of something late."""
        while True:
            waiting = [call for call in calls if may_hedge and not call.is_late]
            until = min((call.due for call in waiting), default=None)
            seconds = None if until is None else max(0.0, until - time.monotonic())
            if wait([call.future for call in calls], seconds, FIRST_COMPLETED).done:
                return
            late = [call for call in waiting if call.due <= time.monotonic()]
            if sum(map(self._hedge, late)):
                return

    def _hedge(self, call: _Call) -> int:
        """This call is late. For how many files something else is asked for in its place."""
        call.is_late = True
        self._holders.promptness[call.place].note_late()
        hedged = 0
        for one in call.readings:
            if one.wait_no_longer(call.place):
                if self._state.hedges.take():
                    hedged += 1
                else:
                    one.late.discard(call.place)
        return hedged

    def _take(self, call: _Call) -> None:
        answer, place = answer_of(call.future), call.place
        for at, one in enumerate(call.readings):
            found = answer if isinstance(answer, Failed) else answer[at]
            one.late.discard(place)
            if call.into:
                one.refilling.discard(place)
                if isinstance(found, Header) and found.length == len(call.into[at]):
                    one.there[place] = call.into[at]
                    continue
            elif isinstance(found, Recalled):
                one.numbers[place] = found.number, found.note
                continue
            one.lacks[place] = found if isinstance(found, Miss | Failed) else Miss.CORRUPT

    def _place_of(self, reading: Reading, place: int, targets: Targets) -> memoryview:
        """Where to read this fragment to."""
        start, end = reading.span(place)
        if place < self._code.data and reading in targets:
            target = window(targets[reading], start, end)
            if target is not None:
                return target
        return memoryview(bytearray(end - start))

    @property
    def _fragment_bytes(self) -> int:
        return fragment_bytes(self._state.file_bytes_max, self._code.data)
