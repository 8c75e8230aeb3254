"""What tier 2 promises, on a real directory: columns come back or a reason does, and caps hold."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvss_agent.redundancy.layout import fragment_part
from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss
from kvss_agent.tier2 import store as store_module
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import (
    Arriving,
    Failed,
    Fault,
    Found,
    Leaving,
    Outgoing,
    Progress,
    Removed,
    ignore_progress,
)
from kvss_agent.tier2.index import Caps, Limits
from kvss_agent.tier2.parts import execution
from kvss_agent.tier2.posix import TEMPORARY, Posix
from kvss_agent.tier2.store import Outcome, Tier2
from tests.kvss_agent.integrity import differences
from tests.kvss_agent.tier2.columns import (
    ACME,
    BOLT,
    NAMESPACE,
    address_of,
    disk_bytes,
    evicted,
    files_in,
    get,
    get_many,
    holds,
    new_slot,
    opened,
    put,
    put_many,
    recall,
    spill,
)
from tests.kvss_agent.tier2.faulty import Faulty, Held, OneByOne

COLUMN_BYTES = 12_288  # of a file, with the payload that these tests use


# Columns


async def test_a_column_comes_back_as_the_evict_that_asks_for_it(tmp_path: Path) -> None:
    address = address_of(1)
    async with opened(tmp_path) as store:
        slot, column = evicted(address, sequence=7, tokens=40)
        assert await spill(store, address, slot, column, note=2**63) is Outcome.STORED
        into = new_slot()
        found = await recall(store, address, into, 12)
        assert isinstance(found, Header)
        assert (found.sequence, found.tokens) == (2**63, 40), "what was noted"
        assert isinstance(seal.verify(into, Column(address.key, address.tag, 12)), Header)
        assert holds(into, address, 12)


async def test_a_column_is_stored_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        outcomes = await asyncio.gather(*(put(store, address_of(1)) for _ in range(5)))
        assert Counter(outcomes) == {Outcome.STORED: 1, Outcome.ALREADY: 4}
        assert store.stats().columns == 1


async def test_shards_namespaces_and_tags_are_kept_apart(tmp_path: Path) -> None:
    addresses = [
        address_of(1),
        address_of(1, shard="full-1"),
        address_of(1, BOLT),
        address_of(1, namespace=bytes(16)),
    ]
    async with opened(tmp_path) as store:
        for address in addresses:
            assert await put(store, address) == "stored"
        assert [await get(store, address) for address in addresses] == ["hit"] * 4


async def test_what_is_not_there_is_absent_and_leaves_the_slot_empty(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        slot, _ = evicted(address_of(2))
        assert await recall(store, address_of(1), slot, 8) is Miss.ABSENT
        assert not any(slot[:HEADER_BYTES])


@pytest.mark.parametrize("shared", [True, False])
async def test_exists_tells_for_each(tmp_path: Path, *, shared: bool) -> None:
    async with opened(tmp_path, shared=shared) as store:
        await put(store, address_of(1))
        asked = [address_of(1), address_of(2), address_of(1)]
        assert await store.exists(asked) == [True, False, True]
        assert await store.exists([]) == []


async def test_a_slot_that_does_not_hold_the_column_is_not_stored(tmp_path: Path) -> None:
    address = address_of(1)
    async with opened(tmp_path) as store:
        slot, column = evicted(address)
        assert await spill(store, address, memoryview(bytearray(4096)), column) is Miss.ABSENT
        newer = Column(column.key, column.tag, column.sequence + 1)
        assert await spill(store, address, slot, newer) is Miss.STALE
        slot[5000] ^= 1
        assert await spill(store, address, slot, column) is Miss.CORRUPT
        seal.open_slot(slot, 8)
        assert await spill(store, address, slot, column) is Miss.TORN
        other, _ = evicted(address_of(1, BOLT))
        assert await spill(store, address, other, column) is Miss.FOREIGN
        assert store.stats().bytes == 0
        assert files_in(tmp_path) == []


async def test_a_slot_that_is_overwritten_while_it_is_spilled_is_not_published(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    async with opened(backend) as store:
        slot, column = evicted(address_of(1))
        spilling = asyncio.create_task(spill(store, address_of(1), slot, column))
        await backend.reached("write")
        seal.open_slot(slot, column.sequence + 1)
        backend.go("write")
        assert await spilling is Miss.TORN
        assert files_in(tmp_path) == []
        assert store.stats().bytes == 0


async def test_readers_find_a_slot_torn_while_it_is_filled(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    address = address_of(1)
    async with opened(backend) as store:
        backend.go("write")
        await put(store, address)
        slot = new_slot()
        recalling = asyncio.create_task(recall(store, address, slot, 3))
        await backend.reached("read")
        assert seal.verify(slot, Column(address.key, address.tag, 3)) is Miss.TORN
        backend.go("read")
        assert isinstance(await recalling, Header)


async def test_a_cancelled_recall_leaves_the_slot_alone_and_empty(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    async with opened(backend) as store:
        backend.go("write")
        await put(store, address_of(1))
        slot = new_slot()
        recalling = asyncio.create_task(recall(store, address_of(1), slot, 3))
        await backend.reached("read")
        recalling.cancel()
        await asyncio.sleep(0)
        recalling.cancel()
        await asyncio.sleep(0)
        assert not recalling.done(), "a thread still writes to the slot"
        backend.go("read")
        with pytest.raises(asyncio.CancelledError):
            await recalling
        assert not any(slot[:HEADER_BYTES])
        assert await get(store, address_of(1)) == "hit"


async def test_misuse_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        slot, column = evicted(address_of(1))
        with pytest.raises(ValueError, match="pages"):
            await spill(store, address_of(1), slot[:100], column)
        with pytest.raises(ValueError, match="own key and tag"):
            await spill(store, address_of(1, BOLT), slot, column)
        with pytest.raises(ValueError, match="a purge is of"):
            await store.purge()


async def test_too_many_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "IN_FLIGHT_MAX", 2)
    backend = Held(tmp_path)
    async with opened(backend) as store:
        writing = [asyncio.create_task(put(store, address_of(number))) for number in range(2)]
        await backend.reached("write")
        assert await put(store, address_of(3)) == Miss.REFUSED
        assert await get(store, address_of(3)) == Miss.REFUSED
        backend.go("write")
        assert await asyncio.gather(*writing) == ["stored", "stored"]
        assert await put(store, address_of(3)) == "stored"


# Batches


async def test_each_of_a_batch_has_an_answer_of_its_own(tmp_path: Path) -> None:
    backend = Faulty(tmp_path)
    async with opened(backend, threads=2) as store:
        await put(store, address_of(1))
        good, wrong = evicted(address_of(2)), evicted(address_of(3), sequence=8)
        backend.fail_for(address_of(4).name)
        assert await store.spill_many(
            [
                (address_of(1), *evicted(address_of(1)), 0),
                (address_of(2), *good, 0),
                (address_of(2), *good, 0),
                (address_of(3), wrong[0], Column(wrong[1].key, wrong[1].tag, 7), 0),
                (address_of(4), *evicted(address_of(4)), 0),
                (address_of(5), *evicted(address_of(5)), 0),
            ]
        ) == [
            Outcome.ALREADY,
            Outcome.STORED,
            Outcome.ALREADY,
            Miss.STALE,
            Outcome.FAILED,
            Outcome.STORED,
        ]
        backend.fail_for(address_of(5).name)
        asked = [address_of(number) for number in (1, 5, 2, 3, 1)]
        assert await get_many(store, asked) == ["hit", Miss.LOST, "hit", Miss.ABSENT, "hit"]
        stats = store.stats()
        assert stats.spills == {"stored": 3, "already": 2, "stale": 1, "failed": 1}
        assert stats.recalls == {"hit": 3, "lost": 1, "absent": 1}
        assert stats.faults == {"io-error": 2}
        assert (stats.work["spill"].count, stats.work["recall"].count) == (7, 5)
        assert stats.work["spill"].bytes == stats.work["recall"].bytes == 3 * COLUMN_BYTES
        assert stats.in_flight == 0
        backend.fail_for("")
        assert await get_many(store, [address_of(5)]) == ["hit"], "a fault is no damage"


async def test_a_batch_of_none_is_none(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert await store.spill_many([]) == []
        assert await store.recall_many([]) == []


async def test_what_is_many_times_in_a_batch_is_written_again_if_it_failed(tmp_path: Path) -> None:
    backend = Faulty(tmp_path)
    async with opened(backend) as store:
        backend.fail_nth(1)
        outcomes = await put_many(store, [address_of(1)] * 3)
        assert outcomes == [Outcome.FAILED, Outcome.STORED, Outcome.ALREADY]


async def test_damage_in_a_batch_is_counted_and_removed_once(tmp_path: Path) -> None:
    addresses = [address_of(number) for number in range(3)]
    async with opened(tmp_path) as store:
        await put_many(store, addresses)
        damage_a_bit(tmp_path / addresses[1].name)
        found = await get_many(store, [*addresses, addresses[1]])
        assert found == ["hit", Miss.CORRUPT, "hit", Miss.CORRUPT]
        assert store.stats().damaged == 1
        assert len(files_in(tmp_path)) == 2


async def test_of_a_batch_as_many_are_taken_as_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "IN_FLIGHT_MAX", 3)
    backend = Held(tmp_path)
    addresses = [address_of(number) for number in range(5)]
    async with opened(backend) as store:
        backend.go("read")
        writing = asyncio.create_task(put_many(store, addresses[:2]))
        await backend.reached("write")
        assert store.stats().in_flight == 2
        assert await get_many(store, addresses[3:]) == [Miss.ABSENT, Miss.REFUSED]
        backend.go("write")
        assert await writing == ["stored"] * 2
        assert await put_many(store, addresses[1:]) == ["already", "stored", "stored", Miss.REFUSED]


async def test_a_cancelled_batch_waits_for_its_threads(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    addresses = [address_of(number) for number in range(6)]
    async with opened(backend, threads=2) as store:
        spilling = asyncio.create_task(put_many(store, addresses))
        await backend.reached("write")
        spilling.cancel()
        await asyncio.sleep(0)
        assert not spilling.done(), "threads still read the slots"
        backend.go("write")
        with pytest.raises(asyncio.CancelledError):
            await spilling
        assert len(files_in(tmp_path)) == 6
        slots = [new_slot() for _ in addresses]
        items = [(address, slot, 3) for address, slot in zip(addresses, slots, strict=True)]
        recalling = asyncio.create_task(store.recall_many(items))
        await backend.reached("read")
        recalling.cancel()
        await asyncio.sleep(0)
        assert not recalling.done(), "threads still write to the slots"
        backend.go("read")
        with pytest.raises(asyncio.CancelledError):
            await recalling
        assert not any(any(slot[:HEADER_BYTES]) for slot in slots)
        assert await get_many(store, addresses) == ["hit"] * 6


async def test_a_purge_refuses_what_of_a_batch_has_not_begun(tmp_path: Path) -> None:
    """The second of two that are the same waits for the first; then there is a purge."""
    backend = Held(tmp_path)
    backend.go("read")
    addresses = [address_of(1), address_of(1), address_of(1, BOLT)]
    async with opened(backend) as store:
        spilling = asyncio.create_task(put_many(store, addresses))
        await backend.reached("write")
        purging = asyncio.create_task(store.purge(tag=ACME))
        await asyncio.sleep(0)
        assert await get_many(store, addresses[:1]) == [Miss.ABSENT]
        backend.go("write")
        assert (await purging).columns == 1
        assert await spilling == [Outcome.STORED, Miss.REFUSED, Outcome.STORED]
        assert await get_many(store, addresses) == [Miss.ABSENT, Miss.ABSENT, "hit"]


async def test_a_purge_refuses_what_waits_while_another_org_s_part_of_the_batch_is_slow(
    tmp_path: Path,
) -> None:
    class Gates(OneByOne):
        def __init__(self, root: Path) -> None:
            super().__init__(root)
            self.reached = {tag.hex(): threading.Event() for tag in (ACME, BOLT)}
            self.go = {tag.hex(): threading.Event() for tag in (ACME, BOLT)}

        def write_one(self, file: Outgoing) -> bool | Failed:
            tag = file.name.split("/")[1]
            self.reached[tag].set()
            assert self.go[tag].wait(60)
            return super().write_one(file)

    backend = Gates(tmp_path)
    async with opened(backend) as store:
        other = asyncio.create_task(put(store, address_of(1)))
        assert await asyncio.to_thread(backend.reached[ACME.hex()].wait, 60)
        batch = asyncio.create_task(put_many(store, [address_of(1), address_of(2, BOLT)]))
        assert await asyncio.to_thread(backend.reached[BOLT.hex()].wait, 60)
        purging = asyncio.create_task(store.purge(tag=ACME))
        await asyncio.sleep(0)
        backend.go[ACME.hex()].set()
        assert (await purging).columns == 1
        assert await other == "stored"
        backend.go[BOLT.hex()].set()
        assert await batch == [Miss.REFUSED, Outcome.STORED]
        assert await get_many(store, [address_of(1), address_of(2, BOLT)]) == [Miss.ABSENT, "hit"]


async def test_what_nobody_foresaw_ends_a_batch_when_no_thread_is_at_it(tmp_path: Path) -> None:
    class Broken(OneByOne):
        def write_one(self, file: Outgoing) -> bool | Failed:
            if file.name == address_of(0).name:
                raise ZeroDivisionError
            return super().write_one(file)

    addresses = [address_of(number) for number in range(6)]
    async with opened(Broken(tmp_path), threads=2) as store:
        with pytest.raises(ZeroDivisionError):
            await put_many(store, addresses)
        # The thread that it happened to had three of them.
        assert await get_many(store, addresses) == ["absent", "absent", "absent", "hit", "hit", "hit"]
        assert store.stats().bytes == disk_bytes(tmp_path)
        assert store.stats().in_flight == 0


# Caps


class Measured(OneByOne):
    """Looks at the whole disk while each file is being written, when most of it is there."""

    def __init__(self, root: Path, caps: Caps) -> None:
        super().__init__(root)
        self._caps = caps
        self._looking = threading.Lock()
        self.looks = 0

    def write_one(self, file: Outgoing) -> bool | Failed:
        def look() -> bool:
            self._look()
            return file.intact()

        return super().write_one(file._replace(intact=look))

    def delete(self, names: Sequence[str]) -> None:
        with self._looking:  # or one would count what has gone, and then what came instead
            super().delete(names)

    def _look(self) -> None:
        files: dict[int, tuple[bytes, int]] = {}  # by inode: a file is renamed while one looks
        with self._looking:
            for folder, _, names in os.walk(self._root):
                for path in (Path(folder) / name for name in names):
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        files[status.st_ino] = (bytes.fromhex(path.parts[-3]), status.st_blocks * 512)
        self.looks += 1
        assert sum(size for _, size in files.values()) <= self._caps.total
        for tag in {tag for tag, _ in files.values()}:
            assert sum(size for owner, size in files.values() if owner == tag) <= self._caps.of(tag)


async def test_concurrent_writers_never_exceed_a_cap(tmp_path: Path) -> None:
    """Three orgs, two hundred columns, many at a time, room for ten; the disk is looked at."""
    caps = Caps(10 * COLUMN_BYTES, 6 * COLUMN_BYTES, {BOLT: 2 * COLUMN_BYTES})
    tags = [ACME, BOLT, b"cozy............"]
    backend = Measured(tmp_path, caps)
    async with opened(backend, caps, threads=8) as store:
        addresses = [address_of(number, tag) for number in range(70) for tag in tags]
        random.Random(1).shuffle(addresses)
        outcomes: Counter[str] = Counter()

        async def write_some(share: list[Address]) -> None:
            for address in share:
                outcomes[await put(store, address)] += 1

        await asyncio.gather(*(put(store, address) for address in addresses[:100]))
        await asyncio.gather(*(write_some(addresses[start::12]) for start in range(12)))
        assert set(outcomes) <= {Outcome.STORED, Outcome.ALREADY, Outcome.FULL}
        assert outcomes[Outcome.STORED] > 50, "most of them had to evict"
        assert backend.looks > 50
        assert disk_bytes(tmp_path) == store.stats().bytes <= caps.total
        difference = await differences(store)
        assert (difference.missing, difference.unknown, difference.resized) == ((), (), ())


async def test_concurrent_batches_never_exceed_a_cap(tmp_path: Path) -> None:
    """As above, by batches that hold some columns twice, while others are recalled."""
    caps = Caps(10 * COLUMN_BYTES, 6 * COLUMN_BYTES, {BOLT: 2 * COLUMN_BYTES})
    tags = [ACME, BOLT, b"cozy............"]
    backend = Measured(tmp_path, caps)
    async with opened(backend, caps, threads=4) as store:
        choice = random.Random(2)
        addresses = [address_of(number, tag) for number in range(12) for tag in tags]
        outcomes: Counter[str] = Counter()

        async def write_some() -> None:
            for _ in range(4):
                outcomes.update(await put_many(store, choice.choices(addresses, k=9)))

        async def read_some() -> None:
            for _ in range(6):
                found = await get_many(store, choice.choices(addresses, k=9))
                assert set(found) <= {"hit", Miss.ABSENT}

        await asyncio.gather(*(write_some() for _ in range(6)), *(read_some() for _ in range(2)))
        assert set(outcomes) <= {Outcome.STORED, Outcome.ALREADY, Outcome.FULL}
        assert outcomes[Outcome.STORED] > 20
        assert backend.looks > 20
        assert disk_bytes(tmp_path) == store.stats().bytes <= caps.total
        difference = await differences(store)
        assert (difference.missing, difference.unknown, difference.resized) == ((), (), ())


async def test_the_least_recently_used_leaves_first(tmp_path: Path) -> None:
    async with opened(tmp_path, Caps(3 * COLUMN_BYTES, 3 * COLUMN_BYTES)) as store:
        for number in range(3):
            await put(store, address_of(number))
        assert await get(store, address_of(0)) == "hit"
        assert await store.exists([address_of(1)]) == [True]
        await put(store, address_of(3))
        assert [await get(store, address_of(number)) for number in (0, 1, 3)] == ["hit"] * 3
        assert await get(store, address_of(2)) == Miss.ABSENT
        assert store.stats().evicted == Removed(1, COLUMN_BYTES)


class Interrupted(Posix):
    """Somebody is called just before whole columns are stored or loaded, in its thread."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.storing: Callable[[Sequence[Leaving]], object] = lambda _: None
        self.loading: Callable[[], Miss | None] = lambda: None

    def store_columns(self, columns: Sequence[Leaving]) -> list[Miss | Failed | None]:
        self.storing(columns)
        return super().store_columns(columns)

    def load_columns(self, columns: Sequence[Arriving]) -> list[Header | Miss | Failed]:
        if found := self.loading():
            return [found] * len(columns)
        return super().load_columns(columns)


