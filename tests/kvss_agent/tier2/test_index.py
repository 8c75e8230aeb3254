"""Caps hold whatever the order of writers, readers and removals: a naive model of the disk says so."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvss_agent.redundancy.layout import fragment_part
from kvss_agent.tier2 import index as indexes
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.index import Caps, Index, Limits, Ticket
from tests.kvss_agent.integrity import check_integrity
from tests.kvss_agent.tier2.columns import ACME, BOLT, address_of

COZY = b"cozy............"
TAGS = (ACME, BOLT, COZY)
numbers = st.integers(0, 3)
tags = st.sampled_from(TAGS)
sizes = st.integers(1, 6)
caps = st.builds(
    Caps, st.integers(0, 20), st.integers(0, 12), st.dictionaries(tags, st.integers(0, 12), max_size=2)
)


def held_by(index: Index, tag: bytes) -> int:
    return index.orgs().get(tag, (0, 0))[0]


def stored(index: Index, number: int, size: int, tag: bytes = ACME) -> Address:
    return written(index, address_of(number, tag), size)


def written(index: Index, address: Address, size: int) -> Address:
    ticket = index.reserve(address, size)
    assert ticket
    assert index.start(ticket)
    index.commit(ticket)
    return address


def test_what_fits_needs_no_victim_and_what_never_fits_is_refused() -> None:
    index = Index(Caps(10, 6))
    assert index.reserve(address_of(1), 7) is None
    assert index.reserve(address_of(2, BOLT), 11) is None
    ticket = index.reserve(address_of(1), 6)
    assert ticket
    assert not ticket.victims
    assert index.orgs() == {ACME: (6, 6)}
    index.cancel(ticket)
    assert (index.held, index.orgs()) == (0, {})


def test_what_a_full_disk_gives_up_is_the_oldest_of_who_fills_most_and_no_fragment() -> None:
    index = Index(Caps(100, 10))
    fragment = written(index, address_of(0, shard=fragment_part("full.0", 1, 4, 1)), 3)
    oldest, next_, last = (stored(index, number, 2) for number in (1, 2, 3))
    stored(index, 4, 8, BOLT)
    assert index.shed(3) == {oldest: 2, next_: 2}
    for address in (oldest, next_):
        index.finish_removal(address)
    assert held_by(index, ACME) == 5
    assert index.shed(1) == {address_of(4, BOLT): 8}
    index.finish_removal(address_of(4, BOLT))
    assert index.shed(9) == {last: 2}
    assert index.shed(9) == {}
    assert index.knows(fragment)


def test_a_full_disk_gives_up_columns_of_others_where_who_fills_most_has_fragments_only() -> None:
    index = Index(Caps(100, 100))
    fragment = written(index, address_of(0, shard=fragment_part("full.0", 1, 4, 1)), 20)
    assert index.shed(1) == {}
    other = stored(index, 1, 10, BOLT)
    assert index.shed(1) == {other: 10}
    assert index.knows(fragment)


def test_numbers_are_told_while_columns_come_and_go() -> None:
    """They are asked for by threads, such as those that report metrics, and others go on meanwhile."""
    index = Index(Caps(100, 100))
    for number, tag in enumerate(TAGS):
        index.begin_read(stored(index, number, 1, tag))

    class ReadBeside:
        """One of another thread begins while this is looked at."""

        readers = 1

        @property
        def bytes(self) -> int:
            index.begin_read(address_of(9))
            return 1

    class StoredBeside(dict[Address, int]):
        def __len__(self) -> int:
            stored(index, 8, 1, b"dale............")
            return 0

    index._reading[address_of(0, ACME)] = ReadBeside()  # type: ignore[assignment]
    index._orgs[ACME].idle = StoredBeside()  # type: ignore[assignment]
    assert index.columns == len(TAGS)


def test_an_org_over_its_cap_evicts_its_own_least_recently_used() -> None:
    index = Index(Caps(100, 6))
    other = stored(index, 9, 6, BOLT)
    first, second, third = (stored(index, number, 2) for number in range(3))
    index.touch(first)
    ticket = index.reserve(address_of(4), 3)
    assert ticket
    assert list(ticket.victims) == [second, third]
    assert index.knows(other)


def test_a_full_store_takes_from_who_fills_most_of_its_cap() -> None:
    index = Index(Caps(12, 100, {BOLT: 7, COZY: 100}))
    cozy = stored(index, 1, 5, COZY)
    bolt = stored(index, 2, 4, BOLT)  # four of seven is more than five of a hundred
    stored(index, 3, 3)
    ticket = index.reserve(address_of(4), 4)
    assert ticket
    assert list(ticket.victims) == [bolt]
    assert index.knows(cozy)


def test_nobody_makes_room_for_who_fills_more_and_has_all_of_it_in_use() -> None:
    index = Index(Caps(10, 10))
    few = [stored(index, number, 2, BOLT) for number in range(2)]
    for number in range(2, 5):
        index.begin_read(stored(index, number, 2))
    assert index.reserve(address_of(9), 1) is None
    assert all(map(index.knows, few))
    assert index.reserve(address_of(9, COZY), 2), "who fills less finds room"


def test_the_room_of_a_victim_belongs_to_who_evicted_it() -> None:
    index = Index(Caps(4, 4))
    stored(index, 1, 4)
    ticket = index.reserve(address_of(2), 2)
    assert ticket
    assert index.reserve(address_of(3), 1) is None, "the victim's file is still there"
    index.start(ticket)
    assert index.reserve(address_of(3), 2), "what the writer did not need is free now"
    assert index.reserve(address_of(4), 1) is None


def test_what_is_being_read_is_not_evicted() -> None:
    index = Index(Caps(2, 2))
    address = stored(index, 1, 2)
    index.begin_read(address)
    index.begin_read(address)
    assert index.reserve(address_of(2), 1) is None
    index.end_read(address)
    assert index.reserve(address_of(2), 1) is None, "somebody else still reads it"
    index.end_read(address)
    assert index.reserve(address_of(2), 1)


def test_a_victim_that_could_not_be_removed_is_known_again_and_the_next_to_go() -> None:
    index = Index(Caps(4, 4))
    first, second = stored(index, 1, 2), stored(index, 2, 2)
    ticket = index.reserve(address_of(3), 2)
    assert ticket
    assert not index.knows(first)
    index.cancel(ticket)
    assert index.knows(first)
    again = index.reserve(address_of(3), 2)
    assert again
    assert list(again.victims) == [first]
    assert index.knows(second)


def test_nothing_is_evicted_for_what_others_wrote() -> None:
    index = Index(Caps(4, 4))
    stored(index, 1, 3)
    assert not index.adopt(address_of(2), 2)
    assert index.adopt(address_of(2), 1)
    assert index.adopt(address_of(3), 9, beyond_caps=True)
    assert len(index.trim()) == 3


def test_lower_caps_are_reached_by_trimming_and_there_is_no_room_until_then() -> None:
    index = Index(Caps(8, 8))
    for number in range(7):
        stored(index, number, 1)
    late = index.reserve(address_of(8), 1)
    assert late
    index.set_caps(Caps(3, 3))
    assert index.exceeds(ACME)
    leaving = index.trim()
    assert len(leaving) == 5, "and one stays free for who was promised room"
    assert index.reserve(address_of(9), 1) is None
    for address in leaving:
        index.finish_removal(address)
    assert not index.any_exceeds()
    assert index.start(late)


def test_who_was_promised_room_that_is_not_there_any_more_must_not_write() -> None:
    index = Index(Caps(8, 8))
    ticket = index.reserve(address_of(1), 2)
    assert ticket
    index.set_caps(Caps(1, 1))
    assert not index.start(ticket)
    index.cancel(ticket)
    assert index.held == 0


def test_nobody_writes_what_is_there_or_in_use() -> None:
    index = Index(Caps(8, 8))
    with pytest.raises(RuntimeError, match="one at a time"):
        index.reserve(stored(index, 1, 1), 1)
    index.begin_read(address_of(2))
    with pytest.raises(RuntimeError, match="one at a time"):
        index.reserve(address_of(2), 1)


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        Caps(1, 1, {ACME: -1})


@pytest.mark.parametrize("limits", [(0, {}), (-1, {}), (None, {ACME: 0}), (60, {ACME: 0})])
def test_a_time_to_live_of_nothing_is_refused(limits: tuple[int | None, dict[bytes, int]]) -> None:
    with pytest.raises(ValueError, match="a second or more"):
        Limits(*limits)


def test_what_is_learnt_of_late_is_as_old_as_it_is() -> None:
    index = Index(Caps(100, 100))
    for number, written in enumerate([50.0, 10.0, 30.0, 90.0, 10.0]):
        assert index.adopt(address_of(number), 1, written=written)
    assert index.expire(Limits(60), 60, 10) == {}
    assert index.expire(Limits(20), 60, 2) == {address_of(1): 30, address_of(4): 30}, "the oldest"
    assert index.expire(Limits(20), 60, 10) == {address_of(2): 10}
    index.cancel_removal(address_of(4))
    index.finish_removal(address_of(1))
    assert index.expire(Limits(20), 70, 10) == {address_of(4): 40, address_of(0): 0}
    index.finish_removal(address_of(4))
    check_integrity(index)
    assert index.adopt(address_of(4), 1, written=65.0)
    assert index.expire(Limits(20), 70, 10) == {}, "it is another one now"
    check_integrity(index)


def test_what_is_being_read_is_too_old_for_no_longer_than_that() -> None:
    index = Index(Caps(100, 100))
    index.adopt(address_of(1), 1, written=10.0)
    index.begin_read(address_of(1))
    index.adopt(address_of(2), 1, written=20.0)
    assert index.expire(Limits(5), 30, 10) == {address_of(2): 5}
    index.end_read(address_of(1))
    assert index.expire(Limits(5), 30, 10) == {address_of(1): 15}


def test_ages_of_what_is_gone_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody asks for what is too old, or for less at a time than is gone."""
    monkeypatch.setattr(indexes, "LOOKS_MAX", 3)
    index = Index(Caps(10, 10))
    for number in range(2000):
        stored(index, number, 1)
        check_integrity(index)
    assert len(index._orgs[ACME].ages) <= 20 + indexes.STALE_MAX
    for _ in range(100):
        if index.expire(Limits(1), 2, 10):
            return
    pytest.fail("it never comes to an end of what is gone")


