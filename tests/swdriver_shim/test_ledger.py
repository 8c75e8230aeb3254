"""What the ledger decides, one thing at a time."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import FrameType

import pytest

from console.environment import PROJECT
from swdriver_shim import loops
from swdriver_shim.cache.displacement import Competition
from swdriver_shim.cache.displacement.lru import Lru
from swdriver_shim.cache.expiry import LOOK_AHEAD_SECONDS
from swdriver_shim.cache.ledger import SLICE, Ledger
from swdriver_shim.cache.overstay import SWEPT_SECONDS
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import USE_SECONDS_MAX
from swdriver_shim.cache.stock import NAMESPACES_MAX
from swdriver_shim.keys import Keys, Prompt
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tiers
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.kinds_of_loops import loops_in_use
from tests.swdriver_shim.ledgers import (
    C,
    carry_out,
    conversation,
    finish,
    is_done,
    ledger,
    missed,
    store,
)
from tests.swdriver_shim.prompts import FULL, HYBRID, NAMESPACE, OTHER, SECRET, STATES, prompt

COLUMN_BYTES = FULL.groups[0].column_bytes


def test_the_longest_prefix_is_found_and_what_follows_was_never_stored() -> None:
    made = ledger()
    assert store(made, prompt(conversation(1, 2, 3))) == [0, 1, 2]
    longer = prompt(conversation(1, 2, 4, 5, rest=10))
    match = made.match(longer, 1)
    assert match.tokens == 2 * C
    assert [column.slot for column in match.columns[0]] == [0, 1]
    assert made._stock.account("acme").tally.missed == {Reason.NEVER_STORED: 2 * C + 10}
    assert made._stock.account("acme").tally.hit_rate == 2 * C / (4 * C + 10)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_no_key_is_looked_up_behind_one_that_is_not_there(left: int) -> None:
    """Of a prompt of which two columns were found before."""
    made = ledger()
    asked = prompt(conversation(1, 2))
    store(made, asked)
    match = made.match(asked, 1)
    made.release(match)
    for column in reversed(match.columns[0][left:]):
        made._stock.remove(column, Reason.DISPLACED)
    asked.extend(conversation(4, 5, 6))
    with loops_in_use(replace(loops.PYTHON, find=_refuse)):
        match = made.match(asked, 2)
    displaced = {Reason.DISPLACED: (2 - left) * C} if left < 2 else {}
    assert (match.tokens, match.missed) == (left * C, displaced | {Reason.NEVER_STORED: 3 * C})
    assert asked.memo == {path: [*match.columns[0], *[None] * (5 - left)] for path in asked.memo}


def _refuse(*asked: object) -> int:
    raise AssertionError("keys were looked up")


@pytest.mark.parametrize("layout", [HYBRID, STATES])
def test_windows_and_states_are_found_behind_columns_that_are_not_there(layout: Layout) -> None:
    made, asked = ledger(layout=layout), prompt(conversation(1, 2, 3, 4))
    made.finish_store(made.begin_store(asked, 4 * C, 0, states=[4 * C]), 0)
    others = [one for one in made._stock.maps_of(asked.maker) if not one.linked]
    for path in others:
        if column := path.columns.get(asked.keys[0]):
            made._stock.remove(column, Reason.DISPLACED)
        assert path.columns
        assert asked.keys[0] not in path.columns
    assert made.query(asked, 1) == 4 * C


def test_a_match_keeps_the_keys_that_were_asked_for() -> None:
    made, asked = ledger(), prompt(conversation(1, 2))
    match, keys = made.match(asked, 1), [*asked.keys]
    asked.extend(conversation(3))
    assert (match.keys, asked.keys[:2], len(asked.keys)) == (keys, keys, 3)
    again = made.match(asked, 1)
    asked.rewind(C)
    asked.extend(conversation(4))
    assert (match.keys, again.keys[:2], len(again.keys)) == (keys, keys, 3)


def test_both_sides_of_isolation() -> None:
    made = ledger()
    tokens = conversation(1, 2)
    store(made, prompt(tokens, "acme"))
    assert made.query(prompt(tokens, "acme"), 0) == 2 * C
    assert made.query(prompt(tokens, "globex"), 0) == 0
    assert missed(made, prompt(tokens, "globex")) == {Reason.NEVER_STORED: 2 * C}


def test_another_namespace_is_another_cache_and_the_miss_says_so() -> None:
    made = ledger()
    store(made, prompt(conversation(1, 2)))
    there = prompt(conversation(1, 2), namespace=OTHER)
    assert missed(made, there) == {Reason.OTHER_NAMESPACE: 2 * C}
    assert missed(made, prompt(conversation(7), namespace=OTHER)) == {Reason.NEVER_STORED: C}


def test_a_miss_looks_into_few_of_many_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = ledger(300), prompt(conversation(1))
    adapters = [replace(NAMESPACE, adapter=f"lora-{number}") for number in range(200)]
    for adapter in adapters:
        store(made, prompt(conversation(2), namespace=adapter))
    looked_into: list[Keys] = []
    begins_as = Prompt.begins_as

    def noted(of: Prompt, maker: Keys) -> bytes | None:
        looked_into.append(maker)
        return begins_as(of, maker)

    monkeypatch.setattr(Prompt, "begins_as", noted)
    assert missed(made, asked) == {Reason.NEVER_STORED: C}
    assert len(looked_into) == NAMESPACES_MAX - 1, "but for its own"
    assert missed(made, prompt(conversation(2))) == {Reason.OTHER_NAMESPACE: C}


def test_adapters_that_were_purged_take_no_memory() -> None:
    made = ledger(8)
    for number in range(3 * NAMESPACES_MAX):
        asked = prompt(conversation(1), namespace=replace(NAMESPACE, adapter=f"lora-{number}"))
        store(made, asked)
        removal = made.purge("acme", asked.maker.namespace, asked.maker.tag)
        finish(made)
        assert is_done(removal)
    account = made.accounts["acme"]
    assert max(len(account.maps), len(account.makers)) <= NAMESPACES_MAX
    check_integrity(made)


def test_only_verified_tokens_are_stored() -> None:
    made = ledger()
    asked = prompt(conversation(1, 2, rest=30))
    begun = made.begin_store(asked, C + 5, 0)
    assert [(place.column.depth, place.column.tokens) for place in begun.places] == [(0, C), (1, 5)]
    with pytest.raises(ValueError, match="can't be verified"):
        made.begin_store(asked, asked.tokens + 1, 0)


def test_a_tail_is_used_by_who_goes_on_from_it_and_is_rewritten_in_place() -> None:
    made = ledger()
    turn = prompt(conversation(1, rest=20))
    assert store(made, turn) == [0, 1]
    turn.extend([5] * 30)
    match = made.match(turn, 1)
    assert match.tokens == C + 20
    assert store(made, turn) == [2], "somebody is reading the tail"
    made.release(match)
    turn.extend([6] * 20)
    assert store(made, turn) == [2, 3], "the column grows where its longest tail was"
    assert made.query(turn, 1) == 2 * C + 6
    assert made.query(prompt([*conversation(1, rest=20), *[5] * 40]), 1) == C + 20
    check_integrity(made)


@pytest.mark.parametrize(
    ("policy", "alive_until", "touched"),
    [
        (Policy(ttl_last_use_seconds=10), 10, False),
        (Policy(ttl_last_use_seconds=10), 18, True),
        (Policy(ttl_first_use_seconds=10, ttl_last_use_seconds=None), 10, True),
        (Policy(ttl_first_use_seconds=15, ttl_last_use_seconds=10), 15, True),
    ],
)
def test_no_hit_after_expiry_though_nobody_has_swept(
    policy: Policy, alive_until: int, *, touched: bool
) -> None:
    made = ledger(acme=policy)
    asked = prompt(conversation(1))
    store(made, asked, 0)
    if touched:
        made.release(made.match(asked, 8))
    assert made.query(asked, alive_until - 0.1) == C
    assert made.query(asked, alive_until) == 0
    assert missed(made, asked, alive_until) == {Reason.EXPIRED: C}
    assert not made.sweep(alive_until + 2)
    assert missed(made, asked, alive_until + 2) == {Reason.EXPIRED: C}, "it is remembered"
    assert (made._stock.overstay.columns, made._stock.overstay.seconds_max) == (0, 2), (
        "no sweeper comes at once"
    )
    assert made._stock.account("acme").bytes == 0


def test_a_late_sweeper_is_counted_by_the_columns_that_lay_there() -> None:
    made = ledger(acme=Policy(ttl_first_use_seconds=10, ttl_last_use_seconds=None))
    store(made, prompt(conversation(1)), 0)
    store(made, prompt(conversation(2)), 1)
    made.sweep(10 + SWEPT_SECONDS + 0.5)
    assert (made._stock.overstay.columns, made._stock.overstay.seconds_max) == (1, SWEPT_SECONDS + 0.5)


def test_columns_of_a_prompt_that_expire_together_are_not_candidates_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, leaves = ledger(acme=Policy(ttl_last_use_seconds=10)), list[object]()
    store(made, prompt(conversation(1, 2, 3)), 0)
    monkeypatch.setattr(Competition, "leaf", lambda _, column: leaves.append(column))
    made.sweep(12)
    assert made._stock.account("acme").bytes == 0
    assert not leaves


def test_a_shorter_ttl_makes_no_sweeper_late() -> None:
    made = ledger(acme=Policy(ttl_last_use_seconds=7 * 86_400))
    store(made, prompt(conversation(1)), 0)
    made.set_policies({"acme": OrgPolicies(policy=Policy(ttl_last_use_seconds=60))}, 3600)
    made.sweep(3601)
    assert made._stock.account("acme").bytes == 0
    assert (made._stock.overstay.columns, made._stock.overstay.seconds_max) == (0, 1)


def test_a_change_of_policy_holds_for_what_is_stored_already() -> None:
    made = ledger(acme=Policy(ttl_last_use_seconds=1000))
    asked = prompt(conversation(1, 2))
    store(made, asked, 0)
    made.set_policies({"acme": OrgPolicies(policy=Policy(ttl_last_use_seconds=5))}, 6)
    assert made.query(asked, 6) == 0
    made.sweep(6)
    assert made._stock.account("acme").bytes == 0
    store(made, asked, 6)
    made.set_policies({"acme": OrgPolicies(policy=Policy(ttl_last_use_seconds=500))}, 7)
    made.sweep(100)
    assert made.query(asked, 100) == 2 * C


def test_a_models_own_policy_comes_before_its_orgs() -> None:
    policies = OrgPolicies(policy=Policy(tiers=Tiers.NONE), models={"llama": Policy()})
    for model, hit in [("llama", C), ("mixtral", 0)]:
        made = Ledger(FULL, model)
        made.set_slot_limit(0, 4)
        made.set_policies({"acme": policies}, 0)
        store(made, prompt(conversation(1)))
        assert made.query(prompt(conversation(1)), 0) == hit


def test_a_request_may_be_stricter_than_its_policy_and_never_laxer() -> None:
    made = ledger(acme=Policy(ttl_last_use_seconds=10))
    brief, long = prompt(conversation(1)), prompt(conversation(2))
    store(made, brief, 0, Rules(ttl_seconds=3))
    store(made, long, 0, Rules(ttl_seconds=1000))
    assert (made.query(brief, 2), made.query(brief, 3)) == (C, 0)
    assert (made.query(long, 9), made.query(long, 10)) == (C, 0)
    secret = prompt(conversation(3))
    assert store(made, secret, 0, Rules(no_store=True)) == []
    assert missed(made, secret) == {Reason.NO_STORE: C}


def test_who_may_keep_it_for_longer_does() -> None:
    made = ledger(acme=Policy(ttl_last_use_seconds=100))
    asked = prompt(conversation(1))
    for seconds, lives in [(5, 5), (20, 20), (7, 20), (None, 100)]:
        store(made, asked, 0, Rules(ttl_seconds=seconds))
        assert made.query(asked, lives - 1) == C
        assert made.query(asked, lives) == 0
    assert made.set_ttl(asked, 3) == 1
    assert made.query(asked, 3) == 0


def test_room_is_made_from_the_end_of_what_was_used_longest_ago() -> None:
    made = ledger(4, acme=Policy(displacement="lru"))
    old, new = prompt(conversation(1, 2, 3)), prompt(conversation(4, 5, 6))
    store(made, old, 0)
    store(made, new, 1)
    assert made.query(new, 1) == 3 * C
    assert made.query(old, 1) == C
    assert missed(made, old, 1) == {Reason.DISPLACED: 2 * C}


def test_a_prompt_larger_than_everything_keeps_its_beginning() -> None:
    made = ledger(4)
    store(made, prompt(conversation(1, 2, 3, 4, 5, 6)))
    assert made.query(prompt(conversation(1, 2, 3, 4, 5, 6)), 0) == 4 * C


def test_what_is_being_read_does_not_make_room() -> None:
    made = ledger(3)
    match = made.match(prompt(conversation(1)), 0)
    store(made, prompt(conversation(1, 2)), 0)
    match = made.match(prompt(conversation(1, 2)), 0)
    assert store(made, prompt(conversation(5, 6)), 1) == [2]
    made.release(match)
    assert len(store(made, prompt(conversation(5, 6)), 2)) == 1


def test_low_priority_goes_first_and_can_be_changed_later() -> None:
    made = ledger(3, acme=Policy(displacement="lru"))
    one, two, three = (prompt(conversation(kind)) for kind in (1, 2, 3))
    store(made, one, 0, Rules(priority=10))
    for at, asked in enumerate((two, three), 1):
        store(made, asked, at)
    assert made.set_priority(one, 90, 3) == 1
    store(made, prompt(conversation(4)), 4)
    assert [made.query(asked, 4) for asked in (one, two, three)] == [C, 0, C]


def test_a_hard_quota_is_never_exceeded_and_pays_for_itself() -> None:
    made = ledger(8, acme=Policy(dram_bytes_max=2 * COLUMN_BYTES, displacement="lru"))
    store(made, prompt(conversation(9), "globex"))
    store(made, prompt(conversation(1, 2)), 0)
    store(made, prompt(conversation(3)), 1)
    assert made._stock.account("acme").bytes == 2 * COLUMN_BYTES
    assert missed(made, prompt(conversation(1, 2)), 1) == {Reason.QUOTA: C}
    assert made.query(prompt(conversation(9), "globex"), 1) == C
    made.set_policies({"acme": OrgPolicies(policy=Policy(dram_bytes_max=0))}, 2)
    made.sweep(2)
    assert made._stock.account("acme").bytes == 0
    assert store(made, prompt(conversation(1)), 3) == []


def test_who_is_over_its_share_pays_first() -> None:
    made = ledger(6, acme=Policy(share=100), globex=Policy(share=200))
    for kind in range(6):
        store(made, prompt(conversation(kind)), kind)
    for kind in range(6):
        store(made, prompt(conversation(kind), "globex"), 10 + kind)
    assert made._stock.account("acme").bytes == 2 * COLUMN_BYTES
    assert made._stock.account("globex").bytes == 4 * COLUMN_BYTES


def test_within_one_store_others_pay_in_turn_and_who_has_nothing_to_give_is_passed_over() -> None:
    made = ledger(9)
    for at in range(4):
        store(made, prompt(conversation(at), "acme"), at)
        store(made, prompt(conversation(at), "globex"), at)
    store(made, prompt(conversation(0), "initech"))
    pinned = made.match(prompt(conversation(0), "initech"), 4)
    asked = prompt(conversation(1, 2, 3, 4, 5), "initech")
    assert len(store(made, asked, 5)) == 5
    assert made.query(asked, 5) == 5 * C
    assert {made._stock.account(org).bytes // COLUMN_BYTES for org in ("acme", "globex")} == {1, 2}
    made.release(pinned)
    check_integrity(made)


def test_a_window_needs_only_its_last_tokens_and_all_groups_agree() -> None:
    made = ledger(20, HYBRID)
    asked = prompt(conversation(1, 2, 3, 4, 5))
    begun = made.begin_store(asked, asked.tokens, 0)
    per_group = [[p.column.depth for p in begun.places if p.column.group == g] for g in range(3)]
    assert per_group == [[0, 1, 2, 3, 4]] * 3
    made.finish_store(begun, 0)
    match = made.match(asked, 0)
    assert match.tokens == 5 * C
    assert [len(hit) for hit in match.columns] == [5, 3, 5]
    made.release(match)
    assert made.query(prompt(conversation(1, 2, 3, 4)), 0) == 4 * C, "others may go on from the middle"
    draft = match.columns[2][1]
    made.refuse(draft, Reason.SEAL_REFUSED)
    assert missed(made, prompt(conversation(1, 2)), 1) == {Reason.SEAL_REFUSED: C}


def test_where_room_is_short_a_window_has_its_end() -> None:
    made = ledger(20, HYBRID)
    made.set_slot_limit(1, 4)
    asked = prompt(conversation(1, 2, 3, 4, 5))
    begun = made.begin_store(asked, asked.tokens, 0)
    window = [place.column.depth for place in begun.places if place.column.group == 1]
    assert window == [0, 2, 3, 4]
    made.finish_store(begun, 0)
    store(made, prompt(conversation(9)), 1)
    assert made.query(asked, 1) == 5 * C, "what is before the window made room"


def test_what_an_engine_has_no_kv_of_any_more_is_not_asked_for() -> None:
    made = ledger(slots=20, layout=HYBRID)
    asked = prompt(conversation(1, 2, 3, 4, 5))

    def stored(*first: int) -> list[list[int]]:
        begun = made.begin_store(asked, asked.tokens, 0, first=first)
        made.finish_store(begun, 0)
        check_integrity(made)
        depths: list[list[int]] = [[], [], []]
        for column, _ in begun.places:
            depths[column.group].append(column.depth)
        return depths

    assert stored(C, 3 * C - 5, 0) == [[], [], []], "nothing can be used behind a gap of a full group"
    assert stored(0, 3 * C + 1, 0) == [[0, 1, 2, 3, 4], [4], [0, 1, 2, 3, 4]]
    assert made.query(asked, 0) == 0, "the window has too little of it"
    assert stored(5 * C, 2 * C - 5, 5 * C) == [[], [2, 3], []]
    assert made.query(asked, 0) == 5 * C
    with pytest.raises(ValueError, match="shorter"):
        stored(0)


def test_a_tail_is_found_where_the_window_reaches_from_its_end_only() -> None:
    made = ledger(layout=HYBRID)
    asked = prompt(conversation(1, 2, 3, 4, 5, rest=10))
    store(made, asked)
    asked.extend([7])
    assert made.query(asked, 0) == 5 * C + 10


def test_a_purge_is_at_once_and_done_when_every_slot_is_empty() -> None:
    made = ledger(2000)
    asked = prompt(conversation(*range(SLICE + 10)))
    store(made, asked)
    store(made, prompt(conversation(1), "globex"))
    evicted = prompt(conversation(5), namespace=OTHER)
    store(made, evicted)
    made.set_slot_limit(0, 2000)
    match = made.match(asked, 0)
    receipt = made.purge("acme")
    assert made.query(asked, 0) == 0
    assert made.query(prompt(conversation(1), "globex"), 0) == C
    assert not is_done(receipt)
    finish(made)
    assert not is_done(receipt), "somebody is still reading"
    made.release(match)
    finish(made)
    assert is_done(receipt)
    assert (receipt.columns, receipt.bytes) == (SLICE + 11, (SLICE + 11) * COLUMN_BYTES)
    assert missed(made, asked) == {Reason.PURGED: (SLICE + 10) * C}


def test_a_purge_reaches_what_was_evicted_before_and_still_lies_in_a_free_slot() -> None:
    made = ledger(2, acme=Policy(displacement="lru"))
    store(made, prompt(conversation(1, 2)))
    made.set_slot_limit(0, 1)
    made.set_slot_limit(0, 2)
    receipt = made.purge("acme")
    finish(made)
    assert receipt.done
    assert receipt.columns == 1


def test_a_purge_reaches_bytes_that_a_store_was_to_overwrite_and_did_not() -> None:
    made = ledger(1, acme=Policy(displacement="lru"))
    store(made, prompt(conversation(1)))
    began = made.begin_store(prompt(conversation(1), "globex"), C, 0)
    receipt = made.purge("acme")
    finish(made)
    assert not is_done(receipt), "its bytes may still be where globex is going to write"
    made.finish_store(began, 0, {column: Reason.AGENT_LOST for column, _ in began.places})
    assert not is_done(receipt), "and are if it has not come to that"
    finish(made)
    assert is_done(receipt)
    check_integrity(made)


def test_a_purge_reaches_bytes_that_stores_were_to_overwrite_before_it_and_did_not() -> None:
    """However often they have tried: the slot knows each org whose bytes it may have, once."""
    made = ledger(1, acme=Policy(displacement="lru"))
    store(made, prompt(conversation(1)))
    for _ in range(3):
        began = made.begin_store(prompt(conversation(1), "globex"), C, 0)
        made.finish_store(began, 0, dict.fromkeys(began.columns, Reason.AGENT_LOST))
    orgs = [[one.org for one in maps] for maps in made.pools[0]._leftovers.values()]
    assert orgs == [["acme", "globex"]]
    receipt = made.purge("acme")
    assert not is_done(receipt)
    finish(made)
    assert is_done(receipt)
    check_integrity(made)


def test_a_store_that_overwrites_bytes_of_what_is_purged_is_as_good_as_emptying_them() -> None:
    made = ledger(1, acme=Policy(displacement="lru"))
    store(made, prompt(conversation(1)))
    began = made.begin_store(prompt(conversation(1), "globex"), C, 0)
    receipt = made.purge("acme")
    made.finish_store(began, 0)
    made.reclaim()
    assert not made.take_clears(64)
    finish(made)
    assert receipt.done
    assert made.query(prompt(conversation(1), "globex"), 0) == C


def test_a_purge_waits_for_no_slot_that_was_overwritten_before() -> None:
    made = ledger(1, acme=Policy(displacement="lru"))
    store(made, prompt(conversation(1)))
    store(made, prompt(conversation(1), "globex"))
    receipt = made.purge("acme")
    finish(made)
    assert receipt.done
    assert made.query(prompt(conversation(1), "globex"), 0) == C


def test_a_second_purge_waits_for_what_the_first_has_not_emptied_yet() -> None:
    made = ledger()
    store(made, prompt(conversation(1)))
    first, second = made.purge("acme"), made.purge("acme")
    made.reclaim()
    third = made.purge("acme")
    clears = made.take_clears(64)
    assert not any(receipt.done for receipt in (first, second, third))
    made.finish_clears(clears, is_done=False)
    finish(made)
    assert all(receipt.done for receipt in (first, second, third))


def test_a_prompt_behind_which_many_have_gone_on_is_hashed_no_more_often_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ledger(1000)
    for kind in range(900):
        store(made, prompt([*conversation(1), kind, *[5] * (kind % 3)]))
    hashed: list[int] = []
    tail = Prompt.tail

    def counted(asked: Prompt, columns: int, count: int) -> bytes:
        hashed.append(count)
        return tail(asked, columns, count)

    monkeypatch.setattr(Prompt, "tail", counted)
    assert made.query(prompt([*conversation(1), 899, 5, 5, 7]), 0) == C + 3
    assert made.query(prompt([*conversation(1), 9999, 7, 7, 7]), 0) == C
    assert hashed == [3, 3, 2, 1], "once for each length"


def test_what_is_gone_is_not_remembered_until_it_would_have_expired() -> None:
    day = 24 * 3600
    made = ledger(2, acme=Policy(ttl_last_use_seconds=365 * day, displacement="lru"))
    asked = [prompt(conversation(kind)) for kind in range(3)]
    seconds = 3 * LOOK_AHEAD_SECONDS
    for now in range(seconds):
        store(made, asked[now % 3], now)
        made.sweep(now)
    parts = chain.from_iterable(made._stock.expiry._due.values())
    waiting = [column for part in parts for column in part]
    assert len(waiting) == 2, "those that are here"
    assert len(made._stock.expiry._due) <= LOOK_AHEAD_SECONDS + 1
    last = asked[(seconds - 1) % 3]
    for now in range(seconds, 365 * day + seconds - 2, LOOK_AHEAD_SECONDS):
        made.sweep(now)
    assert made.query(last, 365 * day + seconds - 2) == C
    made.sweep(365 * day + seconds - 1)
    assert made._stock.account("acme").bytes == 0
    assert not made._stock.expiry._due


def test_where_slots_are_scrubbed_no_more_goes_than_is_needed() -> None:
    made = ledger(64, acme=Policy(scrub=True))
    for kind in range(64):
        store(made, prompt(conversation(kind + 1)))
    assert store(made, prompt(conversation(100))) == [], "its slot has to be emptied first"
    assert made._stock.account("acme").bytes == 63 * COLUMN_BYTES
    assert made.tier2.begin_spill(1, 64) is None, "nothing is copied anywhere"
    assert made._stock.account("acme").bytes == 62 * COLUMN_BYTES, "some are free before they are needed"
    finish(made)
    for kind in range(200, 202):
        assert len(store(made, prompt(conversation(kind)))) == 1
    assert made._stock.account("acme").bytes == 64 * COLUMN_BYTES
    made.set_policies({}, 2)
    assert not made._spills.is_short_of_room
    assert len(store(made, prompt(conversation(300)))) == 1
    check_integrity(made)


def test_a_prompt_in_use_is_deleted_from_its_end_to_its_start() -> None:
    made = ledger()
    asked = prompt(conversation(1, 2, 3, rest=4))
    store(made, asked)
    load = made.match(asked, 0)
    assert made.delete(asked).columns == 4
    made.release(load)
    check_integrity(made)
    assert not list(made.accounts["acme"].columns(0))


def test_a_delete_looks_at_no_columns_that_are_pinned_for_others() -> None:
    """Those of promoted prompts may be a sixteenth of all slots."""
    made = ledger(2000)
    asked, other = prompt(conversation(1)), prompt(conversation(*range(1000)), "globex")
    store(made, asked)
    store(made, other)
    made._slots.pin(list(made.accounts["globex"].columns(0)))
    calls = 0

    def count(_frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        made.delete(asked)
    finally:
        sys.setprofile(None)
    assert calls < 500


def test_a_long_prompt_is_deleted_in_pieces_and_stops_where_another_has_gone_on_meanwhile() -> None:
    made = ledger(4 * SLICE)
    long, beside = prompt(conversation(*range(3 * SLICE))), prompt(conversation(*range(SLICE), 7))
    store(made, long)
    removal = made.delete(long)
    done = removal.columns
    assert 0 < done <= SLICE, "others come in between"
    store(made, beside)
    carry_out(made)
    assert not is_done(removal), "there is more to do, though agents have emptied all slots"
    assert made.sweep(0)
    assert done < removal.columns <= done + SLICE
    while made.sweep(0):
        pass
    finish(made)
    assert is_done(removal)
    assert made.query(long, 0) == made.query(beside, 0) - C == SLICE * C
    check_integrity(made)


@pytest.mark.parametrize("how", ["displaced", "lost"])
def test_the_delete_of_a_long_prompt_empties_what_is_removed_for_another_reason_meanwhile(
    how: str,
) -> None:
    made = ledger(3 * SLICE, acme=Policy(displacement="lru"))
    long = prompt(conversation(*range(3 * SLICE)))
    begun = made.begin_store(long, long.tokens, 0)
    if how == "displaced":
        made.finish_store(begun, 0)
    removal = made.delete(long)
    if how == "displaced":
        store(made, prompt(conversation(7, 8, 9), "globex"))
    else:
        made.finish_store(begun, 0, {column: Reason.AGENT_LOST for column, _ in begun.places})
    while made.sweep(0):
        pass
    assert not is_done(removal), "no slot was emptied yet"
    emptied = set()
    while clears := made.take_clears(64):
        emptied |= {clear.slot for clear in clears}
        made.finish_clears(clears, is_done=True)
    finish(made)
    assert is_done(removal)
    assert emptied == set(range(3 * SLICE))
    check_integrity(made)


@pytest.mark.parametrize("last", range(3))
def test_the_delete_of_a_long_prompt_waits_for_each_column_that_another_delete_removes_meanwhile(
    last: int,
) -> None:
    made = ledger(4 * SLICE)
    long, begins_alike = prompt(conversation(*range(3 * SLICE))), prompt(conversation(0, 1))
    begins_alike.extend([2] * 5)  # a tail
    store(made, long)
    store(made, begins_alike)
    removal = made.delete(long)
    carry_out(made)
    assert made.delete(begins_alike, shared=True).columns == 3
    clears = made.take_clears(3)
    assert made.sweep(0), "the long one has not come so far"
    while made.sweep(0):
        pass
    finish(made)
    made.finish_clears([clear for clear in clears if clear is not clears[last]], is_done=True)
    assert not is_done(removal)
    made.finish_clears([clears[last]], is_done=True)
    assert is_done(removal)
    check_integrity(made)


def test_what_is_left_of_the_delete_of_a_long_prompt_is_in_no_snapshot() -> None:
    made = ledger(4 * SLICE)
    long, other = prompt(conversation(*range(3 * SLICE))), prompt(conversation(7), "globex")
    store(made, long)
    store(made, other)
    assert 0 < made.delete(long).columns <= SLICE
    assert [one.key for one in made.snapshot(0, 0).columns] == other.keys


def test_a_purge_amid_the_delete_of_a_long_prompt_does_the_rest() -> None:
    made = ledger(4 * SLICE)
    asked = prompt(conversation(*range(3 * SLICE)))
    store(made, asked)
    removal = made.delete(asked)
    purged = made.purge("acme")
    assert not made.sweep(0)
    carry_out(made)
    assert not is_done(removal), "bytes of the prompt are there until the purge has removed them"
    finish(made)
    assert is_done(purged)
    assert is_done(removal)
    assert removal.columns + purged.columns == 3 * SLICE


def test_a_delete_stops_where_others_go_on() -> None:
    made = ledger(acme=Policy(scrub=True))
    mine, other = prompt(conversation(1, 2, 3, rest=4)), prompt(conversation(1, 9))
    store(made, mine)
    store(made, other)
    receipt = made.delete(mine)
    assert receipt.columns == 3
    assert made.query(other, 0) == 2 * C
    assert [clear.scrub for clear in made.take_clears(64)] == [True] * 3
    assert made.delete(mine, shared=True).columns == 1
    assert made.query(other, 0) == 0
    store(made, prompt(conversation(1)))
    assert made.query(other, 0) == 2 * C, "what is behind the gap comes back with it"
    check_integrity(made)


def test_a_delete_leaves_what_others_need_of_windows() -> None:
    made = ledger(40, HYBRID)
    mine, other = prompt(conversation(1, 2, 3, 4, 5)), prompt(conversation(1, 2, 3, 9))
    store(made, mine)
    store(made, other)
    assert made.delete(mine).columns == 2 * len(HYBRID.groups)
    assert made.query(other, 0) == 4 * C
    assert made.query(mine, 0) == 3 * C, "as far as the other has it"
    assert made.delete(mine, shared=True).columns == 3 * len(HYBRID.groups)
    check_integrity(made)


def test_a_delete_leaves_states_that_others_continue_from() -> None:
    made = ledger(40, STATES)
    mine, other = prompt(conversation(1, 2, 3)), prompt(conversation(1, 2, 9))
    ends = [C, 2 * C, 3 * C]
    for asked in (mine, other):
        made.finish_store(made.begin_store(asked, asked.tokens, 0, states=ends), 0)
    made.delete(mine)
    assert made.query(mine, 0) == 2 * C
    assert made.query(other, 0) == 3 * C
    check_integrity(made)


def test_a_delete_goes_on_where_another_deleted_prompt_is_being_loaded() -> None:
    made = ledger(40)
    mine, other = prompt(conversation(1, 2, 3, rest=4)), prompt(conversation(1, 2, 8, 9, rest=7))
    store(made, mine)
    store(made, other)
    loads = [made.match(other, 0), made.match(prompt(conversation(1, 2, 8)), 0), made.match(mine, 0)]
    assert made.delete(other).columns == 3
    assert made.delete(mine).columns == 4, "all that is left of both"
    for load in loads:
        made.release(load)
        check_integrity(made)
    assert not list(made.accounts["acme"].columns(0))


def test_a_delete_stops_where_one_of_several_that_are_loaded_is_not_deleted() -> None:
    made = ledger(40)
    mine, gone, other = (prompt(conversation(1, 2, kind)) for kind in (3, 4, 5))
    for asked in (mine, gone, other):
        store(made, asked)
    loads = [made.match(asked, 0) for asked in (mine, gone, other)]
    assert made.delete(gone).columns == 1
    assert made.delete(mine).columns == 1
    assert made.query(other, 0) == 3 * C
    for load in loads:
        made.release(load)
    check_integrity(made)


def test_a_piece_of_a_delete_takes_no_longer_where_others_of_the_org_are_deleted_as_well() -> None:
    def calls_of_a_piece(prompts: int) -> int:
        made = ledger(prompts * 3 * SLICE)
        asked = [prompt(conversation(kind, *range(2 * SLICE))) for kind in range(prompts)]
        for one in asked:
            store(made, one)
        for one in asked:
            made.delete(one)
        calls = 0

        def count(_frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            made.sweep(0)
        finally:
            sys.setprofile(None)
        return calls

    assert calls_of_a_piece(8) < 1.1 * calls_of_a_piece(1)


def test_who_never_comes_back_is_given_up() -> None:
    made = ledger(2)
    asked = prompt(conversation(1))
    store(made, asked)
    made.match(asked, 0)
    lost = made.begin_store(prompt(conversation(2)), C, 0)
    made.sweep(USE_SECONDS_MAX)
    assert missed(made, prompt(conversation(2)), 1) == {Reason.AGENT_LOST: C}
    assert len(store(made, prompt(conversation(3, 4)), 1)) == 2
    made.finish_store(lost, 1)
    check_integrity(made)


def test_while_an_agent_is_lost_nothing_is_served_or_stored_and_nothing_goes() -> None:
    made = ledger()
    asked = prompt(conversation(1))
    store(made, asked)
    made._stock.is_reachable = False
    assert missed(made, asked) == {Reason.AGENT_LOST: C}
    assert store(made, prompt(conversation(2))) == []
    made._stock.is_reachable = True
    assert made.query(asked, 0) == C


def test_hits_that_could_not_be_used_are_misses_after_all() -> None:
    made = ledger()
    asked = prompt(conversation(1, 2))
    store(made, asked)
    match = made.match(asked, 0)
    made.refuse(match.columns[0][1], Reason.SEAL_REFUSED)
    made.shorten(match, C, Reason.SEAL_REFUSED)
    made.release(match)
    tally = made._stock.account("acme").tally
    assert (tally.hits["dram"], tally.missed) == (C, {Reason.SEAL_REFUSED: C})


class Noted(Lru[Column]):
    """Notes which columns are used."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[list[Column]] = []

    def used(self, path: Sequence[Column], now: float) -> None:  # noqa: ARG002
        self.paths.append([*path])


