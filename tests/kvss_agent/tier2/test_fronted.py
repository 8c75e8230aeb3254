"""A directory in front of a store: what is read where, what is copied when, and what a purge leaves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvss_agent.limits.background import Background
from kvss_agent.shard.seal import Miss
from kvss_agent.tier2.address import Scope
from kvss_agent.tier2.backend import (
    Backend,
    Failed,
    Found,
    Incoming,
    Outgoing,
    Progress,
    Seen,
    ignore_progress,
)
from kvss_agent.tier2.front import departures
from kvss_agent.tier2.front.disk import COPIES, WAITING, give_up
from kvss_agent.tier2.front.originals import LOOKS
from kvss_agent.tier2.front.promotions import PROMOTED_BYTES_MAX
from kvss_agent.tier2.front.transfers import read_whole
from kvss_agent.tier2.fronted import Fronted
from kvss_agent.tier2.index import Caps, Limits
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.settings import Writes
from kvss_agent.tier2.store import Outcome, Tier2
from tests.kvss_agent.tier2.columns import (
    ACME,
    BOLT,
    PAGE,
    PLENTY,
    address_of,
    files_in,
    get,
    opened,
    put,
)
from tests.kvss_agent.tier2.faulty import Faulty
from tests.live import wait_until

FILE = 3 * PAGE  # of a column of 10,000 bytes
LOTS = 1 << 30
EACH = pytest.mark.parametrize("writes", list(Writes))


class Place:
    """The directories of a store with a front, and what lies in them."""

    def __init__(self, root: Path) -> None:
        self.front, self.behind = root / "front", root / "behind"

    def names(self, folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in files_in(folder)}

    @property
    def copies(self) -> set[str]:
        return self.names(self.front / COPIES)

    @property
    def waiting(self) -> set[str]:
        return self.names(self.front / WAITING)

    @property
    def in_front(self) -> set[str]:
        """What waits is listed first: it is moved to the copies meanwhile, and never back."""
        return self.waiting | self.copies

    @property
    def stored(self) -> set[str]:
        return self.names(self.behind)

    def backend(self, writes: Writes, cap: int = LOTS, behind: Posix | None = None) -> Fronted:
        return Fronted(self.front, behind or Posix(self.behind), cap, writes)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def until(what: str, holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, what, holds, 10)


@EACH
async def test_what_was_written_is_read_from_the_front(place: Place, writes: Writes) -> None:
    address = address_of(1)
    async with opened(place.backend(writes)) as store:
        assert await put(store, address) == Outcome.STORED
        assert await get(store, address) == "hit"
        assert store.stats().properties["read_front"] == 1
        assert store.stats().properties["read_behind"] == 0
        if writes is not Writes.DISPLACED:
            await until("it is behind", lambda: place.stored == {address.name})
            await until("nothing waits", lambda: place.waiting == set())
        else:
            assert (place.stored, place.waiting) == (set(), {address.name})


@EACH
async def test_what_is_not_in_front_is_read_behind_and_copied_to_the_front(
    place: Place, writes: Writes
) -> None:
    address = address_of(1)
    async with opened(place.behind) as elsewhere:
        await put(elsewhere, address)
    async with opened(place.backend(writes)) as store:
        assert await get(store, address) == "hit"
        await until("it is in front", lambda: store.stats().properties["promoted"] == 1)
        assert place.copies == {address.name}
        assert await get(store, address) == "hit"
        properties = store.stats().properties
        assert (properties["read_behind"], properties["read_front"]) == (1, 1)


@EACH
async def test_a_front_that_is_full_makes_room_and_nothing_is_lost(place: Place, writes: Writes) -> None:
    addresses = [address_of(number) for number in range(6)]
    async with opened(place.backend(writes, cap=2 * FILE)) as store:
        for address in addresses:
            assert await put(store, address) == Outcome.STORED
            assert len(place.in_front) <= 2
        for address in addresses:
            assert await get(store, address) == "hit"
    assert place.stored | place.waiting == {address.name for address in addresses}


@EACH
async def test_a_column_larger_than_the_front_goes_behind(place: Place, writes: Writes) -> None:
    async with opened(place.backend(writes, cap=PAGE)) as store:
        assert await put(store, address_of(1)) == Outcome.STORED
        assert place.stored == {address_of(1).name}
        assert await get(store, address_of(1)) == "hit"


@EACH
async def test_a_purge_reaches_all_levels_and_counts_each_column_once(
    place: Place, writes: Writes
) -> None:
    mine, others = [address_of(n) for n in range(4)], address_of(9, BOLT)
    async with opened(place.backend(writes, cap=2 * FILE)) as store:
        for address in (*mine, others):
            await put(store, address)
        await get(store, mine[0])
        receipt = await store.purge(tag=ACME)
        assert receipt.columns == len(mine)
        assert place.in_front | place.stored == {others.name}
        assert await get(store, mine[0]) == Miss.ABSENT
        await asyncio.sleep(0.05)
        assert place.in_front | place.stored == {others.name}


@EACH
async def test_what_is_deleted_or_expires_goes_everywhere(place: Place, writes: Writes) -> None:
    one, other = address_of(1), address_of(2)
    now = time.time()
    store = Tier2(place.backend(writes), PLENTY, clock=lambda: now)
    await store.open()
    for address in (one, other):
        await put(store, address)
    assert (await store.delete([one])).columns == 1
    assert one.name not in place.in_front | place.stored
    store.limits = Limits(60)
    now += 61
    assert await store.expire() == 1
    assert place.in_front | place.stored == set()
    await store.close()


@EACH
async def test_a_restart_finds_both_levels(place: Place, writes: Writes) -> None:
    addresses = [address_of(number) for number in range(4)]
    async with opened(place.backend(writes, cap=2 * FILE)) as store:
        for address in addresses:
            await put(store, address)
    async with opened(place.backend(writes, cap=2 * FILE), shared=False) as store:
        assert store.stats().columns == 4
        for address in addresses:
            assert await get(store, address) == "hit"
    async with opened(place.backend(Writes.THROUGH, cap=2 * FILE), shared=False) as store:
        await until("nothing waits", lambda: place.waiting == set())
        assert place.stored == {address.name for address in addresses}


async def test_a_copy_whose_original_others_removed_goes_with_the_next_listing(place: Place) -> None:
    address = address_of(1)
    async with opened(place.backend(Writes.THROUGH)) as store:
        await put(store, address)
        async with opened(place.behind) as another_agent:
            await another_agent.delete([address])
        await store.rebuild()
        assert (place.copies, store.stats().columns) == (set(), 0)


@pytest.mark.parametrize("writes", [Writes.BACK, Writes.DISPLACED])
async def test_a_copy_behind_is_as_old_as_its_original(place: Place, writes: Writes) -> None:
    one, other = address_of(1), address_of(2)
    async with opened(place.backend(Writes.DISPLACED)) as store:
        await put(store, one)
    os.utime(place.front / WAITING / one.name, (1000, 1000))
    cap = FILE if writes is Writes.DISPLACED else LOTS
    async with opened(place.backend(writes, cap=cap)) as store:
        await put(store, other)
        await store.expire()
        await until("it is behind", lambda: one.name in place.stored)
    assert (place.behind / one.name).stat().st_mtime == 1000


async def test_a_store_that_is_full_now_and_then_is_in_the_log_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    behind = Faulty(place.behind)
    backend = place.backend(Writes.BACK, behind=behind)

    def has_failed(more_than: int) -> bool:
        return backend.own_faults().get("no-space", 0) > more_than

    async with opened(backend) as store:
        for number in range(3):
            behind.fail_with(errno.ENOSPC)
            tried = backend.own_faults().get("no-space", 0)
            await put(store, address_of(number))
            await until("it was tried", partial(has_failed, tried))
            behind.fail_with(0)
            await until_flushed(store, place)
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert [one for one in said if "no-space" in one] == said
    assert len(said) == 1
    assert said[0].startswith("Copying behind the front of tier 2: no-space")


async def test_an_unreachable_store_costs_what_is_not_in_front_and_nothing_that_waits(
    place: Place,
) -> None:
    one, other, third = (address_of(number) for number in range(3))
    behind = Faulty(place.behind)
    backend = place.backend(Writes.BACK, behind=behind)
    async with opened(backend) as store:
        await put(store, one)
        await until("it is behind", lambda: one.name in place.stored)
        behind.fail_with(errno.ETIMEDOUT)
        assert await put(store, other) == Outcome.STORED
        assert await get(store, one) == "hit"
        assert await get(store, other) == "hit"
        assert await get(store, third) == Miss.LOST
        await until("it was tried", lambda: "unreachable" in backend.own_faults())
        assert store.stats().faults["unreachable"] >= 2  # also of what was asked for and is not in front
        assert store.stats().properties["front_waiting"] == 1
        behind.fail_with(0)
        await until_flushed(store, place)
        assert other.name in place.stored


async def test_a_broken_front_costs_speed_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = address_of(1), address_of(2)
    backend = place.backend(Writes.BACK)
    async with opened(backend) as store:
        await put(store, one)
        await until("it is behind", lambda: one.name in place.stored)
        broken = Faulty(place.front / COPIES)
        broken.fail_with(errno.EIO, only="read")
        monkeypatch.setattr(backend._disk, "copies", broken)
        assert await get(store, one) == "hit"  # from behind
        full = Faulty(place.front / WAITING)
        full.fail_with(errno.ENOSPC, only="write")
        monkeypatch.setattr(backend._disk, "waiting", full)
        assert await put(store, other) == Outcome.STORED
        assert other.name in place.stored


async def test_what_is_in_front_is_read_while_the_store_hangs(place: Place) -> None:
    class Hanging(Posix):
        go = threading.Event()

        def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
            assert not names or self.go.wait(30)
            return super().look(names)

        def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
            assert self.go.wait(30)
            return super().read(files)

    backend = place.backend(Writes.THROUGH, behind=Hanging(place.behind))
    async with opened(backend, threads=2) as store:
        assert await put(store, address_of(1)) == "stored"
        elsewhere = [address_of(number) for number in range(2, 12)]
        waiting: list[asyncio.Task[Any]] = []
        waiting += [asyncio.create_task(store.exists([one])) for one in elsewhere]
        waiting += [asyncio.create_task(get(store, one)) for one in elsewhere]
        await asyncio.sleep(0)  # they have begun
        async with asyncio.timeout(60):
            assert await get(store, address_of(1)) == "hit"
        assert not any(one.done() for one in waiting)
        Hanging.go.set()
        assert await asyncio.gather(*waiting) == [[False]] * 10 + [Miss.ABSENT] * 10


@EACH
async def test_a_front_whose_disk_is_full_at_the_start_is_used_later(
    place: Place, monkeypatch: pytest.MonkeyPatch, writes: Writes
) -> None:
    mkdir = Path.mkdir

    def refuse_in_front(path: Path, *arguments: object, **named: object) -> None:
        if path.is_relative_to(place.front):
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *arguments, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse_in_front)
        async with opened(place.backend(writes)) as store:
            assert await put(store, address_of(1)) == "stored"
            assert await get(store, address_of(1)) == "hit"
            assert set(store.stats().faults) == {"no-space"}
            patched.undo()
            await store.expire()
            assert await put(store, address_of(2)) == "stored"
            assert address_of(2).name in place.in_front


async def test_a_front_whose_copies_cannot_be_listed_is_done_without_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go when they can be: nobody has looked whether their originals are still there."""
    async with opened(place.backend(Writes.THROUGH)) as store:
        assert await put(store, address_of(1)) == "stored"
    backend, broken = place.backend(Writes.THROUGH), Faulty(place.front / COPIES)
    broken.fail_with(errno.EIO, only="files")
    monkeypatch.setattr(backend._disk, "copies", broken)
    async with opened(backend) as store:
        await store.expire()
        assert store.stats().faults == {"io-error": 2}
        assert await get(store, address_of(1)) == "hit"
        assert await put(store, address_of(2)) == "stored"
        await store.delete([address_of(1)])
        broken.fail_with(0)
        await store.expire()
        assert place.copies == {address_of(2).name}


