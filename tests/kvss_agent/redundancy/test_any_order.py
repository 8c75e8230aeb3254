"""Whatever happens to holders, in whatever order: never a wrong byte, and nothing is lost without need.

A name always stands for the same column, so what an earlier write of it has stored is right as well,
until it is deleted or purged.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import pytest

from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.fragments import Fragments
from kvss_agent.redundancy.parts import patience, promptness
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Failed, Outgoing
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.store import Tier2
from tests.kvss_agent.redundancy.holders import NAMESPACE, PART, SLOT
from tests.kvss_agent.redundancy.simulated import SimulatedHolder, connected
from tests.live import wait_until

SEEDS: Final = int(os.environ.get("SEEDS") or 6)
STEPS: Final = int(os.environ.get("STEPS") or 300)
CODES: Final = [(1, 1), (2, 1), (4, 1), (3, 2)]
TAGS: Final = (b"a" * 16, b"b" * 16)
KEYS: Final = 4
HANGING_SECONDS: Final = 0.02  # several times as long as there is patience


@dataclass
class Life:
    """One agent's fragments, and what may come out of them."""

    random: random.Random
    data: int
    parity: int
    holders: list[SimulatedHolder] = field(default_factory=list)
    written: defaultdict[Address, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    counts: Counter[str] = field(default_factory=Counter)
    memory: memoryview = field(default_factory=lambda: memoryview(bytearray(SLOT)))  # of all reads
    there: bytes = bytes(SLOT)  # what it should hold between them
    hanging: Counter[int] = field(default_factory=Counter)  # by place: answers that will be late

    def __post_init__(self) -> None:
        self.holders = [SimulatedHolder(str(place)) for place in range(self.data + self.parity)]
        for place, holder in enumerate(self.holders):
            holder.before = lambda what, place=place: self.wait(place, what)  # type: ignore[misc]
        self.fragments = self._new()

    def _new(self) -> Fragments:
        code = ErasureCode(self.data, self.parity)
        return Fragments(code, connected(self.holders), NAMESPACE, PART, SLOT)

    def address(self) -> Address:
        key = self.random.randrange(KEYS).to_bytes(16)
        return Address(NAMESPACE, self.random.choice(TAGS), key, PART)

    def step(self) -> None:
        what = self.random.choices(
            ("write", "read", "die", "live", "damage", "lose", "full", "read only", "hang"),
            (8, 12, 2, 6, 1, 1, 1, 1, 2),
        ) + self.random.choices(
            ("", "delete", "purge", "repair", "list", "restart"), (12, 1, 1, 3, 1, 1)
        )
        for name in filter(None, what):
            self.counts[name] += 1
            getattr(self, f"do_{name.replace(' ', '_')}")()

    def wait(self, place: int, what: str) -> None:
        if what in ("recall", "refill") and self.hanging[place] > 0:
            self.hanging[place] -= 1
            time.sleep(HANGING_SECONDS)

    def do_hang(self) -> None:
        self.hanging[self.random.randrange(self.data + self.parity)] = self.random.randint(1, 3)

    def whole(self, address: Address) -> int:
        """How many fragments of what was stored last can be read."""
        notes = Counter(
            found.note
            for one in self.holders
            if (found := one.files.get((address.tag, address.key)))
            and one.is_alive
            and not found.is_damaged
        )
        return max(notes.values(), default=0)

    def do_write(self) -> None:
        some = {
            self.address(): secrets.token_bytes(self.random.choice((4096, 8192, SLOT))) for _ in "ab"
        }
        memories = [memoryview(bytearray(content)) for content in some.values()]
        intact = [self.random.random() > 0.1 for _ in some]
        files = [
            Outgoing(address.name, [memory[:64], memory[64:]], lambda is_intact=is_intact: is_intact)  # type: ignore[misc]
            for address, memory, is_intact in zip(some, memories, intact, strict=True)
        ]
        for address, answer, is_intact in zip(some, self.fragments.write(files), intact, strict=True):
            assert is_intact or answer is not True or self.written[address]  # it was there already
            self.counts["stored"] += answer is True
            if is_intact:  # also of what failed some fragments may be there
                self.written[address].add(some[address])

    def do_read(self) -> None:
        address = self.address()
        whole, memory = self.whole(address), self.memory
        assert memory == self.there, "something was written after its read had ended"
        (size,) = self.fragments.read([(address.name, [memory[:64], memory[64:]])])
        self.there = bytes(memory)
        if isinstance(size, int):
            assert bytes(memory[:size]) in self.written[address], "other bytes"
            self.counts["hit"] += 1
        else:
            assert whole < self.data, f"{whole} fragments are there"
            self.counts["miss"] += 1

    def do_die(self) -> None:
        self.random.choice(self.holders).is_alive = False

    def do_live(self) -> None:
        for one in self.random.choices(self.holders, k=2):
            one.is_alive, one.is_full, one.is_read_only = True, False, False

    def do_damage(self) -> None:
        one = self.random.choice(self.holders)
        if one.files:
            self.random.choice(list(one.files.values())).is_damaged = True

    def do_lose(self) -> None:
        one = self.random.choice(self.holders)
        if self.random.random() < 0.2:
            one.files.clear()
        elif one.files:
            del one.files[self.random.choice(list(one.files))]

    def do_full(self) -> None:
        self.random.choice(self.holders).is_full = True

    def do_read_only(self) -> None:
        self.random.choice(self.holders).is_read_only = True

    def do_delete(self) -> None:
        address = self.address()
        try:
            self.fragments.delete([address.name])
        except Failed:
            return
        self.written[address].clear()  # nothing of it may be read from here on
        assert not any((address.tag, address.key) in one.files for one in self.holders)

    def do_purge(self) -> None:
        tag = self.random.choice(TAGS)
        try:
            self.fragments.purge(Scope(tag, NAMESPACE))
        except Failed:
            return
        for address in [one for one in self.written if one.tag == tag]:
            del self.written[address]
        assert not any(name[0] == tag for one in self.holders for name in one.files)

    def do_repair(self) -> None:
        some = self.fragments.some_incomplete(4)
        if some:
            one_by_one = self.random.random() < 0.5
            self.fragments.repair([one.name for one in some], one_by_one=one_by_one)

    def do_list(self) -> None:
        try:
            list(self.fragments.files())
        except Failed:
            assert sum(not one.is_alive for one in self.holders) > self.parity

    def do_restart(self) -> None:
        self.fragments.close()
        # A real connection takes over the former one's; here a call may still be about a slot.
        wait_until("calls have ended", lambda: not any(one.in_use for one in self.holders))
        self.fragments = self._new()

    def ends_well(self) -> None:
        """Once all holders are well, repair makes everything whole that can be."""
        for one in self.holders:
            one.is_alive, one.is_full, one.is_read_only = True, False, False
        self.do_restart()
        list(self.fragments.files())
        for _ in range(4 * KEYS):
            self.do_repair()
        assert self.fragments.incomplete == 0
        names = {name for one in self.holders for name in one.files}
        for tag, key in names:
            found = [one.files[tag, key] for one in self.holders if (tag, key) in one.files]
            # Nobody looks into fragments before they are read: damage, and those of another write, stay.
            is_one = len({one.note for one in found}) == 1 and not any(one.is_damaged for one in found)
            if is_one and len(found) >= self.data:
                assert len(found) == self.data + self.parity


@pytest.mark.parametrize("code", CODES, ids=lambda code: f"{code[0]}+{code[1]}")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_never_a_wrong_byte_and_nothing_lost_that_need_not_be(
    code: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEAST_SECONDS", "FIRST_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(patience, name, HANGING_SECONDS / 5)
    monkeypatch.setattr(promptness, "PROBE_SECONDS", 0.0)
    life = Life(random.Random(f"{code} {seed}"), *code)
    for _ in range(STEPS):
        life.step()
    life.ends_well()
    life.fragments.close()
    assert not any(one.used_twice for one in life.holders), "a slot was used for two things at once"
    for name in ("hit", "miss", "stored"):
        assert life.counts[name] > STEPS // 60, life.counts


async def test_a_purge_during_a_repair_leaves_nothing() -> None:
    holders = [SimulatedHolder(str(place)) for place in range(3)]
    fragments = Fragments(ErasureCode(2, 1), holders, NAMESPACE, PART, SLOT)
    address = Address(NAMESPACE, TAGS[0], b"k" * 16, PART)
    memory = memoryview(bytearray(SLOT))
    assert fragments.write([Outgoing(address.name, [memory], lambda: True)]) == [True]
    holders[2].files.clear()
    store = Tier2(fragments, Caps(1 << 30, 1 << 30))
    await store.open()
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    going = asyncio.run_coroutine_threadsafe
    released = asyncio.Event()

    def hold(what: str) -> None:
        if what == "evict":
            loop.call_soon_threadsafe(begun.set)
            going(released.wait(), loop).result(60)

    holders[2].before = hold
    repair = asyncio.create_task(store.while_read([address], fragments.repair))
    await begun.wait()
    purge = asyncio.create_task(store.purge(tag=TAGS[0], namespace=NAMESPACE))
    await asyncio.sleep(0.05)
    assert not purge.done()
    released.set()
    await asyncio.gather(repair, purge)
    assert not any(one.files for one in holders)
    await store.close()


def test_closing_ends_all_that_waits_for_a_holder() -> None:
    """More than a holder is asked at once: the rest waits for its turn."""
    holders = [SimulatedHolder(str(place)) for place in range(3)]
    fragments = Fragments(ErasureCode(2, 1), connected(holders), NAMESPACE, PART, SLOT)
    hangs, asked = threading.Event(), threading.Semaphore(0)

    def hang(what: str) -> None:
        if what == "exists":
            asked.release()
            hangs.wait(60)

    holders[2].before = hang
    names = [Address(NAMESPACE, TAGS[0], bytes([number]) * 16, PART).name for number in range(8)]
    with ThreadPoolExecutor(len(names)) as pool:
        looking = [pool.submit(fragments.look, [name]) for name in names]
        assert asked.acquire(timeout=60)
        fragments.close()
        hangs.set()
        done, left = wait(looking, 20)
        assert (len(done), len(left)) == (len(names), 0)
