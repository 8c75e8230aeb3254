"""Orgs leave a queue by what they were served; within an org the order is kept."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as some

from inference_brain.admission.fair import CREDIT, WEIGHT_ONE, Counters, FairQueue, Item

ORGS = ("a", "b", "c")
WEIGHTS = {"a": 100, "b": 100, "c": 300}
COST_MAX = 5000.0
ITEMS = some.tuples(some.sampled_from(ORGS), some.integers(0, 3), some.floats(1, COST_MAX))


def served(queue: FairQueue[Item]) -> Item:
    item = queue.head()
    assert item is not None
    assert queue.discard(item)
    queue.counters.charge(item.org, item.weight, item.cost)
    return item


@given(some.lists(ITEMS, min_size=1, max_size=60), some.data())
def test_within_an_org_the_highest_rank_goes_first_and_then_who_came_first(
    told: list[tuple[str, int, float]], data: some.DataObject
) -> None:
    queue: FairQueue[Item] = FairQueue(Counters())
    items = [Item(org, WEIGHTS[org], rank, cost) for org, rank, cost in told]
    for item in items:
        queue.put(item)
    gone = data.draw(some.sets(some.sampled_from(items)))
    for item in gone:
        assert queue.discard(item)
        assert not queue.discard(item)
    left = []
    while queue:
        left.append(served(queue))
    assert set(left) == set(items) - gone
    for org in ORGS:
        of_org = [(-one.rank, one.sequence) for one in left if one.org == org]
        assert of_org == sorted(of_org)
    assert queue.head() is None
    assert queue.lowest is None


@given(some.lists(ITEMS, min_size=20, max_size=200))
def test_orgs_that_wait_are_never_further_apart_than_one_request(
    told: list[tuple[str, int, float]],
) -> None:
    """Whoever waits is behind whoever is served by the credit and one request, at most."""
    queue: FairQueue[Item] = FairQueue(Counters())
    for org, rank, cost in told:
        queue.put(Item(org, WEIGHTS[org], rank, cost))
    apart = CREDIT + COST_MAX
    while queue:
        served(queue)
        waiting = [queue.counters[org] for org in queue.orgs]
        if waiting:
            assert max(waiting) - min(waiting) <= apart


@given(some.lists(some.tuples(some.booleans(), ITEMS), max_size=200))
def test_nobody_starves_while_others_keep_coming(
    steps: list[tuple[bool, tuple[str, int, float]]],
) -> None:
    """A request of another org is served after a bounded amount, however many come before it."""
    queue: FairQueue[Item] = FairQueue(Counters())
    queue.put(Item("a", 100, 0, 10.0))
    for _ in range(5):
        queue.put(Item("b", 100, 0, 10.0))
    late = Item("late", 100, 0, 10.0)
    queue.put(late)
    amount = 0.0
    for _, (_, rank, cost) in steps:
        queue.put(Item("b", 100, rank, cost))
        item = served(queue)
        amount += item.cost
        if item is late:
            break
    else:
        assert amount <= 2 * (CREDIT + COST_MAX) + 60


def test_shares_follow_weights() -> None:
    queue: FairQueue[Item] = FairQueue(Counters())
    for _ in range(400):
        for org in ORGS:
            queue.put(Item(org, WEIGHTS[org], 0, 1000.0))
    counts = Counter[str]()
    for _ in range(500):
        counts[served(queue).org] += 1
    assert counts == {"a": 100, "b": 100, "c": 300}


def test_an_org_that_returns_does_not_catch_up_on_what_it_did_not_ask_for() -> None:
    queue: FairQueue[Item] = FairQueue(Counters())
    for _ in range(300):
        queue.put(Item("b", 100, 0, 1000.0))
    for _ in range(200):
        served(queue)
    for _ in range(100):
        queue.put(Item("a", 100, 0, 1000.0))
    first = [served(queue).org for _ in range(60)]
    assert first[:10] == ["a"] * 10
    assert first.count("a") <= 30 + CREDIT / 1000


def test_what_was_charged_too_much_is_given_back() -> None:
    counters = Counters()
    queue: FairQueue[Item] = FairQueue(counters)
    for org in ("a", "b"):
        for cost in (1000.0, 400.0, 400.0):
            queue.put(Item(org, 100, 0, cost))
    first, second = served(queue), served(queue)
    assert {first.org, second.org} == {"a", "b"}
    counters.charge(first.org, 100, -900.0)
    assert [served(queue).org for _ in range(2)] == [first.org, first.org]


def test_brains_that_raise_a_counter_at_once_raise_it_once() -> None:
    """As Redis adds up what both tell."""
    both = [Counters(), Counters()]
    total = 0.0
    for one in both:
        one.elsewhere = 100_000.0
        one.lift("a", 100, None)
        one.charge("a", 100, 10.0)
    for one in both:
        more, least = one.take_unsent()["a"]
        total = max(total, least) + more
    assert total == 100_000 - CREDIT * WEIGHT_ONE / 100 + 20


@given(some.lists(ITEMS, min_size=2, max_size=50), ITEMS)
def test_the_cost_before_a_request_is_what_is_served_before_it(
    told: list[tuple[str, int, float]], late: tuple[str, int, float]
) -> None:
    """If nobody else comes: to within a request of each org."""
    queue: FairQueue[Item] = FairQueue(Counters())
    for org, rank, cost in told:
        queue.put(Item(org, WEIGHTS[org], rank, cost))
    org, rank, cost = late
    expected = queue.cost_before(org, WEIGHTS[org], rank)
    item = Item(org, WEIGHTS[org], rank, cost)
    queue.put(item)
    before = 0.0
    while (one := served(queue)) is not item:
        before += one.cost
    assert abs(before - expected) <= 5 * COST_MAX