async def test_a_damaged_copy_does_not_take_its_original_along(place: Place) -> None:
    address = address_of(1)
    async with opened(place.backend(Writes.THROUGH)) as store:
        await put(store, address)
        path = place.front / COPIES / address.name
        path.write_bytes(path.read_bytes()[:-PAGE] + bytes(PAGE))
        assert await get(store, address) == "hit", "the original is read in its place"
        assert store.stats().damaged == 1
        # Where the original is what is damaged, both go.
        for path in (place.front / COPIES / address.name, place.behind / address.name):
            await until("it is there", path.exists)
            path.write_bytes(bytes(FILE))
        assert await get(store, address) in (Miss.CORRUPT, Miss.TORN)
        assert place.copies | place.stored == set()
        assert await get(store, address) == Miss.ABSENT


class Slow(Posix):
    """Its writes wait until they may go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def write(self, files: list[Outgoing]) -> list[bool | Failed]:  # type: ignore[override]
        self.begun.set()
        assert self.may_go_on.wait(60)
        return super().write(files)


async def test_nothing_comes_back_of_what_is_being_copied_behind_while_it_is_purged(
    place: Place,
) -> None:
    behind = Slow(place.behind)
    async with opened(place.backend(Writes.BACK, behind=behind)) as store:
        await put(store, address_of(1))
        assert await asyncio.to_thread(behind.begun.wait, 60)
        purging = asyncio.create_task(store.purge(tag=ACME))
        await asyncio.sleep(0.05)
        assert not purging.done()
        behind.may_go_on.set()
        await purging
        assert place.in_front | place.stored == set()
        await store.expire()
        await asyncio.sleep(0.05)
        assert place.in_front | place.stored == set()


async def test_what_is_on_its_way_to_the_front_is_purged_too(place: Place) -> None:
    address = address_of(1)
    async with opened(place.behind) as elsewhere:
        await put(elsewhere, address)
    backend = place.backend(Writes.THROUGH)
    async with opened(backend) as store:
        held = threading.Event()
        for _ in range(4):  # all of its threads
            backend._workers._pool.submit(held.wait, 60)
        assert await get(store, address) == "hit"
        await store.purge(tag=ACME)
        held.set()
        await until("its threads are idle", lambda: not backend._contents.promotions)
        assert place.copies | place.stored == set()
        assert await get(store, address) == Miss.ABSENT


async def test_what_is_on_its_way_to_the_front_takes_bounded_memory(place: Place) -> None:
    backend = place.backend(Writes.THROUGH)
    backend.open()
    held = threading.Event()
    for _ in range(4):
        backend._workers._pool.submit(held.wait, 60)
    size = PROMOTED_BYTES_MAX // 2 - PAGE
    part = memoryview(bytes(size))
    for number in range(4):
        backend._promotions.begin(address_of(number), [part], size)
    assert len(backend._contents.promotions) == 2
    held.set()
    await until("they have arrived", lambda: backend._contents.promoting_bytes == 0)
    assert len(place.copies) == 2
    backend.close()


def test_what_is_purged_while_it_is_copied_on_its_way_to_the_front_does_not_come_there(
    place: Place,
) -> None:
    """And the purge does not wait for the copy."""
    backend = place.backend(Writes.THROUGH)
    backend.open()

    class Parts(list[memoryview]):
        def __iter__(self) -> Iterator[memoryview]:
            purge = threading.Thread(target=backend.purge, args=(Scope(ACME),), daemon=True)
            purge.start()
            purge.join(10)
            assert not purge.is_alive()
            return super().__iter__()

    backend._promotions.begin(address_of(1), Parts([memoryview(bytes(PAGE))]), PAGE)
    assert not backend._contents.promotions
    assert backend._contents.promoting_bytes == 0
    backend.close()
    assert place.copies == set()


async def test_what_is_handed_over_while_it_is_read_is_read_from_the_front(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = Slow(place.behind)
    backend = place.backend(Writes.BACK, behind=behind)
    async with opened(backend) as store:
        await put(store, address_of(1))
        assert await asyncio.to_thread(behind.begun.wait, 60)
        read = backend._disk.waiting.read

        def read_late(files: Sequence[Incoming]) -> list[int | Failed | None]:
            behind.may_go_on.set()
            wait_until("nothing waits", lambda: place.waiting == set(), 10)
            return read(files)

        monkeypatch.setattr(backend._disk.waiting, "read", read_late)
        assert await get(store, address_of(1)) == "hit"
        properties = store.stats().properties
        assert (properties["read_front"], properties["read_behind"]) == (1, 0)


def test_what_there_is_no_memory_to_copy_is_on_its_way_to_the_front_no_more(place: Place) -> None:
    backend = place.backend(Writes.THROUGH)
    backend.open()

    class Parts(list[memoryview]):
        def __iter__(self) -> Iterator[memoryview]:
            raise MemoryError

    with pytest.raises(MemoryError):
        backend._promotions.begin(address_of(1), Parts(), PAGE)
    assert not backend._contents.promotions
    assert backend._contents.promoting_bytes == 0
    backend.close()


async def test_a_front_that_is_given_up_leaves_nothing_and_loses_nothing(place: Place) -> None:
    one, other = address_of(1), address_of(2)
    behind = Posix(place.behind)
    async with opened(place.backend(Writes.DISPLACED)) as store:
        await put(store, one)
        await put(store, other)
    behind.open()
    give_up(place.front, behind, Background())
    assert place.stored == {one.name, other.name}
    assert files_in(place.front) == []
    give_up(place.front, behind, Background())  # again: there is nothing


async def test_orgs_share_the_front_by_what_they_fill_of_it(place: Place) -> None:
    """One that writes much displaces its own first."""
    few = address_of(0, BOLT)
    async with opened(place.backend(Writes.THROUGH, cap=4 * FILE)) as store:
        await put(store, few)
        for number in range(1, 8):
            await put(store, address_of(number))
        assert few.name in place.copies


@EACH
@pytest.mark.parametrize("fault", [0, errno.EIO])
async def test_an_org_that_fills_ten_fronts_leaves_others_their_copies(
    place: Place, writes: Writes, fault: int
) -> None:
    """Also while all that it has in front waits, and cannot make room."""
    backend = place.backend(writes, cap=8 * FILE, behind=(behind := Faulty(place.behind)))
    few = [address_of(number, BOLT) for number in range(4)]
    async with opened(backend) as store, opened(place.behind) as elsewhere:
        for address in few:
            await put(store, address)
        await until("they are in front", lambda: writes is Writes.DISPLACED or len(place.copies) == 4)
        behind.fail_with(fault, only="write")
        for number in range(10, 50):
            await put(store, address_of(number))
            await put(elsewhere, address_of(100 + number))
            await get(store, address_of(100 + number))
        await until("nothing is on its way", lambda: not backend._contents.promotions)
        in_front = place.in_front
        assert len(in_front) <= 8
        assert {address.name for address in few} <= in_front
        behind.fail_with(0)
        assert [await get(store, address) for address in few] == ["hit"] * 4


async def test_what_waits_of_one_org_leaves_room_for_what_waits_of_others(place: Place) -> None:
    behind = Faulty(place.behind)
    async with opened(place.backend(Writes.BACK, cap=12 * FILE, behind=behind)) as store:
        behind.fail_with(errno.ETIMEDOUT)
        first = [await put(store, address_of(number)) for number in range(20)]
        assert first == ["stored"] * 6 + ["failed"] * 14  # a half
        second = [await put(store, address_of(number, BOLT)) for number in range(20)]
        assert second == ["stored"] * 3 + ["failed"] * 17  # as much as is left then
        assert store.stats().properties["front_waiting_bytes"] == 9 * FILE
        behind.fail_with(0)
        await until_flushed(store, place)
        assert store.stats().properties["front_waiting_bytes"] == 0
        assert await put(store, address_of(30)) == "stored"


async def test_it_is_told_for_how_long_the_oldest_column_waits(place: Place) -> None:
    """Also after a restart. One that is copied counts no more."""
    behind = Faulty(place.behind)
    now = time.time()

    def backend() -> Fronted:
        return Fronted(place.front, behind, LOTS, Writes.BACK, clock=lambda: now)

    async with opened(backend()) as store:
        behind.fail_with(errno.ETIMEDOUT)
        await put(store, address_of(1))
        now += 100
        await put(store, address_of(2))
        assert store.stats().properties["front_waiting_seconds"] == 100
        os.utime(place.front / WAITING / address_of(2).name, (now - 500, now - 500))
    behind.fail_with(errno.ETIMEDOUT, only="write")
    async with opened(backend()) as store:
        assert store.stats().properties["front_waiting_seconds"] == 500
        await store.delete([address_of(2)])
        assert 99 <= store.stats().properties["front_waiting_seconds"] <= 101
        behind.fail_with(0)
        await until_flushed(store, place)
        await until("nothing waits", lambda: not store.stats().properties["front_waiting"])
        assert store.stats().properties["front_waiting_seconds"] == 0


async def test_what_waited_at_a_restart_counts_as_waiting(place: Place) -> None:
    behind = Faulty(place.behind)
    async with opened(place.backend(Writes.BACK, cap=12 * FILE, behind=behind)) as store:
        behind.fail_with(errno.ETIMEDOUT)
        for number in range(5):
            await put(store, address_of(number))
    backend = place.backend(Writes.BACK, cap=12 * FILE, behind=behind)
    behind.fail_with(errno.ETIMEDOUT, only="write")
    async with opened(backend) as store:
        assert [await put(store, address_of(number)) for number in (10, 11)] == ["stored", "failed"]


async def test_an_org_has_no_more_in_front_than_its_cap_whoever_wrote_it(place: Place) -> None:
    """What another agent wrote beyond it is read, and is not copied to the front."""
    addresses = [address_of(number) for number in range(6)]
    backend = place.backend(Writes.THROUGH)
    async with opened(backend, Caps(LOTS, 2 * FILE)) as store, opened(place.behind) as elsewhere:
        for address in addresses:
            await put(elsewhere, address)
            assert await get(store, address) == "hit"
            await until("nothing is on its way", lambda: not backend._contents.promotions)
            assert len(place.copies) <= 2
        await store.set_caps(Caps(LOTS, LOTS, {ACME: FILE}))
        await store.expire()
        assert len(place.copies) <= 1


@EACH
async def test_lower_caps_of_the_store_hold_in_front_too(place: Place, writes: Writes) -> None:
    async with opened(place.backend(writes)) as store:
        for number in range(4):
            await put(store, address_of(number))
        await store.set_caps(Caps(FILE, FILE))
        # A copy may be under way to what goes behind.
        await until("caps hold", lambda: len(place.in_front | place.stored) == 1)


async def test_a_purge_that_the_front_cannot_do_has_no_receipt(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = place.backend(Writes.THROUGH)
    async with opened(backend) as store:
        await put(store, address_of(1))
        broken = Faulty(place.front / COPIES)
        broken.fail_with(errno.EIO, only="purge")
        monkeypatch.setattr(backend._disk, "copies", broken)
        with pytest.raises(Failed):
            await store.purge(tag=ACME)
        broken.fail_with(0)
        assert (await store.purge(tag=ACME)).columns == 1
        assert place.copies | place.stored == set()


@pytest.fixture(autouse=True)
async def _no_thread_is_left() -> AsyncIterator[None]:
    yield
    assert not [
        one for one in threading.enumerate() if one.name.startswith(("tier2-front", "tier2-flush"))
    ]


# What threads do at the same time


async def test_a_column_that_makes_room_while_it_is_purged_does_not_come_back(place: Place) -> None:
    """Whose room it makes is another org's."""
    behind = Slow(place.behind)
    backend = place.backend(Writes.DISPLACED, cap=FILE, behind=behind)
    async with opened(backend) as store:
        await put(store, address_of(1))
        putting = asyncio.create_task(put(store, address_of(2, BOLT)))
        assert await asyncio.to_thread(behind.begun.wait, 60)
        purging = asyncio.create_task(store.purge(tag=ACME))
        await asyncio.sleep(0.05)
        assert not purging.done()
        behind.may_go_on.set()
        assert await putting == Outcome.STORED
        await purging
        assert place.in_front | place.stored == {address_of(2, BOLT).name}


