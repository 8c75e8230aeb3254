"""The queues of a shard: order, leases, deletes that come late, lines that move, bounds."""

from __future__ import annotations

import pytest

from kvss_agent.data_plane.breach import Breach
from kvss_agent.shard import core
from kvss_agent.shard.core import (
    Clear,
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
from kvss_agent.shard.leases import FOREVER
from kvss_agent.shard.seal import Miss
from tests.kvss_agent.integrity import check_integrity
from tests.kvss_agent.world import DRIVER, READER, World


def refill(shard: Shard, after: int, *slots: int, now: float = 0.0) -> list[core.Effect]:
    return shard.ask(Request(Verb.REFILL, READER, 7, after, slots, 10, 5), now)


def delete(shard: Shard, after: int, *slots: int, now: float = 0.0) -> list[core.Effect]:
    return shard.ask(Request(Verb.DELETE, READER, 8, after, slots, 10), now)


def evicted(shard: Shard, *slots: int, now: float = 0.0) -> None:
    shard.evict(DRIVER, shard.accepted + 1, slots, now)
    shard.received(DRIVER, now)


def test_an_evict_is_applied_when_it_is_received_and_the_count_says_so() -> None:
    shard = Shard(4)
    assert shard.evict(DRIVER, 1, [0, 2], 0) == [Receive(DRIVER, 1, (0, 2))]
    assert shard.applied == 0
    assert shard.received(DRIVER, 0) == [Publish(2)]


def test_a_refill_waits_for_what_it_comes_after_and_for_nothing_else() -> None:
    shard = Shard(4)
    evicted(shard, 0)
    shard.evict(DRIVER, 2, [1], 0)  # and its payload does not come
    assert refill(shard, 2, 1) == []
    assert [type(effect) for effect in refill(shard, 1, 0)] == [Serve]
    assert [type(effect) for effect in shard.received(DRIVER, 0)] == [Publish, Serve]


def test_what_waits_acts_in_the_order_of_what_it_comes_after_then_of_arrival() -> None:
    shard = Shard(4)
    shard.evict(DRIVER, 1, [0, 1], 0)
    shard.ask(Request(Verb.REFILL, READER, 1, 2, [1], 10, 5), 0)
    shard.ask(Request(Verb.REFILL, READER, 2, 1, [0], 10, 5), 0)
    shard.ask(Request(Verb.REFILL, READER, 3, 1, [0], 10, 5), 0)
    served = [effect.request for effect in shard.received(DRIVER, 0) if isinstance(effect, Serve)]
    assert served == [2, 3, 1]


def test_a_refill_that_waits_too_long_is_turned_away_as_late() -> None:
    shard = Shard(4)
    refill(shard, 1, 0)
    assert shard.next_deadline() == 10
    assert shard.tick(9.9) == []
    assert shard.tick(10) == [Reject(READER, 7, Miss.LATE)]
    assert shard.next_deadline() == FOREVER


def test_nobody_has_to_come_back_for_what_has_been_answered() -> None:
    """Whoever ticks until `next_deadline` would never sleep again."""
    shard = Shard(4)
    (serve,) = refill(shard, 0, 0)
    assert isinstance(serve, Serve)
    shard.done(serve.lease, 1)
    shard.tick(10)
    assert shard.next_deadline() == FOREVER


def test_an_evict_waits_for_a_slot_that_is_being_read_until_the_reader_is_done() -> None:
    shard = Shard(4)
    evicted(shard, 0)
    (serve,) = refill(shard, 1, 0)
    assert isinstance(serve, Serve)
    assert shard.evict(DRIVER, 2, [0], 1) == []
    assert shard.done(serve.lease, 2) == [Receive(DRIVER, 2, (0,))]


def test_a_reader_that_never_finishes_holds_a_slot_until_its_deadline() -> None:
    shard = Shard(4)
    evicted(shard, 0)
    refill(shard, 1, 0)
    shard.evict(DRIVER, 2, [0], 1)
    assert shard.next_deadline() == 5
    assert shard.tick(5) == [Receive(DRIVER, 2, (0,))]
    assert shard.leases.expired == 1


def test_readers_cannot_starve_a_writer() -> None:
    shard = Shard(4)
    evicted(shard, 0)
    (first,) = refill(shard, 1, 0)
    assert isinstance(first, Serve)
    shard.evict(DRIVER, 2, [0], 1)
    (second,) = refill(shard, 1, 0, now=1)
    assert isinstance(second, Serve)
    assert second.slots == (Miss.TORN,)
    assert shard.done(first.lease, 2) == [Receive(DRIVER, 2, (0,))]


def test_a_delete_waits_for_readers_and_takes_nothing_newer() -> None:
    shard = Shard(4)
    evicted(shard, 0)
    (serve,) = refill(shard, 1, 0)
    assert isinstance(serve, Serve)
    assert delete(shard, 1, 0) == []
    (clear,) = shard.done(serve.lease, 1)
    assert isinstance(clear, Clear)
    assert (clear.slots, clear.up_to) == ((0,), 1)
    assert shard.evict(DRIVER, 2, [0], 1) == [], "not before it is empty"
    assert shard.done(clear.lease, 2) == [Receive(DRIVER, 2, (0,))]


def test_a_repeated_evict_is_taken_and_thrown_away() -> None:
    shard = Shard(4)
    evicted(shard, 0, 1)
    assert shard.evict(DRIVER, 2, [1, 2], 0) == [Receive(DRIVER, 2, (None, 2))]
    assert shard.received(DRIVER, 0) == [Publish(3)]
    assert shard.evict(DRIVER, 1, [3], 0) == [Receive(DRIVER, 1, (None,))]
    assert shard.received(DRIVER, 0) == []
    assert shard.counts.repeated == 2


def test_a_gap_is_a_breach_and_changes_nothing() -> None:
    shard = Shard(4)
    with pytest.raises(Breach, match="evict 2 does not follow 0"):
        shard.evict(DRIVER, 2, [0], 0)
    assert shard.accepted == 0


def test_a_lost_connection_leaves_what_was_applied_and_the_next_goes_on_from_there() -> None:
    shard = Shard(4)
    shard.evict(DRIVER, 1, [0, 1, 2], 0)
    shard.evict(DRIVER, 4, [3], 0)
    assert shard.abandon(DRIVER, 2, 0) == [Publish(2)]
    assert (shard.accepted, shard.counts.abandoned) == (2, 2)
    assert shard.evict(3, 3, [0], 0) == [Receive(3, 3, (0,))]


def test_a_driver_that_writes_by_itself_moves_the_count_forward_only() -> None:
    shard = Shard(4)
    assert refill(shard, 3, 0) == []
    assert [type(effect) for effect in shard.observe(3, 0)] == [Serve]
    with pytest.raises(Breach, match="from 3 to 2"):
        shard.observe(2, 0)
    assert shard.evict(DRIVER, 4, [1], 0) == [Receive(DRIVER, 4, (1,))]


def test_two_drivers_cannot_evict_at_once() -> None:
    shard = Shard(4)
    shard.evict(DRIVER, 1, [0], 0)
    with pytest.raises(Breach, match="another driver"):
        shard.evict(DRIVER + 1, 2, [1], 0)


def test_a_shard_that_shrinks_throws_away_above_the_line_and_waits_for_readers_there() -> None:
    shard = Shard(4)
    evicted(shard, 3)
    (serve,) = refill(shard, 1, 3)
    assert isinstance(serve, Serve)
    assert shard.resize(2, 1) == []
    assert shard.evict(DRIVER, 2, [3], 1) == [Receive(DRIVER, 2, (None,))]
    (above,) = refill(shard, 1, 3, now=1)
    assert isinstance(above, Serve)
    assert above.slots == (Miss.ABSENT,)
    assert shard.done(serve.lease, 2) == [Truncate(2)]
    assert (shard.slots, shard.capacity) == (2, 2)


def test_a_shard_that_grows_uses_its_new_slots_at_once() -> None:
    shard = Shard(2)
    shard.resize(4, 0)
    assert shard.evict(DRIVER, 1, [3], 0) == [Receive(DRIVER, 1, (3,))]


def test_every_queue_has_its_bound() -> None:
    shard = Shard(core.BATCH_MAX + 1)
    with pytest.raises(Breach, match="batch"):
        shard.evict(DRIVER, 1, range(core.BATCH_MAX + 1), 0)
    with pytest.raises(Breach, match="batch"):
        refill(shard, 0)
    for first in range(1, core.RUNS_MAX + 1):
        shard.evict(DRIVER, first, [0], 0)
    with pytest.raises(Breach, match="runs"):
        shard.evict(DRIVER, core.RUNS_MAX + 1, [0], 0)
    for _ in range(core.PARKED_MAX):
        assert refill(shard, 99, 0) == []
    assert refill(shard, 99, 0) == [Reject(READER, 7, Miss.REFUSED)]
    assert shard.ask(Request(Verb.DELETE, DRIVER, 1, 99, [0], 1), 0) == [], "who is greedy pays"
    check_integrity(shard)
    late = shard.tick(core.WAIT_SECONDS_MAX)
    assert Reject(READER, 7, Miss.LATE) in late
    check_integrity(shard)
    assert refill(shard, 99, 0) == []


def test_all_that_wait_are_looked_at_seldom_however_many_deadlines_there_are() -> None:
    shard = Shard(1)
    for number in range(100):
        shard.ask(Request(Verb.REFILL, READER, number, 1, [0], 1 + number / 1000), 0)
    looks, late = 0, 0
    while late < 100:
        late += len(shard.tick(shard.next_deadline()))
        looks += 1
    assert looks <= 1 + 0.1 / core.LATE_LOOK_SECONDS


def test_deadlines_have_a_longest() -> None:
    shard = Shard(1)
    shard.ask(Request(Verb.REFILL, READER, 1, 1, [0], 1e9, 1e9), 0)
    assert shard.next_deadline() == core.WAIT_SECONDS_MAX
    evicted(shard, 0)
    assert shard.next_deadline() <= core.LEASE_SECONDS_MAX


def test_integrity_is_checked_for_real() -> None:
    shard = Shard(2)
    shard.evict(DRIVER, 1, [0], 0)
    shard.accepted = 5
    with pytest.raises(RuntimeError, match="accepted"):
        check_integrity(shard)


def test_the_world_notices_a_broken_promise() -> None:
    """The checker checks: a reader that is served older bytes is found out."""
    world = World()
    world.evict([0])
    world.finish_receiving()
    world.evict([0])
    world.finish_receiving()
    world.memory[0] = 1
    with pytest.raises(AssertionError, match="older"):
        world.refill([0], 2)


def fill(shard: Shard, after: int, *slots: int, now: float = 0.0) -> list[core.Effect]:
    return shard.ask(Request(Verb.FILL, READER, 9, after, slots, 10), now)


def test_a_slot_that_is_being_filled_is_torn_for_readers_and_makes_an_evict_wait() -> None:
    shard = Shard(2)
    (effect,) = fill(shard, 0, 1, 2)
    assert effect == Fill(READER, 9, (1, Miss.ABSENT), 0, 1)
    (serve,) = refill(shard, 0, 1)
    assert isinstance(serve, Serve)
    assert serve.slots == (Miss.TORN,)
    assert shard.evict(DRIVER, 1, [1], 0) == []
    assert shard.done(effect.lease, 0) == [Receive(DRIVER, 1, (1,))]


def test_a_fill_waits_for_the_reader_of_its_slot() -> None:
    shard = Shard(2)
    (serve,) = refill(shard, 0, 0)
    assert isinstance(serve, Serve)
    assert fill(shard, 0, 0) == []
    assert [type(effect) for effect in shard.done(serve.lease, 1)] == [Fill]
