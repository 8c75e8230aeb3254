"""Whatever is asked in whatever order: what a dictionary would have given, or a legal miss."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvss_agent.shard.seal import Miss
from kvss_agent.tier2 import fronted
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Backend
from kvss_agent.tier2.front.disk import COPIES
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.settings import Writes
from kvss_agent.tier2.store import Outcome, Receipt, Tier2
from tests.kvss_agent.integrity import differences
from tests.kvss_agent.tier2.columns import (
    ACME,
    BOLT,
    PAGE,
    address_of,
    disk_bytes,
    get,
    get_many,
    put,
    put_many,
)
from tests.live import wait_until

# Where there is a file system in memory, nothing is waited for that is written to a disk.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
NAMESPACES = (b"model-and-layout", b"another-model...")
PAGES = 2
LENGTH = PAGES * PAGE - 64
addresses = st.builds(
    address_of,
    st.integers(0, 4),
    st.sampled_from([ACME, BOLT]),
    st.sampled_from(NAMESPACES),
    st.sampled_from(["full-0", "full-1"]),
)
caps = st.builds(
    lambda total, org, acme: Caps(PAGE * total, PAGE * org, {ACME: PAGE * acme}),
    st.integers(0, 24),
    st.integers(0, 20),
    st.integers(0, 20),
)
scopes = st.one_of(
    st.builds(Scope, st.sampled_from([ACME, BOLT])),
    st.builds(Scope, st.none(), st.sampled_from(NAMESPACES)),
    st.builds(Scope, st.sampled_from([ACME, BOLT]), st.sampled_from(NAMESPACES)),
)


class AgainstADictionary(RuleBasedStateMachine):
    """`kept` is what may be there: stored, and neither deleted nor purged since."""

    @initialize(first=caps)
    def begin(self, first: Caps) -> None:
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(dir=MEMORY))
        self.caps = first
        self.kept: set[Address] = set()
        self._open()

    def _open(self) -> None:
        self.store = Tier2(self._backend(), self.caps, threads=2)
        self.loop.run_until_complete(self.store.open())

    def _backend(self) -> Backend:
        return Posix(self.root)

    def _paths(self, address: Address) -> list[Path]:
        """Of its files: the one that counts first."""
        return [self.root / address.name]

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self.store.close())
            self.loop.close()
            shutil.rmtree(self.root)

    @rule(address=addresses)
    def spill(self, address: Address) -> None:
        outcome = self.loop.run_until_complete(put(self.store, address, LENGTH))
        size = PAGES * PAGE
        fits = size <= min(self.caps.total, self.caps.of(address.tag))
        assert outcome in ((Outcome.STORED, Outcome.ALREADY) if fits else (Outcome.FULL,))
        assert outcome is not Outcome.ALREADY or address in self.kept
        if fits:
            self.kept.add(address)
            assert self.loop.run_until_complete(self.store.exists([address])) == [True]

    @rule(some=st.lists(addresses, min_size=2, max_size=8, unique=True))
    def spill_at_once(self, some: list[Address]) -> None:
        async def all_of_them() -> list[str]:
            return await asyncio.gather(*(put(self.store, address, LENGTH) for address in some))

        for address, outcome in zip(some, self.loop.run_until_complete(all_of_them()), strict=True):
            assert outcome in (Outcome.STORED, Outcome.ALREADY, Outcome.FULL)
            if outcome is not Outcome.FULL:
                self.kept.add(address)

    @rule(batches=st.lists(st.lists(addresses, max_size=6), min_size=1, max_size=3))
    def spill_batches_at_once(self, batches: list[list[Address]]) -> None:
        async def all_of_them() -> list[list[str]]:
            return await asyncio.gather(*(put_many(self.store, batch, LENGTH) for batch in batches))

        asked = [address for batch in batches for address in batch]
        outcomes = [one for batch in self.loop.run_until_complete(all_of_them()) for one in batch]
        for address, outcome in zip(asked, outcomes, strict=True):
            assert outcome in (Outcome.STORED, Outcome.ALREADY, Outcome.FULL)
            if outcome is Outcome.STORED:
                self.kept.add(address)
        for address, outcome in zip(asked, outcomes, strict=True):
            assert outcome is not Outcome.ALREADY or address in self.kept

    @rule(some=st.lists(addresses, max_size=8))
    def recall_a_batch(self, some: list[Address]) -> None:
        expected = ["hit" if (self.root / address.name).exists() else Miss.ABSENT for address in some]
        assert self.loop.run_until_complete(get_many(self.store, some, LENGTH)) == expected

    @rule(
        spilled=st.lists(addresses, max_size=6), recalled=st.lists(addresses, max_size=6), scope=scopes
    )
    def purge_in_the_middle_of_batches(
        self, spilled: list[Address], recalled: list[Address], scope: Scope
    ) -> None:
        async def at_once() -> tuple[list[str], list[str], Receipt]:
            spilling = asyncio.ensure_future(put_many(self.store, spilled, LENGTH))
            recalling = asyncio.ensure_future(get_many(self.store, recalled, LENGTH))
            await asyncio.sleep(0)
            receipt = await self.store.purge(tag=scope.tag, namespace=scope.namespace)
            left = [path for path in self.root.rglob("*") if path.is_file()]
            names = {str(path.relative_to(self.root)) for path in left}
            before = {address for address in (*self.kept, *spilled) if scope.covers(address)}
            assert not names & {address.name for address in before}
            return await spilling, await recalling, receipt

        outcomes, found, _ = self.loop.run_until_complete(at_once())
        for address, outcome in zip(spilled, outcomes, strict=True):
            if outcome in (Outcome.STORED, Outcome.ALREADY):
                self.kept.add(address)
            else:
                assert outcome in (Outcome.FULL, Miss.REFUSED)
        assert set(found) <= {"hit", Miss.ABSENT}
        self.kept = {address for address in self.kept if not scope.covers(address)}

    @rule(address=addresses)
    def recall(self, address: Address) -> None:
        is_there = (self.root / address.name).exists()
        found = self.loop.run_until_complete(get(self.store, address, LENGTH))  # asserts the bytes
        assert found == ("hit" if is_there else Miss.ABSENT)
        assert not is_there or address in self.kept

    @rule(some=st.lists(addresses, max_size=5))
    def exists(self, some: list[Address]) -> None:
        answers = self.loop.run_until_complete(self.store.exists(some))
        assert answers == [(self.root / address.name).exists() for address in some]

    @rule(some=st.lists(addresses, max_size=5))
    def delete(self, some: list[Address]) -> None:
        there = sum((self.root / address.name).exists() for address in set(some))
        assert self.loop.run_until_complete(self.store.delete(some)).columns == there
        self.kept -= set(some)

    @rule(scope=scopes)
    def purge(self, scope: Scope) -> None:
        there = sum(
            (self.root / address.name).exists() for address in self.kept if scope.covers(address)
        )
        purging = self.store.purge(tag=scope.tag, namespace=scope.namespace)
        assert self.loop.run_until_complete(purging).columns == there
        self.kept = {address for address in self.kept if not scope.covers(address)}

    @rule(other=caps)
    def set_caps(self, other: Caps) -> None:
        self.caps = other
        self.loop.run_until_complete(self.store.set_caps(other))

    @rule(address=addresses, offset=st.integers(0, PAGES * PAGE - 65))
    def damage(self, address: Address, offset: int) -> None:
        path = self._paths(address)[0]
        if path.exists():
            content = bytearray(path.read_bytes())
            content[offset] ^= 1
            for one in self._paths(address):
                if one.exists():
                    one.write_bytes(content)
            found = self.loop.run_until_complete(get(self.store, address, LENGTH))
            assert found in (Miss.CORRUPT, Miss.TORN, Miss.STALE, Miss.FOREIGN)
            assert not path.exists()

    @rule(address=addresses)
    def another_agent_removes(self, address: Address) -> None:
        for path in self._paths(address):
            path.unlink(missing_ok=True)
        assert self.loop.run_until_complete(get(self.store, address, LENGTH)) == Miss.ABSENT

    @rule()
    def restart(self) -> None:
        self.loop.run_until_complete(self.store.close())
        self._open()

    @invariant()
    def caps_hold_and_the_index_agrees_with_the_files(self) -> None:
        difference = self.loop.run_until_complete(differences(self.store))
        assert (difference.missing, difference.unknown, difference.resized) == ((), (), ())
        assert disk_bytes(self.root) == self.store.stats().bytes <= self.caps.total
        for tag, (held, cap) in self.store.stats().orgs.items():
            assert held <= cap == self.caps.of(bytes.fromhex(tag))


TestAgainstADictionary = pytest.mark.timeout(300)(pytest.mark.slow(AgainstADictionary.TestCase))
TestAgainstADictionary.settings = settings(max_examples=40, stateful_step_count=30)


class Fronted(AgainstADictionary):
    """With a directory in front that has room for a few: nobody sees that it is there."""

    def _backend(self) -> Backend:
        room = 3 * PAGES * PAGE
        self._levels = fronted.Fronted(self._front, Posix(self.root), room, Writes.THROUGH)
        return self._levels

    @property
    def _front(self) -> Path:
        return self.root.with_name(f"{self.root.name}-front")

    def _paths(self, address: Address) -> list[Path]:
        return [*super()._paths(address), self._front / COPIES / address.name]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "root"):
            shutil.rmtree(self._front)

    @invariant()
    def what_lies_in_front_lies_behind_too(self) -> None:
        wait_until("nothing is on its way to the front", lambda: not self._levels._contents.promotions)
        copies = self._front / COPIES
        for path in copies.rglob("*"):
            assert not path.is_file() or (self.root / path.relative_to(copies)).exists()


TestFronted = pytest.mark.timeout(300)(pytest.mark.slow(Fronted.TestCase))
TestFronted.settings = TestAgainstADictionary.settings
