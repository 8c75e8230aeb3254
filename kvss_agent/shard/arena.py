"""The memory of a shard: equal slots in sealed memfds, and a page with the count of applied evicts.

An arena consists of extents. Each is a memfd whose size can never change again (`F_SEAL_SHRINK`,
`F_SEAL_GROW`), because a driver on the same node gets it too: one that truncated the file would kill
the agent with SIGBUS, and one that extended it would take memory beyond its grant. So growing adds an
extent, and shrinking gives pages back (and whole extents, where it can) without changing a size.

Memory is allocated when it is granted, never when a column arrives. The kernel does not refuse to fill
a memfd; it kills somebody when there is nothing left. So what is available is looked at before each
piece, and a grant that does not fit is an answer here instead of a crash somewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from kvss_agent.shard import seal
from kvss_agent.shard.leases import FOREVER

SLOT_ALIGNMENT: Final = 4096
EXTENTS_MAX: Final = 64
SLOT_BYTES_MAX: Final = 1 << 30
PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 << 20
_PREFAULT_BYTES: Final = 64 << 20  # between two reports of progress
RESERVE_BYTES: Final = 512 << 20  # that stays free for everybody else
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14
_POPULATE_BYTES: Final = 16 << 20  # in one call
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class NoMemory(Exception):
    """The machine cannot grant what was asked for. Nothing has changed."""


def ignore_progress(done: int, total: int) -> None:
    """Progress that nobody follows."""


def slot_bytes_for(payload_bytes: int) -> int:
    """The size of a slot for payloads of so many bytes: header and payload, aligned."""
    return -(-(seal.HEADER_BYTES + payload_bytes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def available_bytes() -> int:
    """Memory that can be granted now: what machine and control group have left, less a reserve."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    available = int(kilobytes) * 1024
    for limit_at, used_at in _limits_of(Path("/proc/self/cgroup").read_text()):
        if (limit := limit_at.read_text().strip()) != "max":
            available = min(available, int(limit) - int(used_at.read_text()))
    return max(0, available - RESERVE_BYTES)


@lru_cache(maxsize=1)
def _limits_of(group: str) -> list[tuple[Path, Path]]:
    """Where the limits of control groups are, and what is used of them. An agent is asked often, and
    seldom changes its group."""
    place = Path("/sys/fs/cgroup") / group.partition("::/")[2].strip()
    found = ((one / "memory.max", one / "memory.current") for one in (place, *place.parents))
    return [limit for limit in found if limit[0].exists()]


