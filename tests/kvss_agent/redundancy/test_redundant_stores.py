"""While nobody can know what holders have, nothing is said to be gone."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvss_agent.client import Credentials
from kvss_agent.desired import HolderSpec, RedundancySpec, ShardSpec
from kvss_agent.limits.background import Measure
from kvss_agent.redundancy.fragments import Fragments
from kvss_agent.redundancy.stores import RedundantStores, _Redundant, _Use
from kvss_agent.tier2.address import Address, address_of
from kvss_agent.tier2.backend import Found
from kvss_agent.tier2.index import Limits
from kvss_agent.tier2.store import Tier2
from kvss_agent.tier2.stores import NotOpen
from tests.kvss_agent.redundancy.holders import DRIVER, NAMESPACE, PART, SECRET, SLOT, World, running
from tests.live import wait_until

TAG = b"t" * 16
STORES = "kvss_agent.redundancy.stores"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path, 2, 1) as made:
        yield made


def spec(world: World, **more: object) -> ShardSpec:
    holders = tuple(HolderSpec(f"tcp:127.0.0.1:{one.port}", "fragments") for one in world.agents)
    redundancy = RedundancySpec(world.data, world.parity, holders, **more)  # type: ignore[arg-type]
    return ShardSpec("s", SLOT, 8, DRIVER, (), NAMESPACE.hex(), PART, redundancy=redundancy)


def made() -> RedundantStores:
    return RedundantStores(lambda _: Credentials(DRIVER, SECRET, stall_seconds=30.0))


async def opened(stores: RedundantStores) -> Tier2:
    async with asyncio.timeout(60):
        while (store := stores.of("s")) is None:  # noqa: ASYNC110 - of a task behind
            await asyncio.sleep(0.01)
    return store


async def test_before_the_first_document_nobody_knows() -> None:
    stores = made()
    with pytest.raises(NotOpen):
        stores.everything()
    stores.follow((), Limits())
    assert stores.everything() == {}


async def test_another_budget_changes_nothing_else(world: World) -> None:
    stores = made()
    stores.follow([spec(world)], Limits())
    store = await opened(stores)
    stores.follow([spec(world, bytes_per_second=1)], Limits())
    assert stores.of("s") is store
    await stores.close()


async def test_a_home_that_another_one_has_superseded_begins_anew_with_another_document(
    world: World,
) -> None:
    stores, told = made(), spec(world)
    stores.follow([told], Limits())
    store = await opened(stores)
    other = world.fragments()
    await asyncio.to_thread(other.open)
    fragments = store._state.backend
    assert isinstance(fragments, Fragments)
    await asyncio.to_thread(wait_until, "it has asked them", lambda: fragments.is_superseded)
    stores.follow([told], Limits())
    assert stores.of("s") is store
    stores.follow([spec(world)], Limits())
    assert await opened(stores) is not store
    await stores.close()


async def test_what_expires_at_a_former_home_takes_no_places_of_the_home_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvss_agent.redundancy.holder.SUPERSEDED_SECONDS", 0.0)
    monkeypatch.setattr("kvss_agent.redundancy.stores.REPAIR_LOOK_SECONDS", 0.01)
    monkeypatch.setattr("kvss_agent.redundancy.stores.REACH_SECONDS", 0.0)
    stores, home = made(), world.fragments()
    stores.follow([spec(world)], Limits())
    store = await opened(stores)
    former = store._state.backend
    assert isinstance(former, Fragments)
    await asyncio.to_thread(home.open)
    await asyncio.to_thread(wait_until, "it is superseded", lambda: former.is_superseded)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    monkeypatch.setattr(former, "reach_holders", look)
    await asyncio.to_thread(wait_until, "what had begun has ended", lambda: looks > 0)
    store.limits = Limits(60)
    store._state.index.adopt(Address(NAMESPACE, TAG, b"k" * 16, PART), 4096, written=1.0)
    before = looks
    await asyncio.to_thread(wait_until, "it has looked again", lambda: looks > before + 2)
    assert store.stats().expired == 0
    assert all(one.incarnation for one in home.holders)
    monkeypatch.setattr("kvss_agent.redundancy.stores.SUPERSEDED_SECONDS", 0.0)
    await asyncio.to_thread(wait_until, "it expires", lambda: store.stats().expired == 1)
    await stores.close()


async def test_what_a_column_lacks_that_is_still_being_written_is_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvss_agent.redundancy.stores.REPAIR_LOOK_SECONDS", 0.01)
    stores = made()
    stores.follow([spec(world)], Limits())
    store = await opened(stores)
    fragments, index = store._state.backend, store._state.index
    assert isinstance(fragments, Fragments)
    ticket = index.reserve(Address(NAMESPACE, TAG, b"k" * 16, PART), 4096)
    assert ticket
    assert index.start(ticket)
    fragments._state.incomplete.mark(ticket.address, {2})  # others of its batch are still written
    await asyncio.to_thread(wait_until, "repair has looked", lambda: not fragments.some_incomplete(9))
    assert fragments.incomplete == 1
    index.cancel(ticket)
    await stores.close()


async def test_what_a_column_lacks_is_not_forgotten_before_the_column_is_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing or a read finds it in a thread, and the index learns of it when that has ended."""
    monkeypatch.setattr("kvss_agent.redundancy.stores.REPAIR_LOOK_SECONDS", 0.01)
    stores = made()
    stores.follow([spec(world)], Limits())
    store = await opened(stores)
    fragments, index = store._state.backend, store._state.index
    assert isinstance(fragments, Fragments)
    listed, read = (Address(NAMESPACE, TAG, key * 16, PART) for key in (b"l", b"r"))

    def has_looked() -> bool:
        return not fragments.some_incomplete(9)

    def files(_: object) -> Iterator[Found]:
        yield Found(listed, 4096, 1.0)
        fragments._state.incomplete.mark(listed, {2})
        wait_until("repair has looked", has_looked)

    monkeypatch.setattr(fragments, "files", files)
    await store.rebuild()
    index.begin_read(read)
    fragments._state.incomplete.mark(read, {2})
    await asyncio.to_thread(wait_until, "repair has looked", has_looked)
    index.adopt(read, 4096)
    index.end_read(read)
    assert [store.knows(one) for one in (listed, read)] == [True, True]
    assert fragments.incomplete == 2
    await stores.close()


