"""Whatever one org has to be removed, another's receipt waits for a few turns of it and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvss_agent.client import Credentials, connect
from kvss_agent.shard.arena import Arena, slot_bytes_for
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from swdriver_shim.cache.fair_queue import FairQueue
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.reasons import Removal
from swdriver_shim.cache.slots import Clear
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.kvss_agent.plane import DRIVER, SECRET, running
from tests.live import wait_until
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import FULL, prompt

C = COLUMN_TOKENS
MANY = 5000
SLOTS = 500
KEPT = Policy(tiers=Tiers.TIER2)


def ledger(policy: Policy | None = None) -> Ledger:
    made = Ledger(FULL, "llama")
    made.set_slot_limit(0, MANY + 100)
    if policy:
        made.set_policies(dict.fromkeys(("greedy", "modest"), OrgPolicies(policy=policy)), 0)
    return made


def store(made: Ledger, org: str, count: int) -> list[list[int]]:
    """Prompts of a column each."""
    stored = [[number] * C for number in range(count)]
    for tokens in stored:
        asked = prompt(tokens, org)
        made.finish_store(made.begin_store(asked, C, 0), 0)
    return stored


def delete(made: Ledger, org: str, stored: list[list[int]]) -> list[Removal]:
    return [made.delete(prompt(tokens, org)) for tokens in stored]


def turns(removal: Removal, turn: Callable[[], object]) -> int:
    """How many it takes until nothing is left."""
    for count in range(200):
        if removal.done:
            return count
        turn()
    raise AssertionError(f"it is not done: {removal}")


def clear_some(made: Ledger) -> None:
    """As housekeeping does in one turn."""
    made.finish_clears(made.take_clears(64), is_done=True)
    made.tier2.finish_deletes(made.tier2.take_deletes(64), is_done=True)
    if purge := made.tier2.take_purge():
        made.tier2.finish_purge(purge, is_done=True)


def test_a_purge_waits_for_few_of_anothers_deletes() -> None:
    made = ledger()
    greedy, modest = store(made, "greedy", MANY), store(made, "modest", 10)
    delete(made, "greedy", greedy)
    del modest
    purged = made.purge("modest")

    def turn() -> None:
        made.reclaim()
        clear_some(made)

    assert turns(purged, turn) <= 3
    check_integrity(made)


def test_a_delete_waits_for_little_of_anothers_purge() -> None:
    made = ledger()
    store(made, "greedy", MANY)
    modest = store(made, "modest", 10)
    made.purge("greedy")
    [deleted] = delete(made, "modest", modest[:1])
    made.reclaim()
    assert turns(deleted, lambda: clear_some(made)) <= 2


def test_a_purge_is_taken_apart_in_turns_with_anothers() -> None:
    made = ledger()
    store(made, "greedy", MANY)
    store(made, "modest", 10)
    made.purge("greedy")
    purged = made.purge("modest")

    def turn() -> None:
        made._stock.remove_purged(300)
        clear_some(made)

    assert turns(purged, turn) <= 4


def test_in_tier_2_a_delete_waits_for_few_of_anothers() -> None:
    made = ledger(KEPT)
    greedy, modest = store(made, "greedy", MANY), store(made, "modest", 10)
    delete(made, "greedy", greedy)
    removals = delete(made, "modest", modest)
    assert turns(removals[-1], lambda: clear_some(made)) <= 3


def test_in_tier_2_a_purge_waits_for_one_of_anothers() -> None:
    made = ledger(KEPT)
    for _ in range(100):
        made.purge("greedy", tag=b"g" * 16)
    purged = made.purge("modest", tag=b"m" * 16)

    def turn() -> None:
        purge = made.tier2.take_purge()
        assert purge
        made.tier2.finish_purge(purge, is_done=True)

    assert turns(purged, turn) <= 2


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"))),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_rounds_lose_nothing_and_keep_the_order_of_each(
    items: list[tuple[str, str]], mosts: list[int]
) -> None:
    rounds: FairQueue[tuple[str, str, int]] = FairQueue()
    put = [(org, kind, number) for number, (org, kind) in enumerate(items)]
    for item in put:
        rounds.put(item[0], item, item[1])
    taken: list[tuple[str, str, int]] = []
    at = 0
    while rounds:
        some = rounds.take(mosts[at % len(mosts)])
        assert 0 < len(some) <= mosts[at % len(mosts)]
        assert len({kind for _, kind, _ in some}) == 1
        if at % 3 == 2 and len(some) > 1:
            for item in reversed(some[1:]):
                rounds.put_back(item[0], item, item[1])
            del some[1:]
        taken += some
        at += 1
        assert len(rounds) + len(taken) == len(put)
    assert sorted(taken) == sorted(put)
    for one in product("abc", "xy"):
        assert [item for item in taken if item[:2] == one] == [item for item in put if item[:2] == one]


@pytest.mark.parametrize("what", ["delete", "purge"])
def test_a_receipt_is_told_while_the_work_of_others_goes_on(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real agent: the deletes of the greedy one never end before the modest one has heard."""
    layout = Layout((Group("full", (1,)),))
    identity = ShardIdentity("s", slot_bytes_for(C), DRIVER, part="s")
    with running(tmp_path) as plane:
        arena = Arena.allocate(identity.slot_bytes, SLOTS)
        plane.shards["s"] = HostedShard(identity, arena, wake_me=plane.plane.wake)
        credentials = Credentials(DRIVER, SECRET)
        shard = Shard("s", lambda: connect(f"unix:{plane.unix}", "s", credentials))
        driver = Driver(layout, "llama", [[shard]])
        try:
            wait_until("it has its slots", lambda: driver.statistics.groups()[0].slots == SLOTS)
            greedy = prompt([number % 251 for number in range(C * (SLOTS - 100))], "greedy")
            modest = prompt([7] * C, "modest")
            for asked in (greedy, modest):
                assert not driver.store(asked, asked.tokens, lambda *_: memoryview(bytes(C))).failed
            slots = driver.ledger._slots
            really_cleared = slots.cleared

            def cleared(clears: Sequence[Clear]) -> None:
                greedys = [clear for clear in clears if clear.removal is deleted]
                slots.retry_clears(greedys)
                really_cleared(clear for clear in clears if clear not in greedys)

            with monkeypatch.context() as patch:
                patch.setattr(slots, "cleared", cleared)
                with driver._lock:
                    deleted = driver.ledger.delete(greedy)
                if what == "delete":
                    receipt = driver.removals.delete(modest, seconds=60)
                else:
                    receipt = driver.removals.purge("modest", seconds=60)
            assert receipt.done, "it waits for the other's"
            assert receipt.columns == 1
            assert not deleted.done
            wait_until("all of it is removed", lambda: deleted.done)
        finally:
            driver.close()