@pytest.mark.parametrize("how", ["deleted", "evicted"])
async def test_what_is_being_copied_behind_is_gone_for_good_when_it_is_removed(
    place: Place, how: str
) -> None:
    behind = Slow(place.behind)
    async with opened(place.backend(Writes.BACK, behind=behind)) as store:
        await put(store, address_of(1))
        assert await asyncio.to_thread(behind.begun.wait, 60)
        going = store.delete([address_of(1)]) if how == "deleted" else store.set_caps(Caps(0, 0))
        removing = asyncio.ensure_future(going)
        await asyncio.sleep(0.05)
        assert not removing.done()
        behind.may_go_on.set()
        await removing
        await store.purge(tag=BOLT)  # nobody holds what is to be released
        assert place.in_front | place.stored == set()
        assert await get(store, address_of(1)) == Miss.ABSENT


class Lists(Posix):
    """Others go on while it has listed, and has not said so yet."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listed, self.may_go_on = threading.Event(), threading.Event()

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        found = list(super().files(progress))
        self.listed.set()
        assert self.may_go_on.wait(60)
        return iter(found)


async def test_what_is_copied_behind_while_that_is_listed_is_known(place: Place) -> None:
    behind = Lists(place.behind)
    backend = place.backend(Writes.DISPLACED, behind=behind)
    async with opened_meanwhile(backend, behind) as store:
        assert store.stats().columns == 1
        assert await get(store, address_of(1)) == "hit"


@contextlib.asynccontextmanager
async def opened_meanwhile(backend: Fronted, behind: Lists) -> AsyncIterator[Tier2]:
    """One column moves from the front to behind while it opens."""
    store = Tier2(backend, PLENTY, shared=False)
    waits = place_of(backend) / address_of(1).name
    waits.parent.mkdir(parents=True)
    slot_file(waits)
    opening = asyncio.create_task(store.open())
    assert await asyncio.to_thread(behind.listed.wait, 60)
    assert backend._claims.take([address_of(1)])
    backend._disk.copy_behind(address_of(1), 1.0)
    backend._disk.waiting.hand_over(address_of(1).name, backend._disk.copies)
    backend._contents.waits_no_more(address_of(1))
    backend._claims.release([address_of(1)])
    behind.may_go_on.set()
    await opening
    yield store
    await store.close()


def place_of(backend: Fronted) -> Path:
    return backend._disk.waiting._root


def slot_file(path: Path) -> None:
    """A column file as a spill makes it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        async def make() -> None:
            async with opened(root) as store:
                await put(store, address_of(1))

        thread = threading.Thread(target=lambda: asyncio.run(make()))
        thread.start()
        thread.join()
        shutil.copy(root / address_of(1).name, path)