def test_each_displacement_queue_is_told_of_the_columns_of_its_priority() -> None:
    made, asked = ledger(), prompt(conversation(1, 2, 3))
    store(made, asked)
    first, *others = columns = made.match(asked, 0).columns[0]
    [queues] = made.accounts["acme"]._queues
    [(usual, real)] = queues.items()
    queues[usual] = alone = Noted()
    made.match(asked, 0)
    assert alone.paths == [columns]
    queues[usual] = real
    made.set_priority(asked, usual + 1, 0, range(1))
    assert set(queues) == {usual, usual + 1}
    queues[usual], queues[usual + 1] = of_others, of_first = Noted(), Noted()
    made.match(asked, 0)
    assert (of_first.paths, of_others.paths) == ([[first]], [others])


def test_what_a_match_has_found_is_known_though_it_is_removed_meanwhile() -> None:
    made = ledger()
    store(made, prompt(conversation(7)))
    asked = prompt(conversation(1, 2, rest=5))
    slots = store(made, asked)
    found = made.match(asked, 0)
    made.delete(asked, shared=True)
    assert [*map(list, found.slots)] == [slots]


def test_tokens_are_counted_once_though_the_prompt_goes_on() -> None:
    made = ledger()
    asked = prompt(conversation(1))
    store(made, asked)
    asked.extend(conversation(2, rest=5))
    found = made.match(asked, 0)
    made.release(found)
    asked.extend(conversation(3))
    made.recount(found, 0)
    assert made._stock.account("acme").tally.missed == {Reason.NEVER_STORED: C + 5}
    check_integrity(made)
    more = made.rematch(found, 0, C)
    made.release(more)
    assert made._stock.account("acme").tally.requested == 3 * C + 5
    check_integrity(made)
    asked.rewind(C)
    made.recount(more, 0)
    check_integrity(made)


