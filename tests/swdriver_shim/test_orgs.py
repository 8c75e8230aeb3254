"""What a driver keeps of each of very many orgs, and of those that are not served any more."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from swdriver_shim.cache.displacement import Competition
from swdriver_shim.cache.displacement.cost import EXPECTED
from swdriver_shim.cache.displacement.returns import Returns
from swdriver_shim.cache.ledger import SLICE, Ledger
from swdriver_shim.cache.prefix_map import Account
from swdriver_shim.cache.slots import USE_SECONDS_MAX
from swdriver_shim.cache.stock import IDLE_SECONDS
from swdriver_shim.data_plane.tier2 import Tier2Transfers
from swdriver_shim.decider import statistics
from swdriver_shim.decider.statistics import Statistics
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tiers
from tests.swdriver_shim.forests import Driver
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.ledgers import C, conversation, finish, ledger, store
from tests.swdriver_shim.prompts import OTHER, prompt

TIER2 = OrgPolicies(policy=Policy(tiers=Tiers.TIER2))
NOW = 10.0
TAG = prompt(conversation(1), "acme").maker.tag
GLOBEX = {"globex": prompt(conversation(1), "globex").maker.tag}
BOTH = {"acme": TAG, **GLOBEX}


def served(**policies: OrgPolicies) -> Ledger:
    """A ledger of two orgs, each with a prompt."""
    made = ledger(50)
    made.set_policies(policies, 0, BOTH)
    for org in BOTH:
        asked = prompt(conversation(1, 2), org)
        store(made, asked)
        made.release(made.match(asked, 1))
    return made


def withdraw(made: Ledger) -> None:
    """One org is not served any more, and purged, which is confirmed."""
    made.set_policies({}, NOW, GLOBEX)
    made.purge_tag("acme", TAG)
    finish(made)


def wait(made: Ledger, now: float = NOW) -> None:
    """As long as it takes to drop an org that has nothing."""
    made.sweep(now)
    made.sweep(now + IDLE_SECONDS)
    check_integrity(made)


def test_an_org_that_is_withdrawn_is_dropped_once_nothing_of_it_is_left() -> None:
    made = served()
    dropped: list[str] = []
    made.on_drop(dropped.append)
    withdraw(made)
    made.sweep(NOW)
    made.sweep(NOW + IDLE_SECONDS - 1)
    assert made.accounts.keys() == BOTH.keys(), "its counters are read once more"
    made.sweep(NOW + IDLE_SECONDS)
    check_integrity(made)
    assert made.accounts.keys() == {"globex"}
    assert made.accounts["globex"].tally.requested == 2 * C, "others keep what they have counted"
    assert dropped == ["acme"]
    made.sweep(NOW + 3 * IDLE_SECONDS)
    assert dropped == ["acme"]


def test_where_nobody_says_who_is_served_all_orgs_are() -> None:
    made = served()
    made.set_policies({}, NOW)
    made.purge_tag("acme", TAG)
    finish(made)
    wait(made)
    assert made.accounts.keys() == BOTH.keys()


def test_an_org_with_columns_stays_until_they_are_purged() -> None:
    made = served()
    made.set_policies({}, NOW, GLOBEX)
    wait(made)
    assert "acme" in made.accounts, "it has columns"
    made.purge_tag("acme", TAG)
    wait(made, 1000)
    assert "acme" in made.accounts, "they are being removed"
    finish(made)
    wait(made, 2000)
    assert "acme" not in made.accounts


def test_an_org_whose_columns_have_expired_stays_until_tier_2_is_purged() -> None:
    made = ledger(50)
    made.set_policies({"acme": OrgPolicies(policy=Policy(ttl_last_use_seconds=5))}, 0, BOTH)
    store(made, prompt(conversation(1, 2), "acme"))
    made.sweep(NOW)
    finish(made)
    assert not made.accounts["acme"].bytes
    made.set_policies({}, NOW, GLOBEX)
    wait(made)
    assert "acme" in made.accounts, "only this says which tags a purge has to look for"
    made.purge("acme")
    finish(made)
    wait(made, 1000)
    assert "acme" not in made.accounts


def test_a_purge_from_before_does_not_count() -> None:
    made = served()
    made.purge("acme")
    finish(made)
    store(made, prompt(conversation(3), "acme"))
    made.delete(prompt(conversation(3), "acme"))
    finish(made)
    made.set_policies({}, NOW, GLOBEX)
    wait(made)
    assert "acme" in made.accounts


def test_an_org_stays_while_tier_2_is_purged() -> None:
    made = served(acme=TIER2)
    made.set_policies({}, NOW, GLOBEX)
    made.purge_tag("acme", TAG)
    purges = []
    while made.reclaim():
        pass
    while purge := made.tier2.take_purge():
        purges.append(purge)
    made.finish_clears(made.take_clears(64), is_done=True)
    wait(made)
    assert "acme" in made.accounts
    for purge in purges:
        made.tier2.finish_purge(purge, is_done=True)
    wait(made, 1000)
    assert "acme" not in made.accounts


def test_an_org_stays_while_a_request_of_it_runs() -> None:
    """Its hits are counted again when the request ends."""
    made = served()
    match = made.match(prompt(conversation(1, 2, 3), "acme"), NOW)
    withdraw(made)
    finish(made)
    wait(made)
    assert "acme" in made.accounts
    assert made.rematch(match, NOW + IDLE_SECONDS).tokens == 0
    check_integrity(made)
    wait(made, NOW + 2 * IDLE_SECONDS + USE_SECONDS_MAX)
    finish(made)
    wait(made, NOW + 4 * IDLE_SECONDS + USE_SECONDS_MAX)
    assert "acme" not in made.accounts


def test_an_org_stays_while_a_late_request_runs() -> None:
    made = served()
    withdraw(made)
    match = made.match(prompt(conversation(7), "acme"), NOW)
    wait(made)
    assert "acme" in made.accounts
    made.rematch(match, NOW + IDLE_SECONDS)
    check_integrity(made)
    wait(made, NOW + IDLE_SECONDS + USE_SECONDS_MAX)
    assert "acme" not in made.accounts


def test_a_purge_of_one_namespace_is_not_one_of_the_org() -> None:
    made = ledger(50)
    made.set_policies({"acme": OrgPolicies(policy=Policy(ttl_last_use_seconds=5))}, 0, BOTH)
    store(made, prompt(conversation(1, 2), "acme"))
    there = prompt(conversation(1, 2), "acme", OTHER)
    store(made, there)
    made.purge("acme", there.maker.namespace)
    finish(made)
    made.set_policies({}, NOW, GLOBEX)
    wait(made)
    finish(made)
    wait(made, 1000)
    assert "acme" in made.accounts


def test_nothing_knows_an_org_that_was_dropped() -> None:
    made = served()
    policy = Policy(tiers=Tiers.TIER2, dram_bytes_max=1 << 40)
    made.set_policies({"acme": OrgPolicies(policy=policy)}, NOW, GLOBEX)
    account = made.accounts["acme"]
    store(made, prompt(conversation(3), "acme"))
    made.purge_tag("acme", TAG)
    finish(made)
    wait(made)
    assert "acme" not in made.accounts
    assert not made._stock.limited
    [ranking] = made._stock.rankings
    assert account.number not in {*ranking._accounts, *ranking._noted, *ranking._ranks}


def test_an_org_stays_while_tier_2_is_purged_again_at_a_new_home() -> None:
    made = served(acme=TIER2)
    withdraw(made)
    made.tier2.repeat_deletes()
    wait(made)
    assert "acme" in made.accounts
    finish(made)
    wait(made, 1000)
    assert "acme" not in made.accounts


def test_a_late_request_begins_the_wait_anew_and_does_not_keep_its_org() -> None:
    made = served()
    withdraw(made)
    made.sweep(NOW)
    match = made.match(prompt(conversation(1), "acme"), NOW + IDLE_SECONDS - 1)
    made.release(match)
    made.sweep(NOW + IDLE_SECONDS)
    assert "acme" in made.accounts
    made.sweep(NOW + 2 * IDLE_SECONDS)
    assert "acme" not in made.accounts


def test_an_org_that_was_dropped_may_come_back() -> None:
    made = served()
    asked = prompt(conversation(1, 2), "acme")
    before = made.tier2.removals(asked)
    made.purge("acme", now=7.0)
    withdraw(made)
    wait(made)
    made.set_policies({}, 1000, BOTH)
    assert len(store(made, asked, 1000)) == 2
    assert made.query(asked, 1000) == 2 * C
    assert made.tier2.removals(asked) > before, "what was searched before is not accepted"
    assert made.accounts["acme"].purges.of(asked.maker.namespace) == 7.0, "nor what a sibling had before"
    wait(made, 2000)
    assert made.query(asked, 3000) == 2 * C


def test_what_was_purged_of_an_org_that_was_dropped_is_purged_again_at_a_new_home() -> None:
    made = served(acme=TIER2)
    withdraw(made)
    wait(made)
    assert made.tags("acme") == {TAG}
    made.tier2.repeat_deletes()
    purge = made.tier2.take_purge()
    assert purge is not None
    assert purge.tags == {TAG}
    made.tier2.finish_purge(purge, is_done=True)
    wait(made, 1000)
    assert "acme" not in made.accounts


def test_few_orgs_are_looked_at_in_one_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ledger(50)
    made.set_policies({}, 0, {})
    for number in range(12 * SLICE // 5):
        made.tally(f"org-{number}")
    looked_at: list[Any] = []

    def is_empty(account: Account) -> bool:
        looked_at.append(account)
        return True

    monkeypatch.setattr(made._stock, "_is_empty", is_empty)
    for second in range(4):
        made.sweep(second)
    looked_at.clear()
    made.sweep(4)
    assert 0 < len(looked_at) <= SLICE
    for step in range(1, 10):
        made.sweep(step * IDLE_SECONDS)
    assert not made.accounts


@pytest.fixture
def transfers() -> Iterator[Tier2Transfers]:
    shards: Any = [[object()]]
    made = Tier2Transfers(
        *(served(), FairLock(), shards),
        clock=lambda: 0.0,
        wall_clock=lambda: 0.0,
        on_change=lambda: None,
    )
    yield made
    made.close()


def test_the_statistics_of_an_org_end_with_it(transfers: Tier2Transfers) -> None:
    made = transfers._ledger
    kept = Statistics(made, transfers._lock, transfers, lambda: 0.0)
    for org in BOTH:
        transfers.pace(org).computing.add(100, 1.0)
        kept.refills_of(org)
        kept.record_refill(org, 1000, 0.1)
    withdraw(made)
    wait(made)
    assert [one.org for one in kept.orgs()] == ["globex"]
    assert kept.transfers().keys() == kept.break_even().keys() == {"globex"}
    assert kept._refills.keys() == {"globex"}
    assert kept.transfers()["globex"].refilled_bytes == 1000


def test_statistics_of_many_orgs_are_read_a_few_at_a_time(
    transfers: Tier2Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "ORGS_AT_ONCE", 10)
    read: list[int] = []

    class Lock:
        def __enter__(self) -> None:
            read.append(0)

        def __exit__(self, *_: object) -> None: ...

    def now() -> float:
        read[-1] += 1
        return 0.0

    made = transfers._ledger
    for number in range(95):
        made.tally(f"org-{number}")
    lock: Any = Lock()
    kept = Statistics(made, lock, transfers, now)
    assert [one.org for one in kept.orgs()] == list(made.accounts)
    assert sum(read) == 97
    assert max(read) <= 10


def test_orgs_that_compute_faster_than_tier_2_recalls_are_looked_at_when_they_have_something(
    transfers: Tier2Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(transfers, "tokens_min", asked.append)
    for number in range(10):
        transfers.pace(f"org-{number}")
    transfers.keep_house()
    assert asked == []


@pytest.fixture
def traces() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_an_org_with_few_requests_has_no_tables_of_its_own(traces: None) -> None:
    """They are made when something is counted."""
    assert Returns(EXPECTED).rate is Returns(EXPECTED).rate
    drivers, before = [], traced()
    for _ in range(50):
        driver = Driver(Competition[Any]())
        driver.use(driver.prompt("a", 5, 1.0), 2.0)
        drivers.append(driver)
    assert (traced() - before) / len(drivers) < 20_000


def test_an_org_with_much_traffic_has_small_tables(traces: None) -> None:
    returns, before = Returns(EXPECTED, share=1), traced()
    for number in range(4000):  # they come back at all ages
        key = (number % 41).to_bytes(2, "big")
        returns.used([key], [number % len(EXPECTED)], 1.003**number)
        returns.refresh(1.003**number)
    assert traced() - before < 45_000
    check_integrity(returns)


def test_an_org_has_a_queue_for_each_priority_in_use_and_for_that_of_its_policy() -> None:
    made = ledger(300)
    usual = Policy().priority
    for priority in range(101):
        store(made, prompt(conversation(priority)), 0, Rules(priority=priority))
    [queues] = made.accounts["acme"]._queues
    assert len(queues) == 101
    for priority in range(50):
        made.delete(prompt(conversation(priority)))
    for priority in range(50, 70):
        made.set_priority(prompt(conversation(priority)), 70, 1)
    assert queues.keys() == {usual, *range(70, 101)}
    made.set_slot_limit(0, 0)
    check_integrity(made)
    assert queues.keys() == {usual}
    made.set_policies({"acme": OrgPolicies(policy=Policy(priority=usual + 1))}, 2)
    assert not queues


def test_a_queue_that_is_emptied_by_displacement_goes() -> None:
    made = ledger(3)
    store(made, prompt(conversation(1, 2, 3)), 0, Rules(priority=10))
    store(made, prompt(conversation(4, 5, 6)), 1)
    [queues] = made.accounts["acme"]._queues
    assert queues.keys() == {Policy().priority}
    check_integrity(made)