def writes_over(store: Tier2) -> bool:
    """Whether files can be written over here."""
    properties = store.stats().properties
    return bool(properties["nameless"] and properties["locks"])


async def test_a_spill_is_written_over_what_it_displaces(tmp_path: Path) -> None:
    async with opened(tmp_path, Caps(COLUMN_BYTES, COLUMN_BYTES)) as store:
        assert await put(store, address_of(1)) == "stored"
        with (tmp_path / address_of(1).name).open("rb") as first:
            assert await put(store, address_of(2)) == "stored"
            second = (tmp_path / address_of(2).name).read_bytes()
            assert (first.read() == second) is writes_over(store)
        assert files_in(tmp_path) == [tmp_path / address_of(2).name]
        assert store.stats().evicted == Removed(1, COLUMN_BYTES)
        assert store.stats().bytes == COLUMN_BYTES
        assert [await get(store, address_of(number)) for number in (1, 2)] == [Miss.ABSENT, "hit"]


@pytest.mark.parametrize(
    ("victim", "length"),
    [
        pytest.param(address_of(1, BOLT), 10_000, id="another org's"),
        pytest.param(address_of(1, namespace=b"another-model..."), 10_000, id="another namespace's"),
        pytest.param(address_of(1), 20_000, id="larger"),
    ],
)
async def test_only_a_column_of_the_same_org_and_size_is_written_over(
    tmp_path: Path, victim: Address, length: int
) -> None:
    cap = slot_bytes_for(length)
    async with opened(tmp_path, Caps(cap, cap)) as store:
        (tmp_path / address_of(2).name).parent.mkdir(parents=True)
        assert await put(store, victim, length) == "stored"
        before = (tmp_path / victim.name).read_bytes()
        with (tmp_path / victim.name).open("rb") as file:
            assert await put(store, address_of(2)) == "stored"
            assert file.read() == before
        assert files_in(tmp_path) == [tmp_path / address_of(2).name]
        assert store.stats().bytes == COLUMN_BYTES