# What goes wrong


async def test_a_damaged_column_that_waits_does_not_take_that_of_others_along(place: Place) -> None:
    address = address_of(1)
    async with opened(place.backend(Writes.DISPLACED)) as store:
        await put(store, address)
        async with opened(place.behind) as another_agent:
            await put(another_agent, address)
        path = place.front / WAITING / address.name
        path.write_bytes(bytes(FILE))
        assert await get(store, address) == "hit"
        assert place.waiting == set()


async def test_a_file_of_a_stranger_is_not_read_to_see_whether_it_is_the_damaged_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be as large as the machine's memory."""
    address, read = address_of(1), list[str]()

    def noted(backend: Backend, name: str) -> memoryview | None:
        read.append(name)
        return read_whole(backend, name)

    monkeypatch.setattr("kvss_agent.tier2.fronted.read_whole", noted)
    async with opened(place.backend(Writes.THROUGH)) as store:
        await put(store, address)
        (place.behind / address.name).write_bytes(b"")
        os.truncate(place.behind / address.name, 1 << 28)
        (place.front / COPIES / address.name).write_bytes(bytes(FILE))
        assert await get(store, address) != "hit"
    assert read == []


async def test_what_waits_and_is_half_a_file_is_dropped_and_copied_nowhere(place: Place) -> None:
    async with opened(place.backend(Writes.BACK)) as store:
        pass
    half = place.front / WAITING / address_of(1).name
    half.parent.mkdir(parents=True)
    half.write_bytes(bytes(5000))
    async with opened(place.backend(Writes.BACK)) as store:
        await store.expire()
        await until("it is dropped", lambda: not store.stats().properties["front_waiting"])
        assert place.waiting | place.stored == set()
        assert await get(store, address_of(1)) == Miss.ABSENT