def test_a_prompt_is_explained_column_by_column() -> None:
    made = ledger(acme=Policy(ttl_last_use_seconds=10))
    store(made, prompt(conversation(1, 2)), 0, Rules(priority=50))
    made.release(made.match(prompt(conversation(1)), 4))
    told = made.explain(prompt(conversation(1, 2, 3, rest=3)), 5)["full"]
    assert [column.state for column in told] == ["ready", "ready", "never_stored", "never_stored"]
    assert [column.tokens for column in told] == [C, C, C, 3]
    first = told[0]
    assert (first.age_seconds, first.idle_seconds, first.expires_in_seconds) == (5, 1, 9)
    assert (first.uses, first.priority, first.slot) == (1, 50, 0)
    assert made.explain(prompt(conversation(1, 2)), 10)["full"][1].state == "expired"


def room_for(count: int) -> Policy:
    return Policy(displacement="s3fifo", dram_bytes_max=count * FULL.column_bytes)


@pytest.mark.parametrize("by", ["store", "quota", "sweeper", "spill"])
def test_a_displacement_policy_knows_who_was_displaced_whoever_made_room(by: str) -> None:
    spilling = Policy(displacement="s3fifo", tiers=Tiers.TIER2)
    policy = {"quota": room_for(8), "spill": spilling}.get(by, Policy(displacement="s3fifo"))
    made = ledger(8 if by in ("store", "spill") else 16, acme=policy)
    first, *others = [prompt(conversation(kind)) for kind in range(9)]
    for asked in (first, *others[:7]):
        store(made, asked)
    if by == "sweeper":
        made.set_policies({"acme": OrgPolicies(policy=room_for(7))}, 1)
        made.sweep(1)
    elif by == "spill":
        spill = made.tier2.begin_spill(1, 64)
        assert spill
        made.tier2.finish_spill(spill, [True])
    else:
        store(made, others[7], 1)
    assert made.query(first, 1) == 0
    store(made, first, 2)
    [again] = [one for one in made._stock.account("acme").columns(0) if one.key == first.keys[0]]
    assert again.mark is not None, "it is not in the queue of newcomers"


