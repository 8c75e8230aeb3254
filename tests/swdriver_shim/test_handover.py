"""A driver's identity goes from one engine to the next while both run: at most one has it, and what the
first has stored the second serves."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent.documents import Conflict
from swdriver_shim.adapters import joining
from swdriver_shim.adapters.handover import CacheState, Goal, Handover, HandoverState, Users
from swdriver_shim.adapters.joining import JoinedDriver
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.daemons import C, told
from tests.swdriver_shim.holder import EACH, MODEL, Holder, config, holder, load, store

ASKED = list(range(3 * C))
OTHER = list(range(1000, 1000 + 2 * C))


@pytest.fixture
def one(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent(tmp_path / "agent") as made:
        made.tell(document(1, spec("s", 20, EACH * C)))
        yield made


@contextlib.contextmanager
def engine(tmp_path: Path, name: str) -> Iterator[tuple[JoinedDriver, Handover]]:
    joined = JoinedDriver(config(tmp_path / "state", tmp_path / name), MODEL, "a test")
    try:
        yield joined, Handover(tmp_path / name)
    finally:
        joined.close()


def waits_for(handover: Handover, cache: CacheState, *, ready: bool = False) -> HandoverState:
    def holds() -> bool:
        state = handover.state()
        return bool(state and state.cache is cache and (state.ready or not ready))

    wait_until(f"it is {cache}", holds)
    state = handover.state()
    assert state
    return state


def test_what_the_first_has_stored_the_second_serves_and_back(
    tmp_path: Path, one: AgentProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as engines:
        first, its = engines.enter_context(engine(tmp_path, "a"))
        waits_for(its, CacheState.ATTACHED)  # of two that begin at once either has it
        second, other = engines.enter_context(engine(tmp_path, "b"))
        assert not waits_for(other, CacheState.WAITING).is_settled
        first.shim.set_desired(json_of(told([one])))
        state = waits_for(its, CacheState.ATTACHED, ready=True)
        assert (state.generation, state.is_settled) == (1, True)
        assert store(first, ASKED) == 3
        assert load(first, ASKED) == len(ASKED)
        assert (load(second, ASKED), store(second, ASKED)) == (0, 0), "it has no cache"
        with pytest.raises(Conflict):
            second.shim.set_desired(json_of(told([one], 2)))

        its.set_goal(Goal.RELEASE)
        waits_for(other, CacheState.ATTACHED, ready=True)
        assert waits_for(its, CacheState.RELEASED).generation == 0
        assert load(second, ASKED) == len(ASKED), "the columns in the agent's memory are its own now"
        assert (load(first, ASKED), store(first, OTHER)) == (0, 0), "it goes on without a cache"
        assert store(second, OTHER) == 2

        its.set_goal(Goal.ATTACH)  # as when a rollout is undone
        waits_for(its, CacheState.WAITING)
        other.set_goal(Goal.RELEASE)
        waits_for(its, CacheState.ATTACHED, ready=True)
        assert load(first, ASKED) == len(ASKED)
        assert load(first, OTHER) == len(OTHER)
    assert "could not" not in caplog.text


def test_a_goal_that_cannot_be_read_once_is_read_again(
    tmp_path: Path, one: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "RETRY_SECONDS", 0.05)
    with engine(tmp_path, "a") as (first, its):
        waits_for(its, CacheState.ATTACHED)
        goal, fails = Handover.goal, threading.Event()

        def fail(_: Handover) -> Goal:
            fails.set()
            raise OSError("Stale file handle")

        monkeypatch.setattr(Handover, "goal", fail)
        assert fails.wait(60)
        assert first.is_attached
        monkeypatch.setattr(Handover, "goal", goal)
        its.set_goal(Goal.RELEASE)
        waits_for(its, CacheState.RELEASED)


def test_a_settled_driver_sees_its_goal_and_its_end_at_once(
    tmp_path: Path, one: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not look for them again and again."""
    monkeypatch.setattr(joining, "SETTLED_SECONDS", 3600.0)
    with engine(tmp_path, "a") as (first, its):
        waits_for(its, CacheState.ATTACHED)
        first.shim.set_desired(json_of(told([one])))
        waits_for(its, CacheState.ATTACHED, ready=True)
        its.set_goal(Goal.RELEASE)
        waits_for(its, CacheState.RELEASED)
        its.set_goal(Goal.ATTACH)
        waits_for(its, CacheState.ATTACHED, ready=True)


