"""The state machine of an instance, whatever happens to its engine and in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swdriver_shim.adapters.handover import CacheState
from workload_manager.state import (
    AGAIN_SECONDS,
    AGAIN_SECONDS_MAX,
    HEALTHY_SECONDS,
    SILENT_PROBES,
    SILENT_PROBES_MAX,
    WARM_SECONDS,
    CacheSeen,
    EndEngine,
    EngineAnswers,
    EngineEnded,
    EngineSilent,
    Fact,
    Goal,
    GoalSet,
    HoldCache,
    Instance,
    NotPrepared,
    Order,
    Prepare,
    Prepared,
    Preparing,
    RequestsRunning,
    Rules,
    StartEngine,
    State,
    StopPreparing,
    TimePassed,
)

RULES = Rules(has_cache=False, start_seconds=100, grace_seconds=20)
CACHED = Rules(has_cache=True, start_seconds=100, grace_seconds=20)
DIED = EngineEnded(1, "The engine ended with status 1: no memory.")


class Life:
    """An instance, and a clock that goes when it is told to."""

    def __init__(self, rules: Rules) -> None:
        self.now = 1000.0
        self.one = Instance(rules, self.now)
        assert self.one.begin() == [Prepare()]

    def take(self, *facts: Fact) -> list[Order]:
        return [order for fact in facts for order in self.one.take(fact, self.now)]

    def passes(self, seconds: float) -> list[Order]:
        self.now += seconds
        return self.take(TimePassed())

    @property
    def state(self) -> tuple[State, str]:
        return self.one.state, self.one.reason


def serving(rules: Rules = RULES) -> Life:
    life = Life(rules)
    life.take(Prepared(), EngineAnswers(1))
    if rules.has_cache:
        life.take(CacheSeen(1, CacheState.ATTACHED, settled=True))
    assert life.one.state is State.READY
    return life


def test_a_life_without_a_fault() -> None:
    life = Life(RULES)
    assert life.state == (State.PENDING, "Created")
    life.take(Preparing(State.COMPILING, "Compiling", "It is compiled."))
    life.take(Preparing(State.LOADING, "LoadingWeights", "Weights are loaded."))
    assert life.state == (State.LOADING, "LoadingWeights")
    assert life.take(Prepared()) == [StartEngine(1)]
    assert life.state == (State.STARTING, "EngineStarting")
    life.take(EngineAnswers(1))
    assert life.state == (State.READY, "Serving")
    life.take(RequestsRunning(2))
    assert life.take(GoalSet(Goal.DRAIN)) == [StopPreparing()]
    assert not life.one.takes_requests
    assert life.take(RequestsRunning(0)) == [EndEngine(1, kill=False)]
    life.take(EngineEnded(1, "The engine ended."))
    assert life.state == (State.GONE, "Drained")


def test_readiness_waits_for_the_cache_once() -> None:
    life = Life(CACHED)
    assert life.take(Prepared()) == [HoldCache(attach=True), StartEngine(1)]
    life.take(EngineAnswers(1))
    assert life.state == (State.STANDBY, "WaitingForCache")
    assert life.one.takes_requests, "it could"
    life.take(CacheSeen(1, CacheState.WAITING, problem="its port is taken."))
    assert life.one.sentence == "The driver can't start: its port is taken."
    life.take(CacheSeen(1, CacheState.ATTACHED))
    assert life.state == (State.STANDBY, "OpeningShards")
    life.take(CacheSeen(1, CacheState.ATTACHED, settled=True))
    assert life.state == (State.READY, "Serving")
    assert life.take(GoalSet(Goal.RELEASE_CACHE)) == [HoldCache(attach=False)]
    life.take(CacheSeen(1, CacheState.RELEASED))
    assert life.one.state is State.READY
    assert life.take(GoalSet(Goal.RUN)) == [HoldCache(attach=True)]
    life.take(CacheSeen(1, CacheState.WAITING))
    assert life.one.state is State.READY, "it goes on serving"


def test_shards_that_do_not_open_keep_nobody_waiting_for_ever() -> None:
    life = Life(CACHED)
    life.take(Prepared(), EngineAnswers(1), CacheSeen(1, CacheState.ATTACHED))
    assert life.one.next_look() == life.now + WARM_SECONDS
    life.passes(WARM_SECONDS)
    assert life.state == (State.READY, "CacheNotReady")


def test_after_a_crash_it_waits_for_the_cache_again_unless_it_was_released() -> None:
    life = serving(CACHED)
    life.take(DIED)
    life.passes(AGAIN_SECONDS)
    life.take(EngineAnswers(2))
    assert life.state == (State.STANDBY, "WaitingForCache")
    life.take(GoalSet(Goal.RELEASE_CACHE), CacheSeen(2, CacheState.RELEASED))
    assert life.state == (State.READY, "CacheReleased")
    life.take(EngineEnded(2, "The engine was killed."))
    assert life.passes(2 * AGAIN_SECONDS) == [HoldCache(attach=False), StartEngine(3)]


def test_an_engine_that_ends_is_started_again_later_each_time() -> None:
    life = Life(RULES)
    life.take(Prepared())
    waits = []
    for run in range(1, 12):
        assert life.take(EngineEnded(run, "The engine ended with status 1: no memory.")) == []
        assert life.state == (State.STARTING, "EngineEnded")
        assert "no memory. It is started again in" in life.one.sentence
        due = life.one.next_look()
        assert due
        waits.append(due - life.now)
        assert life.passes(waits[-1] * 0.9) == []
        assert life.passes(waits[-1] * 0.1 + 1e-6) == [StartEngine(run + 1)]
    assert waits[:4] == pytest.approx([1, 2, 4, 8])
    assert waits[-1] == pytest.approx(AGAIN_SECONDS_MAX)
    assert life.one.restarts == 11
    life.take(EngineAnswers(12))
    life.passes(HEALTHY_SECONDS)
    life.take(EngineEnded(12, "The engine was killed."))
    due = life.one.next_look()
    assert due
    assert due - life.now == pytest.approx(AGAIN_SECONDS), "it was healthy for long enough"


def test_an_engine_that_does_not_answer_in_time_is_killed() -> None:
    life = Life(RULES)
    life.take(Prepared())
    assert life.take(EngineSilent(1)) == [], "it may"
    assert life.passes(100) == [EndEngine(1, kill=True)]
    assert life.passes(100) == [], "once"
    life.take(EngineEnded(1, "It was killed."))
    assert life.state == (State.STARTING, "StartTooSlow")
    assert "within 1 min 40 s of its start" in life.one.sentence


def test_who_answers_in_place_of_an_engine_is_said() -> None:
    life = Life(RULES)
    life.take(Prepared(), EngineSilent(1, "Port 7 is answered by process 8 (nginx)."))
    assert life.state == (State.STARTING, "PortTaken")
    life.take(EngineSilent(1))
    assert life.state == (State.STARTING, "EngineStarting")
    life.take(EngineSilent(1, "Port 7 is answered by process 9 (nginx)."))
    assert life.passes(100) == [EndEngine(1, kill=True)]
    life.take(EngineEnded(1, "It was killed."))
    assert life.state == (State.STARTING, "StartTooSlow")
    assert "of its start. Port 7 is answered by process 9 (nginx). It is started" in life.one.sentence


def test_an_engine_that_falls_silent_is_not_ready_and_ends_at_last() -> None:
    life = serving()
    for _ in range(SILENT_PROBES - 1):
        life.take(EngineSilent(1))
    assert life.one.state is State.READY
    life.take(EngineSilent(1))
    assert life.state == (State.STARTING, "EngineSilent")
    life.take(EngineAnswers(1))
    assert life.one.state is State.READY
    orders = [order for _ in range(SILENT_PROBES_MAX) for order in life.take(EngineSilent(1))]
    assert orders == [EndEngine(1, kill=True)]
    assert not life.one.takes_requests, "those that are cut off read why, and not that it is starting"


def test_what_cannot_be_prepared_is_tried_again() -> None:
    life = Life(RULES)
    life.take(NotPrepared("WeightsMissing", "There is no folder /w."))
    assert life.state == (State.PENDING, "WeightsMissing")
    assert "There is no folder /w. It is tried again in" in life.one.sentence
    assert life.passes(AGAIN_SECONDS) == [Prepare()]
    assert life.take(Prepared()) == [StartEngine(1)]


def test_whoever_has_no_engine_is_gone_at_once() -> None:
    life = Life(RULES)
    assert life.take(GoalSet(Goal.DRAIN)) == [StopPreparing()]
    assert life.one.state is State.GONE
    assert life.take(Prepared(), GoalSet(Goal.RUN)) == []


def test_requests_that_take_too_long_are_cut_off_within_the_grace_period() -> None:
    life = serving()
    life.take(RequestsRunning(3), GoalSet(Goal.DRAIN))
    began = life.now
    due = life.one.next_look()
    assert due
    assert life.passes(due - life.now) == [EndEngine(1, kill=False)]
    assert life.one.sentence.startswith("3 requests are cut off")
    due = life.one.next_look()
    assert due
    assert due - began <= RULES.grace_seconds
    assert life.passes(due - life.now) == [EndEngine(1, kill=True)]
    life.take(EngineEnded(1, "It was killed."))
    assert life.one.state is State.GONE


def test_what_earlier_engines_say_does_not_matter() -> None:
    life = serving()
    life.take(DIED)
    life.passes(AGAIN_SECONDS)
    life.take(EngineAnswers(1), DIED, CacheSeen(1, CacheState.ATTACHED))
    assert life.state == (State.STARTING, "EngineStarting")
    assert life.one.cache is None


class AnyLife(RuleBasedStateMachine):
    """Facts of a world that does what it is told, or breaks: never two engines, and an end for each."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life(CACHED)
        self.running: set[int] = set()  # engines that have a process
        self.asked_to_end: set[int] = set()
        self.prepares = True
        self.starts = 0
        self.drain_at: float | None = None

    def take(self, *facts: Fact) -> None:
        was_gone = self.life.one.state is State.GONE
        for order in self.life.take(*facts):
            assert not was_gone
            match order:
                case StartEngine(run):
                    assert not self.running, "two engines at once"
                    assert self.drain_at is None
                    self.starts += 1
                    assert run == self.starts
                    self.running.add(run)
                case EndEngine(run, kill):
                    assert run in self.running
                    if kill:
                        self.asked_to_end.add(run)
                case Prepare():
                    assert not self.prepares
                    self.prepares = True
                case StopPreparing():
                    self.prepares = False

    @rule(seconds=st.sampled_from([0.1, 1, 5, 30, 200]))
    def passes(self, seconds: float) -> None:
        self.life.now += seconds
        self.take(TimePassed())

    @precondition(lambda self: self.prepares)
    @rule(is_done=st.booleans())
    def prepared(self, is_done: bool) -> None:  # noqa: FBT001
        self.prepares = False
        self.take(Prepared() if is_done else NotPrepared("WeightsMissing", "There is none."))

    @precondition(lambda self: self.prepares)
    @rule()
    def preparing(self) -> None:
        self.take(Preparing(State.LOADING, "LoadingWeights", "It loads."))

    @rule(data=st.data())
    def engine_says(self, data: st.DataObject) -> None:
        """Also an engine that is gone: what it said may arrive late."""
        assume(self.starts)
        run = data.draw(st.integers(max(1, self.starts - 1), self.starts))
        cache = st.builds(CacheSeen, st.just(run), st.sampled_from(CacheState), st.booleans())
        self.take(data.draw(st.one_of(st.just(EngineAnswers(run)), st.just(EngineSilent(run)), cache)))

    @precondition(lambda self: self.running)
    @rule()
    def engine_ends(self) -> None:
        [run] = self.running
        self.running.clear()
        self.take(EngineEnded(run, "The engine ended with status 1."))

    @rule(goal=st.sampled_from([Goal.RUN, Goal.RELEASE_CACHE]))
    def goal(self, goal: Goal) -> None:
        self.take(GoalSet(goal))

    @rule()
    def drain(self) -> None:
        if self.drain_at is None:
            self.drain_at = self.life.now
        self.take(GoalSet(Goal.DRAIN))

    @rule(count=st.integers(0, 3))
    def requests(self, count: int) -> None:
        self.take(RequestsRunning(count))

    @invariant()
    def holds(self) -> None:
        one = self.life.one
        assert one.reason.isalpha()
        assert one.sentence.endswith(".")
        assert (one.engine is not None) == bool(self.running)
        if one.state in (State.READY, State.STANDBY):
            assert one.answers
        if one.state is State.GONE:
            assert not self.running, "an orphan"
        elif self.drain_at is None:
            is_waiting = self.prepares or self.running or one.next_look() is not None
            assert is_waiting, "nothing will ever happen"
        else:
            assert one.state is State.DRAINING
            due = one.next_look()
            is_told = self.asked_to_end >= self.running
            assert is_told or (due and due <= self.drain_at + CACHED.grace_seconds)


TestAnyLife = AnyLife.TestCase
