"""What always holds of shards and stores, whatever has happened: looked up inside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from kvss_agent.shard import seal
from kvss_agent.shard.arena import Arena
from kvss_agent.shard.core import PARKED_MAX, RUNS_MAX, Shard, _count
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import ignore_progress
from kvss_agent.tier2.index import STALE_MAX, Index
from kvss_agent.tier2.store import Tier2


@singledispatch
def check_integrity(it: object, *_: Any) -> Any:
    """Raise RuntimeError or AssertionError if its state contradicts itself."""
    raise TypeError(f"nothing is known of {type(it).__name__}")


def must(holds: bool, what: str) -> None:  # noqa: FBT001
    if not holds:
        raise RuntimeError(f"the state contradicts itself: {what}")


@check_integrity.register(Arena)
def _(it: Arena, applied: int) -> list[int]:
    """Read every header: the numbers of slots that hold a column. RuntimeError on contradiction.

    A column of an evict that never was applied is nobody's: a driver that shared the arena died
    before it had counted it. Payloads are not read.
    """
    held = []
    for number in range(it.slots):
        header = seal.read(it.slot(number)[: seal.HEADER_BYTES])
        if isinstance(header, seal.Header):
            if header.sequence <= applied:
                held.append(number)
        elif header is seal.Miss.CORRUPT:
            raise RuntimeError(f"the header of slot {number} is corrupt")
    return held


@check_integrity.register(Shard)
def _(it: Shard) -> None:
    """Raise RuntimeError if the state contradicts itself. For tests, and after a restart."""
    claimed: dict[int, int] = {}
    sequence = it.applied
    for run in it._runs:
        must(run.first <= sequence + 1, "the evict queue has no gaps")
        sequence = max(sequence, run.first + len(run.slots) - 1)
        _count(claimed, run.targets(), 1)
    for slots in it._clearing.values():
        _count(claimed, slots, 1)
    must(sequence == it.accepted, "what is accepted is applied or queued")
    must(claimed == it._claimed, "claims are those of the evict queue and of deletes")
    must(all(not run.receiving for run in list(it._runs)[1:]), "only the head is received")
    waiting = Counter(parked.request.owner for parked in it._parked)
    must(+it._parked_of == waiting, "each owner's are counted")
    must(len(it._runs) <= RUNS_MAX, "the evict queue is bounded")
    must(all(count <= PARKED_MAX for count in waiting.values()), "what waits is bounded")
    must(it._parked == sorted(it._parked), "what waits is in order")
    must(it.slots <= it.capacity, "there is memory up to the slot limit")
    receiving = it._runs[0].targets() if it._runs and it._runs[0].receiving else []
    must(not it.leases.any_of(receiving), "nobody reads what is being written")


@check_integrity.register(HostedShard)
def _(it: HostedShard) -> None:
    """Raise RuntimeError if core and memory contradict themselves or one another."""
    with it._lock:
        check_integrity(it.core)
        if not it._shared:
            check_integrity(it.arena, it.core.accepted)


@check_integrity.register(Index)
def _(it: Index) -> None:
    """Raise RuntimeError if the state contradicts itself."""
    held: dict[bytes, int] = dict.fromkeys(it._orgs, 0)
    leaving: dict[bytes, int] = dict.fromkeys(it._orgs, 0)
    total = 0
    idle = {address: size for org in it._orgs.values() for address, size in org.idle.items()}
    reading = {address: reading.bytes for address, reading in it._reading.items()}
    for address, size in [*idle.items(), *reading.items(), *it._leaving.items()]:
        if size:
            held[address.tag] += size
            total += size
    for address, size in it._leaving.items():
        if size:
            leaving[address.tag] += size
    coming: dict[bytes, int] = dict.fromkeys(it._orgs, 0)
    for address, ticket in it._writing.items():
        coming[address.tag] += 0 if ticket.started else ticket.bytes - ticket.claimed[1]
        held[address.tag] += ticket.bytes if ticket.started else ticket.claimed[1]
        total += ticket.bytes if ticket.started else ticket.claimed[0]
    states: Iterable[Mapping[Address, object]] = (idle, reading, it._writing, it._leaving)
    addresses = [address for state in states for address in state]
    must(len(addresses) == len(set(addresses)), "a column is in one state at a time")
    must(total == it._store.held, "what the store holds is the sum of its columns")
    must(held == {tag: org.held for tag, org in it._orgs.items()}, "so is what an org holds")
    must(leaving == {tag: org.leaving for tag, org in it._orgs.items()}, "leaving adds up")
    must(sum(leaving.values()) == it._store.leaving, "leaving adds up in the store")
    must(coming == {tag: org.coming for tag, org in it._orgs.items()}, "what is coming adds up")
    must(all(org.held or org.coming for org in it._orgs.values()), "who holds nothing is forgotten")
    written = {address for org in it._orgs.values() for address in org.written}
    there = {*idle, *(a for a, size in reading.items() if size)}
    there |= {address for address, size in it._leaving.items() if size}
    must(written == there, "of all that is there it is known since when")
    for org in it._orgs.values():
        ages = {(when, address) for address, when in org.written.items()}
        must(ages <= {*org.ages}, "and it is found by its age")
        must(len(org.ages) <= 2 * len(org.written) + STALE_MAX, "what is gone does not pile up")
    must(all(org.cap == it.caps.of(tag) for tag, org in it._orgs.items()), "caps are kept")


@dataclass(frozen=True, slots=True)
class Difference:
    """How files and index differ. Between agents that share a store, they may."""

    missing: tuple[Address, ...]  # known, but there is no such file
    unknown: tuple[Address, ...]  # a file that is not known
    resized: tuple[Address, ...]  # known with another size


async def differences(it: Tier2) -> Difference:
    """Compare the index with the files, while nothing is under way."""
    check_integrity(it._state.index)
    files = {file.address: file.bytes for file in await it._lister.files(ignore_progress)}
    known = dict(it._state.index.sizes())
    return Difference(
        missing=tuple(known.keys() - files.keys()),
        unknown=tuple(files.keys() - known.keys()),
        resized=tuple(a for a in known.keys() & files.keys() if known[a] != files[a]),
    )