async def test_what_is_displaced_by_a_spill_that_fails_is_there_as_far_as_its_file_is(
    tmp_path: Path,
) -> None:
    backend = Interrupted(tmp_path)
    async with opened(backend, Caps(COLUMN_BYTES, COLUMN_BYTES)) as store:
        assert await put(store, address_of(1)) == "stored"

        def fail(_: object) -> None:
            raise Failed(Fault.IO_ERROR, "as the kernel would")

        backend.storing = fail
        assert await put(store, address_of(2)) == Outcome.FAILED
        backend.storing = lambda _: None
        assert await get(store, address_of(1)) == "hit"
        assert store.stats().evicted == Removed(0, 0)

        def change(columns: Sequence[Leaving]) -> None:
            slot[-1] ^= 1
            slot[HEADER_BYTES] ^= 1

        backend.storing = change
        slot, column = evicted(address_of(3))
        assert await spill(store, address_of(3), slot, column) == Miss.CORRUPT
        assert await store.exists([address_of(1), address_of(3)]) == [False, False]
        assert files_in(tmp_path) == []
        assert store.stats().bytes == 0


async def test_a_victim_that_is_gone_has_left_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    """What nobody foresaw in one thread ends the batch, of which another thread has stored a part."""
    backend = Interrupted(tmp_path)
    async with opened(backend, Caps(2 * COLUMN_BYTES, 2 * COLUMN_BYTES), threads=2) as store:
        assert await put_many(store, [address_of(1), address_of(2)]) == ["stored"] * 2

        def fail(columns: Sequence[Leaving]) -> None:
            if columns[0].name == address_of(4).name:
                raise MemoryError

        backend.storing = fail
        with pytest.raises(MemoryError):
            await put_many(store, [address_of(3), address_of(4)])
        found = await get_many(store, [address_of(number) for number in (1, 2, 3, 4)])
        assert found == [Miss.ABSENT, "hit", "hit", Miss.ABSENT]
        assert store.stats().evicted == Removed(1, COLUMN_BYTES)
        assert not store._state.index.is_leaving(address_of(1))


