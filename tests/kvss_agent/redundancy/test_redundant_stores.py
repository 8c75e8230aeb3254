"""While nobody can know what holders have, nothing is said to be gone."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent.client import Credentials
from kvss_agent.desired import HolderSpec, RedundancySpec, ShardSpec
from kvss_agent.limits.background import Measure
from kvss_agent.redundancy.fragments import Fragments
from kvss_agent.redundancy.stores import RedundantStores
from kvss_agent.tier2.address import Address, address_of
from kvss_agent.tier2.index import Limits
from kvss_agent.tier2.store import Tier2
from kvss_agent.tier2.stores import NotOpen
from tests.kvss_agent.redundancy.holders import DRIVER, NAMESPACE, PART, SECRET, SLOT, World, running
from tests.live import wait_until

TAG = b"t" * 16


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


async def test_repair_asks_one_holder_after_the_other_while_somebody_is_served(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And compares what that takes with columns that it has read in the same way."""
    monkeypatch.setattr("kvss_agent.redundancy.stores.REPAIR_LOOK_SECONDS", 0.01)
    served = iter([10, 20, 20, 30, *[30] * 1000])
    stores = RedundantStores(
        lambda _: Credentials(DRIVER, SECRET, stall_seconds=30.0), lambda: next(served)
    )
    stores.follow([spec(world)], Limits())
    store = await opened(stores)
    fragments = store._state.backend
    assert isinstance(fragments, Fragments)
    asked: list[bool] = []

    def repair(names: list[str], *, one_by_one: bool) -> int:
        asked.append(one_by_one)
        fragments.forget([address_of(name) for name in names])
        return 1

    monkeypatch.setattr(fragments, "repair", repair)
    one = stores._redundant["s"]
    judged: list[Measure | None] = []

    def moved(size: int, seconds: float, now: float, measure: Measure | None) -> None:
        judged.append(measure)

    monkeypatch.setattr(one.background, "moved", moved)
    addresses = [Address(NAMESPACE, TAG, bytes([at]) * 16, PART) for at in range(5)]
    for address in addresses:
        store._state.index.adopt(address, SLOT, written=1.0)
    monkeypatch.setattr("kvss_agent.redundancy.stores.AT_ONCE", 1)
    for address in addresses:
        fragments._state.incomplete.mark(address, {2})
    await asyncio.to_thread(wait_until, "all were repaired", lambda: len(asked) == len(addresses))
    assert asked == [True, True, False, True, False]
    await asyncio.to_thread(wait_until, "all were judged", lambda: len(judged) == len(addresses))
    assert judged == [one.beside if one_by_one else None for one_by_one in asked]
    await stores.close()
