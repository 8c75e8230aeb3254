"""A world around one shard's core: it carries out the effects on a dictionary and checks the promises.

What a slot holds is the number of the evict that wrote it. Beside it runs a model that knows nothing of
queues: it replays what was applied, in order, and says what a reader may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvss_agent.shard.core import (
    Clear,
    Effect,
    Fill,
    Publish,
    Receive,
    Reject,
    Request,
    Serve,
    Shard,
    Truncate,
    Verb,
)
from kvss_agent.shard.seal import Miss
from tests.kvss_agent.integrity import check_integrity

DRIVER, READER = 1, 2
OPEN = -1  # what a slot holds while it is being written


@dataclass
class World:
    slots: int = 3
    now: float = 0.0
    lease_seconds: float = 5.0
    shard: Shard = field(init=False)
    memory: dict[int, int] = field(default_factory=dict)  # what lies in the slots
    written: dict[int, int] = field(default_factory=dict)  # evict -> its slot, as it was asked
    answers: dict[int, str] = field(default_factory=dict)
    after: list[int] = field(default_factory=list)  # of each request
    brought: dict[int, int] = field(default_factory=dict)  # what fills brought: newer than evicts
    receiving: Receive | None = None
    reading: dict[int, tuple[Serve, dict[int, int], float]] = field(default_factory=dict)
    clearing: dict[int, Clear | Fill] = field(default_factory=dict)
    published: int = 0

    def __post_init__(self) -> None:
        self.shard = Shard(self.slots)

    @property
    def asked(self) -> int:
        return len(self.after)

    # Events

    def evict(self, slots: Sequence[int], first: int | None = None) -> None:
        first = self.shard.accepted + 1 if first is None else first
        for sequence, slot in enumerate(slots, first):
            if sequence > self.shard.accepted and slot < self.shard.slots:
                self.written[sequence] = slot
        self.carry_out(self.shard.evict(DRIVER, first, slots, self.now))

    def finish_receiving(self) -> None:
        assert self.receiving
        run, self.receiving = self.receiving, None
        self._seal(run, len(run.slots))
        self.carry_out(self.shard.received(DRIVER, self.now))

    def break_the_connection(self, received: int = 0) -> None:
        """The driver's connection ends when `received` columns of the current run are in."""
        run, self.receiving = self.receiving, None
        received = min(received, len(run.slots) - 1) if run else 0
        if run:
            self._seal(run, received)
            for torn in run.slots[received:]:
                if torn is not None and self.memory.get(torn) == OPEN:
                    del self.memory[torn]  # nothing to read there
        self.carry_out(self.shard.abandon(DRIVER, received, self.now))
        self.written = {n: slot for n, slot in self.written.items() if n <= self.shard.applied}
        assert self.shard.accepted == self.shard.applied

    def refill(self, slots: Sequence[int], after: int, wait: float = 10.0) -> int:
        return self._ask(Verb.REFILL, slots, after, wait)

    def delete(self, slots: Sequence[int], after: int, wait: float = 10.0) -> int:
        return self._ask(Verb.DELETE, slots, after, wait)

    def fill(self, slots: Sequence[int], after: int, wait: float = 10.0) -> int:
        return self._ask(Verb.FILL, slots, after, wait)

    def _ask(self, verb: Verb, slots: Sequence[int], after: int, wait: float) -> int:
        self.after.append(after)
        request = Request(verb, READER, self.asked, after, slots, wait, self.lease_seconds)
        self.carry_out(self.shard.ask(request, self.now))
        return self.asked

    def finish_reading(self, lease: int) -> None:
        serve, seen, until = self.reading.pop(lease)
        if self.now < until:
            for slot, sequence in seen.items():
                assert self.memory.get(slot, 0) == sequence, "a slot changed while it was under lease"
        self.answers[serve.request] = "served"
        self.carry_out(self.shard.done(lease, self.now))

    def finish_clearing(self, lease: int) -> None:
        clear = self.clearing.pop(lease)
        for slot in clear.slots:
            if isinstance(slot, Miss):
                continue
            assert self.memory.get(slot, 0) != OPEN, "a delete met a slot that was being written"
            if self.memory.get(slot, 0) <= clear.up_to:
                self.memory.pop(slot, None)
                if isinstance(clear, Fill):
                    self.memory[slot] = clear.up_to
                    self.brought[slot] = clear.up_to
        self.answers[clear.request] = "cleared"
        self.carry_out(self.shard.done(lease, self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.shard.tick(self.now))

    def resize(self, slots: int) -> None:
        self.carry_out(self.shard.resize(slots, self.now))

    # Effects

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Receive():
                    assert self.receiving is None, "two runs are received at once"
                    assert effect.first <= self.shard.applied + 1, "a run overtakes another"
                    self.receiving = effect
                    for sequence, slot in enumerate(effect.slots, effect.first):
                        if slot is None:
                            if sequence > self.shard.applied:  # not a repetition: above the line
                                self.written.pop(sequence, None)
                        else:
                            assert slot < self.shard.slots, "a write above the line"
                            self._nobody_reads(slot)
                            self.memory[slot] = OPEN
                case Serve():
                    self._check_served(effect)
                case Clear() | Fill():
                    self._comes_after(effect.request)
                    for place in effect.slots:
                        if isinstance(place, int):
                            self._nobody_reads(place)
                            assert self.memory.get(place, 0) != OPEN, "two write into one slot"
                    self.clearing[effect.lease] = effect
                case Reject():
                    self._answer(effect.request, effect.reason)
                case Publish():
                    assert effect.count > self.published, "the count goes up only"
                    self.published = effect.count
                case Truncate():
                    for slot in [slot for slot in self.memory if slot >= effect.slots]:
                        self._nobody_reads(slot)
                        del self.memory[slot]
        assert self.published == self.shard.applied
        check_integrity(self.shard)

    def _check_served(self, serve: Serve) -> None:
        """A reader sees the latest applied evict of a slot, or nothing."""
        self._answer(serve.request, "serving")
        self._comes_after(serve.request)
        seen: dict[int, int] = {}
        for slot in serve.slots:
            if isinstance(slot, Miss):
                continue
            held = self.memory.get(slot, 0)
            assert held != OPEN, "a reader meets a slot that is being written"
            latest = self._latest(slot)
            assert held in (0, latest, self.brought.get(slot)), "a reader gets older bytes"
            seen[slot] = held
        self.reading[serve.lease] = (serve, seen, self.now + self.lease_seconds)

    def _latest(self, slot: int) -> int:
        """The last applied evict that was meant for this slot."""
        applied = self.shard.applied
        return max((n for n, at in self.written.items() if at == slot and n <= applied), default=0)

    def _nobody_reads(self, slot: int) -> None:
        for _, seen, until in self.reading.values():
            assert slot not in seen or self.now >= until, "a slot under lease is taken away"
        for clear in self.clearing.values():
            assert slot not in clear.slots, "a slot that is being emptied is taken away"

    def _comes_after(self, request: int) -> None:
        assert self.after[request - 1] <= self.shard.applied, "a request acts before its time"

    def _answer(self, request: int, answer: str) -> None:
        assert request not in self.answers, "a request is answered twice"
        self.answers[request] = answer

    def _seal(self, run: Receive, count: int) -> None:
        for sequence, slot in enumerate(run.slots[:count], run.first):
            if slot is not None:
                self.memory[slot] = sequence
                self.brought.pop(slot, None)

    # The end

    def come_to_rest(self) -> None:
        """Everybody finishes what they are at; then every request has its answer and nothing is held."""
        for _ in range(100):
            if self.receiving:
                self.finish_receiving()
            for lease in list(self.reading):
                self.finish_reading(lease)
            for lease in list(self.clearing):
                self.finish_clearing(lease)
            if not (self.receiving or self.reading or self.clearing):
                if len(self.answers) == self.asked and not self.shard.leases:
                    break
                self.pass_time(20.0)
        assert len(self.answers) == self.asked, "a request got no answer"
        assert self.shard.accepted == self.shard.applied
        assert len(self.shard.leases) == 0
        for slot, held in self.memory.items():
            assert held in (self._latest(slot), self.brought.get(slot)), "memory is behind the count"
