"""Columns, slots and stores to test tier 2 with."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Backend
from kvss_agent.tier2.column_file import CLEAR, Form
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.store import Outcome, Tier2
from tests.kvss_agent.integrity import check_integrity

PAGE = 4096
NAMESPACE = b"model-and-layout"
ACME, BOLT = b"acme............", b"bolt............"
PLENTY = Caps(1 << 40, 1 << 40)


def address_of(
    number: int, tag: bytes = ACME, namespace: bytes = NAMESPACE, shard: str = "full-0"
) -> Address:
    key = hashlib.sha256(number.to_bytes(8)).digest()[:16]
    return Address(namespace, tag, key, shard)


def payload_of(address: Address, length: int = 10_000) -> bytes:
    """What this column consists of. Another column has other bytes."""
    return hashlib.shake_128(address.name.encode()).digest(length)


def new_slot(payload_bytes: int = 10_000) -> memoryview:
    """A slot as an arena has it: at a page's boundary, and it held another org's column before."""
    slot = memoryview(mmap.mmap(-1, slot_bytes_for(payload_bytes)))
    slot[HEADER_BYTES:] = b"\xee" * (len(slot) - HEADER_BYTES)
    return slot


def evicted(
    address: Address, sequence: int = 7, length: int = 10_000, tokens: int = 64
) -> tuple[memoryview, Column]:
    """A slot that holds this column, and what one expects to find in it."""
    slot = new_slot(length)
    column = Column(address.key, address.tag, sequence)
    seal.write(slot, column, tokens, memoryview(payload_of(address, length)))
    return slot, column


def holds(slot: memoryview, address: Address, sequence: int, length: int = 10_000) -> bool:
    """Whether a reader finds exactly this column there, sealed as this evict."""
    found = seal.verify(slot, Column(address.key, address.tag, sequence))
    if not isinstance(found, Header):
        return False
    return slot[HEADER_BYTES : HEADER_BYTES + found.length] == payload_of(address, length)


async def put(store: Tier2, address: Address, length: int = 10_000) -> str:
    slot, column = evicted(address, length=length)
    return await spill(store, address, slot, column)


async def get(store: Tier2, address: Address, length: int = 10_000) -> str:
    """`hit` if the right bytes came back, or the reason of the miss. Anything else is a failed test."""
    slot = new_slot(length)
    found = await recall(store, address, slot, 99)
    if isinstance(found, Header):
        assert holds(slot, address, 99, length)
        return "hit"
    assert not any(slot[:HEADER_BYTES]), "after a miss the slot is empty"
    return found


async def put_many(store: Tier2, addresses: Sequence[Address], length: int = 10_000) -> list[str]:
    slots = [evicted(address, length=length) for address in addresses]
    items = [(address, *slot, 0) for address, slot in zip(addresses, slots, strict=True)]
    return [*await store.spill_many(items)]


async def get_many(store: Tier2, addresses: Sequence[Address], length: int = 10_000) -> list[str]:
    """As `get`, for each."""
    items = [(address, new_slot(length), 90 + place) for place, address in enumerate(addresses)]
    answers: list[str] = []
    for (address, slot, sequence), found in zip(items, await store.recall_many(items), strict=True):
        if isinstance(found, Header):
            assert found.sequence == 0, "nothing was noted"
            assert holds(slot, address, sequence, length)
        else:
            assert not any(slot[:HEADER_BYTES]), "after a miss the slot is empty"
        answers.append("hit" if isinstance(found, Header) else found)
    return answers


@contextlib.asynccontextmanager
async def opened(
    where: Path | Backend, caps: Caps = PLENTY, *, shared: bool = True, threads: int = 4
) -> AsyncIterator[Tier2]:
    """A store for as long as the block lasts. Its index does not contradict itself at the end."""
    backend = Posix(where) if isinstance(where, Path) else where
    store = Tier2(backend, caps, shared=shared, threads=threads)
    await store.open()
    try:
        yield store
        check_integrity(store._state.index)
    finally:
        await store.close()


def files_in(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def disk_bytes(root: Path) -> int:
    """What the files occupy, as the file system says."""
    return sum(path.stat().st_blocks * 512 for path in files_in(root))


async def spill(
    store: Tier2,
    address: Address,
    slot: memoryview,
    column: Column,
    note: int = 0,
    form: Form = CLEAR,
) -> Outcome | Miss:
    [outcome] = await store.spill_many([(address, slot, column, note)], form)
    return outcome


async def recall(
    store: Tier2, address: Address, slot: memoryview, sequence: int, form: Form = CLEAR
) -> Header | Miss:
    [found] = await store.recall_many([(address, slot, sequence)], form)
    return found
