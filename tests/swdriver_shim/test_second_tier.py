"""What the ledger decides about tier 2, one thing at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product

import pytest

from swdriver_shim.cache import tier2_deletes
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.listener import Listener
from swdriver_shim.cache.prefix_map import Column, State
from swdriver_shim.cache.purge_dates import DATES_MAX, PurgeDates
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.request_log import PromptKeys
from swdriver_shim.cache.slots import USE_SECONDS_MAX
from swdriver_shim.cache.spills import Dates
from swdriver_shim.data_plane.tier2 import _dates, _note
from swdriver_shim.keys import COLUMN_TOKENS, Keys
from swdriver_shim.layout import Layout
from swdriver_shim.lending import LentColumn
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tiers
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.ledgers import conversation, finish, ledger, missed, store
from tests.swdriver_shim.prompts import (
    FULL,
    HYBRID,
    NAMESPACE,
    OTHER,
    PURE,
    SECRET,
    STATES,
    keys,
    prompt,
)

C = COLUMN_TOKENS
KEPT = Policy(tiers=Tiers.TIER2)


def in_state(made: Ledger, state: State) -> int:
    return sum(
        column.state is state
        for account in made._stock.accounts.values()
        for column in account.columns(0)
    )


def test_one_slow_use_does_not_empty_memory() -> None:
    made = ledger(1024, acme=KEPT)
    for kind in range(1024):
        store(made, prompt(conversation(kind + 1)))
    made.match(prompt(conversation(1)), 1)  # which is never released
    for _ in range(200):
        if spill := made.tier2.begin_spill(1, 64):
            made.tier2.finish_spill(spill, [True] * len(spill.copies))
    assert in_state(made, State.READY) > 900
    check_integrity(made)


def test_room_is_kept_for_as_much_as_stores_take_at_once() -> None:
    made = ledger(64, acme=KEPT)
    for first in range(0, 64, 8):
        store(made, prompt(conversation(*range(first + 1, first + 9))))
    while spill := made.tier2.begin_spill(1, 64):
        made.tier2.finish_spill(spill, [True] * len(spill.copies))
    assert made._slots.pools[0].free == 8
    store(made, prompt(conversation(*range(101, 109))))
    assert made.tier2.spilled.no_time == 0


def test_a_spill_is_no_larger_than_asked_for() -> None:
    size = FULL.groups[0].column_bytes
    orgs = [f"org-{number}" for number in range(20)]
    made = ledger(2000)
    made.set_policies(dict.fromkeys(orgs, OrgPolicies(policy=KEPT)), 0)
    for org in orgs:
        store(made, prompt(conversation(*range(1, 41)), org))
    lower = Policy(tiers=Tiers.TIER2, dram_bytes_max=20 * size)
    made.set_policies(dict.fromkeys(orgs, OrgPolicies(policy=lower)), 1)
    copied = 0
    while spill := made.tier2.begin_spill(1, 64):
        assert len(spill.copies) <= 64
        copied += len(spill.copies)
        made.tier2.finish_spill(spill, [True] * len(spill.copies))
    assert copied >= 20 * 20
    assert all(made._stock.account(org).bytes <= 20 * size for org in orgs)


def test_a_piece_of_a_recall_holds_slots_from_its_turn_on() -> None:
    made = ledger(200, acme=KEPT)
    asked = prompt(conversation(*range(1, 101)))
    first, second = made.tier2.begin_recalls(asked, [set(range(100))], 1)
    assert made.tier2.start_recall(first, 1)
    made.sweep(1 + USE_SECONDS_MAX)  # the first takes for ever
    assert in_state(made, State.RECALLING) == len(second.places)
    made.purge("acme")
    assert not made.tier2.start_recall(second, 400), "nothing of it may come back"
    made.tier2.finish_recall(second, 400, {})
    finish(made)
    assert not made._slots.pools[0].used


def test_restoring_leaves_room_for_others() -> None:
    made = ledger(64, acme=KEPT)
    for kind in range(64):
        store(made, prompt(conversation(kind + 1)))
    for column in made._stock.account("acme").columns(0):
        column.tier2_used_at = 0.0
    made.lose(0, frozenset({0}))
    while made.reclaim():
        pass
    assert in_state(made, State.RECALLING) == 16
    assert store(made, prompt(conversation(500)))
    restored = 0
    while recall := made.tier2.begin_restore(64):
        assert made.tier2.start_recall(recall, 1)
        restored += len(recall.places)
        made.tier2.finish_recall(recall, 1, {column: Dates(0, 0) for column, _ in recall.places})
        while made.reclaim():
            pass
    assert restored == 63
    check_integrity(made)


class Heard(Listener):
    """What an engine's events are made of."""

    def __init__(self) -> None:
        self.there: Counter[Column] = Counter()

    def arrived(self, columns: Sequence[Column]) -> None:
        self.there.update(columns)

    def removed(self, columns: Sequence[Column]) -> None:
        self.there.subtract(columns)


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_is_lost_with_an_agent_is_told_to_be_gone_until_it_is_back(*, comes_back: bool) -> None:
    made = ledger(8, acme=KEPT)
    heard = Heard()
    made.add_listener(heard)
    store(made, prompt(conversation(1)))
    [column] = made._stock.account("acme").columns(0)
    column.tier2_used_at = 0.0
    made.lose(0, frozenset({0}))
    made.reclaim()
    assert heard.there == {column: 0}
    recall = made.tier2.begin_restore(64)
    assert recall
    assert made.tier2.start_recall(recall, 1)
    made.tier2.finish_recall(recall, 1, {column: Dates(0, 0)} if comes_back else {})
    assert heard.there == {column: int(comes_back)}