async def test_a_disk_that_dates_no_files_costs_no_column_and_holds_nothing_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not here")

    one, other = address_of(1), address_of(2, BOLT)
    async with opened(place.backend(Writes.DISPLACED, cap=FILE)) as store:
        await put(store, one)
        monkeypatch.setattr("kvss_agent.tier2.posix.os.utime", refuse)
        assert await put(store, other) == Outcome.STORED
        assert (place.waiting, place.stored) == ({one.name}, {other.name})
        assert store.stats().faults["denied"] == 1
        assert (await store.purge(tag=ACME)).columns == 1


async def test_a_store_that_is_full_and_unreachable_loses_nothing_that_waits(place: Place) -> None:
    behind = Faulty(place.behind)
    addresses = [address_of(number) for number in range(4)]
    caps = Caps(2 * FILE, 2 * FILE)
    async with opened(place.backend(Writes.BACK, behind=behind), caps) as store:
        behind.fail_with(errno.ETIMEDOUT)
        assert [await put(store, address) for address in addresses] == ["stored"] * 2 + ["failed"] * 2
        behind.fail_with(0)
        assert [await get(store, address) for address in addresses[:2]] == ["hit"] * 2
        await until_flushed(store, place)


async def until_flushed(store: Tier2, place: Place) -> None:
    """Until the front knows of nothing that waits: it notes that after it has moved the file."""
    async with asyncio.timeout(60):
        while store.stats().properties["front_waiting"]:
            await store.expire()
            await asyncio.sleep(0.01)
    assert not place.waiting


