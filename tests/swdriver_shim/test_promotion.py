"""What is recalled from tier 2 before a request, and what is not: the planner on a real ledger."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.prefix_map import State
from swdriver_shim.cache.promotion import (
    BURST_SECONDS,
    HELD_PART,
    HOLD_SECONDS,
    Budget,
    PromotionPlanner,
)
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.recalls import RECALL_AT_ONCE, Recall
from swdriver_shim.cache.request_log import PromptKeys
from swdriver_shim.cache.spills import Dates
from swdriver_shim.cache.trails import Trail, Trails
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tiers
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.ledgers import conversation, finish, ledger, store
from tests.swdriver_shim.prompts import FULL, HYBRID, NAMESPACE, SECRET, keys, prompt

C = COLUMN_TOKENS
KEPT = Policy(tiers=Tiers.TIER2, ttl_last_use_seconds=None)
PLENTY = 1e9
SLOTS = 256
PERIOD = 20.0
TIMES = 90  # until there is enough to learn from
TALK = conversation(*range(1, 9))  # 8 columns, asked for every 20 s
SIZE = FULL.groups[0].column_bytes


class Tier:
    """A ledger, and the files of its tier 2, which has whatever was ever stored."""

    def __init__(self, made: Ledger, budget: float = PLENTY) -> None:
        self.ledger = made
        made.tier2.set_promotion_budget(budget)
        self.files: dict[bytes, Dates] = {}
        self.recalled = 0

    def ask(self, asked: Prompt, now: float, rules: Rules | None = None) -> int:
        """A request: how many tokens are in memory. All is stored then, and copied."""
        made = self.ledger
        match = made.match(asked, now)
        made.release(match)
        store(made, asked, now, rules or Rules())
        for key in asked.keys:
            self.files[key] = Dates(now, now)
        self.keep_house(now)
        return match.tokens

    def keep_house(self, now: float) -> None:
        made = self.ledger
        made.sweep(now)
        finish(made)
        while spill := made.tier2.begin_spill(now, 64):
            made.tier2.finish_spill(spill, [True] * len(spill.copies))

    def round(self, now: float) -> list[Recall]:
        """What house-keeping promotes at once."""
        asked = self.ledger.tier2.next_promotion(now)
        return self.promote(asked, now) if asked else []

    def promote(self, asked: PromptKeys, now: float) -> list[Recall]:
        if not self.ledger.tier2.is_promotion_wanted(asked, now):
            return []
        there = {depth for depth, key in enumerate(asked.keys) if key in self.files}
        start = self.ledger.tier2.has(asked, now)
        exists = [{depth for depth in there if depth >= start} for _ in self.ledger.layout.groups]
        recalls = self.ledger.tier2.begin_promotion(asked, exists, now)
        for recall in recalls:
            assert self.ledger.tier2.start_recall(recall, now)
            found = {column: self.files[column.key] for column, _ in recall.places}
            self.recalled += len(found)
            self.ledger.tier2.finish_recall(recall, now, found)
        self.ledger.tier2.hold_promoted(recalls, now)
        check_integrity(self.ledger)
        return recalls

    def promoted(self, now: float) -> int:
        """How many columns are promoted until there is nothing more to do."""
        before = self.recalled
        for _ in range(100):
            self.round(now)
        return self.recalled - before


def other(number: int) -> Prompt:
    """Of a conversation that never comes back."""
    return prompt(conversation(*range(1000 * number + 100, 1000 * number + 116)))


def crowded(slots: int = SLOTS, policy: Policy = KEPT, budget: float = PLENTY) -> tuple[Tier, float]:
    """A conversation came back every 20 s, many times, and was displaced since the last one."""
    tier, now = Tier(ledger(slots, acme=policy), budget), 0.0
    for _ in range(TIMES):
        tier.ask(prompt(TALK), now)
        now += PERIOD
    displace(tier)
    return tier, now


def displace(tier: Tier) -> None:
    """All columns are displaced, as when memory is taken away and comes back."""
    limit = tier.ledger.pools[0].limit
    for group in range(len(tier.ledger.layout.groups)):
        tier.ledger.set_slot_limit(group, 0)
        tier.ledger.set_slot_limit(group, limit)


def test_a_prompt_that_comes_back_regularly_is_in_memory_before_its_request() -> None:
    tier, due = crowded()
    assert tier.promoted(due - 5) == 8
    assert tier.ask(prompt(TALK), due) == 8 * C
    promoted = tier.ledger.tier2.promoted
    assert (promoted.columns, promoted.bytes) == (8, 8 * SIZE)
    assert (promoted.used, promoted.unused) == (8, 0)


def test_promotion_is_off_until_it_has_a_budget() -> None:
    tier, due = crowded(budget=0)
    assert tier.ledger.tier2.next_promotion(due - 5) is None
    assert not tier.ledger._stock.trails
    assert not tier.ledger._stock.listeners


def test_switching_it_off_forgets_all_and_holds_nothing() -> None:
    tier, due = crowded()
    tier.promoted(due - 5)
    tier.ledger.tier2.set_promotion_budget(0)
    assert not list(tier.ledger._slots.pins())
    assert not tier.ledger._stock.trails
    assert not tier.ledger._stock.listeners
    check_integrity(tier.ledger)


def test_a_budget_below_zero_and_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        ledger().tier2.set_promotion_budget(-1)
    alone = Layout((Group("objects", (16,), alone=True),))
    with pytest.raises(ValueError, match="objects are not promoted"):
        ledger(layout=alone).tier2.set_promotion_budget(1)


def test_what_came_once_is_not_promoted() -> None:
    tier = Tier(ledger(SLOTS, acme=KEPT))
    for number in range(40):
        tier.ask(other(number), number * PERIOD)
    displace(tier)
    assert tier.promoted(40 * PERIOD + 300) == 0


def test_a_conversation_is_followed_as_it_grows() -> None:
    tier, now = Tier(ledger(SLOTS, acme=KEPT)), 0.0
    for turn in range(2, 2 + TIMES):
        tier.ask(prompt(conversation(*range(1, turn))), now)
        now += PERIOD
    [trail] = tier.ledger._stock.trails.all()
    assert (trail.uses, trail.columns) == (TIMES, TIMES)
    displace(tier)
    assert tier.promoted(now - 5) == SLOTS // HELD_PART, "as much of it as may be held"


def test_the_budget_holds() -> None:
    tier, due = crowded(budget=2 * SIZE)
    at = due - 10
    assert 0 < tier.promoted(at) <= 2 + 8
    batch = tier.recalled
    assert tier.promoted(at + 0.1) == 0, "the batch was more than a second's budget"
    assert batch <= RECALL_AT_ONCE


def test_a_column_that_is_as_likely_to_be_used_is_not_displaced() -> None:
    tier, due = crowded(slots=32)
    while tier.ledger.pools[0].free:  # all of it is for conversations like the one that was displaced
        number = tier.ledger.pools[0].used
        for back in (3, 2, 1, 0):
            tier.ask(prompt(conversation(500 + number)), due - 5 - PERIOD * back)
        if tier.ledger.pools[0].free <= 8:
            break
    before = {column.key for column in tier.ledger._stock.account("acme").columns(0)}
    tier.promoted(due - 5)
    after = {column.key for column in tier.ledger._stock.account("acme").columns(0)}
    assert before <= after, "it takes free slots only"
    assert tier.recalled <= 32 // HELD_PART


def test_slots_are_taken_that_are_free_and_no_column_is_displaced_for_them() -> None:
    tier, due = crowded()
    for number in range(8):
        tier.ask(other(number), due - 6)
    before = {column.key for column in tier.ledger._stock.account("acme").columns(0)}
    assert tier.promoted(due - 5) > 0
    after = {column.key for column in tier.ledger._stock.account("acme").columns(0)}
    assert before < after
    assert tier.ledger.tier2.spilled.no_time == 0


def test_promoted_columns_stay_for_a_while_and_then_make_room() -> None:
    tier, due = crowded(slots=64 * HELD_PART // 4)
    tier.promoted(due - 5)
    held = list(tier.ledger._slots.pins())
    assert len(held) == 8
    for number in range(40):
        tier.ask(other(number), due - 4)
    assert tier.ledger.query(prompt(TALK), due) == 8 * C
    late = due + HOLD_SECONDS
    for number in range(40, 80):
        tier.ask(other(number), late)
    assert not list(tier.ledger._slots.pins())
    assert tier.ledger.query(prompt(TALK), late) < 8 * C
    assert tier.ledger.tier2.promoted.unused > 0


def test_a_part_of_memory_at_most_is_held() -> None:
    tier, due = crowded(slots=32)
    tier.promoted(due - 5)
    assert len(list(tier.ledger._slots.pins())) <= 32 // HELD_PART


def test_what_has_expired_is_not_promoted() -> None:
    tier, due = crowded(policy=Policy(tiers=Tiers.TIER2, ttl_last_use_seconds=10))
    assert tier.promoted(due - 5) == 0


def test_what_expires_on_its_way_is_not_served() -> None:
    """A copy in tier 2 has dates of its own, and they hold."""
    tier, due = crowded(policy=Policy(tiers=Tiers.TIER2, ttl_last_use_seconds=60))
    tier.files = {key: Dates(0.0, due - 100) for key in tier.files}
    tier.promoted(due - 5)
    assert tier.ledger.tier2.recalled.late == 8
    assert tier.ledger.tier2.promoted.columns == 0
    assert tier.ledger.query(prompt(TALK), due - 5) == 0


def test_a_promoted_column_lives_no_longer_than_before() -> None:
    tier, due = crowded(policy=Policy(tiers=Tiers.TIER2, ttl_last_use_seconds=30))
    assert tier.promoted(due - 5) == 8
    assert tier.ledger.query(prompt(TALK), due) == 8 * C
    assert tier.ledger.query(prompt(TALK), due + 10) == 0, "30 s after its last use"
    tier.keep_house(due + 11)
    assert tier.ledger.accounts["acme"].bytes == 0, "a hold does not prolong it"
    check_integrity(tier.ledger)


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_purged_org_has_nothing_promoted(when: str) -> None:
    tier, due = crowded()
    asked = tier.ledger.tier2.next_promotion(due - 5)
    assert asked
    if when == "before":
        tier.ledger.purge("acme", now=due - 5)
        assert tier.ledger.tier2.next_promotion(due - 4) is None
    else:
        tier.ledger.purge("acme", now=due - 5)
        assert tier.promote(asked, due - 4) == []
    assert not tier.ledger._stock.trails
    finish(tier.ledger)
    assert tier.ledger.accounts["acme"].bytes == 0


def test_a_purge_empties_promoted_columns_that_are_held() -> None:
    tier, due = crowded()
    tier.promoted(due - 5)
    removal = tier.ledger.purge("acme", now=due - 4)
    finish(tier.ledger)
    assert removal.done
    assert removal.columns == 8
    assert tier.ledger.accounts["acme"].bytes == 0
    tier.ledger.sweep(due + HOLD_SECONDS)
    check_integrity(tier.ledger)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(tiers=Tiers.DRAM),
        Policy(tiers=Tiers.NONE),
        Policy(tiers=Tiers.TIER2, encrypt_tier2=True),
        Policy(tiers=Tiers.TIER2, store_tokens_max=64),
    ],
)
def test_a_stricter_policy_ends_it(policy: Policy) -> None:
    tier, due = crowded()
    asked = tier.ledger.tier2.next_promotion(due - 5)
    assert asked
    tier.ledger.set_policies({"acme": OrgPolicies(policy=policy)}, due - 5)
    assert tier.promote(asked, due - 4) == []
    assert tier.promoted(due - 4) == 0


def test_another_secret_ends_it() -> None:
    tier, due = crowded()
    asked = tier.ledger.tier2.next_promotion(due - 5)
    assert asked
    other_keys = Keys("acme", bytes(reversed(SECRET)), NAMESPACE)
    tier.ask(other_keys.prompt(TALK), due - 4)
    assert tier.promote(asked, due - 4) == []
    assert [trail.maker.tag for trail in tier.ledger._stock.trails.all()] == [other_keys.tag]
    tier.ledger.release(tier.ledger.match(other_keys.prompt(TALK), due - 4))
    assert tier.ledger.accounts["acme"].tally.missed[Reason.PURGED] == 0


def test_nothing_is_promoted_while_an_agent_is_lost() -> None:
    tier, due = crowded()
    tier.ledger.is_reachable = False
    assert tier.ledger.tier2.next_promotion(due - 5) is None


def test_a_quota_is_not_exceeded() -> None:
    quota = 4 * SIZE
    tier = Tier(ledger(SLOTS, acme=Policy(tiers=Tiers.TIER2, dram_bytes_max=quota)))
    for turn in range(TIMES):
        tier.ask(prompt(TALK), turn * PERIOD)
        assert tier.ledger.accounts["acme"].bytes <= quota
    displace(tier)
    before = tier.ledger.tier2.spilled.no_time
    assert tier.promoted(TIMES * PERIOD - 5) <= 4
    assert tier.ledger.accounts["acme"].bytes <= quota
    assert tier.ledger.tier2.spilled.no_time == before


def test_a_layout_with_a_window_gets_all_that_a_prompt_needs_or_nothing() -> None:
    tier, now = Tier(ledger(SLOTS, HYBRID, acme=KEPT)), 0.0
    for _ in range(TIMES):
        tier.ask(prompt(TALK), now)
        now += PERIOD
    displace(tier)
    tier.promoted(now - 5)
    assert tier.ledger.query(prompt(TALK), now - 5) == 8 * C


def trail(leaf: int, columns: int = 3, org: str = "acme") -> Trail:
    raw = b"".join(bytes([leaf, at] * 8) for at in range(columns))
    last = raw[-16:]
    return Trail(keys(org), raw, last, last, 0.0, 0.0, 0)


def test_trails_are_bounded_and_the_oldest_are_dropped() -> None:
    trails = Trails(trails_max=3, keys_max=8)
    for leaf in range(5):
        trails.add(trail(leaf))
    assert [one.leaf[0] for one in trails.all()] == [3, 4], "three would have nine keys"
    trails.forget("globex")
    assert len(trails) == 2
    trails.forget("acme")
    assert not len(trails)


def test_the_budget_is_made_good_before_the_next_batch() -> None:
    budget = Budget(100.0)
    assert not budget.has_some(0.0)
    assert budget.has_some(0.5)
    budget.left -= 250
    assert not budget.has_some(2.0)
    assert budget.has_some(2.6)
    budget.has_some(1000.0)
    assert budget.left <= 100 * BURST_SECONDS


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "round", "round", "purge", "policy", "lose"]),
        st.integers(0, 5),
        st.floats(0.0, 40.0),
    ),
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from([8, 16, 64]), st.sampled_from([SIZE / 2, 3 * SIZE, PLENTY]))
def test_whatever_happens_the_budget_holds_and_no_column_makes_way(
    steps: Sequence[tuple[str, int, float]], slots: int, rate: float
) -> None:
    tier, now = Tier(ledger(slots, acme=KEPT), rate), 0.0
    began = None
    for what, number, seconds in steps:
        now += seconds
        if what == "ask":
            tier.ask(prompt(conversation(*range(10 * number + 1, 10 * number + 2 + number))), now)
        elif what == "round":
            tier.ledger.sweep(now)
            account = tier.ledger._stock.account("acme")
            before = {one.key for one in account.columns(0) if one.state is State.READY}
            assert sum(len(recall.places) for recall in tier.round(now)) <= RECALL_AT_ONCE
            began = now if began is None else began
            after = {one.key for one in account.columns(0) if one.state is State.READY}
            assert before <= after
            spent = tier.recalled * SIZE
            assert spent <= rate * (now - began + BURST_SECONDS) + RECALL_AT_ONCE * SIZE
            assert len(list(tier.ledger._slots.pins())) <= slots // HELD_PART
        elif what == "purge":
            tier.ledger.purge("acme", now=now)
            tier.files.clear()
        elif what == "policy":
            tiers = Tiers.TIER2 if number else Tiers.DRAM
            tier.ledger.set_policies({"acme": OrgPolicies(policy=Policy(tiers=tiers))}, now)
        else:
            displace(tier)
        check_integrity(tier.ledger)
    promoted = tier.ledger.tier2.promoted
    assert promoted.used + promoted.unused <= promoted.columns


def test_the_planner_is_a_listener_only_while_it_is_on() -> None:
    made = ledger(acme=KEPT)
    made.tier2.set_promotion_budget(1)
    made.tier2.set_promotion_budget(2)
    assert [type(one) for one in made._stock.listeners] == [PromotionPlanner]
