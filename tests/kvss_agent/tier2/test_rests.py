"""Spills that keep to a budget of links rest before they begin; one that would rest too long is late."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvss_agent.limits.background import Background, Rate, Totals
from kvss_agent.shard.seal import Miss
from kvss_agent.tier2.construction import make
from kvss_agent.tier2.front.disk import WAITING, give_up
from kvss_agent.tier2.fronted import Fronted
from kvss_agent.tier2.parts.spills import REST_SECONDS_MAX
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.settings import FrontSettings, Tier2Settings, Writes
from kvss_agent.tier2.store import Outcome, Tier2
from tests.kvss_agent.tier2.columns import (
    ACME,
    PLENTY,
    address_of,
    evicted,
    files_in,
    get,
    opened,
    put,
    put_many,
)
from tests.live import wait_until

SIZE = 3 * 4096  # of the file of a column of 10,000 bytes
LOTS = 1 << 30


class Told(Background):
    """Says for how long to rest as the test wants it, and what was booked."""

    def __init__(self, *seconds: float | None, piece_bytes: int = 1) -> None:
        super().__init__(piece_bytes=piece_bytes)
        self.seconds = [*seconds]
        self.booked: list[tuple[int, float]] = []

    def book(self, size: int, now: float, most: float = math.inf) -> float | None:  # noqa: ARG002
        self.booked.append((size, most))
        return self.seconds.pop(0)


async def store_with(folder: Path, background: Background, share: float = 1.0) -> Tier2:
    store = Tier2(Posix(folder), PLENTY, threads=4, background=background, share=share)
    await store.open()
    return store


async def test_each_has_the_outcome_of_its_own_rest(tmp_path: Path) -> None:
    background = Told(0.0, 0.05, None)
    store = await store_with(tmp_path, background, share=1.5)
    began = time.monotonic()
    outcomes = await put_many(store, [address_of(number) for number in range(3)])
    assert outcomes == [Outcome.STORED, Outcome.STORED, Outcome.LATE]
    assert time.monotonic() - began >= 0.05
    assert background.booked == [(SIZE * 3 // 2, REST_SECONDS_MAX)] * 3
    assert store.stats().spills == {"stored": 2, "late": 1}
    assert not store.stats().faults
    await store.close()


async def test_small_columns_rest_together(tmp_path: Path) -> None:
    background = Told(0.0, 0.0, piece_bytes=2 * SIZE)
    store = await store_with(tmp_path, background)
    assert set(await put_many(store, [address_of(number) for number in range(3)])) == {Outcome.STORED}
    assert [size for size, _ in background.booked] == [2 * SIZE, SIZE]
    await store.close()


async def test_what_is_there_or_was_overwritten_takes_nothing_of_the_budget(tmp_path: Path) -> None:
    background = Told(0.0)
    store = await store_with(tmp_path, background)
    assert await put(store, address_of(1)) == Outcome.STORED
    assert await put(store, address_of(1)) == Outcome.ALREADY
    slot, _ = evicted(address_of(2))
    _, other = evicted(address_of(3))
    assert await store.spill_many([(address_of(3), slot, other, 0)]) == [Miss.STALE]
    assert len(background.booked) == 1
    await store.close()


@pytest.mark.parametrize("remove", ["purge", "delete", "closed"])
async def test_what_is_removed_while_it_rests_does_not_come_back(tmp_path: Path, remove: str) -> None:
    background = Told(0.3, 0.3)
    store = await store_with(tmp_path, background)
    spilling = asyncio.create_task(put_many(store, [address_of(1), address_of(2, b"b" * 16)]))
    while not store._state.resting:  # noqa: ASYNC110 - of another task
        await asyncio.sleep(0.01)
    if remove == "purge":
        await store.purge(tag=ACME)
    elif remove == "delete":
        await store.delete([address_of(1)])
    else:
        with store.closed_to([]):
            pass
    expected = Outcome.STORED if remove == "closed" else Miss.REFUSED
    assert await spilling == [expected, Outcome.STORED]
    assert len(files_in(tmp_path)) == (2 if remove == "closed" else 1)
    await store.close()


@pytest.fixture
async def limited(tmp_path: Path) -> AsyncIterator[Callable[[int | None, Writes | None], Tier2]]:
    made = []

    def limit(rate: int | None, writes: Writes | None) -> Tier2:
        front = None if writes is None else FrontSettings(str(tmp_path / "front"), LOTS, writes)
        settings = Tier2Settings(
            "posix", LOTS, path=str(tmp_path / "behind"), front=front, write_bytes_per_second=rate
        )
        made.append(make(settings))
        return made[-1]

    yield limit
    for store in made:
        await store.close()


@pytest.mark.parametrize("writes", [None, Writes.THROUGH])
async def test_a_burst_to_a_store_behind_links_keeps_to_its_rate(
    limited: Callable[[int | None, Writes | None], Tier2], writes: Writes | None
) -> None:
    rate = 2 * SIZE
    store = limited(rate, writes)
    await store.open()
    began = time.monotonic()
    outcomes = await put_many(store, [address_of(number) for number in range(40)])
    seconds = REST_SECONDS_MAX + time.monotonic() - began  # none rests longer before it begins
    stored = outcomes.count(Outcome.STORED)
    assert rate * REST_SECONDS_MAX * 0.9 < stored * SIZE <= rate * seconds + SIZE
    assert stored + outcomes.count(Outcome.LATE) == 40
    assert store.written.bytes == stored * SIZE
    store.write_rate.bytes_per_second = None
    assert await put(store, address_of(50)) == Outcome.STORED


async def test_a_front_takes_a_burst_at_once_and_copies_it_behind_at_the_rate(
    limited: Callable[[int | None, Writes | None], Tier2], tmp_path: Path
) -> None:
    rate, addresses = SIZE // 2, [address_of(number) for number in range(20)]
    store = limited(rate, Writes.BACK)
    await store.open()
    began = time.monotonic()
    assert set(await put_many(store, addresses)) == {Outcome.STORED}
    await asyncio.sleep(0.5)
    behind = len(files_in(tmp_path / "behind"))
    assert behind * SIZE <= rate * (time.monotonic() - began) + 2 * SIZE
    assert [await get(store, one) for one in addresses] == ["hit"] * 20
    await store.close()
    assert len(files_in(tmp_path / "behind")) < 20, "it does not wait for what would take 36 seconds"
    left = limited(None, Writes.BACK)
    await left.open()
    await left.expire()
    await asyncio.to_thread(
        wait_until, "the rest is behind", lambda: len(files_in(tmp_path / "behind")) == 20
    )


async def test_a_full_front_does_not_let_a_burst_through(tmp_path: Path) -> None:
    """Whoever spills can't wait for the links, and is told so; it is no fault of the store."""
    background = Told(None, 0.0, 5.0, 5.0, 5.0)
    front = Fronted(
        tmp_path / "front", Posix(tmp_path / "behind"), SIZE - 1, Writes.BACK, background=background
    )
    async with opened(front) as store:
        assert await put(store, address_of(1)) == Outcome.LATE
        assert not files_in(tmp_path / "behind")
        assert await put(store, address_of(2)) == Outcome.STORED
        assert len(files_in(tmp_path / "behind")) == 1
        assert not store.stats().faults