async def test_a_front_that_became_smaller_holds_its_cap_once_nothing_waits(place: Place) -> None:
    behind = Faulty(place.behind)
    addresses = [address_of(number) for number in range(3)]
    async with opened(place.backend(Writes.BACK, behind=behind)) as store:
        behind.fail_with(errno.ETIMEDOUT)
        for address in addresses:
            await put(store, address)
    behind.fail_with(0)
    async with opened(place.backend(Writes.BACK, cap=FILE, behind=behind)) as store:
        await until_flushed(store, place)
        await store.expire()
        assert len(place.copies) == 1
        assert store.stats().properties["front_bytes"] == FILE
        assert [await get(store, address) for address in addresses] == ["hit"] * 3


async def test_a_file_that_vanished_from_the_front_takes_no_room(place: Place) -> None:
    behind = Faulty(place.behind)
    async with opened(place.backend(Writes.BACK, behind=behind)) as store:
        behind.fail_with(errno.ETIMEDOUT)
        await put(store, address_of(1))
        (place.front / WAITING / address_of(1).name).unlink()
        behind.fail_with(0)
        async with asyncio.timeout(60):
            while store.stats().properties["front_bytes"]:
                await store.expire()
                await asyncio.sleep(0.01)
        assert store.stats().properties["front_waiting"] == 0