def test_what_is_asked_for_first_is_restored_first() -> None:
    made = ledger(64, acme=KEPT)
    for kind in range(64):
        store(made, prompt(conversation(kind + 1)))
    for column in made._stock.account("acme").columns(0):
        column.tier2_used_at = 0.0
    made.lose(0, frozenset({1}))
    match = made.match(prompt(conversation(60)), 1)
    made.refuse(match.columns[0][0], Reason.SEAL_REFUSED)
    assert match.columns[0][0].state is State.RECALLING
    made.release(match)


def test_what_fails_to_be_forgotten_keeps_no_purge_waiting() -> None:
    made = ledger(8, acme=KEPT, globex=KEPT)
    store(made, prompt(conversation(1)))
    made.delete(prompt(conversation(1)))
    made.purge("globex", tag=keys("globex").tag)
    made.tier2.finish_deletes(made.tier2.take_deletes(256), is_done=False)
    assert made.tier2.take_purge() is not None


def test_of_columns_with_a_ttl_of_their_own_no_copy_is_known_in_tier_2() -> None:
    made = ledger(acme=KEPT)
    lost, expiring = prompt(conversation(1)), prompt(conversation(2))
    for asked in (lost, expiring):
        store(made, asked)
        made.release(made.match(asked, 1))
    spill = made.tier2.begin_spill(1, 10)
    assert spill
    made.tier2.finish_spill(spill, [True, True])
    made.set_ttl(lost, 1000)
    made.set_ttl(expiring, 5)
    finish(made)
    made.sweep(10)
    assert made.accounts["acme"].expired.dram == 1
    assert made.accounts["acme"].expired.tier2 == 0, "its copy was deleted long before"
    made.lose(0, frozenset({0}))
    finish(made)
    assert made.tier2.begin_restore(10) is None, "there is nothing to restore it from"
    assert missed(made, lost, 11) == {Reason.AGENT_LOST: C}


def test_a_column_that_gets_a_ttl_of_its_own_while_it_is_recalled_has_no_copy_in_tier_2() -> None:
    made = ledger(acme=KEPT)
    asked = prompt(conversation(1))
    [recall] = made.tier2.begin_recalls(asked, [{0}], 1)
    assert made.tier2.start_recall(recall, 1)
    made.set_ttl(asked, 5)
    made.tier2.finish_recall(recall, 2, {one: Dates(1, 1) for one, _ in recall.places})
    finish(made)
    made.sweep(20)
    assert made.accounts["acme"].expired.dram == 1
    assert made.accounts["acme"].expired.tier2 == 0


def test_what_is_deleted_is_deleted_again_where_a_shard_returns_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ledger(8, acme=KEPT, globex=KEPT)
    deleted, shorter = prompt(conversation(1)), prompt(conversation(2))
    made.delete(deleted)
    made.set_ttl(shorter, 10)
    finish(made)
    made.tier2.repeat_deletes()
    again = made.tier2.take_deletes(256)
    assert [one.key for one in again] == [*deleted.keys, *shorter.keys]
    made.tier2.finish_deletes(again, is_done=True)
    monkeypatch.setattr(tier2_deletes, "DELETED_MAX", 2)
    made.delete(prompt(conversation(3), "globex"))
    finish(made)
    made.tier2.repeat_deletes()
    purge = made.tier2.take_purge()
    assert purge
    assert (purge.account.org, set(purge.tags)) == ("acme", {keys().tag}), "the oldest is not known now"
    assert len(made.tier2.take_deletes(256)) == 2


