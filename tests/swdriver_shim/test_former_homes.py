"""What a shard leaves behind where it was: a receipt waits until nothing of it is there either."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvss_agent.client import Lost, ShardClient
from kvss_agent.shard import seal
from swdriver_shim.data_plane.agent_control import PullResult
from swdriver_shim.data_plane.shard import Shard, moves
from tests.live import wait_until
from tests.swdriver_shim.fleets import PULLED, C, Engine, Fleet, driving, pull_with, tokens
from tests.swdriver_shim.prompts import keys, prompt

NOT_PULLED = PullResult(done=False, bytes=0)


def holds(fleet: Fleet, name: str, org: str) -> bool:
    """Whether a slot of this shard, wherever it is by now, has something of this org."""
    shard, tag = fleet.plane.shards[name], keys(org).tag
    found = [seal.read(shard.arena.slot(slot)[: seal.HEADER_BYTES]) for slot in range(shard.arena.slots)]
    return any(isinstance(one, seal.Header) and one.tag == tag for one in found)


class Gate:
    """A way to a shard that can be shut."""

    def __init__(self, connect: Callable[[], ShardClient]) -> None:
        self.connect = connect
        self.is_shut = False

    def __call__(self) -> ShardClient:
        if self.is_shut:
            raise Lost("there is no way")
        return self.connect()


@contextmanager
def moving_on(
    fleet: Fleet, shard: Shard, monkeypatch: pytest.MonkeyPatch, *, is_lost: bool = False
) -> Iterator[None]:
    """While its bytes are still at the old home, of which nothing can be fetched."""
    monkeypatch.setattr(moves, "PULL_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(moves, "PULL_TRIES", 10_000)
    begun, go_on = threading.Event(), threading.Event()

    def pull(_slots: Sequence[int], _after: int) -> PullResult:
        begun.set()
        if is_lost and (old := shard._homes.old):
            shard._homes.lose(old, Lost("a connection has broken"))
        return PULLED if go_on.is_set() else NOT_PULLED

    fleet.make_one("moved", 32 * C, 20, shard.count_from())
    target = fleet.connect("moved", "unix")
    thread = threading.Thread(target=lambda: shard.move(target, pull))
    thread.start()
    assert begun.wait(30)
    try:
        yield
    finally:
        go_on.set()
        thread.join()


@pytest.fixture
def small(fleet: Fleet) -> Fleet:
    """Of three slots each."""
    for name, size in fleet.names():
        fleet.end_one(name)
        fleet.make_one(name, size, 3, 0)
    return fleet


@pytest.mark.parametrize("kind", ["shm", "unix"])
def test_what_was_overwritten_at_the_new_home_is_emptied_at_the_old_one(
    small: Fleet, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a shard moves, what its slots had before lies on at the old home, though nothing that is
    cached is there."""
    with driving(small, kind) as engine:
        for number in range(3):
            engine.store(prompt(tokens(number)))
        shard = engine.driver._shards[0][1]
        with moving_on(small, shard, monkeypatch):
            for number in range(3):  # takes all slots from the others
                engine.store(prompt(tokens(number), "globex"))
            wait_until("it is evicted", lambda: holds(small, "moved", "globex"))
            assert engine.driver.removals.purge("acme", seconds=20).done
            assert not holds(small, "0.1", "acme")
        assert not holds(small, "moved", "acme")


def left(engine: Engine, fleet: Fleet) -> Shard:
    """A shard that has moved. Its old home is still there."""
    shard = engine.driver._shards[0][1]
    fleet.make_one("moved", 32 * C, 20, shard.count_from())
    assert shard.move(fleet.connect("moved", "unix"), pull_with(fleet, "0.1", "moved"))
    return shard


@pytest.mark.parametrize("kind", ["shm", "unix"])
def test_a_home_that_was_left_is_emptied_though_nobody_has_taken_it_away(
    fleet: Fleet, kind: str
) -> None:
    with driving(fleet, kind) as engine:
        engine.store(prompt(tokens(1, 2)))
        left(engine, fleet)
        assert engine.driver.removals.purge("acme", seconds=20).done
        assert not holds(fleet, "0.1", "acme")
        assert not holds(fleet, "moved", "acme")