async def test_what_would_make_room_waits_for_the_links_as_well(tmp_path: Path) -> None:
    background = Told(None, None, 0.0)
    front = Fronted(
        tmp_path / "front", Posix(tmp_path / "behind"), SIZE, Writes.DISPLACED, background=background
    )
    async with opened(front) as store:
        assert await put(store, address_of(1)) == Outcome.STORED
        assert await put(store, address_of(2)) == Outcome.LATE
        assert await get(store, address_of(1)) == "hit"
        assert await put(store, address_of(3)) == Outcome.STORED
        assert len(files_in(tmp_path / "behind")) == 1


async def test_a_front_that_is_given_up_is_copied_at_the_rate(tmp_path: Path) -> None:
    async with opened(
        Fronted(tmp_path / "front", Posix(tmp_path / "behind"), LOTS, Writes.DISPLACED)
    ) as store:
        await put_many(store, [address_of(number) for number in range(3)])
    background = Told(0.0, 0.05, 0.05)
    began = time.monotonic()
    behind = Posix(tmp_path / "behind")
    behind.open()
    await asyncio.to_thread(give_up, tmp_path / "front", behind, background)
    assert time.monotonic() - began >= 0.1
    assert [size for size, _ in background.booked] == [SIZE] * 3
    assert len(files_in(tmp_path / "behind")) == 3
    assert not (tmp_path / "front" / WAITING).exists()


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="more than no bytes"):
        Tier2Settings("posix", LOTS, path="/x", write_bytes_per_second=0)


def test_many_threads_book_what_one_after_the_other_would() -> None:
    rate, totals = Rate(1_000_000), Totals()
    background = Background(rate, totals)
    threads = [
        threading.Thread(target=lambda: [background.book(1000, 10.0) for _ in range(200)])
        for _ in range(4)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert background.rest(10.0) == pytest.approx(0.8)
    assert totals.bytes == 800_000