def test_however_often_shards_move_what_has_to_go_waits_once() -> None:
    made = ledger(8, acme=KEPT, globex=KEPT)
    deleted = prompt(conversation(1, 2, 3))
    made.delete(deleted)
    made.purge("globex", tag=keys("globex").tag)
    for _ in range(5):
        made.tier2.repeat_deletes()
    first = made.tier2.take_deletes(256)
    assert len(first) == 2 * len(deleted.keys), "for the delete, and for wherever shards are now"
    purges = []
    while purge := made.tier2.take_purge():
        purges.append(purge)
    assert [purge.account.org for purge in purges] == ["globex"]
    made.tier2.repeat_deletes()
    assert len(made.tier2.take_deletes(256)) == len(deleted.keys), "what is on its way goes elsewhere"
    assert made.tier2.take_purge()


@pytest.mark.parametrize("is_by_policy", [False, True])
def test_what_an_org_stores_after_a_purge_stays_when_a_shard_moves(*, is_by_policy: bool) -> None:
    """Its new home may have files from before the purge: they have their dates."""
    made = ledger(8, acme=KEPT)
    store(made, prompt(conversation(1)), 5)
    if is_by_policy:
        encrypted = Policy(tiers=Tiers.TIER2, encrypt_tier2=True)
        made.set_policies({"acme": OrgPolicies(policy=encrypted)}, 10)
        made.set_policies({"acme": OrgPolicies(policy=KEPT)}, 10)
    else:
        made.purge("acme", tag=keys().tag, now=10)
    finish(made)
    while made.sweep(10):
        pass
    store(made, prompt(conversation(2)), 11)
    made.tier2.repeat_deletes()
    assert made.tier2.take_purge() is None
    for kind, stored_at in ((3, 9), (4, 11)):
        asked = prompt(conversation(kind))
        [recall] = made.tier2.begin_recalls(asked, [{0}], 12)
        assert made.tier2.start_recall(recall, 12)
        [column] = [place.column for place in recall.places]
        made.tier2.finish_recall(recall, 12, {column: Dates(stored_at, 12)})
        assert made.query(asked, 12) == (C if stored_at > 10 else 0)
    assert [one.key for one in made.tier2.take_deletes(256)] == prompt(conversation(3)).keys


def test_a_purge_of_one_namespace_refuses_no_older_column_of_another() -> None:
    """It stayed in memory, and was copied to tier 2 after the purge."""
    made = ledger(8, acme=KEPT)
    made.purge("acme", OTHER, keys().tag, now=10)
    finish(made)
    for namespace in (NAMESPACE, OTHER):
        asked = prompt(conversation(1), namespace=namespace)
        [recall] = made.tier2.begin_recalls(asked, [{0}], 12)
        assert made.tier2.start_recall(recall, 12)
        [column] = [place.column for place in recall.places]
        made.tier2.finish_recall(recall, 12, {column: Dates(9, 12)})
        assert made.query(asked, 12) == (C if namespace == NAMESPACE else 0)


@pytest.mark.parametrize("is_started", [False, True])
def test_what_is_recalled_while_another_namespace_is_purged_has_no_copy(*, is_started: bool) -> None:
    """A purge of one namespace removes the files of all."""
    made = ledger(8, acme=KEPT)
    asked = prompt(conversation(1))
    [recall] = made.tier2.begin_recalls(asked, [{0}], 12)
    [column] = [place.column for place in recall.places]
    if is_started:
        assert made.tier2.start_recall(recall, 12)
    made.purge("acme", OTHER, keys().tag, now=13)
    if not is_started:
        assert not made.tier2.start_recall(recall, 14), "its file may be deleted meanwhile"
    made.tier2.finish_recall(recall, 14, {column: Dates(9, 12)} if is_started else {})
    finish(made)
    assert made.query(asked, 15) == (C if is_started else 0)
    assert column.tier2_used_at is None
    check_integrity(made)


def test_dates_of_purges_are_bounded() -> None:
    dates = PurgeDates()
    assert not dates
    names = [replace(NAMESPACE, adapter=f"lora-{number}") for number in range(DATES_MAX + 1)]
    for at, namespace in enumerate(names):
        dates.note(at, namespace)
    assert [dates.of(one) for one in names] == list(range(DATES_MAX + 1))
    assert dates.of(NAMESPACE) == 0, "the oldest holds for all"
    dates.note(1000)
    assert {dates.of(one) for one in names} == {1000}