async def test_a_copy_whose_original_is_gone_is_noticed_in_time(place: Place) -> None:
    async with opened(place.backend(Writes.THROUGH)) as store:
        await put(store, address_of(1))
        (place.behind / address_of(1).name).unlink()
        async with asyncio.timeout(60):
            while place.copies:
                await store.expire()
                await asyncio.sleep(0.01)
        assert await get(store, address_of(1)) == Miss.ABSENT


async def test_a_look_that_failed_is_not_the_last(place: Place) -> None:
    behind = Faulty(place.behind)
    async with opened(place.backend(Writes.THROUGH, behind=behind)) as store:
        await put(store, address_of(1))
        behind.fail_with(errno.ETIMEDOUT, only="look")
        async with asyncio.timeout(60):
            while not store.stats().faults:
                await store.expire()
                await asyncio.sleep(0.01)
        behind.fail_with(0)
        (place.behind / address_of(1).name).unlink()
        async with asyncio.timeout(60):
            while place.copies:
                await store.expire()
                await asyncio.sleep(0.01)


async def test_a_store_that_fails_is_asked_about_one_copy_at_a_time(place: Place) -> None:
    behind = Faulty(place.behind)
    backend = place.backend(Writes.THROUGH, behind=behind)

    async def tidied() -> int:
        """How many faults it took."""
        before = backend.own_faults().get("unreachable", 0)
        await asyncio.to_thread(backend.tidy)
        await until("nothing is looked for", lambda: not backend._originals._looking)
        return backend.own_faults().get("unreachable", 0) - before

    async with opened(backend) as store:
        for number in range(2 * LOOKS):
            await put(store, address_of(number))
        behind.fail_with(errno.ETIMEDOUT, only="look")
        assert [await tidied() for _ in range(4)] == [0, LOOKS, 1, 1]
        behind.fail_with(0)


async def test_a_store_that_fails_is_given_one_waiting_column_at_a_time(place: Place) -> None:
    behind = Faulty(place.behind)
    backend = place.backend(Writes.BACK, behind=behind)
    async with opened(backend) as store:
        behind.fail_with(errno.ETIMEDOUT, only="write")
        await put(store, address_of(0))
        await until("it was tried", lambda: backend._flushes.is_failing)
        for number in range(1, 8):
            await put(store, address_of(number))
        await until("nothing is copied", lambda: not backend._flushes._flushing)
        before = backend.own_faults()["unreachable"]
        await asyncio.to_thread(backend.tidy)
        await until("nothing is copied", lambda: not backend._flushes._flushing)
        assert backend.own_faults()["unreachable"] == before + 1
        behind.fail_with(0)


async def test_what_rests_for_its_budget_holds_up_no_promotion(place: Place) -> None:
    backend = place.backend(Writes.BACK)
    async with opened(backend) as store:
        with mock.patch.object(backend._disk.background, "book", return_value=30.0):
            for number in range(8):
                await put(store, address_of(number))
            await store.expire()  # which begins to copy them behind
            async with opened(place.behind) as elsewhere:
                await put(elsewhere, address_of(9))
            assert await get(store, address_of(9)) == "hit"
            await until("it is in front", lambda: len(place.copies) == 1)
            assert len(place.waiting) == 8