async def test_while_one_is_closed_with_work_on_its_way_nothing_is_said_to_be_gone(world: World) -> None:
    stores = made()
    stores.follow([spec(world)], Limits())
    store = await opened(stores)
    going, release = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        going.set()
        assert release.wait(60)

    address = Address(NAMESPACE, TAG, b"k" * 16, PART)
    store._state.index.adopt(address, 4096)  # so that there is something to hold
    holding = asyncio.create_task(store.while_read([address], hold))
    await asyncio.to_thread(going.wait, 60)
    stores.follow((), Limits())
    assert not stores.has("s")
    with pytest.raises(NotOpen, match="being closed"):
        stores.everything()
    with pytest.raises(NotOpen, match="being closed"):
        stores.everything(["s"])
    assert stores.everything(["other"]) == {}
    release.set()
    await holding
    async with asyncio.timeout(60):
        while stores._ending:  # noqa: ASYNC110 - of a task behind
            await asyncio.sleep(0.01)
    assert stores.everything() == {}


async def test_holders_that_say_nothing_hold_up_neither_documents_nor_the_loop(world: World) -> None:
    for agent in world.agents:
        agent.stop()
    mute = [socket.create_server(("127.0.0.1", one.port)) for one in world.agents]
    stores, loop = made(), asyncio.get_running_loop()
    stores.follow([spec(world)], Limits())
    await asyncio.sleep(0.1)
    before, gaps = loop.time(), list[float]()
    stores.follow((), Limits())
    for _ in range(20):
        gaps.append(loop.time() - before)
        before = loop.time()
        await asyncio.sleep(0.01)
    assert max(gaps) < 15, "it waits for none of them"
    for one in mute:
        one.close()
    await stores.close()
    for one in mute:
        one.close()


@dataclass
class Repairs:
    """Of columns that all lack a fragment, by a stand-in that stores nothing."""

    stores: RedundantStores
    store: Tier2
    one: _Redundant
    is_in_use: bool = True
    uses: Iterator[bool] = field(default_factory=lambda: iter(()))  # one for after each piece
    looks: int = 0  # whether it is in use
    asked: list[bool] = field(default_factory=list)  # one holder after the other, by piece
    files: list[int] = field(default_factory=list)  # by piece
    judged: list[Measure | None] = field(default_factory=list)

    def is_there(self, _: float) -> bool:
        self.looks += 1
        return self.is_in_use

    def repair(self, names: list[str], *, one_by_one: bool) -> int:
        self.asked.append(one_by_one)
        self.files.append(len(names))
        self.fragments.forget([address_of(name) for name in names])
        self.is_in_use = next(self.uses, self.is_in_use)
        return 1

    def moved(self, _size: int, _seconds: float, _now: float, measure: Measure | None) -> None:
        self.judged.append(measure)

    @property
    def fragments(self) -> Fragments:
        found = self.store._state.backend
        assert isinstance(found, Fragments)
        return found

    def lose(self, columns: int) -> None:
        """Of so many, the fragment with parity."""
        for at in range(columns):
            address = Address(NAMESPACE, TAG, bytes([at]) * 16, PART)
            self.store._state.index.adopt(address, SLOT, written=1.0)
            self.fragments._state.incomplete.mark(address, {2})

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        await asyncio.to_thread(wait_until, what, holds)