def test_dates_of_purges_do_not_go_back() -> None:
    dates = PurgeDates()
    dates.note(10, OTHER)
    dates.note(9, OTHER)
    assert dates.of(OTHER) == 10
    dates.note(9)
    assert dates.of(OTHER) == 10
    assert dates.of(NAMESPACE) >= 9


def test_a_copy_that_ends_after_its_purge_is_not_noted() -> None:
    made = ledger(8, acme=KEPT)
    asked = prompt(conversation(1))
    store(made, asked)
    made.release(made.match(asked, 1))
    spill = made.tier2.begin_spill(1, 10)
    assert spill
    encrypted = Policy(tiers=Tiers.TIER2, encrypt_tier2=True)
    made.set_policies({"acme": OrgPolicies(policy=encrypted)}, 1)
    made.tier2.finish_spill(spill, [True])
    purge = made.tier2.take_purge()
    assert purge
    made.tier2.finish_purge(purge, is_done=True)
    assert made.match(asked, 2).columns[0][0].tier2_used_at is None


def test_a_stricter_policy_reaches_an_org_that_was_not_seen_yet() -> None:
    made = ledger(8, acme=KEPT)
    made.set_policies({"acme": OrgPolicies()}, 1, {"acme": keys().tag})
    purge = made.tier2.take_purge()
    assert purge
    assert set(purge.tags) == {keys().tag}


def test_an_org_with_another_secret_is_another_org() -> None:
    made = ledger(64, acme=KEPT)
    old, new = Keys("acme", SECRET, NAMESPACE), Keys("acme", SECRET[::-1], NAMESPACE)
    waiting = made.match(old.prompt(conversation(1)), 1)
    made.purge("acme", tag=old.tag)
    waiting = made.rematch(waiting, 1)  # it looks again, with the key that it came with
    made.release(waiting)
    asked = new.prompt(conversation(2))
    store(made, asked)
    finish(made)
    made.release(made.match(asked, 2))
    spill = made.tier2.begin_spill(2, 10)
    assert spill
    assert [one.tag for one in spill.copies] == [new.tag]


def test_a_request_that_waited_with_the_old_secret_takes_nothing_from_the_new_one() -> None:
    made = ledger(64)
    old, new = Keys("acme", SECRET, NAMESPACE), Keys("acme", SECRET[::-1], NAMESPACE)
    store(made, old.prompt(conversation(1)))
    made.set_policies({"acme": OrgPolicies(policy=KEPT)}, 1, {"acme": new.tag})
    asked, late = new.prompt(conversation(2)), old.prompt(conversation(3))
    store(made, asked, 2)
    finish(made)
    assert made.query(late, 3) == 0
    made.release(made.match(late, 3))
    made.set_ttl(late, 1)
    removal = made.delete(late)
    assert made.tier2.take_purge() is None
    finish(made)
    assert removal.done
    assert made.query(asked, 3) == C


def test_a_prompt_may_be_asked_for_again_with_an_old_answer() -> None:
    made = ledger(8, acme=KEPT)
    asked = prompt(conversation(1, 2))
    first = made.match(asked, 1)
    made.release(made.rematch(first, 1))
    store(made, asked)
    made.release(made.rematch(first, 1))
    check_integrity(made._stock.account("acme").tally)


def test_what_was_left_since_computing_is_faster_stays_so_when_it_is_counted_again() -> None:
    made = ledger(8, acme=KEPT)
    store(made, prompt(conversation(1, 2)))
    match = made.match(prompt(conversation(1, 2, 3)), 1)
    made.shorten(match, 0, Reason.NOT_WORTH_IT)
    made.recount(match, 1)
    tally = made._stock.account("acme").tally
    check_integrity(tally)
    assert +tally.missed == {Reason.NOT_WORTH_IT: 2 * C, Reason.NEVER_STORED: C}


def test_a_conversation_of_which_there_is_no_column_takes_no_memory() -> None:
    made = ledger(8, acme=KEPT)
    for number in range(100):
        store(made, prompt([1, 2, 3]), rules=Rules(continue_id=f"chat-{number}"))
    assert made._stock.conversations.find("acme", "chat-99") is None
    store(made, prompt(conversation(1)), rules=Rules(continue_id="chat-99"))
    assert made._stock.conversations.find("acme", "chat-99") is not None


def test_a_calendar_that_is_put_back_makes_nothing_younger() -> None:
    note = _note(Dates(100.0, 100.0), 9900)  # by the calendar, 10,000
    assert _dates([note], 9900, now=3700) == Dates(100.0, 100.0)
    assert _dates([note], 9900 - 3600, now=100) is Reason.EXPIRED, "as far as anybody can tell"