async def test_what_waits_is_queued_once_however_long_the_store_fails(place: Place) -> None:
    behind = Faulty(place.behind)
    backend = place.backend(Writes.BACK, behind=behind)
    async with opened(backend) as store:
        behind.fail_with(errno.ETIMEDOUT)
        for number in range(20):
            await put(store, address_of(number))
        held = threading.Event()
        pools = (backend._workers._pool, backend._flushes._workers._pool)
        for pool in pools:
            for _ in range(4):
                pool.submit(held.wait, 60)
        for _ in range(100):
            await store.expire()
        assert pools[0]._work_queue.qsize() <= LOOKS
        assert 0 < pools[1]._work_queue.qsize() <= 20
        held.set()
        behind.fail_with(0)
        await until_flushed(store, place)


def test_of_a_large_slot_only_the_file_is_held_in_memory(place: Place) -> None:
    backend = place.backend(Writes.THROUGH)
    backend.open()
    held = threading.Event()
    for _ in range(4):
        backend._workers._pool.submit(held.wait, 60)
    backend._promotions.begin(address_of(1), [memoryview(bytes(64)), memoryview(bytes(8 << 20))], PAGE)
    (promotion,) = backend._contents.promotions.values()
    content = promotion.content
    assert content is not None
    assert isinstance(content.obj, bytearray)
    assert len(content.obj) == PAGE
    held.set()
    backend.close()


def part_of(shard: str) -> tuple[bytes, str]:
    one = address_of(1)
    return one.namespace, shard


async def test_a_shard_that_leaves_has_what_waits_copied_behind_and_no_other(place: Place) -> None:
    mine, others = [address_of(n) for n in range(3)], address_of(9, shard="other")
    async with opened(place.backend(Writes.DISPLACED)) as store:
        for address in (*mine, others):
            assert await put(store, address) == Outcome.STORED
        part = part_of(mine[0].shard)
        assert await store.flush(part) == len(mine)
        await until("they are copies", lambda: len(place.copies) == len(mine))
        later = address_of(5)
        assert await put(store, later) == Outcome.STORED
        while await store.flush(part):  # noqa: ASYNC110 - of threads
            await asyncio.sleep(0.01)
        assert place.stored == {address.name for address in mine}, "not what has come since"
        assert (place.waiting, place.copies) == ({later.name, others.name}, set())
        assert await store.flush(part_of("nobody's")) == 0


async def test_what_waits_of_shards_that_are_gone_is_copied_behind_by_itself(place: Place) -> None:
    mine, others = address_of(1), address_of(9, shard="other")
    async with opened(place.backend(Writes.DISPLACED)) as store:
        for address in (mine, others):
            assert await put(store, address) == Outcome.STORED
        assert store.orphans == 0, "nobody has said which shards there are"
        store.attend([part_of(mine.shard)])
        assert store.orphans == 1
        while store.orphans:
            await store.expire()
        assert (place.stored, place.waiting, place.copies) == ({others.name}, {mine.name}, set())


async def test_what_was_on_its_way_when_its_shard_left_is_copied_behind_by_itself(place: Place) -> None:
    address = address_of(1)
    async with opened(place.backend(Writes.DISPLACED)) as store:
        store.attend([])
        assert await put(store, address) == Outcome.STORED
        assert store.orphans == 1
        while store.orphans:
            await store.expire()
        assert (place.stored, place.waiting, place.copies) == ({address.name}, set(), set())


async def test_copies_of_a_shard_that_is_gone_go_and_none_comes(place: Place) -> None:
    """A purge by its driver would not reach them."""
    mine, others = address_of(1), address_of(9, shard="other")
    async with opened(place.backend(Writes.THROUGH)) as store:
        for address in (mine, others):
            await put(store, address)
        store.attend([part_of(mine.shard)])
        while store.orphans:
            await store.expire()
        assert (place.copies, place.stored) == ({mine.name}, {mine.name, others.name})
        assert await get(store, others) == "hit", "a recall that was on its way"
        await asyncio.sleep(0.05)
        assert place.copies == {mine.name}
    async with opened(place.backend(Writes.THROUGH)) as store:
        store.attend([part_of("new")])
        while store.orphans:
            await store.expire()
        assert place.copies == set()


async def test_what_can_t_be_copied_is_dropped_in_the_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = Faulty(place.behind)
    address = address_of(1)
    async with opened(place.backend(Writes.DISPLACED, behind=behind)) as store:
        assert await put(store, address) == Outcome.STORED
        behind.fail_with(errno.ETIMEDOUT)
        part = part_of(address.shard)
        assert [await store.flush(part) for _ in range(3)] == [1, 1, 1]
        assert place.waiting == {address.name}
        monkeypatch.setattr(departures, "GIVE_UP_SECONDS", 0.0)
        monkeypatch.setattr(departures, "ASKED_SECONDS", -1.0)
        assert await store.flush(part) == 1, "it was asked for the last time long ago"
        monkeypatch.setattr(departures, "ASKED_SECONDS", 60.0)
        while await store.flush(part):  # noqa: ASYNC110 - of a thread that has its claim
            await asyncio.sleep(0.01)
        assert place.waiting == set()
        assert store.stats().properties["given_up"] == 1
