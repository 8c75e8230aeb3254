"""What a directory in front of tier 2 gives, and what it costs; siblings' memory (`borrows`);
and columns that outlive agents (`redundancy`).

    python -m benchmarks.sharing --quick

Hit rates are those of real stores with real files, whose columns are small, for the requests of the
conversation trace: they say nothing of this machine. `one`: all money goes into a node's own disk;
`chain`: half of it, and the other half into a store behind that is ten times as cheap. Reads are timed
in turns with a plain store on the same disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.borrows import borrows
from benchmarks.harness import Row, options, progress, show, traces_folder
from benchmarks.redundancy import redundancy
from benchmarks.routing.shared import ttft
from kvss_agent import native
from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import Column
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Backend
from kvss_agent.tier2.fronted import Fronted
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.settings import Writes
from kvss_agent.tier2.store import Tier2
from swdriver_shim.replay.traces import read

TAG, NAMESPACE = b"bench...........", b"model-and-layout"
SMALL, LARGE = 2048, (1 << 20) - 4096  # bytes of a payload
FILE: Final = slot_bytes_for(SMALL)
CHEAPER: Final = 10  # a byte behind costs so much less than one of a node's own disk
BUDGETS: Final = (500, 2000)  # files of a node's own disk that the money would buy
REQUESTS, QUICK_REQUESTS = 4000, 800
COLUMNS, ROUNDS, QUICK_ROUNDS = 64, 15, 5


def address_of(block: int, shard: str = "full-0") -> Address:
    key = hashlib.blake2b(block.to_bytes(8), digest_size=16).digest()
    return Address(NAMESPACE, TAG, key, shard)


@contextlib.asynccontextmanager
async def opened(backend: Backend, caps: Caps) -> AsyncIterator[Tier2]:
    store = Tier2(backend, caps, shared=False, mover=native.current())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


class Columns:
    """Slots with what is stored, and slots for what comes back."""

    def __init__(self, payload: int, count: int) -> None:
        size = slot_bytes_for(payload)
        self._slots = [memoryview(mmap.mmap(-1, size)) for _ in range(count)]
        self._payload = memoryview(hashlib.shake_128(b"payload").digest(payload))

    async def put(self, store: Tier2, addresses: Sequence[Address]) -> None:
        items = []
        for address, slot in zip(addresses, self._slots, strict=False):
            column = Column(address.key, address.tag, 1)
            seal.write(slot, column, 64, self._payload)
            items.append((address, slot, column, 0))
        await store.spill_many(items)

    async def get(self, store: Tier2, addresses: Sequence[Address]) -> int:
        """How many came back, up to the first that did not."""
        items = [(address, slot, 2) for address, slot in zip(addresses, self._slots, strict=False)]
        found = await store.recall_many(items)
        hits = [isinstance(one, seal.Header) for one in found]
        return hits.index(False) if False in hits else len(hits)


async def hit_rate(store: Tier2, requests: Sequence[Sequence[int]]) -> float:
    """Of blocks: a request hits its longest prefix that is there, and stores the rest."""
    columns = Columns(SMALL, max(map(len, requests)))
    asked = hit = 0
    for blocks in requests:
        addresses = [address_of(block) for block in blocks]
        there = await store.exists(addresses)
        known = there.index(False) if False in there else len(there)
        hits = await columns.get(store, addresses[:known]) if known else 0
        asked, hit = asked + len(blocks), hit + hits
        if hits < len(addresses):
            await columns.put(store, addresses[hits:])
    return hit / asked


async def chains(folder: Path, *, quick: bool) -> list[Row]:
    count = QUICK_REQUESTS if quick else REQUESTS
    trace = read(traces_folder() / "conversation.jsonl")
    requests = [request.blocks for _, request in zip(range(count), trace, strict=False)]
    rows = []
    for budget in BUDGETS:
        progress(f"hit rate for the price of {budget} files")
        root = folder / str(budget)
        alone = budget * FILE
        async with opened(Posix(root / "one"), Caps(alone, alone)) as store:
            one = await hit_rate(store, requests)
        front, behind = alone // 2, CHEAPER * alone // 2
        chain = Fronted(root / "front", Posix(root / "behind"), front, Writes.THROUGH)
        async with opened(chain, Caps(behind, behind)) as store:
            both = await hit_rate(store, requests)
            reads = store.stats().properties
        near = reads["read_front"] / max(1, reads["read_front"] + reads["read_behind"])
        rows += [
            Row(f"chain.hit_rate.{budget}.one", 100 * one, "%"),
            Row(f"chain.hit_rate.{budget}", 100 * both, "%", "one level", both / one, 1.0),
            Row(f"chain.read_in_front.{budget}", 100 * near, "% of hits"),
        ]
    return rows


async def reads(folder: Path, *, quick: bool) -> list[Row]:
    """How fast a batch of columns is recalled: the median of rounds, in turns."""
    progress("reads in front, and of a plain store")
    plenty = Caps(1 << 40, 1 << 40)
    addresses = [address_of(number) for number in range(COLUMNS)]
    columns = Columns(LARGE, COLUMNS)
    mover = native.current()
    behind = Posix(folder / "b", mover=mover)
    chain = Fronted(folder / "f", behind, 1 << 40, Writes.THROUGH, mover=mover)
    async with (
        opened(Posix(folder / "p", mover=mover), plenty) as plain,
        opened(chain, plenty) as fronted,
    ):
        seconds: dict[str, list[float]] = {"plain": [], "front": []}
        for store in (plain, fronted):
            await columns.put(store, addresses)
        for _ in range(QUICK_ROUNDS if quick else ROUNDS):
            for name, store in (("plain", plain), ("front", fronted)):
                began = time.perf_counter()
                assert await columns.get(store, addresses) == COLUMNS
                seconds[name].append(time.perf_counter() - began)
    took = {name: statistics.median(some) for name, some in seconds.items()}
    speed = COLUMNS * LARGE / took["front"] / 1e9
    ratio = took["plain"] / took["front"]
    return [Row("chain.recall.front", speed, "GB/s", "a plain store", ratio, 0.95)]


async def measured(*, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="tidegate-sharing-") as folder:
        return [
            *await chains(Path(folder), quick=quick),
            *await reads(Path(folder) / "reads", quick=quick),
            *await asyncio.to_thread(borrows, quick=quick),
            *await asyncio.to_thread(lambda: redundancy(quick=quick)),
            *await asyncio.to_thread(lambda: list(ttft(quick=quick))),
        ]


def main() -> None:
    given = options(__doc__)
    native.best(build=True)
    show("Sharing", asyncio.run(measured(quick=given.quick)), given.json)


if __name__ == "__main__":
    main()