async def test_what_another_agent_writes_over_while_it_is_read_is_absent_and_no_damage(
    tmp_path: Path,
) -> None:
    backend = Interrupted(tmp_path)
    cap = Caps(COLUMN_BYTES, COLUMN_BYTES)
    async with opened(tmp_path, cap) as writer, opened(backend) as reader:
        loop = asyncio.get_running_loop()
        found = [Miss.TORN]

        def write_over() -> Miss | None:
            if found:
                stored = asyncio.run_coroutine_threadsafe(put(writer, address_of(2)), loop)
                assert stored.result(10) == "stored"
            return found.pop() if found else None

        assert await put(writer, address_of(1)) == "stored"
        assert await get(reader, address_of(1)) == "hit"
        backend.loading = write_over
        assert await get(reader, address_of(1)) == Miss.ABSENT
        assert await get(reader, address_of(2)) == "hit"
        assert reader.stats().damaged == 0


async def test_batches_that_displace_each_other_leave_what_the_index_says(tmp_path: Path) -> None:
    """Two agents with caps of their own in one directory, at the same columns of two orgs."""
    caps = Caps(10 * COLUMN_BYTES, 6 * COLUMN_BYTES)
    async with opened(tmp_path, caps, threads=8) as one, opened(tmp_path, caps, threads=8) as two:
        choice = random.Random(3)
        addresses = [address_of(number, tag) for number in range(15) for tag in (ACME, BOLT)]

        async def write_some(store: Tier2) -> None:
            for _ in range(8):
                outcomes = await put_many(store, choice.choices(addresses, k=9))
                assert set(outcomes) <= {Outcome.STORED, Outcome.ALREADY, Outcome.FULL}
                found = await get_many(store, choice.choices(addresses, k=9))
                assert set(found) <= {"hit", Miss.ABSENT}

        await asyncio.gather(*(write_some(store) for store in (one, two) for _ in range(4)))
        assert disk_bytes(tmp_path) <= 2 * caps.total
        for store in (one, two):
            assert store.stats().damaged == 0
            assert not store.stats().faults
            assert store.stats().bytes <= caps.total
            await store.refresh()
        assert not [path for path in files_in(tmp_path) if path.name.startswith(TEMPORARY)]


async def test_a_column_larger_than_a_cap_is_full(tmp_path: Path) -> None:
    async with opened(tmp_path, Caps(100 * COLUMN_BYTES, COLUMN_BYTES - 1)) as store:
        assert await put(store, address_of(1)) == Outcome.FULL
        assert files_in(tmp_path) == []


