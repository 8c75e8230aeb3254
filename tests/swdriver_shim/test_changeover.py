"""The change of an org's displacement policy: in pieces, whatever comes in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, product
from typing import Any

import pytest

from swdriver_shim.cache.column_table import WHOLE_MAX
from swdriver_shim.cache.displacement import (
    POLICIES,
    Changeover,
    Competition,
    DisplacementPolicy,
)
from swdriver_shim.cache.displacement.changeover import MOVED, MOVERS, PIECES
from swdriver_shim.cache.displacement.cost import Cost
from swdriver_shim.cache.displacement.parted import PARTS
from swdriver_shim.cache.ledger import SLICE, Ledger
from swdriver_shim.cache.listener import Listener
from swdriver_shim.cache.prefix_map import Account
from swdriver_shim.policy import DisplacementName, OrgPolicies, Policy, Rules
from tests.swdriver_shim.forests import Column, Driver
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.ledgers import conversation, finish, ledger, store
from tests.swdriver_shim.prompts import keys, prompt

NAMES = sorted(POLICIES)


def changing(prompts: int, length: int, to: str = "lru") -> tuple[Driver, Changeover[Column]]:
    """A driver in which so many prompts are about to have another policy."""
    driver = Driver(Cost())
    for number in range(prompts):
        driver.prompt(f"p{number}", length, float(number))
    driver.change_policy(POLICIES[to]())
    assert isinstance(driver.policy, Changeover)
    return driver, driver.policy


def waiting(policy: Changeover[Any]) -> int:
    """How many columns the old policy has."""
    return 0 if policy._old is None else len(policy._old)


def test_the_new_policy_knows_who_was_displaced_before_the_change_has_ended() -> None:
    driver, policy = changing(1, 30, "s3fifo")
    old = next(column for column in driver.columns.values() if column.needs == 29)
    old.ref_count += 1  # in use
    newer = driver.store("newer", 1.0)
    assert driver.displace(2.0) is newer
    assert waiting(policy)
    assert driver.store("newer", 3.0).mark is not None


@pytest.mark.parametrize(("name", "to"), [*product(NAMES, NAMES)])
def test_each_column_is_displaced_once_whichever_policy_has_it(name: str, to: str) -> None:
    driver = Driver(POLICIES[name]())
    prompts = [driver.prompt(f"p{number}", 4, float(number)) for number in range(60)]
    for number, path in enumerate(prompts[::3]):
        driver.use(path, 50.0 + number)
    driver.change_policy(POLICIES[to]())
    gone: list[Column] = []
    for number in range(20):
        if isinstance(driver.policy, Changeover):
            driver.policy.move(number % 5, 100.0 + number)
        gone += [one for one in [driver.displace(100.0 + number) for _ in range(3)] if one]
        if number % 4 == 0:
            prompts.append(driver.prompt(f"more {number}", 2, 100.0 + number))
        if all(map(driver.has, prompts[number])):
            driver.use(prompts[number], 100.0 + number)
        check_integrity(driver.policy, driver.columns.values())
    while last := driver.displace(200.0):
        gone.append(last)
    assert driver.policy.name == to
    assert len(gone) == len(set(gone)) == sum(map(len, prompts))
    assert not driver.columns


def test_those_of_the_policy_before_go_first_and_in_its_order() -> None:
    driver, policy = changing(30, 1, to="lfu")
    columns = list(driver.columns.values())
    policy.move(2, 30.0)
    newcomer = driver.store("new", 30.0)
    [*moved] = policy._moved
    left = [one for one in columns if one not in moved]
    assert len(left) == 30 - 2 - MOVED
    gone = [driver.displace(31.0) for _ in range(len(columns) + 1)]
    assert gone[: len(left)] == sorted(left, key=lambda one: one.used_at)
    assert gone[-1] is newcomer


def test_columns_are_moved_a_few_at_a_time() -> None:
    driver, policy = changing(40, 10)
    driver.store("new", 42.0)
    assert waiting(policy) == 400 - MOVED
    assert len(policy) == 401
    policy.move(30, 43.0)
    assert waiting(policy) == 400 - MOVED - 30
    while driver.policy is policy:
        policy.move(30, 43.0)
    assert driver.policy is policy.to
    check_integrity(driver.policy, driver.columns.values())


def test_a_large_store_moves_no_more_than_so_many() -> None:
    driver, policy = changing(300, 10)
    columns = [Column(bytes([number >> 8, number & 0xFF, number % 251])) for number in range(500)]
    policy.columns = lambda _: iter([iter(list(driver.columns.values()))])
    policy._unmoved = policy.columns(0)
    driver.columns |= {column.key: column for column in columns}
    policy.stored_all(columns, 301.0)
    assert waiting(policy) == 3000 - MOVED * MOVERS
    check_integrity(policy, driver.columns.values())


def test_columns_that_are_few_among_many_are_not_looked_for_all_at_once() -> None:
    """As those of one priority among those of another."""
    driver, policy = changing(1, 3)
    begun: list[int] = []

    def sparse(_: int) -> Iterator[Iterator[Column]]:
        for number in range(100):
            begun.append(number)
            yield iter(())
        yield iter(list(driver.columns.values()))

    policy.columns = sparse
    policy._unmoved = sparse(0)
    columns = [Column(bytes([0, 0, number])) for number in range(50)]
    driver.columns |= {column.key: column for column in columns}
    policy.stored_all(columns, 2.0)
    assert begun == list(range(PIECES))
    for _ in range(100):
        policy.move(500, 2.0)
    assert driver.policy is policy.to
    assert len(driver.policy) == 53


def test_columns_that_are_about_to_be_stored_are_not_moved_from_the_policy_before() -> None:
    driver, policy = changing(20, 5)
    columns = [Column(bytes([0, 0, number]), used_at=30.0) for number in range(5)]
    driver.columns |= {column.key: column for column in columns}  # so they are listed
    policy.stored_all(columns, 30.0)
    assert waiting(policy) == 100 - 5 * MOVED
    assert len(policy._moved) == 5 + 5 * MOVED
    check_integrity(policy, driver.columns.values())


def test_columns_that_were_left_out_of_pieces_are_moved_all_the_same() -> None:
    driver, policy = changing(6, 10)
    listed, rounds = policy.columns, list[int]()

    def every_second(bits: int) -> Iterator[Iterator[Column]]:
        rounds.append(bits)
        yield (one for one in chain.from_iterable(listed(bits)) if one.key[-1] % 2 == len(rounds) % 2)

    policy.columns = every_second
    policy._unmoved = every_second(0)
    for number in range(12):
        driver.store(f"more {number}", 7.0)
    assert driver.policy is policy.to
    assert rounds == [0, 0]
    check_integrity(driver.policy, driver.columns.values())


def test_a_round_that_begins_again_moves_no_column_twice() -> None:
    """What is taken from the last piece is listed in the first one of the next round."""
    driver, policy = changing(1, 10)
    columns = list(driver.columns.values())
    rounds = iter([columns[:3], columns, columns])
    policy.columns = lambda _: iter([iter(next(rounds))])
    policy._unmoved = policy.columns(0)
    policy.move(2, 2.0)
    policy.move(5, 2.0)
    assert waiting(policy) == 3
    policy.move(5, 2.0)
    assert len(driver.policy) == 10
    assert driver.policy is policy.to


def test_no_step_takes_longer_with_more_columns() -> None:
    """A set that grows is copied as a whole, and one that goes is gone through."""
    driver, policy = changing(1000, 10)
    largest = 0
    while waiting(policy):
        driver.store(f"more {len(policy)}", 1002.0)
        largest = max([largest, *map(len, policy._moved.parts)])
    assert largest <= WHOLE_MAX
    assert max(map(len, policy._left)) < 100, "however few a part begins with"
    for left in range(PARTS - 1, 0, -1):
        assert len(policy._left) == left
        assert driver.policy is policy
        driver.store(f"then {left}", 1003.0)
    assert not policy._left
    assert driver.policy is policy.to


def test_what_was_noted_of_columns_that_are_gone_is_freed_with_them() -> None:
    """An org that stores nothing any more would keep it for as long as it is served."""
    driver, policy = changing(10, 200)
    for _ in range(150):
        driver.store(f"more {len(policy)}", 1002.0)
    assert waiting(policy)
    assert len(policy._moved.parts) == PARTS
    for column in sorted(driver.columns.values(), key=lambda one: one not in policy._moved):
        policy.removed(column)
    assert not policy._left
    assert not len(policy)
    assert driver.policy is policy.to


def test_miniatures_know_what_newcomers_are_behind_that_came_to_the_policy_after_them() -> None:
    driver = Driver(POLICIES["lru"]())
    path = driver.prompt("a", 4, 0.0)
    to = Competition[Column](1, 1)
    driver.change_policy(to)
    newcomer = driver.store("a/4", 1.0, path[-1])
    assert next(iter(to._sample)) is newcomer
    while driver.policy is not to:
        assert isinstance(driver.policy, Changeover)
        driver.policy.move(4, 2.0)
    assert to.victim(3.0) is newcomer
    for one in to._miniatures:
        asked = [one.columns[column.key] for column in (newcomer, *reversed(path))]
        assert [column.parent for column in asked] == [*asked[1:], None]
        assert [column.ref_count for column in asked] == [0, 1, 1, 1, 1]


# In a ledger


def queues(made: Ledger, org: str = "acme") -> Mapping[int, DisplacementPolicy[Any]]:
    return made.accounts[org]._queues[0]


def policies(name: DisplacementName, **more: Any) -> dict[str, OrgPolicies]:
    return {"acme": OrgPolicies(policy=Policy(displacement=name, **more))}


def full(columns: int, name: DisplacementName = "lru") -> Ledger:
    """An org has so many columns, which is all there is room for."""
    made = ledger(columns, acme=Policy(displacement=name))
    for number in range(0, columns, 10):
        store(made, prompt(conversation(*range(number, number + 10)), "acme"), now=number)
    return made


def sweep(made: Ledger, now: float) -> int:
    """Until there is no more to do. How many times that was."""
    times = 1
    while made.sweep(now):
        times += 1
    return times


def of_change(made: Ledger) -> Changeover[Any]:
    [queue] = queues(made).values()
    assert isinstance(queue, Changeover)
    return queue


def test_an_operators_change_is_carried_out_in_pieces() -> None:
    made = full(2000)
    made.set_policies(policies("slru"), 3000)
    change, account = of_change(made), made.accounts["acme"]
    assert waiting(change) == 2000, "none is moved under the lock of who changes it"
    for moved in (SLICE, 2 * SLICE, 3 * SLICE):
        assert made.sweep(3000)
        assert waiting(change) == 2000 - moved
        check_integrity(made)
    sweep(made, 3000)
    assert not account.is_changing_over
    assert [(one.name, len(one)) for one in queues(made).values()] == [("slru", 2000)]
    check_integrity(made)


def test_a_change_goes_on_while_much_expires() -> None:
    """Each sweep has one budget for all that takes long."""
    half = 10 * SLICE
    made = ledger(2 * half, acme=Policy(displacement="lru", ttl_last_use_seconds=100))
    for number in range(0, 2 * half, 10):
        store(made, prompt(conversation(*range(number, number + 10)), "acme"), now=50 * (number >= half))
    made.set_policies(policies("arc", ttl_last_use_seconds=100), 60)
    change = of_change(made)
    assert all(made.sweep(120) for _ in range(0, half, SLICE))
    assert waiting(change) == len(change) == half
    sweep(made, 120)
    assert [(one.name, len(one)) for one in queues(made).values()] == [("arc", half)]
    check_integrity(made)


@pytest.mark.parametrize("last", ["lru", "slru", "arc", "default"])
def test_a_second_change_follows_the_first_and_those_between_are_left_out(
    last: DisplacementName,
) -> None:
    made = full(1000)
    made.set_policies(policies("slru"), 2000)
    made.sweep(2000)
    for name in ("cost", "s3fifo", last):
        made.set_displacement("acme", name, 2000)
        assert of_change(made).to.name == "slru"
    check_integrity(made)
    store(made, prompt(conversation(*range(5000, 5010)), "acme"), now=2001)
    times = sweep(made, 2002)
    assert times < 3 * 1000 // SLICE, "of the policies between none had columns"
    assert [(one.name, len(one)) for one in queues(made).values()] == [(last, 1000)]
    check_integrity(made)


def test_the_policy_in_use_is_that_which_newcomers_come_to() -> None:
    made = full(1000)
    account = made.accounts["acme"]
    assert account.choice(1000) is None
    made.set_displacement("acme", "default", 1000)
    choice = account.choice(1000)
    assert choice is not None
    assert choice.in_use == "cost"
    sweep(made, 1000)
    made.set_displacement("acme", "lru", 1001)
    assert of_change(made)._old is not None
    assert account.choice(1001) is None, "the policy names one"
    assert made.reuse("acme", 1001).displacement is None  # type: ignore[union-attr]


def test_each_priority_changes_by_itself() -> None:
    made = ledger(1000, acme=Policy(displacement="arc"))
    for number in range(0, 1000, 10):
        asked = prompt(conversation(*range(number, number + 10)), "acme")
        store(made, asked, number, Rules(priority=number // 10 % 3))
    made.set_displacement("acme", "lfu", 2000)
    account, seen = made.accounts["acme"], set()
    while account.is_changing_over:
        made.sweep(2000, 100)
        seen.add(tuple(type(one) for one in queues(made).values()))
        check_integrity(made)
        store(made, prompt(conversation(0, len(seen), 77), "acme"), 2000, Rules(priority=2))
        check_integrity(made)
    assert len(seen) > 3, "one after the other"
    assert {one.name for one in queues(made).values()} == {"lfu"}


def test_a_purge_takes_columns_of_both_policies() -> None:
    made = full(2000)
    made.set_displacement("acme", "cost", 3000)
    made.sweep(3000)
    receipt = made.purge("acme")
    check_integrity(made)
    finish(made)
    assert receipt.done
    assert receipt.columns == 2000
    assert not made.accounts["acme"].is_changing_over
    assert not made.accounts["acme"].bytes
    sweep(made, 3000)
    check_integrity(made)


def test_a_snapshot_has_the_columns_of_both_policies() -> None:
    made = full(1000)
    made.set_displacement("acme", "s3fifo", 3000)
    made.sweep(3000)
    left = made.snapshot(3000, 3000)
    following = ledger(1000, acme=Policy(displacement="s3fifo"))
    following.restore(left, keys, 10, 3010)
    assert [(one.name, len(one)) for one in queues(following).values()] == [("s3fifo", 1000)]
    check_integrity(following)


def test_quotas_and_the_slot_limit_take_columns_of_both_policies() -> None:
    made = full(2000)
    each = made.accounts["acme"].bytes // 2000
    made.set_policies(policies("lfu", dram_bytes_max=1200 * each), 3000)
    sweep(made, 3000)
    assert made.accounts["acme"].bytes == 1200 * each
    made.set_displacement("acme", "default", 3001)
    made.sweep(3001)
    made.set_slot_limit(0, 1000)
    check_integrity(made)
    sweep(made, 3001)
    assert not made.accounts["acme"].is_changing_over
    check_integrity(made)


class Changes(Listener):
    def __init__(self) -> None:
        self.orgs: list[str] = []

    def policy_changed(self, account: Account) -> None:
        self.orgs.append(account.org)


def test_who_displaces_what_is_no_reason_to_look_at_all_columns() -> None:
    """Neither for the sweeper, nor for brains that follow what is stored."""
    made, changes = full(1000), Changes()
    made.add_listener(changes)
    made.set_policies(policies("slru"), 2000)
    assert not changes.orgs
    assert not made._stock.expiry.is_behind
    made.set_policies(policies("slru", ttl_last_use_seconds=10), 2000)
    assert changes.orgs == ["acme"]
    assert made._stock.expiry.is_behind
