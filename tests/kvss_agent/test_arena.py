"""Memory that is granted is there, cannot be pulled away, and is given back."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from kvss_agent.shard import seal
from kvss_agent.shard.arena import (
    EXTENTS_MAX,
    SLOT_BYTES_MAX,
    Arena,
    CountPage,
    Extent,
    NoMemory,
    available_bytes,
    slot_bytes_for,
)
from kvss_agent.shard.hosted import reopen
from tests.kvss_agent.integrity import check_integrity

SLOT = 64 * 1024
COLUMN = seal.Column(bytes(16), bytes(16), 1)


def shrink(arena: Arena, slots: int) -> None:
    arena.truncate(slots)
    for extent in arena.drop():
        extent.close()
    arena.free(slots)


def allocated(arena: Arena) -> int:
    return sum(os.fstat(extent.fd).st_blocks * 512 for extent in arena.extents)


def test_a_slot_has_room_for_header_and_payload_and_is_aligned() -> None:
    assert [slot_bytes_for(n) for n in (1, 4032, 4033, 65536)] == [4096, 4096, 8192, 69632]


def test_granted_memory_is_present_and_reported_as_it_comes() -> None:
    seen: list[tuple[int, int]] = []
    arena = Arena.allocate(SLOT, 2048, lambda done, total: seen.append((done, total)))
    assert allocated(arena) == arena.bytes == 2048 * SLOT
    assert seen == [(0, 128 << 20), (64 << 20, 128 << 20), (128 << 20, 128 << 20)]
    arena.close()


def test_slots_do_not_overlap_across_extents() -> None:
    arena = Arena.allocate(SLOT, 3)
    arena.grow(5)
    for number in range(5):
        arena.slot(number)[:] = bytes([number]) * SLOT
    assert all(arena.slot(number) == bytes([number]) * SLOT for number in range(5))
    with pytest.raises(IndexError):
        arena.slot(5)
    with pytest.raises(IndexError):
        arena.slot(-1)
    arena.close()


def test_growing_keeps_what_is_there_and_shrinking_gives_memory_back() -> None:
    arena = Arena.allocate(SLOT, 4)
    arena.slot(1)[:5] = b"stays"
    assert arena.grow(8) is not None
    shrink(arena, 6)
    assert allocated(arena) == 6 * SLOT
    shrink(arena, 2)
    assert (len(arena.extents), allocated(arena)) == (1, 2 * SLOT)
    assert bytes(arena.slot(1)[:5]) == b"stays"
    assert arena.grow(4) is None, "it fits the extent that is there"
    assert allocated(arena) == 4 * SLOT
    assert not any(arena.slot(3)), "what comes back is empty"
    shrink(arena, 0)
    assert (arena.bytes, arena.extents) == (0, [])


def test_memory_comes_back_only_as_far_as_it_is_granted_whoever_maps_it() -> None:
    arena = Arena.allocate(SLOT, 4)
    arena.grow(12)
    arena.truncate(2)
    arena.free(2)  # before the extent that is not needed has been dropped
    assert allocated(arena) == 2 * SLOT
    other = Arena(SLOT, [])
    reopen((4, 8), [os.dup(extent.fd) for extent in arena.extents], SLOT, 2, other)
    assert allocated(arena) == 2 * SLOT, "mapping it takes nothing beyond the line"
    arena.grow(6)
    assert allocated(arena) == 6 * SLOT
    other.slot(1)[:5] = b"there"
    assert bytes(arena.slot(1)[:5]) == b"there"
    for one in (other, arena):
        one.close()


def test_nobody_who_shares_an_extent_can_change_its_size() -> None:
    arena = Arena.allocate(SLOT, 2)
    for size in (0, 4 * SLOT):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.extents[0].fd, size)
    arena.close()


def test_an_extent_that_could_be_pulled_away_is_not_mapped() -> None:
    fd = os.memfd_create("not-sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SLOT)
    with pytest.raises(ValueError, match="truncated"):
        Extent.attach(fd, SLOT, 1)
    with pytest.raises(ValueError, match="smaller"):
        Extent.attach(fd, SLOT, 2)
    os.close(fd)


def test_what_cannot_be_granted_is_said_and_leaves_nothing() -> None:
    arena = Arena.allocate(SLOT, 1)
    with pytest.raises(NoMemory):
        arena.grow((1 << 50) // SLOT)
    assert (arena.slots, allocated(arena)) == (1, SLOT)
    arena.close()


def test_a_grant_stops_where_memory_becomes_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([128 << 20, 10 << 20, 10 << 20])
    monkeypatch.setattr("kvss_agent.shard.arena.available_bytes", lambda: next(left))
    with pytest.raises(NoMemory, match="are available"):
        Arena.allocate(SLOT, 2048)


def test_what_is_available_is_known() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_an_arena_does_not_grow_for_ever_in_small_steps() -> None:
    arena = Arena.allocate(4096, 1)
    for slots in range(2, EXTENTS_MAX + 1):
        arena.grow(slots)
    with pytest.raises(NoMemory, match="too often"):
        arena.grow(EXTENTS_MAX + 1)
    arena.close()


def test_huge_pages_are_used_or_refused_but_not_pretended() -> None:
    try:
        extent = Extent.allocate(SLOT, 1, huge_pages=True)
    except NoMemory:
        return  # this machine has none to give
    assert extent.huge_pages
    extent.close()


@pytest.mark.parametrize("slot_bytes", [0, 100, 4097, SLOT_BYTES_MAX + 4096])
def test_a_slot_size_that_makes_no_sense_is_refused(slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Arena.allocate(slot_bytes, 1)


def test_integrity_of_what_lies_in_the_slots() -> None:
    arena = Arena.allocate(SLOT, 3)
    seal.write(arena.slot(1), COLUMN, 64, memoryview(b"payload"))
    assert check_integrity(arena, 1) == [1]
    assert check_integrity(arena, 0) == [], "its evict was broken off"
    arena.slot(1)[20] ^= 1
    with pytest.raises(RuntimeError, match="corrupt"):
        check_integrity(arena, 1)
    arena.close()


def test_memory_that_was_closed_lives_on_in_views_and_only_there() -> None:
    arena = Arena.allocate(SLOT, 1)
    view = arena.slot(0)
    view[:4] = b"here"
    arena.close()
    assert bytes(view[:4]) == b"here"


def test_the_count_is_seen_by_another_process() -> None:
    page = CountPage()
    script = (
        "import sys; from kvss_agent.shard.arena import CountPage;"
        "page = CountPage(int(sys.argv[1])); page.publish(page.applied + 41)"
    )
    page.publish(1)
    subprocess.run([sys.executable, "-c", script, str(page.fd)], pass_fds=(page.fd,), check=True)
    assert page.applied == 42
    page.close()


def test_a_driver_that_writes_costs_no_further_memory() -> None:
    arena = Arena.allocate(SLOT, 256)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(256):
        arena.slot(number)[:] = bytes(SLOT)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 256, "pages were entered when the memory was granted"
    arena.close()