async def test_a_column_that_is_being_read_is_not_evicted(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    async with opened(backend, Caps(COLUMN_BYTES, COLUMN_BYTES)) as store:
        backend.go("write")
        await put(store, address_of(1))
        recalling = asyncio.create_task(get(store, address_of(1)))
        await backend.reached("read")
        assert await put(store, address_of(2)) == Outcome.FULL
        backend.go("read")
        assert await recalling == "hit"
        assert await put(store, address_of(2)) == "stored"


async def test_lower_caps_evict_and_higher_ones_give_room(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for number in range(6):
            await put(store, address_of(number))
            await put(store, address_of(number, BOLT))
        await store.set_caps(Caps(8 * COLUMN_BYTES, 5 * COLUMN_BYTES, {BOLT: COLUMN_BYTES}))
        assert store.stats().orgs == {
            ACME.hex(): (5 * COLUMN_BYTES, 5 * COLUMN_BYTES),
            BOLT.hex(): (COLUMN_BYTES, COLUMN_BYTES),
        }
        assert disk_bytes(tmp_path) == 6 * COLUMN_BYTES
        await store.set_caps(Caps(0, 0))
        assert files_in(tmp_path) == []
        assert await put(store, address_of(1)) == Outcome.FULL
        await store.set_caps(Caps(COLUMN_BYTES, COLUMN_BYTES))
        assert await put(store, address_of(1)) == "stored"


async def test_caps_lowered_while_a_column_is_written_hold_when_that_is_done(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    async with opened(backend) as store:
        writing = asyncio.create_task(put(store, address_of(1)))
        await backend.reached("write")
        lowering = asyncio.create_task(store.set_caps(Caps(0, 0)))
        await asyncio.sleep(0)
        assert not lowering.done()
        backend.go("write")
        await lowering
        assert files_in(tmp_path) == []
        assert await writing == "stored", "it was, for a moment"


async def test_caps_lowered_while_a_column_is_written_over_hold_when_that_is_done(
    tmp_path: Path,
) -> None:
    backend, reached, go = Interrupted(tmp_path), threading.Event(), threading.Event()
    async with opened(backend, Caps(COLUMN_BYTES, COLUMN_BYTES)) as store:
        assert await put(store, address_of(1)) == "stored"

        def stop(_: object) -> None:
            reached.set()
            assert go.wait(10)

        backend.storing = stop
        writing = asyncio.create_task(put(store, address_of(2)))
        assert await asyncio.to_thread(reached.wait, 10)
        lowering = asyncio.create_task(store.set_caps(Caps(0, 0)))
        await asyncio.sleep(0)
        go.set()
        await lowering
        assert files_in(tmp_path) == []
        assert await writing == "stored", "it was, for a moment"


# Delete and purge


async def test_delete_says_what_is_gone(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, address_of(1))
        twice_and_unknown = [address_of(1), address_of(1), address_of(2)]
        assert await store.delete(twice_and_unknown) == Removed(1, COLUMN_BYTES)
        assert await store.delete(twice_and_unknown) == Removed(0, 0)
        assert await get(store, address_of(1)) == Miss.ABSENT


async def test_deletes_that_cross_each_other_both_end(tmp_path: Path) -> None:
    addresses = [address_of(number) for number in range(4)]
    async with opened(tmp_path) as store:
        for address in addresses:
            await put(store, address)
        async with asyncio.timeout(60):
            results = await asyncio.gather(store.delete(addresses), store.delete(addresses[::-1]))
        assert sum(removed.columns for removed in results) == 4


@pytest.mark.parametrize(
    ("scope", "left"),
    [
        ({"tag": ACME}, [False, True, False]),
        ({"namespace": NAMESPACE}, [False, False, True]),
        ({"tag": ACME, "namespace": NAMESPACE}, [False, True, True]),
    ],
    ids=["tag", "namespace", "both"],
)
async def test_a_purge_takes_all_of_its_scope_and_nothing_else(
    tmp_path: Path, scope: dict[str, bytes], left: list[bool]
) -> None:
    addresses = [address_of(1), address_of(2, BOLT), address_of(3, namespace=bytes(16))]
    async with opened(tmp_path) as store:
        for address in addresses:
            await put(store, address)
        receipt = await store.purge(**scope)
        assert receipt.columns == left.count(False)
        assert receipt.bytes == left.count(False) * COLUMN_BYTES
        assert await store.exists(addresses) == left
        assert len(files_in(tmp_path)) == left.count(True)
        assert (await store.purge(**scope)).columns == 0


async def test_a_purge_takes_what_the_index_does_not_know(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, address_of(1))
        known = files_in(tmp_path)[0]
        (known.parent / ".tmp-of-another-agent").write_bytes(b"half of something")
        (known.parent / "stranger").write_bytes(b"who put this here?")
        (known.parent / "folder").mkdir()
        (known.parent / "link").symlink_to(tmp_path)
        async with opened(tmp_path, shared=False) as other:
            await put(other, address_of(2))
        receipt = await store.purge(tag=ACME)
        assert receipt.columns == 2
        assert list(os.walk(tmp_path)) == [(str(tmp_path), [], [])], "empty directories go too"


async def test_a_spill_from_before_a_purge_does_not_come_back_after_it(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    backend.go("read")
    async with opened(backend) as store:
        slot, column = evicted(address_of(1))
        before = asyncio.create_task(spill(store, address_of(1), slot, column))
        await backend.reached("write")
        purging = asyncio.create_task(store.purge(tag=ACME))
        await asyncio.sleep(0)
        assert await put(store, address_of(2)) == Miss.REFUSED
        assert await get(store, address_of(1)) == Miss.ABSENT
        assert await store.exists([address_of(1)]) == [False]
        assert not purging.done()
        backend.go("write")
        receipt = await purging
        assert await before is Outcome.STORED
        assert receipt.columns == 1
        assert files_in(tmp_path) == []
        assert await get(store, address_of(1)) == Miss.ABSENT
        assert store.stats().bytes == 0
        assert await put(store, address_of(2)) == "stored", "after the receipt the org may come back"


async def test_a_recall_from_before_a_purge_brings_nothing(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    async with opened(backend) as store:
        backend.go("write")
        await put(store, address_of(1))
        recalling = asyncio.create_task(get(store, address_of(1)))
        await backend.reached("read")
        purging = asyncio.create_task(store.purge(tag=ACME))
        await asyncio.sleep(0)
        assert await put(store, address_of(2)) == Miss.REFUSED
        assert await store.exists([address_of(1)]) == [False], "it is going"
        backend.go("read")
        assert (await purging).columns == 1
        assert await recalling == Miss.ABSENT


async def test_a_purge_while_everybody_writes_leaves_nothing_of_before(tmp_path: Path) -> None:
    async with opened(tmp_path, threads=8) as store:
        writers = [
            asyncio.create_task(put(store, address_of(n, tag)))
            for n in range(60)
            for tag in (ACME, BOLT)
        ]
        await asyncio.sleep(0.005)
        receipt = await store.purge(tag=ACME)
        folder = tmp_path / NAMESPACE.hex() / ACME.hex()
        assert not folder.exists()
        await asyncio.gather(*writers)
        stored = [address_of(n) for n in range(60)]
        assert receipt.columns <= 60
        assert not any(await store.exists(stored)), "all of them were on their way before the purge"
        assert all(await store.exists([address_of(n, BOLT) for n in range(60)]))


# Sharing


async def test_two_agents_share_a_directory(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        await put(one, address_of(1))
        assert await two.exists([address_of(1), address_of(2)]) == [True, False]
        assert await get(two, address_of(1)) == "hit"
        assert two.stats().bytes == COLUMN_BYTES, "it has been adopted"
        await one.delete([address_of(1)])
        assert await get(two, address_of(1)) == Miss.ABSENT
        assert two.stats().bytes == 0, "and forgotten"
        await put(two, address_of(2))
        assert await get(one, address_of(2)) == "hit"
        assert await one.delete([address_of(2)]) == Removed(1, COLUMN_BYTES)


async def test_an_agent_that_does_not_share_asks_nobody(tmp_path: Path) -> None:
    async with opened(tmp_path, shared=False) as one, opened(tmp_path) as other:
        await put(other, address_of(1))
        assert await one.exists([address_of(1)]) == [False]
        assert await get(one, address_of(1)) == Miss.ABSENT
        assert await one.delete([address_of(1)]) == Removed(0, 0)


async def test_what_does_not_fit_is_read_without_being_adopted(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path, Caps(COLUMN_BYTES, COLUMN_BYTES)) as two:
        await put(two, address_of(1))
        await put(one, address_of(2))
        assert await get(two, address_of(2)) == "hit"
        assert (await two.exists([address_of(1), address_of(2)])) == [True, True]
        assert two.stats().bytes == COLUMN_BYTES


async def test_a_store_that_did_not_answer_is_not_looked_at_for_a_moment(tmp_path: Path) -> None:
    backend = Faulty(tmp_path)
    async with opened(tmp_path) as other, opened(backend) as store:
        assert await put(other, address_of(1)) == "stored"
        backend.fail_with(errno.ETIMEDOUT)
        assert await store.exists([address_of(1)]) == [False]
        backend.fail_with(0)
        assert await store.exists([address_of(1)]) == [False]
        assert store.stats().faults == {"unreachable": 1}
        store._lister._looker._unreachable_until = 0.0
        assert await store.exists([address_of(1)]) == [True]


@pytest.mark.parametrize("how", ["purge", "delete", "evict"])
async def test_what_is_removed_while_files_are_listed_is_not_known_again(
    tmp_path: Path, how: str
) -> None:
    class Listed(Posix):
        listed, go = threading.Event(), threading.Event()

        def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
            found = list(super().files(progress))
            self.listed.set()
            assert self.go.wait(30)
            yield from found

    async with opened(tmp_path) as other:
        assert await put(other, address_of(0)) == "stored"
    backend = Listed(tmp_path)
    backend.go.set()
    async with opened(backend, Caps(4 * COLUMN_BYTES, 4 * COLUMN_BYTES)) as store:
        removed = [address_of(number) for number in range(3)]
        assert await put_many(store, removed[1:]) == ["stored"] * 2
        backend.listed.clear()
        backend.go.clear()
        listing = asyncio.create_task(store.rebuild())
        assert await asyncio.to_thread(backend.listed.wait, 30)
        if how == "purge":
            assert (await store.purge(tag=ACME)).columns == 3
        elif how == "delete":
            assert (await store.delete(removed)).columns == 3
        else:
            others = [address_of(number) for number in range(3, 7)]
            assert [await put(store, one) for one in others] == ["stored"] * 4
        backend.go.set()
        await listing
        assert (await differences(store)).missing == ()
        assert await store.exists(removed) == [False] * 3


async def test_rebuilding_finds_what_others_wrote_and_removed(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        await put(one, address_of(1))
        await put(two, address_of(2))
        await put(two, address_of(3))
        await two.delete([address_of(3)])
        difference = await differences(one)
        assert difference.unknown == (address_of(2),)
        await one.rebuild()
        assert (await differences(one)).unknown == ()
        await two.delete([address_of(1)])
        assert (await differences(one)).missing == (address_of(1),)
        await one.rebuild()
        difference = await differences(one)
        assert (difference.missing, difference.unknown) == ((), ())


async def test_what_others_removed_is_stored_again_once_that_is_known(tmp_path: Path) -> None:
    """By a listing, or since it could not be recalled. Until then a spill costs no look at the store."""
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        for learn in (one.refresh, lambda: get(one, address_of(1))):
            assert await put(one, address_of(1)) == "stored"
            await two.delete([address_of(1)])
            assert await put(one, address_of(1)) == "already"
            await learn()
        assert await put(one, address_of(1)) == "stored"
        assert one.stats().faults == {}


async def test_a_refresh_learns_what_others_did_evicts_nothing_and_expires_what_is_nobodys(
    tmp_path: Path,
) -> None:
    now = time.time()
    few = Caps(2 * COLUMN_BYTES, 2 * COLUMN_BYTES)
    store = Tier2(Posix(tmp_path), few, clock=lambda: now)
    await store.open()
    async with opened(tmp_path) as others:
        assert await put_many(others, [address_of(number) for number in range(5)]) == ["stored"] * 5
        assert await put(store, address_of(9)) == "stored"
        await others.delete([address_of(9)])
        await store.refresh()
        assert (store.stats().columns, len(files_in(tmp_path))) == (2, 5)
        assert (await differences(store)).missing == ()
        store.limits = Limits(60)
        await store.refresh()
        assert len(files_in(tmp_path)) == 5
        now += 120
        await store.refresh()
        await store.expire()
        assert (store.stats().expired, len(files_in(tmp_path))) == (5, 0)
    await store.close()


async def test_what_another_agent_wrote_that_is_gone_does_not_live_longer_for_a_recall(
    tmp_path: Path,
) -> None:
    now = time.time()
    store = Tier2(Posix(tmp_path), Caps(1 << 40, 1 << 40), clock=lambda: now)
    store.limits = Limits(100)
    await store.open()
    async with opened(tmp_path) as gone:
        assert await put(gone, address_of(1)) == "stored"
    os.utime(tmp_path / address_of(1).name, (now, now))
    now += 90
    assert await get(store, address_of(1)) == "hit"
    now += 60
    await store.refresh()
    await store.expire()
    assert files_in(tmp_path) == []
    assert store.stats().overstay_seconds_max == pytest.approx(50)
    await store.close()


async def test_what_a_clock_that_was_ahead_has_dated_does_not_live_longer_for_it(tmp_path: Path) -> None:
    right = time.time()
    now = right + 3600
    store = Tier2(Posix(tmp_path), Caps(1 << 40, 1 << 40), clock=lambda: now)
    store.limits = Limits(100)
    await store.open()
    assert await put(store, address_of(1)) == "stored"
    now = right
    await store.refresh()
    now += 101
    await store.expire()
    assert files_in(tmp_path) == []
    await store.close()


async def test_what_is_stored_during_a_listing_is_not_as_old_as_the_file_before_it(
    tmp_path: Path,
) -> None:
    """Another agent removes its expired column after the listing has read it, and this agent stores it
    again: popular prefixes expire as others do."""
    now = time.time()
    store = Tier2(Posix(tmp_path), Caps(1 << 40, 1 << 40), clock=lambda: now)
    store.limits = Limits(100)
    await store.open()
    files = store._lister.files

    async def slowly(progress: Progress) -> list[Found]:
        found = await files(progress)
        async with opened(tmp_path) as other:
            await other.delete([address_of(1)])
        assert await put(store, address_of(1)) == "stored"
        return found

    async with opened(tmp_path) as other:
        assert await put(other, address_of(1)) == "stored"
    os.utime(tmp_path / address_of(1).name, (now, now))
    now += 101
    store._lister.files = slowly  # type: ignore[method-assign]
    await store.refresh()
    await store.expire()
    assert await get(store, address_of(1)) == "hit"
    assert store.stats().overstay_seconds_max == 0
    await store.close()


# The start


async def test_the_index_is_rebuilt_from_the_files_with_progress(tmp_path: Path) -> None:
    addresses = [address_of(number) for number in range(20)]
    async with opened(tmp_path) as store:
        for address in addresses:
            await put(store, address)
    seen: list[tuple[int, int | None]] = []
    store = Tier2(Posix(tmp_path), Caps(1 << 40, 1 << 40), shared=False)
    await store.open(lambda done, total: seen.append((done, total)))
    assert await store.exists(addresses) == [True] * 20
    assert store.stats().bytes == disk_bytes(tmp_path)
    await store.close()
    assert [done for done, _ in seen] == list(range(len(seen)))
    assert {total for _, total in seen} == {len(seen) - 1}


async def test_at_the_start_the_caps_hold_too_and_the_oldest_leaves(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for number in range(5):
            await put(store, address_of(number))
    for age, number in enumerate((3, 0, 1, 4, 2)):
        os.utime(tmp_path / address_of(number).name, (1000 + age, 1000 + age))
    async with opened(tmp_path, Caps(2 * COLUMN_BYTES, 2 * COLUMN_BYTES)) as store:
        assert await store.exists([address_of(n) for n in range(5)]) == [False, False, True, False, True]
        assert disk_bytes(tmp_path) == 2 * COLUMN_BYTES


async def test_files_that_are_not_ours_are_counted_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine too")
    async with opened(tmp_path) as store:
        assert store.stats().properties["unknown_files"] == 2
        assert store.stats().columns == 0
    assert (tmp_path / "README").read_text() == "mine"


# Damage


def damage_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[9000] ^= 1
    path.write_bytes(content)


def change_the_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4] = seal.VERSION + 1
    path.write_bytes(content)


def copy_over(other: Address) -> Callable[[Path], object]:
    """Somebody copies the file of another column over it."""

    def copy(path: Path) -> None:
        root = path.parents[3]
        shutil.copyfile(root / other.name, path)

    return copy


@pytest.mark.parametrize("restarted", [False, True], ids=["known", "after a restart"])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (damage_a_bit, Miss.CORRUPT),
        (change_the_version, Miss.CORRUPT),
        (lambda path: os.truncate(path, 8192), Miss.TORN),
        (lambda path: path.write_bytes(bytes(COLUMN_BYTES)), Miss.TORN),
        (copy_over(address_of(2, BOLT)), Miss.FOREIGN),
        (copy_over(address_of(3)), Miss.STALE),
        (copy_over(address_of(1, shard="full-1")), Miss.STALE),
    ],
    ids=["bit", "version", "truncated", "zeros", "other org", "other column", "other shard"],
)
async def test_what_is_not_what_its_name_says_is_a_miss_and_removed(
    tmp_path: Path, harm: Callable[[Path], object], reason: Miss, *, restarted: bool
) -> None:
    address = address_of(1)
    path = tmp_path / address.name
    async with opened(tmp_path) as store:
        for other in (address, address_of(2, BOLT), address_of(3), address_of(1, shard="full-1")):
            await put(store, other)
        harm(path)
        if not restarted:
            assert await get(store, address) == reason
    async with opened(tmp_path) as store:
        if restarted:
            assert await get(store, address) == reason
            assert store.stats().damaged == 1
            assert store.stats().recalls == {reason: 1}
        assert not path.exists()
        assert await put(store, address) == "stored"
        assert await get(store, address) == "hit"


async def test_bytes_of_another_org_do_not_stay_in_the_slot(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, address_of(1))
        await put(store, address_of(2, BOLT))
        shutil.copyfile(tmp_path / address_of(2, BOLT).name, tmp_path / address_of(1).name)
        slot = new_slot()
        assert await recall(store, address_of(1), slot, 3) is Miss.FOREIGN
        assert not any(slot)


@pytest.mark.parametrize("size", [0, 100, 5000])
async def test_half_a_file_found_at_the_start_is_removed(tmp_path: Path, size: int) -> None:
    async with opened(tmp_path) as store:
        await put(store, address_of(1))
    os.truncate(tmp_path / address_of(1).name, size)
    async with opened(tmp_path) as store:
        assert store.stats().damaged == 1
        assert files_in(tmp_path) == []
        assert await get(store, address_of(1)) == Miss.ABSENT


# Faults


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (5, "io-error"),
        (28, "no-space"),
        (122, "no-space"),
        (30, "denied"),
        (110, "unreachable"),
        (12, "other"),
    ],
    ids=["EIO", "ENOSPC", "EDQUOT", "EROFS", "ETIMEDOUT", "ENOMEM"],
)
async def test_what_the_kernel_refuses_is_a_reason_and_passes(
    tmp_path: Path, number: int, fault: str
) -> None:
    backend = Faulty(tmp_path)
    async with opened(backend, Caps(4 * COLUMN_BYTES, 4 * COLUMN_BYTES)) as store:
        await put(store, address_of(1))
        backend.fail_with(number)
        assert await put(store, address_of(2)) == Outcome.FAILED
        assert await get(store, address_of(1)) in (Miss.LOST, Miss.ABSENT)
        assert await store.exists([address_of(2)]) == [False]
        with pytest.raises(Failed):
            await store.delete([address_of(1)])
        with pytest.raises(Failed):
            await store.purge(tag=ACME)
        with pytest.raises(Failed):
            await store.set_caps(Caps(0, 0))
        with pytest.raises(Failed):
            await store.rebuild()
        assert set(store.stats().faults) == {fault}
        assert store.stats().last_fault.startswith(fault)
        backend.fail_with(0)
        await store.set_caps(Caps(4 * COLUMN_BYTES, 4 * COLUMN_BYTES))
        assert await put(store, address_of(2)) == "stored"
        assert await get(store, address_of(2)) == "hit"
        assert store.stats().bytes == disk_bytes(tmp_path)


async def test_whichever_call_fails_nothing_wrong_is_served_and_caps_hold(tmp_path: Path) -> None:
    """Fail the first call to the kernel, then the second, and so on, until none is left to fail."""
    for nth in range(1, 60):
        root = tmp_path / str(nth)
        backend = Faulty(root)
        async with opened(backend, Caps(2 * COLUMN_BYTES, 2 * COLUMN_BYTES)) as store:
            backend.fail_nth(nth)
            for number in range(4):
                assert await put(store, address_of(number)) in ("stored", "failed")
                assert await get(store, address_of(number)) in ("hit", "absent", "lost")
            is_done = backend.fail_nth(0)
            assert disk_bytes(root) <= 2 * COLUMN_BYTES
            for number in range(4):
                assert await get(store, address_of(number)) in ("hit", "absent")
            await put(store, address_of(9))
            assert await get(store, address_of(9)) == "hit"
            difference = await differences(store)
            assert (difference.unknown, difference.resized) == ((), ())
        if is_done:
            assert nth > 10
            return
    raise AssertionError("there is always another call to fail")


async def test_a_full_disk_makes_room_for_the_next(tmp_path: Path) -> None:
    backend = Faulty(tmp_path)
    async with opened(backend) as store:
        for number in range(3):
            await put(store, address_of(number))
        backend.fail_with(28, only="write")
        assert await put(store, address_of(9)) == Outcome.FAILED
        assert store.stats().evicted == Removed(1, COLUMN_BYTES)
        assert await store.exists([address_of(n) for n in range(3)]) == [False, True, True]
        assert store.stats().faults == {"no-space": 1}


async def test_the_log_has_a_fault_of_a_kind_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is what the runbook sends people to, and each column of a full disk is another fault."""
    backend = Faulty(tmp_path)
    async with opened(backend) as store:
        for number in (errno.ENOSPC, errno.EIO, errno.ENOSPC):
            backend.fail_with(number, only="write")
            assert await put(store, address_of(number)) != Outcome.STORED
        assert sum(store.stats().faults.values()) == 3
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert [one.split(":")[:2] for one in said] == [["Tier 2", " no-space"], ["Tier 2", " io-error"]]


async def test_a_full_disk_gives_up_no_fragment_and_says_that_it_is_full(tmp_path: Path) -> None:
    """The agent whose columns they are of is not asked: it counts on them."""
    fragments = [address_of(number, shard=fragment_part("full.0", 1, 4, 1)) for number in range(3)]
    backend = Faulty(tmp_path)
    async with opened(backend) as store:
        for address in fragments[:2]:
            await put(store, address)
        await put(store, address_of(8))
        backend.fail_with(28, only="write")
        assert await put(store, fragments[2]) == Outcome.FAILED
        assert await store.exists([*fragments[:2], address_of(8)]) == [True, True, False]
        for address in (fragments[2], address_of(9)):
            assert await put(store, address) == Outcome.FULL
        assert await store.exists(fragments) == [True, True, False]
        backend.fail_with(0)
        assert await put(store, fragments[2]) == Outcome.STORED


async def test_a_store_that_cannot_be_written_to_does_not_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Tier2(Posix(tmp_path / "file" / "under"), Caps(1, 1))
    with pytest.raises(Failed, match="Not a directory"):
        await store.open()
    await store.close()


async def test_what_lies_there_for_too_long_is_removed_for_each_org_in_its_time(tmp_path: Path) -> None:
    now = [1000.0]
    async with opened(tmp_path) as store:
        store._state.clock = lambda: now[0]
        for number in (1, 2):
            await put(store, address_of(number, ACME))
        now[0] += 30
        await put(store, address_of(3, ACME))
        await put(store, address_of(1, BOLT))
        store.limits = Limits(None, {ACME: 60})
        now[0] += 29
        assert await store.expire() == 0
        now[0] += 2
        assert await store.expire() == 2
        assert await store.exists([address_of(n, ACME) for n in (1, 2, 3)]) == [False, False, True]
        now[0] += 1000
        assert await store.expire() == 1
        assert await store.exists([address_of(1, BOLT)]) == [True], "nobody limits it"
        stats = store.stats()
        assert (stats.expired, stats.overstay_seconds_max) == (3, 971)
        assert len(files_in(tmp_path)) == 1


async def test_a_store_that_is_closed_removes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_EXPIRE_AT_ONCE", 1)
    async with opened(tmp_path) as store:
        for number in range(3):
            await put(store, address_of(number))
        store.limits = Limits(60)
        store._state.clock = lambda: time.time() + 1000
        expiring = asyncio.create_task(store.expire())
        await asyncio.sleep(0)  # the first one is being removed
        await store.close()
        assert await expiring == 1
        assert await store.expire() == 0
    assert len(files_in(tmp_path)) == 2


async def test_what_another_agent_wrote_is_as_old_as_its_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as store, opened(tmp_path) as other:
        await put(other, address_of(1))
        for file in files_in(tmp_path):
            os.utime(file, (0, 0))
        await put(store, address_of(2))
        assert await store.exists([address_of(1)]) == [True]
        store.limits = Limits(3600)
        assert await store.expire() == 1
        assert await store.exists([address_of(1), address_of(2)]) == [False, True]


async def test_a_clock_that_jumps_forward_removes_nothing_for_the_others_of_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as store:
        await put(store, address_of(1))
        store.limits = Limits(3600)
        now = time.time()
        monkeypatch.setattr(store._state.clock, "_wall", lambda: now + 86_400)
        assert await store.expire() == 0
        assert len(files_in(tmp_path)) == 1


@pytest.mark.parametrize("is_found_by", ["a listing", "a request"])
async def test_a_file_of_a_clock_that_was_ahead_is_as_old_as_its_discovery(
    tmp_path: Path, is_found_by: str
) -> None:
    async with opened(tmp_path) as store, opened(tmp_path) as other:
        await put(other, address_of(1))
        for file in files_in(tmp_path):
            os.utime(file, (time.time() + 86_400,) * 2)
        if is_found_by == "a listing":
            await store.rebuild()
        else:
            assert await store.exists([address_of(1)]) == [True]
        store.limits = Limits(3600)
        later = time.time() + 3601
        store._state.clock = lambda: later
        assert await store.expire() == 1


async def test_the_age_of_a_file_outlives_its_agent(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, address_of(1))
    async with opened(tmp_path) as store:
        store.limits = Limits(3600)
        assert await store.expire() == 0
        for file in files_in(tmp_path):
            os.utime(file, (0, 0))
        await store.rebuild()
        assert await store.expire() == 0, "it is known since it was written, as this agent has seen it"
    async with opened(tmp_path) as store:
        store.limits = Limits(3600)
        assert await store.expire() == 1
        assert not files_in(tmp_path)


async def test_whatever_stops_a_removal_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(*_: object) -> None:
        raise Panic

    async with opened(tmp_path) as store:
        await put(store, address_of(1))
        with monkeypatch.context() as patched:
            patched.setattr(Posix, "delete", panic)
            with pytest.raises(Panic):
                await store.delete([address_of(1)])
        assert (await store.purge(tag=ACME)).columns == 1
