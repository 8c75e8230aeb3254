"""How often holders are asked, and what one that fails costs the columns of the others."""

from __future__ import annotations

import mmap
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvss_agent.client import TierAnswer
from kvss_agent.data_plane.wire import ListedColumn
from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.fragments import Fragments
from kvss_agent.redundancy.holder import Evicted
from kvss_agent.redundancy.parts.gatherer import Gatherer
from kvss_agent.redundancy.parts.readings import Reading
from kvss_agent.shard.core import BATCH_MAX
from kvss_agent.shard.seal import Miss
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Outgoing
from kvss_agent.tier2.column_file import PAGE
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.store import Tier2
from tests.kvss_agent.redundancy.holders import NAMESPACE, PART, SLOT
from tests.kvss_agent.redundancy.simulated import SimulatedHolder
from tests.live import wait_until

TAG = b"t" * 16
ADDRESSES = [Address(NAMESPACE, TAG, number.to_bytes(16), PART) for number in range(BATCH_MAX)]
STORED = ADDRESSES[::2]


@dataclass
class Scene:
    """Two drivers of one model: what one stores, the index of the other does not know."""

    holders: list[SimulatedHolder] = field(
        default_factory=lambda: [SimulatedHolder(str(place)) for place in range(3)]
    )
    asked: Counter[tuple[int, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for place, holder in enumerate(self.holders):
            holder.before = lambda what, place=place: self.asked.update([(place, what)])  # type: ignore[misc]

    def fragments(self) -> Fragments:
        return Fragments(ErasureCode(2, 1), self.holders, NAMESPACE, PART, SLOT)

    def lose(self, place: int, address: Address) -> None:
        del self.holders[place].files[address.tag, address.key]

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Tier2]:
        """It has been opened before anything was stored."""
        store = Tier2(self.fragments(), Caps(1 << 30, 1 << 30), threads=4)
        await store.open()
        other = self.fragments()
        files = [Outgoing(one.name, [memoryview(bytearray(SLOT))], lambda: True) for one in STORED]
        assert other.write(files) == [True] * len(files)
        other.close()
        self.asked.clear()
        yield store
        await store.close()


async def test_each_holder_is_asked_once_whether_the_columns_of_a_request_exist() -> None:
    scene = Scene()
    async with scene.store() as store:
        assert await store.exists(ADDRESSES) == [one in STORED for one in ADDRESSES]
        assert scene.asked == {(place, "exists"): 1 for place in range(3)}
        assert await store.exists(STORED) == [True] * len(STORED)
        assert scene.asked.total() == 3, "the index knows them"


async def test_what_cannot_be_told_of_one_column_is_told_of_the_others() -> None:
    """One holder is away, and another one has lost a fragment."""
    scene = Scene()
    async with scene.store() as store:
        scene.lose(0, STORED[3])
        scene.holders[1].is_alive = False
        found = await store.exists(STORED)
        assert [one for one, there in zip(STORED, found, strict=True) if not there] == [STORED[3]]
        assert store.stats().last_fault == "unreachable: 1 is dead"


async def test_a_list_asks_each_holder_once_for_all_that_is_not_in_it() -> None:
    scene = Scene()
    async with scene.store() as store:
        await store.exists(STORED)
        for address in STORED[:10]:
            for place in range(3):
                scene.lose(place, address)
        scene.asked.clear()
        await store.rebuild()
        assert store.stats().columns == len(STORED) - 10
        expected = Counter(
            {(place, what): 1 for place in range(3) for what in ("open", "list", "exists")}
        )
        assert scene.asked == expected


async def test_what_fragments_add_up_to_is_not_taken_for_damage() -> None:
    """With parity that is more than a file can have, and a holder may say anything of its own."""

    class Listing(SimulatedHolder):
        size = 0

        def listed(self) -> Iterator[ListedColumn]:
            return (one._replace(bytes=self.size) for one in super().listed())

    holders = [Listing(str(place)) for place in range(3)]
    scene = Scene(holders=[*holders])
    async with scene.store() as store:
        for holders[0].size in (-1, 0, 1, SLOT + 5, 1 << 40):
            await store.rebuild()
            assert (store.stats().columns, store.stats().damaged) == (len(STORED), 0)


@pytest.mark.parametrize("length", [0, 1, SLOT + 5, (1 << 32) - 1])
def test_a_length_that_no_file_has_makes_no_file(length: int) -> None:
    """Whichever answer comes first."""
    good, lie = 7 << 32 | SLOT, 8 << 32 | length
    for order in ((1, 0), (0, 1)):
        reading = Reading(ADDRESSES[0], 0, ErasureCode(2, 1), range(3), lacks={2: Miss.ABSENT})
        reading.numbers = {place: (1, lie if place == 1 else good) for place in order}
        reading.agree(SLOT + PAGE)
        reading.agree(SLOT + PAGE)
        assert (reading.note, reading.lacks[1]) == (None, Miss.STALE)
        reading.lacks.pop(2)
        reading.numbers[2] = 1, good
        reading.agree(SLOT + PAGE)
        assert (reading.note, reading.file_bytes) == (good, SLOT)


def test_where_all_that_are_asked_have_a_length_that_no_file_has_the_others_are_asked() -> None:
    """With one fragment that has data, that takes one holder."""
    good, lie = 7 << 32 | SLOT, 8 << 32
    reading = Reading(ADDRESSES[0], 0, ErasureCode(1, 1), range(2), asked={0}, numbers={0: (1, lie)})
    reading.agree(SLOT)
    assert not reading.conclude()
    assert (reading.note, reading.lacks, reading.wanted) == (None, {0: Miss.STALE}, [1])
    reading.asked.add(1)
    reading.numbers[1] = 1, good
    reading.agree(SLOT)
    assert reading.note == good


@pytest.mark.parametrize("is_first", [True, False])
def test_parity_of_another_write_beside_a_late_fragment_makes_no_file_absent(*, is_first: bool) -> None:
    """Whether that parity or the late fragment comes first."""
    note, other = 7 << 32 | SLOT, 8 << 32 | SLOT
    reading = Reading(ADDRESSES[0], 0, ErasureCode(2, 2), range(4))
    reading.asked |= {0, 1, 2}
    reading.numbers = {0: (1, note), 1: (1, note)}
    reading.agree(SLOT)
    assert reading.note == note
    reading.there[0] = memoryview(b"")
    reading.late.add(1)
    if is_first:
        reading.numbers[2] = 1, other
        reading.agree(SLOT)
    reading.there[1] = memoryview(b"")
    reading.numbers[2] = 1, other
    if reading.is_recalled:
        reading.agree(SLOT)
    assert not reading.conclude()
    assert reading.wanted == [3]
    reading.asked.add(3)
    reading.numbers[3] = 1, note
    reading.agree(SLOT)
    assert (reading.note, reading.lacks) == (note, {2: Miss.STALE})


async def test_what_keeps_files_from_being_repaired_comes_after_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    async with scene.store():
        fragments = scene.fragments()
        scene.lose(2, STORED[0])
        list(fragments.files())

        def fail(*_: object, **__: object) -> None:
            raise ValueError("negative count")

        monkeypatch.setattr(Gatherer, "gather", fail)
        assert fragments.some_incomplete(9) == STORED[:1]
        with pytest.raises(ValueError, match="negative"):
            fragments.repair([STORED[0].name])
        assert fragments.some_incomplete(9) == []
        fragments.close()


async def test_what_is_removed_by_a_listing_is_stored_again_though_it_was_found_by_a_repair() -> None:
    """One that goes on beside it takes the file for whole before it is removed."""
    scene = Scene()
    async with scene.store():
        fragments = scene.fragments()
        list(fragments.files())
        scene.holders[0].since = 1.0  # these say of all that it is older

        def repair(what: str) -> None:
            if what == "delete":
                scene.holders[0].before = lambda _: None
                fragments.repair([one.name for one in STORED[:2]])

        scene.holders[0].before = repair
        list(fragments.files())
        assert not scene.holders[0].files
        assert fragments.incomplete_at() == [len(STORED), 0, 0]
        scene.holders[0].since = 0.0
        assert fragments.repair([one.name for one in STORED[:2]]) > 2 * SLOT
        assert len(scene.holders[0].files) == 2
        fragments.close()


async def test_what_a_listing_removes_while_a_repair_reads_is_stored_again() -> None:
    """The repair has found it in its place, and ends after it is known to be missing."""
    scene = Scene()
    async with scene.store():
        fragments = scene.fragments()
        first, names = scene.holders[0], [one.name for one in STORED[:2]]
        stored = scene.holders[1].files.copy()
        scene.holders[1].files.clear()
        list(fragments.files())
        scene.holders[1].files |= stored  # so there is nothing to repair
        assert fragments.incomplete_at() == [0, len(STORED), 0]

        def remove(what: str) -> None:
            if what == "recall":
                scene.holders[1].before = lambda _: None
                first.since = 1.0
                list(fragments.files())
                first.since = 0.0

        scene.holders[1].before = remove
        fragments.repair(names)
        assert not first.files
        assert fragments.incomplete_at() == [len(STORED), len(STORED) - 2, 0]
        fragments.repair(names)
        assert len(first.files) == 2
        assert fragments.incomplete_at() == [len(STORED) - 2, len(STORED) - 2, 0]
        fragments.close()


async def test_what_a_listing_removes_while_it_is_written_is_stored_again() -> None:
    """The clock of the first holder is behind, so it says of new fragments that they are older."""

    class Last(SimulatedHolder):
        def spill(self, evicted: Sequence[Evicted], notes: Sequence[int]) -> list[TierAnswer | Miss]:
            answers = super().spill(evicted, notes)
            wait_until("the others have stored it", lambda: all(len(one.files) for one in scene.holders))
            first.since = 1.0
            list(fragments.files())
            return answers

    scene = Scene(holders=[SimulatedHolder("0"), SimulatedHolder("1"), Last("2")])
    first, name, fragments = scene.holders[0], ADDRESSES[0].name, scene.fragments()
    list(fragments.files())
    assert fragments.write([Outgoing(name, [memoryview(bytearray(SLOT))], lambda: True)]) == [True]
    assert not first.files
    assert fragments.incomplete_at() == [1, 0, 0]
    fragments.repair([name])
    assert len(first.files) == 1
    assert fragments.incomplete_at() == [0, 0, 0]
    fragments.close()


async def test_what_a_listing_could_not_remove_of_all_is_stored_again_where_it_did() -> None:
    scene = Scene()
    async with scene.store():
        fragments = scene.fragments()
        list(fragments.files())
        scene.holders[0].since = 1.0
        scene.holders[0].is_read_only = True
        with pytest.raises(Failed, match="read-only"):
            list(fragments.files())
        assert fragments.incomplete_at() == [len(STORED), 0, 0]
        fragments.close()


@pytest.mark.parametrize("one_by_one", [True, False])
async def test_a_repair_hops_to_threads_of_holders_only_where_they_are_asked_at_once(
    *, one_by_one: bool
) -> None:
    scene = Scene()
    async with scene.store():
        fragments = scene.fragments()
        scene.lose(0, STORED[0])
        threads = dict[str, set[int]]()
        for holder in scene.holders:
            holder.before = lambda what: threads.setdefault(what, set()).add(threading.get_ident())
        assert fragments.repair([STORED[0].name], one_by_one=one_by_one) > SLOT
        here = {threading.get_ident()}
        assert all((threads[what] == here) == one_by_one for what in ("recall", "refill"))
        fragments.close()


@pytest.mark.parametrize("why", [Miss.REFUSED, Miss.LATE])
async def test_a_repair_leaves_the_fragment_of_a_holder_that_has_not_looked_for_it(why: Miss) -> None:
    """Its tier 2 may not be open yet, or it waits for an evict that is on its way, and then nobody knows
    whether it lacks something."""
    scene = Scene()
    async with scene.store():
        fragments, first = scene.fragments(), scene.holders[0]
        first.recall = lambda places: [why for _ in places]  # type: ignore[method-assign]
        fragments.repair([STORED[0].name])
        assert {what for place, what in scene.asked if place == 0} == set()
        assert fragments.incomplete_at() == [1, 0, 0]
        assert (STORED[0].tag, STORED[0].key) in first.files
        fragments.close()


@pytest.mark.parametrize("why", [Miss.REFUSED, Miss.LATE])
async def test_a_column_whose_holders_have_not_looked_for_it_is_not_absent(why: Miss) -> None:
    """Too few answer in time: on a slow link each recall waits behind the evicts before it."""
    scene = Scene()
    async with scene.store() as store:
        assert await store.exists(STORED[:1]) == [True]
        for holder in scene.holders[:2]:
            holder.recall = lambda places: [why for _ in places]  # type: ignore[method-assign]
        slot = memoryview(mmap.mmap(-1, SLOT))
        assert await store.recall_many([(STORED[0], slot, 1)]) == [Miss.LOST]
        scene.asked.clear()
        assert await store.exists(STORED[:1]) == [True]
        assert not scene.asked, "the index has forgotten it"
        fragments = scene.fragments()
        fragments._state.incomplete.mark(STORED[0], {2})
        fragments.repair([STORED[0].name])
        assert fragments.incomplete_at() == [0, 0, 1]
        fragments.close()


async def test_files_that_are_repaired_one_after_the_other_have_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a larger one has left there is no part of a smaller one. It is given back in the end."""
    made = list[int]()

    def memory(size: int) -> bytearray:
        made.append(size)
        return bytearray(size)

    monkeypatch.setattr("kvss_agent.redundancy.parts.repairs.bytearray", memory, raising=False)
    scene = Scene()
    fragments = scene.fragments()
    contents = [secrets.token_bytes(size) for size in (SLOT, PAGE, SLOT)]
    files = [
        Outgoing(one.name, [memoryview(bytearray(content))], lambda: True)
        for one, content in zip(ADDRESSES, contents, strict=False)
    ]
    assert fragments.write(files) == [True] * 3
    stored = scene.holders[0].files.copy()
    scene.holders[0].files.clear()
    list(fragments.files())
    for address in ADDRESSES[:3]:
        fragments.repair([address.name])
    assert scene.holders[0].files == stored
    assert made == [SLOT + PAGE]
    scene.lose(0, ADDRESSES[0])
    fragments.repair([ADDRESSES[0].name])
    assert made == [SLOT + PAGE] * 2
    fragments.close()