class AgainstADisk(RuleBasedStateMachine):
    """A disk is a dictionary: a file is on it from the start of its writing until its removal."""

    @initialize(first=caps)
    def begin(self, first: Caps) -> None:
        self.index = Index(first)
        self.caps = first
        self.lowered = False
        self.disk: dict[Address, int] = {}
        self.before: dict[bytes | None, int] = {}
        self.used: list[Address] = []  # the model's own record of what was used when
        self.tickets: list[Ticket] = []
        self.removing: list[Address] = []
        self.readers: list[Address] = []

    def _use(self, address: Address) -> None:
        self.used = [known for known in self.used if known != address] + [address]

    @rule(number=numbers, tag=tags, size=sizes)
    def reserve(self, number: int, tag: bytes, size: int) -> None:
        address = address_of(number, tag)
        if self.index.knows(address) or self.index.is_busy(address):
            return
        idle = set(self.index.idle())
        ticket = self.index.reserve(address, size)
        if ticket is None:
            assert set(self.index.idle()) == idle
            return
        assert set(ticket.victims) <= idle
        for victim in ticket.victims:  # nobody older of the same org was spared
            older = self.used[: self.used.index(victim)]
            assert not [a for a in older if a.tag == victim.tag and a in idle - set(ticket.victims)]
        self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), outcome=st.sampled_from(["start", "commit", "cancel"]))
    def proceed(self, data: st.DataObject, outcome: str) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        if not ticket.started and outcome != "cancel":
            for victim in ticket.victims:
                del self.disk[victim]
            if self.index.start(ticket):
                self.disk[ticket.address] = ticket.bytes
            else:
                assert self.lowered
                self.index.cancel(ticket)
                self.tickets.remove(ticket)
        elif outcome == "commit":
            self.index.commit(ticket)
            self.tickets.remove(ticket)
            self._use(ticket.address)
        elif outcome == "cancel":
            self.index.cancel(ticket)
            self.tickets.remove(ticket)
            if ticket.started:
                del self.disk[ticket.address]
            for victim in reversed([] if ticket.started else list(ticket.victims)):
                self.used.remove(victim)
                self.used.insert(0, victim)

    @rule(number=numbers, tag=tags)
    def begin_read(self, number: int, tag: bytes) -> None:
        address = address_of(number, tag)
        if not self.index.is_written(address) and not self.index.is_leaving(address):
            self.index.begin_read(address)
            self.readers.append(address)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), is_there=st.booleans(), size=sizes)
    def end_read(self, data: st.DataObject, size: int, *, is_there: bool) -> None:
        address = data.draw(st.sampled_from(self.readers))
        self.readers.remove(address)
        if not is_there:  # somebody else has removed the file
            self.disk.pop(address, None)
            self.index.remove(address)
        elif self.index.adopt(address, size):
            self.disk[address] = size
        self.index.end_read(address)
        self._use(address)

    @rule(number=numbers, tag=tags)
    def touch(self, number: int, tag: bytes) -> None:
        address = address_of(number, tag)
        self.index.touch(address)
        if address in set(self.index.idle()):
            self._use(address)

    @rule(number=numbers, tag=tags, size=sizes)
    def adopt(self, number: int, tag: bytes, size: int) -> None:
        address = address_of(number, tag)
        if self.index.adopt(address, size):
            self.disk[address] = size
            self._use(address)

    @rule(number=numbers, tag=tags)
    def leave(self, number: int, tag: bytes) -> None:
        address = address_of(number, tag)
        if not self.index.is_busy(address):
            assert self.index.begin_removal(address) == self.disk.get(address, 0)
            self.removing.append(address)

    @precondition(lambda self: self.removing)
    @rule(data=st.data(), is_gone=st.booleans())
    def finish_removing(self, data: st.DataObject, *, is_gone: bool) -> None:
        address = data.draw(st.sampled_from(self.removing))
        self.removing.remove(address)
        if is_gone:
            self.disk.pop(address, None)
            self.index.finish_removal(address)
        else:
            self.index.cancel_removal(address)
            if address in self.disk:
                self.used.remove(address)
                self.used.insert(0, address)

    @rule(other=caps)
    def set_caps(self, other: Caps) -> None:
        self.index.set_caps(other)
        self.caps = other
        self.lowered = True
        self.removing += self.index.trim()
        assert not self.index.trim(), "once is enough"

    @invariant()
    def caps_hold(self) -> None:
        scopes: dict[bytes | None, int] = {tag: self.caps.of(tag) for tag in TAGS}
        scopes[None] = self.caps.total
        for tag, cap in scopes.items():
            on_disk = sum(size for address, size in self.disk.items() if tag in (None, address.tag))
            # Above a cap that was lowered it may only become less.
            assert on_disk <= max(cap, self.before.get(tag, 0))
            self.before[tag] = on_disk

    @invariant()
    def the_index_knows_what_is_there(self) -> None:
        check_integrity(self.index)
        leaving = {*self.removing, *(v for t in self.tickets if not t.started for v in t.victims)}
        written = {ticket.address for ticket in self.tickets}
        for number in range(4):
            for tag in TAGS:
                address = address_of(number, tag)
                expected = address in self.disk and address not in leaving | written
                assert self.index.knows(address) == expected

    @invariant()
    def a_scope_is_busy_while_something_in_it_is(self) -> None:
        for tag in TAGS:
            busy = [*self.readers, *self.removing, *(t.address for t in self.tickets)]
            if any(address.tag == tag for address in busy):
                assert self.index.any_busy(Scope(tag=tag))


TestAgainstADisk = pytest.mark.slow(AgainstADisk.TestCase)
TestAgainstADisk.settings = settings(max_examples=150, stateful_step_count=40)