def test_a_tail_that_its_prompt_has_outgrown_is_not_explained_by_an_earlier_removal() -> None:
    made = ledger(acme=Policy(ttl_last_use_seconds=10))
    tail, longer = prompt(conversation(1, rest=3)), prompt(conversation(1, rest=8))
    store(made, tail, 0)
    made.sweep(20)
    assert made.explain(tail, 20)["full"][1].state == "expired"
    store(made, tail, 20)
    assert made.explain(tail, 21)["full"][1].state == "ready"
    store(made, longer, 22)
    assert made.explain(tail, 23)["full"][1].state == "never_stored"


def test_a_shape_that_makes_no_sense_is_refused() -> None:
    for make in (
        lambda: Group("", (1,)),
        lambda: Group("a", ()),
        lambda: Group("a", (0,)),
        lambda: Group("a", (1,), window=0),
        lambda: Layout(()),
        lambda: Layout((Group("a", (1,)), Group("a", (1,)))),
    ):
        with pytest.raises(ValueError, match=r"group|shard|window"):
            make()
    assert HYBRID.slots_for(10 * sum(group.column_bytes for group in HYBRID.groups) + 1) == [10] * 3


def test_of_a_unit_all_columns_are_found_or_none() -> None:
    made = ledger(layout=HYBRID, slots=16)
    asked = Keys("acme", SECRET, NAMESPACE, 2 * C).prompt(conversation(1, 2, 3, 4, 5, rest=9))
    assert len(store(made, asked)) == 3 * 4, "the fifth column is half a unit, and the rest no tail"
    assert made.query(asked, 0) == 4 * C
    [third] = [one for one in made._stock.account("acme").columns(0) if one.key == asked.keys[2]]
    made.refuse(third, Reason.SEAL_REFUSED)
    assert made.query(asked, 0) == 2 * C
    [first] = [one for one in made._stock.account("acme").columns(0) if one.key == asked.keys[0]]
    made.refuse(first, Reason.SEAL_REFUSED)
    assert made.query(asked, 0) == 0
    assert len(made.explain(asked, 0)["full"]) == 4
    check_integrity(made)


