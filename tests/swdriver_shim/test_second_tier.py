"""What the ledger decides about tier 2, one thing at a time."""

from __future__ import annotations

from collections import Counter

import pytest

from swdriver_shim.cache import forgetting
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.prefix_map import Column, State
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import USE_SECONDS_MAX
from swdriver_shim.cache.spilling import Dates
from swdriver_shim.data_plane.tier2 import _dates, _note
from swdriver_shim.keys import COLUMN_TOKENS, Keys
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tiers
from tests.swdriver_shim.prompts import FULL, NAMESPACE, SECRET, keys, prompt
from tests.swdriver_shim.test_ledger import conversation, finish, ledger, store

C = COLUMN_TOKENS
KEPT = Policy(tiers=Tiers.TIER2)


def in_state(made: Ledger, state: State) -> int:
    return sum(
        column.state is state
        for account in made.stock.accounts.values()
        for column in account.columns(0)
    )


def test_one_slow_use_does_not_empty_memory() -> None:
    made = ledger(1024, acme=KEPT)
    for kind in range(1024):
        store(made, prompt(conversation(kind + 1)))
    made.match(prompt(conversation(1)), 1)  # which is never released
    for _ in range(200):
        if spill := made.spilling.begin(1, 64):
            made.spilling.finish(spill, [True] * len(spill.leaving))
    assert in_state(made, State.READY) > 900
    made.check_integrity()


def test_room_is_kept_for_as_much_as_stores_take_at_once() -> None:
    made = ledger(64, acme=KEPT)
    for first in range(0, 64, 8):
        store(made, prompt(conversation(*range(first + 1, first + 9))))
    while spill := made.spilling.begin(1, 64):
        made.spilling.finish(spill, [True] * len(spill.leaving))
    assert made.slots.pools[0].free == 8
    store(made, prompt(conversation(*range(101, 109))))
    assert made.spilling.spilled.no_time == 0


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
    while spill := made.spilling.begin(1, 64):
        assert len(spill.leaving) <= 64
        copied += len(spill.leaving)
        made.spilling.finish(spill, [True] * len(spill.leaving))
    assert copied >= 20 * 20
    assert all(made.stock.account(org).bytes <= 20 * size for org in orgs)


def test_a_piece_of_a_recall_holds_slots_from_its_turn_on() -> None:
    made = ledger(200, acme=KEPT)
    asked = prompt(conversation(*range(1, 101)))
    first, second = made.recalling.begin(asked, [set(range(100))], 1)
    assert made.recalling.start(first, 1)
    made.sweep(1 + USE_SECONDS_MAX)  # the first takes for ever
    assert in_state(made, State.COMING) == len(second.places)
    made.purge("acme")
    assert not made.recalling.start(second, 400), "nothing of it may come back"
    made.recalling.finish(second, 400, {})
    finish(made)
    assert not made.slots.pools[0].used


def test_restoring_leaves_room_for_others() -> None:
    made = ledger(64, acme=KEPT)
    for kind in range(64):
        store(made, prompt(conversation(kind + 1)))
    for column in made.stock.account("acme").columns(0):
        column.kept_at = 0.0
    made.restoring.lose(0, frozenset({0}))
    while made.reclaim():
        pass
    assert in_state(made, State.COMING) == 16
    assert store(made, prompt(conversation(500)))
    restored = 0
    while recall := made.restoring.begin(64):
        assert made.recalling.start(recall, 1)
        restored += len(recall.places)
        made.recalling.finish(recall, 1, {column: Dates(0, 0) for column, _ in recall.places})
        while made.reclaim():
            pass
    assert restored == 63
    made.check_integrity()


class Heard:
    """What an engine's events are made of."""

    def __init__(self) -> None:
        self.there: Counter[Column] = Counter()

    def arrived(self, column: Column) -> None:
        self.there[column] += 1

    def gone(self, column: Column) -> None:
        self.there[column] -= 1


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_is_lost_with_an_agent_is_told_to_be_gone_until_it_is_back(*, comes_back: bool) -> None:
    made = ledger(8, acme=KEPT)
    heard = made.stock.watch = Heard()
    store(made, prompt(conversation(1)))
    [column] = made.stock.account("acme").columns(0)
    column.kept_at = 0.0
    made.restoring.lose(0, frozenset({0}))
    made.reclaim()
    assert heard.there == {column: 0}
    recall = made.restoring.begin(64)
    assert recall
    assert made.recalling.start(recall, 1)
    made.recalling.finish(recall, 1, {column: Dates(0, 0)} if comes_back else {})
    assert heard.there == {column: int(comes_back)}


def test_what_is_asked_for_first_is_restored_first() -> None:
    made = ledger(64, acme=KEPT)
    for kind in range(64):
        store(made, prompt(conversation(kind + 1)))
    for column in made.stock.account("acme").columns(0):
        column.kept_at = 0.0
    made.restoring.lose(0, frozenset({1}))
    match = made.match(prompt(conversation(60)), 1)
    made.restoring.refuse(match.columns[0][0], Reason.SEAL_REFUSED)
    assert match.columns[0][0].state is State.COMING
    made.release(match)


def test_what_fails_to_be_forgotten_keeps_no_purge_waiting() -> None:
    made = ledger(8, acme=KEPT, globex=KEPT)
    store(made, prompt(conversation(1)))
    made.delete(prompt(conversation(1)))
    made.purge("globex", tag=keys("globex").tag)
    made.forgetting.not_forgotten(made.forgetting.take(256))
    assert made.forgetting.take_purge() is not None


