"""The supervisor's core under any order of events that Hypothesis can think of."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.stack.world import SPECS, World

NAMES = st.sampled_from([spec.name for spec in SPECS])
STAYING = st.sampled_from([spec.name for spec in SPECS if not spec.once])


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(seconds=st.floats(0.01, 60))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(name=STAYING)
    def says_ready(self, name: str) -> None:
        if name in self.world.running:
            self.world.becomes_ready(name)

    @rule(name=STAYING)
    def says_alive(self, name: str) -> None:
        if name in self.world.running:
            self.world.is_alive(name)

    @rule(name=STAYING)
    def dies(self, name: str) -> None:
        if name in self.world.running:
            self.world.ends(name)

    @rule()
    def the_step_succeeds(self) -> None:
        if "prepare" in self.world.running:
            self.world.ends("prepare", success=True)

    @rule()
    def all_behave(self) -> None:
        self.world.behave()

    @precondition(lambda self: self.world.core.all_up)
    @rule()
    def stop(self) -> None:
        self.world.stop()

    @precondition(lambda self: self.world.core.stopping)
    @rule()
    def hurry(self) -> None:
        self.world.stop()

    @invariant()
    def down_means_that_nothing_runs(self) -> None:
        if self.world.core.stopping and self.world.core.all_down:
            assert not self.world.running

    def teardown(self) -> None:
        """From wherever it got to, well-behaved processes come up, or go down when asked to."""
        for _ in range(200):
            self.world.behave()
            self.world.tick()
        core = self.world.core
        assert core.all_down if core.stopping else core.all_up


TestAnyOrder = pytest.mark.slow(AnyOrder.TestCase)
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60)
