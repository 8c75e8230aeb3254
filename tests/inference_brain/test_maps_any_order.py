"""What a brain knows of a cache is what the cache serves, whatever happens in whatever order.

Once it has caught up it never promises more, now or later; of layouts with a prefix it knows all whole
chunks, and less only by as much as an expiry may lag behind.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from swdriver_shim.cache.prefix_map import State
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache_map.codec import CHUNK
from swdriver_shim.cache_map.messages import DELTAS_MAX
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import Policy, Rules, Tiers
from tests.inference_brain.map_worlds import MapWorld, tokens_of
from tests.swdriver_shim.prompts import FULL, HYBRID, PURE, STATES

SPECULATIVE = Layout((Group("target", (64,)), Group("draft", (16,))))
CHUNK_TOKENS = CHUNK * COLUMN_TOKENS
TTL_MAX = 40
EXAMPLES = 30
SECONDS = st.one_of(st.none(), st.integers(1, TTL_MAX))
POLICIES = st.builds(
    Policy,
    ttl_first_use_seconds=SECONDS,
    ttl_last_use_seconds=SECONDS,
    tiers=st.sampled_from([Tiers.NONE, *[Tiers.DRAM] * 5, *[Tiers.TIER2] * 3]),
    store_tokens_max=st.sampled_from([None, None, None, None, 0, 700, 1024]),
)
RULES = st.builds(Rules, ttl_seconds=st.one_of(st.none(), st.none(), SECONDS))
ORGS = st.sampled_from(["acme", "globex"])
# Prefixes of a few trunks that part at some columns: chunks are shared, cut, and continued.
TRUNKS = st.sampled_from(
    [[1] * 40, [1] * 11 + [2] * 20, [1] * 11 + [3] * 9, [4] * 30, [1] * 16 + [5] * 8]
)
LENGTHS = st.integers(0, 40)
RESTS = st.sampled_from([0, 0, 1, 40])


class MapMachine(RuleBasedStateMachine):
    layout: Layout

    def __init__(self) -> None:
        super().__init__()
        self.world = MapWorld(self.layout, slots=60)
        self.prompts: dict[tuple[str, tuple[int, ...], int], Prompt] = {}

    def prompt(self, org: str, trunk: list[int], length: int, rest: int) -> Prompt:
        name = org, tuple(trunk[:length]), rest
        if name not in self.prompts:
            self.prompts[name] = self.world.prompt(tokens_of(trunk[:length], rest), org)
        return self.prompts[name]

    @rule(org=ORGS, trunk=TRUNKS, length=LENGTHS, rest=RESTS, rules=RULES, fails=st.booleans())
    def store(
        self, org: str, trunk: list[int], length: int, rest: int, rules: Rules, *, fails: bool
    ) -> None:
        prompt, world = self.prompt(org, trunk, length, rest), self.world
        states = [*range(64, prompt.tokens + 1, 128), prompt.tokens]
        states = states if self.layout.has_states and prompt.tokens else []
        begun = world.ledger.begin_store(prompt, prompt.tokens, world.now, rules, (), states)
        failed = {place.column: Reason.AGENT_LOST for place in begun.places[3:4]} if fails else {}
        world.ledger.finish_store(begun, world.now, failed)

    @rule(org=ORGS, trunk=TRUNKS, length=LENGTHS, rest=RESTS)
    def use(self, org: str, trunk: list[int], length: int, rest: int) -> None:
        self.world.use(self.prompt(org, trunk, length, rest))

    @rule(seconds=st.floats(0.1, TTL_MAX))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def sweep(self) -> None:
        self.world.sweep()

    @rule(org=ORGS, policy=POLICIES)
    def set_policy(self, org: str, policy: Policy) -> None:
        self.world.set_policy(policy, org)

    @rule(slots=st.sampled_from([10, 30, 60, 90]))
    def set_slot_limit(self, slots: int) -> None:
        for group in range(len(self.layout.groups)):
            self.world.ledger.set_slot_limit(group, slots)

    @rule(org=ORGS, trunk=TRUNKS, length=LENGTHS, shared=st.booleans())
    def delete(self, org: str, trunk: list[int], length: int, *, shared: bool) -> None:
        self.world.ledger.delete(self.prompt(org, trunk, length, 0), shared=shared)

    @rule(org=ORGS, trunk=TRUNKS, length=LENGTHS, seconds=st.integers(1, TTL_MAX))
    def set_ttl(self, org: str, trunk: list[int], length: int, seconds: int) -> None:
        self.world.ledger.set_ttl(self.prompt(org, trunk, length, 0), seconds)

    @rule(org=ORGS, place=st.integers(0, 100), group=st.integers(0, 2))
    def refuse(self, org: str, place: int, group: int) -> None:
        ledger = self.world.ledger
        if org in ledger.accounts and group < len(self.layout.groups):
            columns = [one for one in ledger.accounts[org].columns(group) if one.state is State.READY]
            if columns:
                ledger.refuse(columns[place % len(columns)], Reason.SEAL_REFUSED)

    @rule(copied=st.booleans())
    def spill(self, *, copied: bool) -> None:
        ledger = self.world.ledger
        if begun := ledger.tier2.begin_spill(self.world.now, 64):
            ledger.tier2.finish_spill(begun, [copied] * len(begun.copies))

    @rule()
    def reclaim(self) -> None:
        ledger = self.world.ledger
        while ledger.reclaim():
            pass
        while clears := ledger.take_clears(64):
            ledger.finish_clears(clears, is_done=True)
        while purge := ledger.tier2.take_purge():
            ledger.tier2.finish_purge(purge, is_done=True)
        while deletes := ledger.tier2.take_deletes(64):
            ledger.tier2.finish_deletes(deletes, is_done=True)

    @rule(is_reachable=st.booleans())
    def set_reachable(self, *, is_reachable: bool) -> None:
        self.world.ledger.is_reachable = is_reachable

    @rule(org=ORGS)
    def purge(self, org: str) -> None:
        self.world.ledger.purge(org)

    @rule(org=ORGS)
    def purge_and_report(self, org: str) -> None:
        self.world.ledger.purge(org)
        self.world.catch_up()
        table = self.world.maps.table
        for prompt in (one for one in self.prompts.values() if one.org == org):
            assert self.world.hit(prompt) == (0, 0, float("inf"))
        if all(not account.maps for account in self.world.ledger.accounts.values()):
            assert table.rows == 0

    # The way to the brain

    @rule()
    def publish(self) -> None:
        self.world.publish()

    @rule(has_doubts=st.booleans())
    def compact(self, *, has_doubts: bool) -> None:
        """Because there are many deltas, or because nobody knows which of them have arrived."""
        self.world.log.follower.wants_snapshot |= has_doubts
        self.world.log._deltas = DELTAS_MAX
        self.world.publish()

    @rule()
    def read(self) -> None:
        self.world.read()

    @rule(place=st.integers(0, 50))
    def lose_message(self, place: int) -> None:
        if self.world.stream:
            at = place % len(self.world.stream)
            del self.world.stream[at]
            self.world.position -= at < self.world.position

    @rule()
    def empty_redis(self) -> None:
        self.world.stream, self.world.position = [], 0
        self.world.log.follower.wants_snapshot = True  # as the publisher finds out

    @rule()
    def restart_brain(self) -> None:
        self.world.restart_brain()

    @rule()
    def restart_publisher(self) -> None:
        self.world.restart_publisher()

    @rule()
    def start_over(self) -> None:
        self.world.log.follower.start_over()

    @rule()
    def compare(self) -> None:
        world = self.world
        world.catch_up()
        for prompt in self.prompts.values():
            hit = world.hit(prompt)
            for after in (0.0, 1.0, 5.0, 20.0):
                assert world.hit(prompt, after).tokens <= world.truth(prompt, after)
            if hit.tokens:
                assert world.wall < hit.expires_at
                assert world.truth(prompt, hit.expires_at - world.wall - 0.01) >= hit.tokens
            if all(group.linked for group in self.layout.groups):
                # An expiry is reported again once it has moved by a tenth, and in whole seconds.
                sure = world.truth(prompt, TTL_MAX / 10 + 2)
                assert hit.tokens >= sure - sure % CHUNK_TOKENS


LAYOUTS = {"full": FULL, "hybrid": HYBRID, "states": STATES, "pure": PURE, "speculative": SPECULATIVE}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_brain_knows_what_the_cache_serves(name: str) -> None:
    kind: Any = type("Machine", (MapMachine,), {"layout": LAYOUTS[name]})
    run_state_machine_as_test(
        kind, settings=settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
    )