def test_what_is_deleted_is_deleted_again_where_a_shard_returns_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ledger(8, acme=KEPT, globex=KEPT)
    deleted, shorter = prompt(conversation(1)), prompt(conversation(2))
    made.delete(deleted)
    made.set_ttl(shorter, 10)
    finish(made)
    made.stock.purge_again()
    again = made.forgetting.take(256)
    assert [one.key for one in again] == [*deleted.keys, *shorter.keys]
    made.forgetting.forgotten(again)
    monkeypatch.setattr(forgetting, "DELETED_MAX", 2)
    made.delete(prompt(conversation(3), "globex"))
    finish(made)
    made.stock.purge_again()
    purge = made.forgetting.take_purge()
    assert purge
    assert (purge.account.org, set(purge.tags)) == ("acme", {keys().tag}), "the oldest is not known now"
    assert len(made.forgetting.take(256)) == 2


def test_however_often_shards_move_what_has_to_go_waits_once() -> None:
    made = ledger(8, acme=KEPT, globex=KEPT)
    deleted = prompt(conversation(1, 2, 3))
    made.delete(deleted)
    made.purge("globex", tag=keys("globex").tag)
    for _ in range(5):
        made.stock.purge_again()
    first = made.forgetting.take(256)
    assert len(first) == 2 * len(deleted.keys), "for the delete, and for wherever shards are now"
    purges = []
    while purge := made.forgetting.take_purge():
        purges.append(purge)
    assert [purge.account.org for purge in purges] == ["globex"]
    made.stock.purge_again()
    assert len(made.forgetting.take(256)) == len(deleted.keys), "what is on its way goes elsewhere"
    assert made.forgetting.take_purge()


def test_a_copy_that_ends_after_its_purge_is_not_noted() -> None:
    made = ledger(8, acme=KEPT)
    asked = prompt(conversation(1))
    store(made, asked)
    made.release(made.match(asked, 1))
    spill = made.spilling.begin(1, 10)
    assert spill
    encrypted = Policy(tiers=Tiers.TIER2, encrypt_tier2=True)
    made.set_policies({"acme": OrgPolicies(policy=encrypted)}, 1)
    made.spilling.finish(spill, [True])
    purge = made.forgetting.take_purge()
    assert purge
    made.forgetting.purged(purge)
    assert made.match(asked, 2).columns[0][0].kept_at is None


def test_a_stricter_policy_reaches_an_org_that_was_not_seen_yet() -> None:
    made = ledger(8, acme=KEPT)
    made.set_policies({"acme": OrgPolicies()}, 1, {"acme": keys().tag})
    purge = made.forgetting.take_purge()
    assert purge
    assert set(purge.tags) == {keys().tag}


def test_an_org_with_another_secret_is_another_org() -> None:
    made = ledger(64, acme=KEPT)
    old, new = Keys("acme", SECRET, NAMESPACE), Keys("acme", SECRET[::-1], NAMESPACE)
    waiting = made.match(old.prompt(conversation(1)), 1)
    made.purge("acme", tag=old.tag)
    waiting = made.again(waiting, 1)  # it looks again, with the key that it came with
    made.release(waiting)
    asked = new.prompt(conversation(2))
    store(made, asked)
    finish(made)
    made.release(made.match(asked, 2))
    spill = made.spilling.begin(2, 10)
    assert spill
    assert [one.tag for one in spill.leaving] == [new.tag]


def test_a_prompt_may_be_asked_for_again_with_an_old_answer() -> None:
    made = ledger(8, acme=KEPT)
    asked = prompt(conversation(1, 2))
    first = made.match(asked, 1)
    made.release(made.again(first, 1))
    store(made, asked)
    made.release(made.again(first, 1))
    made.stock.account("acme").tally.check_integrity()


def test_what_was_left_since_computing_is_faster_stays_so_when_it_is_counted_again() -> None:
    made = ledger(8, acme=KEPT)
    store(made, prompt(conversation(1, 2)))
    match = made.match(prompt(conversation(1, 2, 3)), 1)
    made.shorten(match, 0, Reason.NOT_WORTH_IT)
    made.recount(match, 1)
    tally = made.stock.account("acme").tally
    tally.check_integrity()
    assert +tally.missed == {Reason.NOT_WORTH_IT: 2 * C, Reason.NEVER_STORED: C}


def test_a_conversation_of_which_there_is_no_column_takes_no_memory() -> None:
    made = ledger(8, acme=KEPT)
    for number in range(100):
        store(made, prompt([1, 2, 3]), rules=Rules(continue_id=f"chat-{number}"))
    assert made.stock.trails.find("acme", "chat-99") is None
    store(made, prompt(conversation(1)), rules=Rules(continue_id="chat-99"))
    assert made.stock.trails.find("acme", "chat-99") is not None


def test_a_calendar_that_is_put_back_makes_nothing_younger() -> None:
    note = _note(Dates(100.0, 100.0), 9900)  # by the calendar, 10,000
    assert _dates([note], 9900, now=3700) == Dates(100.0, 100.0)
    assert _dates([note], 9900 - 3600, now=100) is Reason.EXPIRED, "as far as anybody can tell"
