"""Whoever asks for a lot waits behind itself, and nobody else does."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvss_agent.limits.shares import Claim, FairShare, NoShare, Shares
from tests.live import wait_until


def nothing() -> None:
    """Nobody has to be woken."""


def test_owners_are_served_in_turns_whoever_came_first() -> None:
    share = FairShare(Shares(total=1, per_owner=1))
    order: list[str] = []
    first = share.ask("greedy", 1, nothing)
    claims: dict[str, list[Claim]] = {"greedy": [], "modest": []}
    for owner, count in (("greedy", 10), ("modest", 2)):
        for _ in range(count):
            claims[owner].append(share.ask(owner, 1, partial(order.append, owner)))
    share.release(first)
    while len(order) < 12:
        share.release(claims[order[-1]].pop(0))
    assert order[:4] == ["greedy", "modest", "greedy", "modest"]


def test_one_owner_never_has_more_than_its_part() -> None:
    share = FairShare(Shares(total=10, per_owner=6))
    share.ask("a", 6, nothing)
    assert not share.ask("a", 1, nothing).granted
    assert share.ask("b", 4, nothing).granted


def test_what_is_reserved_is_given_though_others_have_everything() -> None:
    share = FairShare(Shares(total=10, per_owner=5, reserved=1))
    for owner in "ab":
        assert share.ask(owner, 5, nothing).granted
    assert share.ask("c", 1, nothing).granted
    assert not share.ask("c", 1, nothing).granted


def test_queues_are_bounded_and_nobody_fills_that_of_another() -> None:
    share = FairShare(Shares(total=1, per_owner=1, waiting=5, waiting_per_owner=3))
    share.ask("a", 1, nothing)
    for _ in range(3):
        share.ask("a", 1, nothing)
    with pytest.raises(NoShare):
        share.ask("a", 1, nothing)
    for _ in range(2):
        share.ask("b", 1, nothing)
    with pytest.raises(NoShare):
        share.ask("c", 1, nothing)
    assert (share.waiting, share.refused) == (5, 2)


def test_what_is_more_than_an_owner_may_have_is_refused_at_once() -> None:
    with pytest.raises(NoShare):
        FairShare(Shares(total=10, per_owner=6)).ask("a", 7, nothing)


def test_waiting_ends() -> None:
    share = FairShare(Shares(total=1, per_owner=1))
    with share.held("a", seconds=0), pytest.raises(NoShare), share.held("b", seconds=0.01):
        pass
    assert (share.used, share.waiting, share.refused) == (0, 0, 1)


def test_threads_and_tasks_wait_for_each_other() -> None:
    share = FairShare(Shares(total=1, per_owner=1))
    seen: list[str] = []

    async def wait() -> None:
        async with share.held_async("task", seconds=20):
            seen.append("task")

    with share.held("thread", seconds=1):
        thread = threading.Thread(target=lambda: asyncio.run(wait()))
        thread.start()
        wait_until("it waits", lambda: share.waiting == 1)
        seen.append("thread")
    thread.join()
    assert seen == ["thread", "task"]


@given(
    st.lists(st.one_of(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), st.integers(0, 9))),
)
def test_the_bounds_hold_and_nothing_waits_that_fits(steps: list[tuple[str, int] | int]) -> None:
    shares = Shares(total=6, per_owner=4, reserved=1, waiting=8, waiting_per_owner=4)
    share, claims = FairShare(shares), list[Claim]()
    for step in steps:
        if isinstance(step, int):
            if claims:
                share.release(claims.pop(step % len(claims)))
        else:
            try:
                claims.append(share.ask(*step, nothing))
            except NoShare:
                continue
        granted = [claim for claim in claims if claim.granted]
        assert share.used == sum(claim.amount for claim in granted) <= 6 + 3
        for owner in "abc":
            held = sum(claim.amount for claim in granted if claim.owner == owner)
            assert share._held[owner] == held <= 4
            first = next((one for one in claims if one.owner == owner and not one.granted), None)
            if first:
                assert held + first.amount > 4 or share.used + first.amount > 6
    for claim in claims:
        share.release(claim)
    assert (share.used, share.waiting) == (0, 0)
