"""Each transition exactly once, with any number of evaluators: by a state machine over how they
come between one another, and by threads with connections of their own."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from console.alerts.conditions.condition import Finding
from console.alerts.models import Alert, Transition
from console.alerts.state.lifecycle import Delays, Lifecycle, State, Verdict, advance
from console.alerts.state.transitions import first_seen, observe
from telemetry.models import Event
from tests.console.alerts.numbers import StaticCondition, at, rule_of

EVALUATORS = 3
RULE = rule_of(StaticCondition())
PATIENCE = Delays(timedelta(seconds=20), timedelta(seconds=20))


def finding(verdict: Verdict) -> Finding:
    return Finding("node:ax-7", verdict, "it is so", 2.0, 1.0)


class Evaluators(RuleBasedStateMachine):
    """Several read, wait for any time, and write what they have decided. The model is one that is alone,
    and sees what those saw whose writing counted."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.read: dict[int, tuple[Alert | None, Verdict, int]] = {}
        self.life: Any = None  # of the model
        self.transitions: list[tuple[str, str]] = []

    @initialize()
    def nothing_is_there(self) -> None:
        Alert.objects.all().delete()
        Event.objects.all().delete()

    @rule(who=st.integers(0, EVALUATORS - 1), verdict=st.sampled_from(Verdict))
    def an_evaluator_reads(self, who: int, verdict: Verdict) -> None:
        self.clock += 10
        self.read[who] = (Alert.objects.first(), verdict, self.clock)

    @rule(who=st.integers(0, EVALUATORS - 1))
    def it_writes(self, who: int) -> None:
        alert, verdict, second = self.read.pop(who, (None, Verdict.NO_DATA, 0))
        if not second:
            return
        alert = alert or first_seen(RULE, finding(verdict), None, at(second))
        if alert is None:
            return
        seen = alert.observed_at
        current = Alert.objects.get()
        flipped = observe(alert, finding(verdict), PATIENCE, at(second))
        counted = seen == current.observed_at and at(second) > seen
        before = self.life.state if self.life else State.QUIET
        if counted and (self.life or verdict is Verdict.BREACH):
            life = self.life or Lifecycle(State.QUIET, at(second))
            self.life = advance(life, verdict, PATIENCE, at(second))
        now = self.life.state if self.life else State.QUIET
        assert flipped == (counted and now != before)
        if flipped:
            self.transitions.append((before, now))

    @rule(who=st.integers(0, EVALUATORS - 1))
    def it_dies(self, who: int) -> None:
        self.read.pop(who, None)

    @invariant()
    def what_is_stored_is_what_happened(self) -> None:
        stored = list(Transition.objects.order_by("number").values_list("number", "before", "after"))
        assert stored == [(n, *transition) for n, transition in enumerate(self.transitions, 1)]
        assert Alert.objects.count() <= 1
        for alert in Alert.objects.all():
            assert alert.state == (self.life.state if self.life else State.QUIET)
            assert alert.transition_count == len(self.transitions)
        told = [now for _, now in self.transitions if now not in (State.PENDING, State.QUIET)]
        kinds = Event.objects.order_by("id").values_list("kind", flat=True)
        assert list(kinds) == [f"alert.{state}" for state in told]


@pytest.mark.slow
@pytest.mark.django_db
def test_a_flip_happens_once_however_evaluators_come_between_one_another() -> None:
    run_state_machine_as_test(
        Evaluators,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.django_db(transaction=True)
def test_of_evaluators_that_see_the_same_at_the_same_time_one_flips() -> None:
    """A barrier before each write, and connections of their own: each state is entered once."""
    hasty = Delays(timedelta(0), timedelta(0))
    count, wins = 6, list[tuple[str, int]]()
    barrier = threading.Barrier(count, timeout=60)

    def evaluator(who: int) -> None:
        try:
            for step, verdict in enumerate([Verdict.BREACH, Verdict.OK] * 5, 1):
                barrier.wait()
                alert = Alert.objects.first() or first_seen(RULE, finding(verdict), None, at(step))
                barrier.wait()
                assert alert
                # They do not even agree on the time.
                if observe(alert, finding(verdict), hasty, at(step * 10 + who)):
                    wins.append((verdict, step))
        finally:
            connection.close()

    threads = [threading.Thread(target=evaluator, args=(who,)) for who in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [step for _, step in sorted(wins, key=lambda win: win[1])] == list(range(1, 11))
    transitions = list(Transition.objects.order_by("number").values_list("number", "after", "episode"))
    states = ["firing", "resolved"] * 5
    assert transitions == [(n, state, (n + 1) // 2) for n, state in enumerate(states, 1)]
    assert Event.objects.count() == 10


@pytest.mark.django_db
def test_what_an_evaluator_saw_before_counts_no_more() -> None:
    hasty = Delays(timedelta(0), timedelta(0))
    alert = first_seen(RULE, finding(Verdict.BREACH), None, at(0))
    assert alert
    observe(alert, finding(Verdict.BREACH), hasty, at(10))
    late = Alert.objects.get()
    observe(late, finding(Verdict.OK), hasty, at(30))
    assert not observe(Alert.objects.get(), finding(Verdict.BREACH), hasty, at(20))
    assert Alert.objects.get().state == State.RESOLVED
