"""Objects in the ledger, in any order: each against a model that knows nothing but what was put when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.object_ledger import Found, ObjectLedger
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import USE_SECONDS_MAX
from swdriver_shim.cache.stores import Store
from swdriver_shim.keys import COLUMN_TOKENS, Named
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import OrgPolicies, Policy, Rules
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import keys

SLOTS, TTL, QUOTA = 6, 50, 4
ORGS = ("acme", "globex")
LAYOUT = Layout((Group("objects", (64,), alone=True),))
COLUMN = LAYOUT.groups[0].column_bytes

numbers = st.lists(st.integers(0, 7), min_size=1, max_size=5)


class Objects(RuleBasedStateMachine):
    """Slots are memory here: what a store writes, a find has to find until it is released."""

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger(LAYOUT)
        self.ledger.set_slot_limit(0, SLOTS)
        policy = Policy(ttl_last_use_seconds=TTL)
        quota = Policy(ttl_last_use_seconds=TTL, dram_bytes_max=QUOTA * COLUMN)
        self.ledger.set_policies(
            {"acme": OrgPolicies(policy=policy), "globex": OrgPolicies(policy=quota)}, 0
        )
        self.objects = self.ledger.objects()
        self.now = 1.0
        self.memory: dict[int, bytes] = {}  # by slot: whose bytes lie there
        self.used_at: dict[bytes, float] = {}  # of what may still be served
        self.finding: list[tuple[Found, dict[int, bytes], float]] = []  # since when, at the end
        self.storing: list[tuple[Store, float]] = []
        self.dead: list[Found] = []  # who took so long that nobody waits for them
        self.asked: Counter[str] = Counter()

    def named(self, org: str, wanted: list[int]) -> Named:
        return keys(org).named([b"%d" % number for number in wanted])

    @rule(org=st.sampled_from(ORGS), wanted=numbers, no_store=st.booleans())
    def begin_store(self, org: str, wanted: list[int], no_store: bool) -> None:  # noqa: FBT001
        asked = self.named(org, wanted)
        begun = self.ledger.begin_store(asked, asked.tokens, self.now, Rules(no_store=no_store))
        assert not (no_store and begun.places)
        leased = {slot for _, read, _ in self.finding for slot in read}
        written = {slot for store, _ in self.storing for _, slot in store.places}
        for column, slot in begun.places:
            assert slot not in leased, "somebody reads there"
            assert slot not in written, "somebody writes there"
            self.memory[slot] = column.key
        self.storing.append((begun, self.now))

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), fails=st.booleans())
    def finish_store(self, data: st.DataObject, fails: bool) -> None:  # noqa: FBT001
        begun, _ = self.storing.pop(data.draw(st.integers(0, len(self.storing) - 1)))
        failed = {column: Reason.AGENT_LOST for column, _ in begun.places} if fails else {}
        self.ledger.finish_store(begun, self.now, failed)
        for column, _ in begun.places:
            if not fails:
                self.used_at[column.key] = self.now

    @rule(org=st.sampled_from(ORGS), wanted=numbers)
    def find(self, org: str, wanted: list[int]) -> None:
        asked = self.named(org, wanted)
        here = self.objects.query(asked, self.now)
        found = self.objects.find(asked, self.now)
        assert [place in found.columns for place in range(len(wanted))] == here
        self._look(found)
        self.asked[org] += asked.tokens

    def _look(self, found: Found) -> None:
        read = {}
        for place, slot in found.slots.items():
            key = found.asked.keys[place]
            assert self.memory[slot] == key, "somebody else's bytes"
            assert self.used_at[key] + TTL > self.now, "it has expired"
            self.used_at[key] = self.now
            read[slot] = key
        self.finding.append((found, read, self.now))

    @precondition(lambda self: self.finding)
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        found, _, _ = self.finding.pop(data.draw(st.integers(0, len(self.finding) - 1)))
        self.objects.refresh(found, self.now)
        self._look(found)

    @precondition(lambda self: self.finding)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        found, read, _ = self.finding.pop(data.draw(st.integers(0, len(self.finding) - 1)))
        assert all(self.memory[slot] == key for slot, key in read.items()), "overwritten while read"
        self.objects.finish(found, {}, self.now)

    @rule(org=st.sampled_from(ORGS), wanted=numbers)
    def remove(self, org: str, wanted: list[int]) -> None:
        asked = self.named(org, wanted)
        self.ledger.delete(asked, shared=True)
        assert not any(self.objects.query(asked, self.now))

    @rule(org=st.sampled_from(ORGS))
    def purge(self, org: str) -> None:
        self.ledger.purge(org)
        assert not any(self.objects.query(self.named(org, list(range(8))), self.now))

    @rule(seconds=st.sampled_from([1, 20, 60]))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        begun = self.now - USE_SECONDS_MAX
        self.dead += [found for found, _, since in self.finding if since <= begun]
        self.finding = [one for one in self.finding if one[2] > begun]
        self.storing = [one for one in self.storing if one[1] > begun]

    @rule()
    def keep_house(self) -> None:
        while self.ledger.sweep(self.now) or self.ledger.reclaim():
            pass
        clears = self.ledger.take_clears(100)
        leased = {slot for _, read, _ in self.finding for slot in read}
        for clear in clears:
            assert clear.slot not in leased
            self.memory.pop(clear.slot, None)
        self.ledger.finish_clears(clears, is_done=True)

    @rule(slots=st.sampled_from([2, SLOTS]))
    def set_slot_limit(self, slots: int) -> None:
        self.ledger.set_slot_limit(0, slots)
        if slots < SLOTS:  # readers see that by their seals
            self.finding = [
                (found, {slot: key for slot, key in read.items() if slot < slots}, since)
                for found, read, since in self.finding
            ]

    @invariant()
    def it_holds_together(self) -> None:
        check_integrity(self.ledger)
        assert self.ledger._stock.account("globex").bytes <= QUOTA * COLUMN

    def teardown(self) -> None:
        for found in [*self.dead, *(found for found, *_ in self.finding)]:
            self.objects.finish(found, {}, self.now)
        for org, asked in self.asked.items():
            tally = self.ledger.tally(org)
            check_integrity(tally)
            assert tally.requested == asked
        check_integrity(self.ledger)


TestObjects = Objects.TestCase
TestObjects.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.fixture
def kept() -> Iterator[ObjectLedger]:
    ledger = Ledger(LAYOUT)
    ledger.set_slot_limit(0, SLOTS)
    yield ledger.objects()
    check_integrity(ledger)


def test_an_object_counts_as_one_column(kept: ObjectLedger) -> None:
    found = kept.find(keys().named([b"1", b"2", b"1"]), 1.0)
    kept.finish(found, {}, 1.0)
    tally = kept._stock.account("acme").tally
    assert (tally.requests, tally.requested) == (1, 3 * COLUMN_TOKENS)
    assert tally.missed == {Reason.NEVER_STORED: 3 * COLUMN_TOKENS}
