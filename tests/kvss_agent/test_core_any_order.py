"""The core under any order of events: all orders of small worlds, and what Hypothesis thinks of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.kvss_agent.world import World

SLOTS = st.lists(st.integers(0, 3), min_size=1, max_size=3)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @precondition(lambda self: self.world.shard.accepted - self.world.shard.applied < 4)
    @rule(slots=SLOTS)
    def evict(self, slots: list[int]) -> None:
        if len(self.world.shard._runs) < 4:
            self.world.evict(slots)

    @precondition(lambda self: len(self.world.shard._runs) < 4)
    @rule(slots=SLOTS, back=st.integers(0, 3))
    def evict_again(self, slots: list[int], back: int) -> None:
        self.world.evict(slots, first=max(1, self.world.shard.accepted + 1 - back))

    @precondition(lambda self: self.world.receiving)
    @rule()
    def finish_receiving(self) -> None:
        self.world.finish_receiving()

    @rule(received=st.integers(0, 3))
    def break_the_connection(self, received: int) -> None:
        self.world.break_the_connection(received)

    @rule(slots=SLOTS, ahead=st.integers(-2, 3), wait=st.floats(0, 12))
    def refill(self, slots: list[int], ahead: int, wait: float) -> None:
        self.world.refill(slots, max(0, self.world.shard.applied + ahead), wait)

    @rule(slots=SLOTS, ahead=st.integers(-2, 3), wait=st.floats(0, 12))
    def delete(self, slots: list[int], ahead: int, wait: float) -> None:
        self.world.delete(slots, max(0, self.world.shard.applied + ahead), wait)

    @rule(slots=SLOTS, ahead=st.integers(-2, 3), wait=st.floats(0, 12))
    def fill(self, slots: list[int], ahead: int, wait: float) -> None:
        self.world.fill(slots, max(0, self.world.shard.applied + ahead), wait)

    @precondition(lambda self: self.world.reading)
    @rule(data=st.data())
    def finish_reading(self, data: st.DataObject) -> None:
        self.world.finish_reading(data.draw(st.sampled_from(sorted(self.world.reading))))

    @precondition(lambda self: self.world.clearing)
    @rule(data=st.data())
    def finish_clearing(self, data: st.DataObject) -> None:
        self.world.finish_clearing(data.draw(st.sampled_from(sorted(self.world.clearing))))

    @rule(seconds=st.floats(0.1, 8))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(slots=st.integers(0, 5))
    def resize(self, slots: int) -> None:
        self.world.resize(slots)

    def teardown(self) -> None:
        self.world.come_to_rest()


TestAnyOrder = pytest.mark.slow(AnyOrder.TestCase)
TestAnyOrder.settings = settings(max_examples=120, stateful_step_count=40)


Step = Callable[[World], object]

EVICTS: list[Step] = [lambda w: w.evict([0]), lambda w: w.evict([1]), lambda w: w.evict([0])]
OTHERS: dict[str, list[Step]] = {
    "refills": [lambda w: w.refill([0], 1), lambda w: w.refill([1, 0], 2), lambda w: w.refill([0], 3)],
    "deletes": [lambda w: w.delete([0], 1), lambda w: w.refill([0], 3), lambda w: w.delete([0, 1], 3)],
    "fills": [lambda w: w.fill([0], 1), lambda w: w.refill([0], 1), lambda w: w.fill([1, 0], 3)],
    "a smaller shard": [lambda w: w.resize(1), lambda w: w.refill([0, 1], 2), lambda w: w.resize(3)],
    "a lost driver": [
        lambda w: w.refill([0], 1),
        lambda w: w.break_the_connection(1),
        lambda w: w.delete([0, 1], 1),
    ],
}


def visit(others: str, finishes: Sequence[Step]) -> int:
    """Three evicts and three others, merged in every way. Between any two steps whatever is under way
    finishes or does not, in every combination; and each world comes to rest at its end."""
    visited = 0
    for order in merges(EVICTS, OTHERS[others]):
        for pattern in itertools.product(finishes, repeat=len(order)):
            world = World(slots=2)
            for step, finish in zip(order, pattern, strict=True):
                step(world)
                finish(world)
            world.come_to_rest()
            visited += 1
    return visited


@pytest.mark.parametrize("others", OTHERS)
def test_every_interleaving_of_two_queues_keeps_the_promises(others: str) -> None:
    assert visit(others, [nothing, everything]) == 20 * 2**6


@pytest.mark.slow
@pytest.mark.parametrize("others", OTHERS)
def test_every_interleaving_with_every_order_of_finishing(others: str) -> None:
    assert visit(others, [nothing, finish_writing, finish_other]) == 20 * 3**6


def nothing(world: World) -> None:
    pass


def finish_writing(world: World) -> None:
    if world.receiving:
        world.finish_receiving()


def finish_other(world: World) -> None:
    for lease in sorted(world.reading)[:1]:
        world.finish_reading(lease)
    for lease in sorted(world.clearing)[:1]:
        world.finish_clearing(lease)


def everything(world: World) -> None:
    finish_writing(world)
    finish_other(world)


def merges(left: list[Step], right: list[Step]) -> Iterator[list[Step]]:
    """All ways to merge two sequences that each keep their order."""
    for places in itertools.combinations(range(len(left) + len(right)), len(left)):
        lefts, rights = iter(left), iter(right)
        yield [next(lefts) if i in places else next(rights) for i in range(len(left) + len(right))]