@pytest.fixture
async def repairs(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Repairs]:
    monkeypatch.setattr(f"{STORES}.REPAIR_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(f"{STORES}.LOOK_SECONDS", 0.01)
    stores = made()
    stores.follow([spec(world)], Limits())
    its = Repairs(stores, await opened(stores), stores._redundant["s"])
    monkeypatch.setattr(its.fragments, "repair", its.repair)
    monkeypatch.setattr(stores._use, "is_there", its.is_there)
    monkeypatch.setattr(its.one.background, "moved", its.moved)
    yield its
    await stores.close()


async def test_repair_asks_one_holder_after_the_other_while_somebody_is_served(
    repairs: Repairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And compares what that takes with columns that it has read in the same way."""
    monkeypatch.setattr(f"{STORES}.AT_ONCE", 1)
    repairs.stores.beside_bytes_per_second = 1 << 40
    repairs.uses = iter([True, False, True, False])
    repairs.lose(5)
    await repairs.until("all were judged", lambda: len(repairs.judged) == 5)
    assert repairs.asked == [True, True, False, True, False]
    assert repairs.judged == [repairs.one.beside if one else None for one in repairs.asked]


async def test_beside_evicts_repair_rests_until_nobody_is_there_and_the_rest_goes_on(
    repairs: Repairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{STORES}.AT_ONCE", 1)
    repairs.stores.beside_bytes_per_second = 1  # the next one after a day
    old = Address(NAMESPACE, TAG, b"k" * 16, PART)
    repairs.store._state.index.adopt(old, SLOT, written=1.0)
    repairs.lose(5)
    await repairs.until("one is repaired", lambda: bool(repairs.asked))
    looks = repairs.looks
    await repairs.until("it has looked whether to go on", lambda: repairs.looks > looks + 5)
    assert len(repairs.asked) == 1
    repairs.store.limits = Limits(60)
    await repairs.until("what is too old goes", lambda: not repairs.store.knows(old))
    repairs.store.limits = Limits()
    assert len(repairs.asked) == 1
    repairs.lose(5)
    repairs.is_in_use = False
    await repairs.until("the others are repaired, too", lambda: repairs.fragments.incomplete == 0)
    assert not any(repairs.asked[2:])


async def test_beside_evicts_repair_goes_on_at_its_rate(
    repairs: Repairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{STORES}.AT_ONCE", 1)
    repairs.stores.beside_bytes_per_second = 100 * SLOT
    booked, waits = repairs.stores._beside.book, list[float | None]()

    def book(size: int, _now: float) -> float | None:
        waits.append(booked(size, 0.0))  # as if repair took no time
        return waits[-1]

    monkeypatch.setattr(repairs.stores._beside, "book", book)
    repairs.lose(5)
    await repairs.until("all are repaired", lambda: repairs.fragments.incomplete == 0)
    assert all(repairs.asked)
    assert waits == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04])


async def test_a_piece_is_what_one_holder_sends_beside_evicts_and_what_all_send_else(
    repairs: Repairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{STORES}.BESIDE_PIECE_BYTES", SLOT)  # two of the halves that one has
    monkeypatch.setattr(repairs.one.background, "piece", lambda: 3 * SLOT)
    repairs.uses = iter([False])
    repairs.lose(5)
    await repairs.until("all are repaired", lambda: sum(repairs.files) == 5)
    assert repairs.files == [2, 3]


def test_somebody_is_there_for_a_second_after_something_was_served() -> None:
    served = 7
    use = _Use(lambda: served)
    assert use.is_there(100.0)  # nobody knows
    assert use.is_there(100.9)
    assert not use.is_there(101.1)
    served = 8
    assert use.is_there(105.0)
    assert not use.is_there(106.1)
