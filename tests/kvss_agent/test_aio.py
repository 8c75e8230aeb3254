"""The client for asyncio keeps the order of evicts and lets the loop go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent.client import Credentials, Evict, Header, Lost, Wanted
from kvss_agent.client.aio import AsyncShardClient, connect
from tests.kvss_agent.plane import DRIVER, SECRET, TAG, Plane, column, kv, place, running

KINDS = ["shm", "unix", "tcp"]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with running(tmp_path) as plane:
        plane.add(slots=64)
        yield plane


async def client(plane: Plane, kind: str) -> AsyncShardClient:
    address = f"tcp:127.0.0.1:{plane.tcp}" if kind == "tcp" else f"unix:{plane.unix}"
    transport = "shm" if kind == "shm" else "stream"
    return await connect(address, "s", Credentials(DRIVER, SECRET), transport=transport)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
async def test_many_at_once_each_get_their_own(plane: Plane, kind: str) -> None:
    payloads = [kv() for _ in range(32)]
    async with await client(plane, kind) as shard:
        numbers = await asyncio.gather(
            *(shard.evict(n, column(f"{n}").key, TAG, 64, payload) for n, payload in enumerate(payloads))
        )
        assert numbers == list(range(1, 33))

        async def read(slot: int) -> None:
            into = place()
            [found] = await shard.refill([Wanted(slot, column(f"{slot}", slot + 1))], [into])
            assert isinstance(found, Header)
            assert into == payloads[slot]
            views = await shard.view([Wanted(slot, column(f"{slot}", slot + 1))])
            assert views.columns == [payloads[slot]]
            views.release()

        await asyncio.gather(*(read(slot) for slot in range(32)))
        last = await shard.evict_batch([Evict(40, column("x").key, TAG, 1, payloads[0])])
        await shard.wait_applied(last)
        assert await shard.delete([40]) is None


async def test_the_loop_goes_on_while_a_refill_waits(plane: Plane) -> None:
    async with await client(plane, "unix") as shard:
        task = asyncio.create_task(shard.refill([Wanted(0, column("a", 1))], [place()], wait_seconds=60))
        await asyncio.sleep(0.05)
        assert not task.done()
        await shard.evict(0, column("a").key, TAG, 64, kv())
        assert isinstance((await task)[0], Header)


async def test_a_cancelled_call_settles(plane: Plane) -> None:
    async with await client(plane, "unix") as shard:
        task = asyncio.create_task(shard.refill([Wanted(0, column("a", 1))], [place()], wait_seconds=60))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await shard.evict(0, column("a").key, TAG, 64, kv())  # what it waited for
        await shard.settled()


async def test_after_close_everything_is_lost(plane: Plane) -> None:
    shard = await client(plane, "unix")
    task = asyncio.create_task(shard.refill([Wanted(0, column("a", 1))], [place()], wait_seconds=30))
    await asyncio.sleep(0.05)
    await shard.close()
    with pytest.raises(Lost):
        await task