def test_the_parts_of_a_ledger_are_its_own() -> None:
    made = ledger(4)
    parts = [part for name, part in vars(made).items() if name[0] == "_"]
    public = vars(made) | vars(made.tier2)
    assert not [
        name for name, value in public.items() if name[0] != "_" and any(value is part for part in parts)
    ]
    reached = [
        f"{path.relative_to(PROJECT)}:{node.lineno} {node.attr}"
        for package in ("benchmarks", "swdriver_shim")
        for path in PROJECT.glob(f"{package}/**/*.py")
        if "cache" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr[0] == "_" and is_ledger(node.value)
    ]
    assert not reached


def is_ledger(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.strip("_") in ("ledger", "tier2") and name != "_tier2"


@pytest.mark.parametrize("change", ["nothing", "displaced", "stored again", "purged", "rewound", "cut"])
def test_a_prompt_that_is_asked_for_again_finds_what_is_there_now(change: str) -> None:
    """What was found for it before is remembered, as far as it holds."""
    made = ledger(4)
    store(made, prompt(conversation(1, 2, 3)))
    asked = prompt(conversation(1, 2, 3))
    made.release(made.match(asked, 1))
    if change in ("displaced", "stored again"):
        store(made, prompt(conversation(7, 8, 9)), 2)
        assert made.query(asked, 2) < 3 * C
    if change == "stored again":
        store(made, prompt(conversation(1, 2, 3)), 3)
    if change == "purged":
        made.purge("acme")
    if change == "rewound":
        asked.rewind(C)
        asked.extend(conversation(4, 5))
        store(made, prompt(conversation(1)), 3)
    if change == "cut":
        made.set_policies({"acme": OrgPolicies(policy=Policy(store_tokens_max=C))}, 3)
    asked.extend(conversation(6))
    match = made.match(asked, 4)
    expected = made.query(prompt(conversation_of(change)), 4)
    assert match.tokens == expected
    assert (match.tokens > 0) is (change != "purged")
    columns = made._stock.maps_of(asked.maker)[0].columns
    assert all(columns[column.key] is column for column in match.columns[0])


def conversation_of(change: str) -> list[int]:
    return [*conversation(1, 4, 5, 6)] if change == "rewound" else [*conversation(1, 2, 3, 6)]