def test_a_home_that_is_lost_while_it_is_left_is_waited_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection has broken, and its memory is as it was."""
    with driving(fleet, "unix") as engine:
        shard = engine.driver._shards[0][1]
        gate = shard._homes.connect = Gate(shard._homes.connect)
        engine.store(prompt(tokens(1, 2)))
        gate.is_shut = True
        with moving_on(fleet, shard, monkeypatch, is_lost=True):
            wait_until("it is lost", lambda: not shard._homes.old)
            assert not engine.driver.removals.purge("acme", seconds=0.5).done
        wait_until("it is left", lambda: bool(shard.former_homes))
        assert not engine.driver.removals.purge("acme", seconds=0.5).done
        assert holds(fleet, "0.1", "acme")
        gate.is_shut = False
        assert engine.driver.removals.purge("acme", seconds=20).done
        assert not holds(fleet, "0.1", "acme")


def test_a_home_that_is_lost_before_a_move_is_waited_for_by_those_who_were_there(fleet: Fleet) -> None:
    """Its shard goes on elsewhere, empty, as when a node is lost. Who came later need not wait."""
    with driving(fleet, "unix") as engine:
        shard = engine.driver._shards[0][1]
        gate = shard._homes.connect = Gate(shard._homes.connect)
        engine.store(prompt(tokens(1, 2)))
        gate.is_shut = True
        client = shard._homes.client
        assert client
        shard._homes.lose(client, Lost("a node is lost"))
        fleet.make_one("moved", 32 * C, 20, shard.count_from())
        assert shard.move(fleet.connect("moved", "unix"), lambda *_: PULLED)
        wait_until("it goes on", lambda: engine.store(prompt(tokens(3), "globex")) > 0)
        assert not engine.driver.removals.purge("acme", seconds=0.5).done
        assert engine.driver.removals.purge("globex", seconds=20).done
        (shown,) = shard.former_homes
        assert shown.endswith("not emptied yet: there is no way")
        gate.is_shut = False
        assert engine.driver.removals.purge("acme", seconds=20).done
        assert not holds(fleet, "0.1", "acme")
        assert shard.former_homes == []


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_home_whose_memory_is_gone_is_waited_for_no_longer(
    fleet: Fleet,
    is_made_anew: bool,  # noqa: FBT001
) -> None:
    with driving(fleet, "unix") as engine:
        shard = engine.driver._shards[0][1]
        gate = shard._homes.connect = Gate(shard._homes.connect)
        engine.store(prompt(tokens(1)))
        gate.is_shut = True
        client = shard._homes.client
        assert client
        shard._homes.lose(client, Lost("a node is lost"))
        left(engine, fleet)
        assert not engine.driver.removals.purge("acme", seconds=0.5).done
        fleet.end_one("0.1")
        if is_made_anew:
            fleet.make_one("0.1", 32 * C, 20, 0)
        gate.is_shut = False
        assert engine.driver.removals.purge("acme", seconds=20).done


def test_what_a_pull_brings_when_nobody_waits_for_it_any_more_is_not_there_after_a_receipt(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new home goes on fetching though the driver has given that up."""
    monkeypatch.setattr(moves, "PULL_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(moves, "PULL_TRIES", 1)
    with driving(fleet, "unix") as engine:
        engine.store(prompt(tokens(1, 2)))
        shard, asked = engine.driver._shards[0][1], list[Sequence[int]]()
        gate = shard._homes.connect = Gate(shard._homes.connect)

        def is_given_up(slots: Sequence[int], _after: int) -> PullResult:
            asked.append(list(slots))
            gate.is_shut = True
            old = shard._homes.old
            assert old
            shard._homes.lose(old, Lost("a connection has broken"))
            return NOT_PULLED

        fleet.make_one("moved", 32 * C, 20, shard.count_from())
        assert shard.move(fleet.connect("moved", "unix"), is_given_up)
        assert not engine.driver.removals.purge("acme", seconds=0.5).done
        pull_with(fleet, "0.1", "moved")(asked[0], 0)
        assert holds(fleet, "moved", "acme")
        gate.is_shut = False
        assert engine.driver.removals.purge("acme", seconds=20).done
        assert not holds(fleet, "moved", "acme")
        assert not holds(fleet, "0.1", "acme")


def test_a_home_that_a_shard_comes_back_to_is_empty_first_and_forgotten_as_a_former_one(
    fleet: Fleet,
) -> None:
    with driving(fleet, "unix") as engine:
        asked = prompt(tokens(1, 2))
        engine.store(asked)
        shard = engine.driver._shards[0][1]
        first = shard._homes.connect = Gate(shard._homes.connect)
        client = shard._homes.client
        assert client
        first.is_shut = True
        shard._homes.lose(client, Lost("a node is lost"))
        left(engine, fleet)
        assert shard.former_homes
        ledger = engine.driver.ledger
        # Else what is stored again may be forgotten as well.
        wait_until("what was lost is forgotten", lambda: not list(ledger.accounts["acme"].columns(0)))
        first.is_shut = False
        with shard._homes.former.emptying:
            pass
        assert shard.move(first, lambda *_: PULLED)
        assert not holds(fleet, "0.1", "acme")
        wait_until("all is served", lambda: engine.store(asked) > 0 or engine.load(asked) == 2 * C)
        assert engine.load(asked) == 2 * C, "and nobody empties it as a home that was left"
        wait_until("no home is left", lambda: not shard.former_homes)
        assert engine.load(asked) == 2 * C