@pytest.mark.parametrize(
    "layout", [FULL, HYBRID, STATES, PURE], ids=["full", "hybrid", "states", "pure"]
)
@pytest.mark.parametrize("order", list(product(range(4), repeat=3)))
def test_keys_in_whatever_order_leave_every_column_in_its_place(
    order: Sequence[int], layout: Layout
) -> None:
    """Whoever asks for a recall names columns by their keys only. A column that is believed to be
    elsewhere in its prompt would be loaded to another place, and a purge would not find it."""
    made = ledger(40, layout, acme=KEPT)
    asked = prompt(conversation(*range(1, 5)))
    wrong = PromptKeys(asked.maker, [asked.keys[at] for at in order])
    store(made, prompt(conversation(1)))
    for recall in made.tier2.begin_recalls(wrong, [set(range(3))] * len(layout.groups), 1):
        assert made.tier2.start_recall(recall, 1)
        made.tier2.finish_recall(recall, 1, {column: Dates(1, 1) for column, _ in recall.places})
    queried = made.query(asked, 2)
    match = made.match(asked, 2)
    made.release(match)
    assert queried == match.tokens
    places = [range(group.first_needed(match.tokens), match.tokens // C) for group in layout.groups]
    assert [[column.depth for column in hit] for hit in match.columns] == list(map(list, places))
    begun = made.begin_store(asked, asked.tokens, 2, states=[C, 2 * C, 3 * C, 4 * C])
    assert all(column.key == asked.keys[column.depth] for column, _ in begun.places)
    made.finish_store(begun, 2)
    assert made.query(asked, 2) == asked.tokens
    check_integrity(made)
    made.purge("acme")
    finish(made)
    assert not any(pool.used for pool in made.pools)


@pytest.mark.parametrize("order", [*permutations(range(4)), *permutations(range(1, 4))])
def test_what_is_behind_columns_in_another_order_goes_with_them(order: Sequence[int]) -> None:
    """Also where a prompt is stored without a match before. A column at the right depth, behind one that
    is removed, must not stay in the map: another one takes its key, and no purge finds its slot. Nor
    must one stay that is behind none of the prompt, which has a first column that is not there."""
    made = ledger(40, acme=KEPT)
    asked = prompt(conversation(*range(1, 6)))
    wrong = PromptKeys(asked.maker, [asked.keys[at] for at in order])
    for recall in made.tier2.begin_recalls(wrong, [set(range(len(order)))], 1):
        assert made.tier2.start_recall(recall, 1)
        made.tier2.finish_recall(recall, 1, {column: Dates(1, 1) for column, _ in recall.places})
    store(made, asked, 2)
    assert made.query(asked, 2) == asked.tokens
    check_integrity(made)
    made.purge("acme")
    finish(made)
    assert not any(pool.used for pool in made.pools)


def test_what_is_in_use_is_borrowed_to_no_other_place() -> None:
    """A state that is refused in the middle of a load keeps its place in the map. A request for its key
    alone made a recall of it that nobody carried out or ended."""
    made = ledger(40, PURE, acme=KEPT)
    asked = prompt(conversation(1, 2, 3, 4))
    begun = made.begin_store(asked, asked.tokens, 0, states=[2 * C, 4 * C])
    made.finish_store(begun, 0)
    match = made.match(asked, 1)
    [[column]] = match.columns
    made.refuse(column, Reason.SEAL_REFUSED)
    wrong, lent = PromptKeys(asked.maker, [column.key]), {0: LentColumn(0, 0, 0.0, 0.0)}
    removals = made.tier2.removals(wrong)
    assert made.tier2.begin_borrows(wrong, [lent], (1.0, removals), 1) == []
    made.release(match)
    check_integrity(made)
    assert made.query(asked, 1) == 2 * C


def test_to_forget_a_delete_costs_the_same_however_many_were_forgotten() -> None:
    """The ledger's lock is held."""
    made = ledger(8, acme=KEPT)
    store(made, prompt(conversation(1)))
    [[prefix_map]] = made.accounts["acme"].maps.values()
    seconds = []
    for first in range(0, 6 * tier2_deletes.DELETED_MAX, tier2_deletes.DELETED_MAX):
        numbers = range(first, first + tier2_deletes.DELETED_MAX)
        began = time.thread_time()
        made._stock.deletes.delete(prefix_map, [b"%016d" % number for number in numbers])
        seconds.append(time.thread_time() - began)
        while taken := made.tier2.take_deletes(4096):
            made.tier2.finish_deletes(taken, is_done=True)
    assert max(seconds[1:]) < 5 * seconds[0], "and more, where each is looked for"
