"""What has to wait for what: slots for whoever uses them, removals for whatever is left, tier 2 for
copies that are under way. Each fence by itself; `test_ledger_any_order` tries them in any order."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

from swdriver_shim.cache.reasons import Reason, Removal
from swdriver_shim.cache.spills import Dates
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tiers
from tests.swdriver_shim.ledgers import C, conversation, finish, is_done, ledger, missed, store
from tests.swdriver_shim.prompts import NAMESPACE, OTHER, keys, prompt

KEPT = Policy(tiers=Tiers.TIER2)


def test_a_slot_waits_for_all_that_was_under_way_though_what_began_later_ends_before() -> None:
    made = ledger(4)
    asked = prompt(conversation(1))
    store(made, asked)
    reading = made.match(asked, 1)
    made.refuse(reading.columns[0][0], Reason.SEAL_REFUSED)
    made.release(made.match(prompt(conversation(9)), 1))
    assert made._slots.pools[0].free == 3
    made.release(reading)
    assert made._slots.pools[0].free == 4


def test_a_policy_that_keeps_nothing_holds_for_what_is_stored_already() -> None:
    made = ledger()
    asked = prompt(conversation(1, 2))
    store(made, asked)
    made.set_policies({"acme": OrgPolicies(policy=Policy(tiers=Tiers.NONE))}, 1)
    assert made.query(asked, 1) == 0
    assert missed(made, asked, 1) == {Reason.NO_STORE: 2 * C}
    finish(made)
    made.sweep(2)
    assert sorted(clear.slot for clear in made.take_clears(64)) == [0, 1]
    assert made._stock.account("acme").bytes == 0
    assert made.overstay.columns == 0
    made.set_policies({"acme": OrgPolicies()}, 3)
    assert made.query(asked, 3) == 0


def test_many_purges_of_an_org_in_a_row_are_soon_asked_whether_they_are_done() -> None:
    made = ledger(64)
    purges = []
    for kind in range(18):
        store(made, prompt(conversation(kind)))
        purges.append(made.purge("acme"))
    asked: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        asked[frame.f_code.co_name] += event == "call"

    sys.setprofile(count)
    try:
        assert not any(is_done(one) for one in reversed(purges))
    finally:
        sys.setprofile(None)
    assert asked["done"] == len(purges)
    finish(made)
    assert all(map(is_done, purges))


def test_a_purge_waits_for_what_earlier_ones_wait_for() -> None:
    first, second, third = (Removal(Reason.PURGED) for _ in range(3))
    second.wait_for([first])
    third.wait_for([second])
    first.pending = 1
    assert (is_done(second), is_done(third)) == (False, False)
    first.pending = 0
    assert (is_done(third), is_done(second)) == (True, True)


def test_a_removal_that_gets_another_to_wait_for_while_it_is_asked_waits_for_it() -> None:
    """As a delete in pieces does when its org is purged meanwhile, in another thread."""
    deleted, purged = Removal(Reason.DELETED, pending=1), Removal(Reason.PURGED, pending=1)

    def purge(_frame: FrameType, event: str, _: object) -> None:
        if event == "return":
            sys.setprofile(None)
            deleted.wait_for([purged])

    sys.setprofile(purge)
    try:
        assert not is_done(deleted)
    finally:
        sys.setprofile(None)
    deleted.pending = 0
    assert not is_done(deleted)
    purged.pending = 0
    assert is_done(deleted)


def test_a_purge_waits_for_bytes_that_lie_in_slots_that_are_free() -> None:
    made = ledger(4)
    store(made, prompt(conversation(1, 2)))
    made.set_policies({"acme": OrgPolicies(policy=Policy(dram_bytes_max=0))}, 1)
    made.sweep(1)
    assert made._slots.pools[0].free == 4
    purged = made.purge("acme")
    while made.reclaim():
        pass
    while purge := made.tier2.take_purge():
        made.tier2.finish_purge(purge, is_done=True)
    assert not is_done(purged)
    clears = made.take_clears(64)
    assert sorted(clear.slot for clear in clears) == [0, 1]
    made.finish_clears(clears, is_done=True)
    assert is_done(purged)


def test_a_purge_waits_until_others_have_written_over_what_it_is_of() -> None:
    made = ledger(1)
    store(made, prompt(conversation(1)))
    writing = made.begin_store(prompt(conversation(1), "globex"), C, 1)
    assert [place.slot for place in writing.places] == [0]
    purged = made.purge("acme")
    assert purged.slots == {(0, 0)}
    made.finish_store(writing, 2)
    assert not purged.slots
    finish(made)
    assert is_done(purged)


def test_who_purges_again_waits_for_the_purge_before() -> None:
    made = ledger()
    store(made, prompt(conversation(1)))
    made.purge("acme")
    again = made.purge("acme")
    while purge := made.tier2.take_purge():
        made.tier2.finish_purge(purge, is_done=True)
    assert not is_done(again)
    finish(made)
    assert is_done(again)


def test_nothing_goes_from_tier_2_while_it_may_be_being_copied_there() -> None:
    made = ledger(acme=KEPT)
    asked = prompt(conversation(1))
    store(made, asked)
    made.release(made.match(asked, 1))
    copying = made.tier2.begin_spill(1, 10)
    assert copying
    made.delete(asked)
    made.purge("acme")
    assert made.tier2.take_deletes(64) == []
    assert made.tier2.take_purge() is None
    made.tier2.finish_spill(copying, [True])
    assert [one.key for one in made.tier2.take_deletes(64)] == asked.keys
    assert made.tier2.take_purge() is not None


def test_nothing_comes_back_of_what_is_being_removed() -> None:
    made = ledger(acme=KEPT)
    asked = prompt(conversation(1, 2))
    made.delete(asked)
    assert made.tier2.begin_recalls(asked, [{0, 1}], 1) == []
    made.tier2.finish_deletes(made.tier2.take_deletes(64), is_done=True)
    assert len(made.tier2.begin_recalls(asked, [{0, 1}], 1)) == 1
    purged = made.purge("acme", tag=keys().tag)
    assert made.tier2.search(asked, 0, 1) is None
    finish(made)
    assert is_done(purged)
    assert made.tier2.search(asked, 0, 1) is not None


def test_a_purge_of_one_namespace_is_one_of_all_in_tier_2_and_of_what_was_to_go_on() -> None:
    made = ledger(acme=KEPT)
    store(made, prompt(conversation(1)), rules=Rules(continue_id="chat"))
    store(made, prompt(conversation(1), namespace=OTHER))
    for column in made._stock.account("acme").columns(0):
        column.tier2_used_at = 0.0
    made.purge("acme", NAMESPACE)
    finish(made)
    assert not made._stock.may_use_tier2(made.accounts["acme"]), "as long as any column is not looked at"
    while made.sweep(1):
        pass
    assert made._stock.may_use_tier2(made.accounts["acme"])
    assert made._stock.conversations.find("acme", "chat") is None
    [left] = made._stock.maps_of(keys(namespace=OTHER))[0].columns.values()
    assert left.tier2_used_at is None, "it would not be copied again"


def test_what_was_purged_from_tier_2_does_not_expire_there() -> None:
    made = ledger(acme=Policy(tiers=Tiers.TIER2, ttl_last_use_seconds=10))
    for namespace in (NAMESPACE, OTHER):
        store(made, prompt(conversation(1), namespace=namespace))
    account = made.accounts["acme"]
    for column in account.columns(0):
        column.tier2_used_at = 0.0
    made.purge("acme", NAMESPACE)
    finish(made)
    made.sweep(100)
    assert not [*account.columns(0)]
    assert (account.expired.dram, account.expired.tier2) == (1, 0)
    assert made.tier2.take_deletes(64) == []


def test_what_comes_back_too_late_is_not_kept() -> None:
    made = ledger(acme=KEPT)
    asked = prompt(conversation(1))
    [recall] = made.tier2.begin_recalls(asked, [{0}], 1)
    assert made.tier2.start_recall(recall, 1)
    [column] = [place.column for place in recall.places]
    made.tier2.finish_recall(recall, 5000, {column: Dates(1, 1)})
    assert made.tier2.recalled.late == 1
    assert made._stock.account("acme").bytes == 0
    assert missed(made, asked, 5000) == {Reason.EXPIRED: C}


def test_what_has_a_time_to_live_of_its_own_is_not_copied() -> None:
    made = ledger(acme=KEPT)
    asked = prompt(conversation(1))
    store(made, asked, rules=Rules(ttl_seconds=10))
    made.release(made.match(asked, 1))
    assert made.tier2.begin_spill(1, 10) is None


def test_a_store_that_ends_late_says_nothing_of_what_was_begun_since() -> None:
    made = ledger()
    asked = prompt(conversation(1, 2))
    first = made.begin_store(asked, 2 * C, 1)
    made.delete(prompt(conversation(1)), shared=True)  # its place stays: another column is behind it
    second = made.begin_store(asked, 2 * C, 1)
    assert [place.column for place in second.places] == [first.places[0].column]
    made.finish_store(first, 2)
    assert made.query(asked, 2) == 0, "its bytes are on their way into another slot"
    made.finish_store(second, 2)
    assert made.query(asked, 2) == 2 * C
