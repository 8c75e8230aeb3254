"""What the supervisor decides, event by event."""

from __future__ import annotations

import pytest

from console.stack.core import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_SECONDS_MAX,
    STABLE_SECONDS,
    STALL_SECONDS,
    Deed,
    Effect,
    Spec,
    State,
    Supervision,
)


def spawn(name: str) -> Effect:
    return Effect(Deed.SPAWN, name)


def stop(name: str) -> Effect:
    return Effect(Deed.STOP, name)


def kill(name: str) -> Effect:
    return Effect(Deed.KILL, name)


DATABASE = Spec("database", keeps_data=True, attempts_max=3, watchdog_seconds=10)
CACHE = Spec("cache", keeps_data=True)
PREPARE = Spec("prepare", after=("database", "cache"), once=True)
WEB = Spec("web", after=("prepare",), watchdog_seconds=10, ready_seconds_max=30, stop_seconds_max=5)
WORKER = Spec("worker", after=("prepare",))


def supervision(*specs: Spec) -> Supervision:
    return Supervision(specs or (DATABASE, CACHE, PREPARE, WEB, WORKER), lambda: 1.0)


def all_ready(core: Supervision, now: float = 0.0) -> Supervision:
    core.start(now)
    for service in core.services.values():
        name = service.spec.name
        if service.spec.once:
            core.on_exit(name, "exit code 0", now, success=True)
        else:
            core.on_ready(name, now)
    core.on_tick(now)
    assert core.all_up
    return core


def let_time_pass(core: Supervision, since: float, until: float) -> list[Effect]:
    """Tick as the supervisor does: never so far apart that it looks like a stall."""
    effects, now = [], since
    while now < until:
        now = min(until, now + STALL_SECONDS / 2)
        effects += core.on_tick(now)
    return effects


def state(core: Supervision, name: str) -> State:
    return core.services[name].state


def test_starts_in_order_and_in_parallel_where_it_may() -> None:
    core = supervision()
    assert core.start(0) == [spawn("database"), spawn("cache")]
    assert core.on_ready("cache", 1) == []
    assert core.on_ready("database", 2) == [spawn("prepare")]
    assert core.on_exit("prepare", "exit code 0", 3, success=True) == [
        spawn("web"),
        spawn("worker"),
    ]
    assert core.on_ready("web", 4) == []
    assert not core.all_up
    core.on_ready("worker", 5)
    assert core.all_up


def test_stops_the_last_first() -> None:
    core = all_ready(supervision())
    assert core.stop(1) == [stop("web"), stop("worker")]
    assert core.on_exit("web", "exit code 0", 2) == []
    assert core.on_exit("worker", "exit code 0", 3) == [stop("database"), stop("cache")]
    core.on_exit("database", "exit code 0", 4)
    assert not core.all_down
    core.on_exit("cache", "exit code 0", 5)
    assert core.all_down


def test_what_dies_is_started_again_with_growing_pauses_and_never_given_up() -> None:
    core = all_ready(supervision(CACHE))
    now, pauses = 0.0, []
    for _ in range(2_000):  # far beyond what a float can take as a power of two
        core.on_exit("cache", "exit code 1", now)
        pause = core.services["cache"].deadline - now
        pauses.append(pause)
        assert let_time_pass(core, now, now + pause) == [spawn("cache")]
        now += pause
    assert pauses[:4] == pytest.approx([BACKOFF_FIRST_SECONDS * factor for factor in (1, 2, 4, 8)])
    assert max(pauses) == pytest.approx(BACKOFF_SECONDS_MAX)
    assert core.services["cache"].restarts == 2_000


@pytest.mark.parametrize(("ready_for", "failures"), [(STABLE_SECONDS - 1, 3), (STABLE_SECONDS, 1)])
def test_who_was_stable_starts_over_with_short_pauses(ready_for: float, failures: int) -> None:
    core = all_ready(supervision(CACHE))
    now = 0.0
    for _ in range(2):
        core.on_exit("cache", "exit code 1", now)
        let_time_pass(core, now, now + 2)
        now += 2
    core.on_ready("cache", now)
    core.on_exit("cache", "exit code 1", now + ready_for)
    assert core.services["cache"].failures == failures