def _allocate(fd: int, start: int, end: int, progress: Progress, *, huge_pages: bool) -> None:
    """Make the pages of a memfd present, piece by piece. NoMemory where there are no more."""
    for at in range(start, end, _PREFAULT_BYTES):
        progress(at - start, end - start)
        # Huge pages are set aside beforehand and not part of what is available.
        if not huge_pages and available_bytes() < end - at:
            raise NoMemory(f"{end - at} bytes more are wanted, {available_bytes()} are available")
        try:
            os.posix_fallocate(fd, at, min(_PREFAULT_BYTES, end - at))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise NoMemory(f"{end - at} bytes more are wanted: {error.strerror}") from error
    progress(end - start, end - start)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _punch(fd: int, start: int, end: int) -> None:
    """Free these pages of a memfd. Python's other threads go on: many gigabytes take seconds."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, start, end - start):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Extent:
    """Some slots in one memfd, mapped. The same class on both sides: who has `fd` can map it."""

    def __init__(self, fd: int, slot_bytes: int, slots: int, *, huge_pages: bool = False) -> None:
        """Map what `fd` is. The extent owns it from here on."""
        self.fd = fd
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.huge_pages = huge_pages
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.view = memoryview(self.map)[: slots * slot_bytes]

    @classmethod
    def allocate(
        cls,
        slot_bytes: int,
        slots: int,
        progress: Progress = ignore_progress,
        *,
        huge_pages: bool = False,
    ) -> Extent:
        """New memory, all of it present. Raises NoMemory if there is not enough."""
        length = slots * slot_bytes
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge_pages:
            length = -(-length // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            flags |= os.MFD_HUGETLB
        fd = os.memfd_create("kvss-arena", flags)
        try:
            os.ftruncate(fd, length)
            _allocate(fd, 0, length, progress, huge_pages=huge_pages)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            extent = cls(fd, slot_bytes, slots, huge_pages=huge_pages)
        except (OSError, NoMemory):
            os.close(fd)
            raise
        extent.populate(0, slots)
        return extent

    @classmethod
    def attach(cls, fd: int, slot_bytes: int, slots: int) -> Extent:
        """Map an extent that another process allocated. Refuses one that is smaller than it claims."""
        if os.fstat(fd).st_size < slots * slot_bytes:
            raise ValueError("an extent is smaller than its slots")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
            raise ValueError("an extent could be truncated under us")
        return cls(fd, slot_bytes, slots)

    def populate(self, first: int, end: int) -> None:
        """Enter the pages of these slots, which are there, into this process' page table, so that no
        column pays for it."""
        stop = end * self.slot_bytes
        pinned = ctypes.c_char.from_buffer(self.map)
        address = ctypes.addressof(pinned)
        for at in range(first * self.slot_bytes, stop, _POPULATE_BYTES):
            # That of `mmap` keeps all other threads of Python waiting meanwhile, for 0.2 s in all.
            if _libc.madvise(address + at, min(_POPULATE_BYTES, stop - at), _POPULATE_WRITE):
                return  # kernels before 5.14 do it page by page, later

    def free(self, first: int) -> None:
        """Free the memory of the slots from this one on. They read as zeros until `take_back`."""
        start = first * self.slot_bytes
        if self.huge_pages:
            start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        if start < len(self.map):
            _punch(self.fd, start, len(self.map))

    def take_back(self, first: int, end: int, progress: Progress = ignore_progress) -> None:
        """Allocate these slots anew, which `free` has freed. Raises NoMemory if there is not enough."""
        size = self.slot_bytes
        _allocate(self.fd, first * size, end * size, progress, huge_pages=self.huge_pages)
        self.populate(first, end)

    def close(self) -> None:
        """Let go of the memory. Views that are still out keep it mapped until they are gone."""
        os.close(self.fd)
        self.view.release()
        with contextlib.suppress(BufferError):
            self.map.close()


class CountPage:
    """One page that both sides map: the number of the last applied evict, alone on its cache line.

    A store of eight aligned bytes is one store on every machine that Python's memoryview is compiled
    for. The driver stores, the agent and whoever moves a shard load.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Map the page that `fd` is, or a new one. Owns the descriptor."""
        if fd is None:
            fd = os.memfd_create("kvss-count", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, PAGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        elif os.fstat(fd).st_size != PAGE_BYTES:
            os.close(fd)
            raise ValueError("this is not a count page")
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self.words = memoryview(self._map).cast("Q")

    @property
    def applied(self) -> int:
        return self.words[0]

    def publish(self, count: int) -> None:
        self.words[0] = count

    def close(self) -> None:
        os.close(self.fd)
        self.words.release()
        self._map.close()


class Arena:
    """The slots of one shard, over all its extents. Slot numbers go on from one to the next."""

    def __init__(self, slot_bytes: int, extents: Sequence[Extent], slots: int | None = None) -> None:
        _check_slot_bytes(slot_bytes)
        self.slot_bytes = slot_bytes
        self.extents = list(extents)
        total = sum(extent.slots for extent in self.extents)
        self.slots = total if slots is None else slots

    @classmethod
    def allocate(
        cls,
        slot_bytes: int,
        slots: int,
        progress: Progress = ignore_progress,
        *,
        huge_pages: bool = False,
    ) -> Arena:
        """A new arena, its memory present. Raises NoMemory; leaves nothing behind then."""
        arena = cls(slot_bytes, [])
        arena.grow(slots, progress, huge_pages=huge_pages)
        return arena

    @property
    def payload_bytes_max(self) -> int:
        return self.slot_bytes - seal.HEADER_BYTES

    @property
    def bytes(self) -> int:
        """What is granted."""
        return self.slots * self.slot_bytes

    def slot(self, number: int) -> memoryview:
        """All of a slot, header first. `number` is below `slots`: IndexError if not."""
        if not 0 <= number < self.slots:
            raise IndexError(f"slot {number} of {self.slots}")
        size = self.slot_bytes
        for extent in self.extents:
            if number < extent.slots:
                return extent.view[number * size : (number + 1) * size]
            number -= extent.slots
        raise IndexError("the extents are smaller than the arena")

    def grow(
        self, slots: int, progress: Progress = ignore_progress, *, huge_pages: bool = False
    ) -> Extent | None:
        """Make it so many slots. The new extent, if one was needed.

        Memory that was given back is taken back, empty. Raises NoMemory and changes nothing.
        """
        if slots <= self.slots:
            return None
        mapped = sum(extent.slots for extent in self.extents)
        added: Extent | None = None
        if slots > mapped:
            if len(self.extents) >= EXTENTS_MAX:
                raise NoMemory(f"an arena has at most {EXTENTS_MAX} extents: it has grown too often")
            added = Extent.allocate(self.slot_bytes, slots - mapped, progress, huge_pages=huge_pages)
        try:
            self.free(self.slots)  # if nobody has yet: what comes back is empty
            for extent, first, end in self._parts(self.slots, slots):
                extent.take_back(first, end, progress)
        except (NoMemory, OSError):
            self.free(self.slots)
            if added:
                added.close()
            raise
        if added:
            self.extents.append(added)
        self.slots = slots
        return added

    def truncate(self, slots: int) -> None:
        """Nobody may use the slots from this number on any more. Their memory stays until `free`."""
        self.slots = min(self.slots, slots)

    def drop(self) -> list[Extent]:
        """Take out the extents that are not used at all; they are the caller's to close."""
        dropped: list[Extent] = []
        before = sum(extent.slots for extent in self.extents)
        while self.extents and before - self.extents[-1].slots >= self.slots:
            before -= self.extents[-1].slots
            dropped.append(self.extents.pop())
        return dropped

    def free(self, line: int) -> None:
        """Free the memory of the slots from this number on."""
        for extent, first, _ in self._parts(line, FOREVER):
            extent.free(first)

    def populate(self, slots: int) -> None:
        """Enter the memory of the slots up to this number into the page table, if it is not there."""
        for extent, first, end in self._parts(self.slots, slots):
            extent.populate(first, end)

    def _parts(self, first: int, end: float) -> list[tuple[Extent, int, int]]:
        """The extents that these slots lie in, and which of theirs."""
        parts: list[tuple[Extent, int, int]] = []
        before = 0
        for extent in self.extents:
            begin, stop = max(first - before, 0), min(end - before, extent.slots)
            if begin < stop:
                parts.append((extent, begin, int(stop)))
            before += extent.slots
        return parts

    def close(self) -> None:
        while self.extents:
            self.extents.pop().close()
        self.slots = 0


def _check_slot_bytes(slot_bytes: int) -> None:
    if slot_bytes % SLOT_ALIGNMENT or not 0 < slot_bytes <= SLOT_BYTES_MAX:
        raise ValueError(
            f"a slot is a multiple of {SLOT_ALIGNMENT} bytes, at most {SLOT_BYTES_MAX}: not {slot_bytes}"
        )