def json_of(document: object) -> bytes:
    return json.dumps(document).encode()


def test_a_process_that_ends_leaves_everything_to_the_one_that_waits(
    tmp_path: Path, one: AgentProcess
) -> None:
    with holder(tmp_path / "state", tmp_path / "a") as first:
        first.wait_for(CacheState.ATTACHED)
        first.ask(tell=told([one]))
        first.wait_for(CacheState.ATTACHED, ready=True)
        assert first.ask(store=ASKED) == 3
        with engine(tmp_path, "b") as (second, other):
            waits_for(other, CacheState.WAITING)
            first.stop()
            waits_for(other, CacheState.ATTACHED, ready=True)
            assert load(second, ASKED) == len(ASKED)


def test_whoever_waits_attaches_when_the_holder_is_killed(tmp_path: Path, one: AgentProcess) -> None:
    with holder(tmp_path / "state", tmp_path / "a") as first:
        first.wait_for(CacheState.ATTACHED)
        first.ask(tell=told([one]))
        first.wait_for(CacheState.ATTACHED, ready=True)
        assert first.ask(store=ASKED) == 3
        with engine(tmp_path, "b") as (second, other):
            waits_for(other, CacheState.WAITING)
            first.kill()
            waits_for(other, CacheState.ATTACHED, ready=True)
            assert load(second, ASKED) == 0, "without a note nothing is known of what there is"
            wait_until("slots are empty", lambda: store(second, ASKED) == 3)
            assert load(second, ASKED) == len(ASKED)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_of_many_at_most_one_has_it_whatever_happens_to_it(tmp_path: Path, one: AgentProcess) -> None:
    """Each keeps what the ones before it have stored, unless one was killed."""
    with contextlib.ExitStack() as all_of_them:
        engines: list[Holder] = [
            all_of_them.enter_context(holder(tmp_path / "state", tmp_path / str(number)))
            for number in range(4)
        ]

        def attached() -> list[Holder]:
            found = [
                each
                for each in engines
                if each.process.poll() is None
                and (state := each.state())
                and state.cache is CacheState.ATTACHED
            ]
            assert len(found) <= 1, "two have it"
            return found

        stored: set[int] = set()
        for turn in range(4):
            wait_until("one has it", attached)
            [having] = attached()
            if turn == 0:
                having.ask(tell=told([one]))
            having.wait_for(CacheState.ATTACHED, ready=True)
            for seed in stored:
                assert having.ask(load=[seed] * C) == C, "of an earlier turn"
            assert having.ask(store=[turn] * C) == 1
            stored.add(turn)
            for other in engines:
                if other is not having and other.process.poll() is None:
                    assert other.ask(load=[turn] * C) == 0
            if turn == 2:
                having.kill()
                stored.clear()
            elif turn == 1:
                having.stop()
            else:
                having.release()
                having.wait_for(CacheState.RELEASED)


def test_an_engine_that_was_told_before_its_start_does_not_attach(tmp_path: Path) -> None:
    """As one that is started again after it was told to release."""
    Handover(tmp_path / "a").set_goal(Goal.RELEASE)
    with engine(tmp_path, "a") as (first, its):
        waits_for(its, CacheState.RELEASED)
        assert not first.is_attached
        its.set_goal(Goal.ATTACH)
        waits_for(its, CacheState.ATTACHED)
        assert first.is_attached


def test_a_driver_that_cannot_start_says_why_and_tries_again(tmp_path: Path) -> None:
    (tmp_path / "state" / "desired.json").mkdir(parents=True)
    with engine(tmp_path, "a") as (_, its):
        wait_until("it says why", lambda: (state := its.state()) and "desired.json" in state.reason)
        assert waits_for(its, CacheState.WAITING).reason
        (tmp_path / "state" / "desired.json").rmdir()
        assert not waits_for(its, CacheState.ATTACHED).reason


def test_a_driver_is_stopped_when_nobody_uses_it() -> None:
    users, has_ended = Users(), threading.Event()
    with users.one() as may:
        assert may

        def close() -> None:
            assert users.close(30)
            has_ended.set()

        closing = threading.Thread(target=close)
        closing.start()
        wait_until("nobody else begins", lambda: not _may(users))
        assert not has_ended.is_set()
    closing.join()
    assert has_ended.is_set()
    users.open()
    assert _may(users)
    with users.one():
        assert not users.close(0), "too late for somebody"


def _may(users: Users) -> bool:
    with users.one() as may:
        return may