def test_whoever_is_not_ready_in_time_is_killed_and_started_again() -> None:
    core = supervision(Spec("web", ready_seconds_max=30))
    core.start(0)
    assert let_time_pass(core, 0, 29) == []
    assert let_time_pass(core, 29, 31) == [kill("web")]
    assert core.on_ready("web", 31) == [], "too late: it is as good as dead"
    core.on_exit("web", "killed by SIGKILL", 32)
    assert core.services["web"].reason == "not ready within 30 s"
    assert state(core, "web") is State.BACKING_OFF


def test_the_watchdog_kills_whoever_falls_silent() -> None:
    core = all_ready(supervision(Spec("web", watchdog_seconds=10)))
    for second in range(1, 10):
        core.on_tick(second)
        core.on_alive("web", second)
    assert let_time_pass(core, 9, 18.5) == []
    assert let_time_pass(core, 18.5, 30) == [kill("web")], "once"
    core.on_alive("web", 30)
    core.on_exit("web", "killed by SIGKILL", 31)
    assert core.services["web"].reason == "silent for 10 s"


def test_time_in_which_the_supervisor_slept_counts_for_nobody() -> None:
    core = all_ready(supervision(Spec("web", watchdog_seconds=10)))
    core.on_tick(1)
    assert core.on_tick(1_000) == []
    assert let_time_pass(core, 1_000, 1_008) == []
    assert let_time_pass(core, 1_008, 1_010) == [kill("web")]


def test_nothing_is_started_while_what_it_comes_after_is_down() -> None:
    core = all_ready(supervision())
    core.on_exit("database", "killed by SIGKILL", 1)
    core.on_exit("web", "exit code 1", 1)
    core.on_tick(1.1)
    assert core.on_tick(1.3) == [spawn("database")]
    assert let_time_pass(core, 1.3, 5) == []
    assert state(core, "web") is State.WAITING
    assert core.on_ready("database", 5) == [spawn("web")]
    assert state(core, "worker") is State.READY, "who lives on is left in peace"


def test_a_step_that_fails_is_the_end() -> None:
    core = supervision()
    core.start(0)
    core.on_ready("database", 1)
    core.on_ready("cache", 1)
    assert core.on_exit("prepare", "exit code 1", 2) == []
    assert core.failed
    assert core.failed.spec.name == "prepare"
    assert core.stop(3) == [stop("database"), stop("cache")]


def test_a_server_that_never_was_ready_has_few_attempts() -> None:
    core = supervision()
    core.start(0)
    for attempt in range(3):
        assert core.failed is None
        core.on_exit("database", "exit code 1", attempt * 2)
        let_time_pass(core, attempt * 2, attempt * 2 + 2)
    assert core.failed
    assert core.failed.spec.name == "database"


def test_a_server_that_once_was_ready_has_any_number() -> None:
    core = all_ready(supervision())
    for attempt in range(10):
        core.on_exit("database", "exit code 1", attempt * 20)
        let_time_pass(core, attempt * 20, attempt * 20 + 20)
    assert core.failed is None


def test_whoever_does_not_stop_in_time_is_killed() -> None:
    core = all_ready(supervision(Spec("web", stop_seconds_max=5)))
    core.stop(0)
    assert let_time_pass(core, 0, 4) == []
    assert let_time_pass(core, 4, 20) == [kill("web")]
    core.on_exit("web", "killed by SIGKILL", 20)
    assert core.all_down


def test_in_a_hurry_only_what_keeps_no_data_is_killed() -> None:
    core = all_ready(supervision())
    core.stop(1)
    assert core.stop(2) == [kill("web"), kill("worker")]
    core.on_exit("web", "killed by SIGKILL", 3)
    assert core.on_exit("worker", "killed by SIGKILL", 3) == [stop("database"), stop("cache")]
    assert core.stop(4) == [], "these write their data down first"


def test_stopping_in_the_middle_of_the_start() -> None:
    core = supervision()
    core.start(0)
    core.on_ready("database", 1)
    assert core.stop(2) == [stop("database"), stop("cache")]
    core.on_exit("cache", "exit code 0", 3)
    core.on_exit("database", "exit code 0", 3)
    assert core.all_down
    assert state(core, "web") is State.STOPPED


def test_nothing_is_started_again_while_stopping() -> None:
    core = all_ready(supervision())
    core.on_exit("web", "exit code 1", 1)
    core.stop(1)
    assert Deed.SPAWN not in [effect.deed for effect in let_time_pass(core, 1, 20)]


def test_an_order_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="web comes after"):
        supervision(WEB, PREPARE)
