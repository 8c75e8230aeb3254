"""Months of a driver's life, with its agents and their disks, in minutes: whatever breaks, nobody gets a
byte that is not theirs, too old, torn or removed. From a seed.

`make sim SEEDS=1000 STEPS=1000` runs longer, `make sim-long MINUTES=60` for as long as it is told. A
failure is shrunk, and prints what repeats it.
"""

from __future__ import annotations

import gc
import random
import socket

import pytest

from kvss_agent.data_plane.breach import Breach, Cause
from swdriver_shim import loops
from tests.lives import Life
from tests.one_thread import Turns
from tests.swdriver_shim.kinds_of_loops import COMPILED, IN_PYTHON, kind_of_seed, kinds_of_loops
from tests.swdriver_shim.simulated.network import STALL_SECONDS, End, Pipe
from tests.swdriver_shim.simulation import Simulation
from tests.worlds import SHRINK_SECONDS, STEPS_A_SECOND, WORLDS, live, lives

# Of agents that crashed; and where the collector came in a frame that can't warn.
quiet = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited",
    "ignore:Exception ignored in. <coroutine object (TierRequests|Tier2|Lister)",
)


@pytest.mark.sim
@pytest.mark.timeout(
    60 + SHRINK_SECONDS + sum(len(life.steps) for life in lives("driver")) / STEPS_A_SECOND
)
@quiet
def test_a_driver_and_its_agents_whatever_breaks() -> None:
    live(lives("driver"))


@pytest.mark.sim
@quiet
def test_a_life_is_the_same_each_time() -> None:
    twice = [Life.of("driver", 3, 200).run(WORLDS) for _ in range(2)]
    gc.collect()
    assert twice[0] == twice[1]


@pytest.mark.sim
@quiet
def test_a_life_is_the_same_with_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    if COMPILED not in kinds_of_loops():
        pytest.skip("there are no compiled loops here")
    found = []
    for kind in (IN_PYTHON, COMPILED):
        monkeypatch.setattr("tests.swdriver_shim.simulation.kind_of_seed", lambda _, its=kind: its)
        seen = Life.of("driver", 3, 200).run(WORLDS)
        assert seen.pop(f"loops were {kind}") == 1
        found.append(seen)
    gc.collect()
    assert found[0] == found[1]


@pytest.mark.sim
def test_half_of_the_lives_have_compiled_loops_and_one_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds, before = [kind_of_seed(seed) for seed in range(20)], loops.current
    if COMPILED in kinds_of_loops():
        assert 5 < kinds.count(COMPILED) < 15

    def step(self: Simulation) -> None:
        name = next(name for name, its in kinds_of_loops().items() if its is loops.current)
        raise AssertionError(f"It fails with loops {name}.")

    monkeypatch.setattr(Simulation, "step", step)
    for seed, kind in enumerate(kinds):
        failure = Life.of("driver", seed, 1).failure(WORLDS)
        assert failure
        assert f"It fails with loops {kind}." in failure.told
        assert f"Its loops over prompts were {kind}." in failure.told
    assert loops.current is before


def test_a_simulated_peer_that_reads_too_slowly_is_given_up_as_a_real_one() -> None:
    """It reads a byte before each end of the stall time."""
    turns, here, there = Turns(random.Random(1)), Pipe(room=100), Pipe(room=100)
    sender, told = End(turns, there, here, socket.AF_INET), list[Breach]()

    def send() -> None:
        try:
            sender.send([bytes(10_000)])
        except Breach as breach:
            told.append(breach)

    def read() -> None:
        while not told:
            turns.wait(None, STALL_SECONDS / 2)
            del here.bytes[:1]
            turns.wake_all(here.writers)

    turns.start(send, "sender")
    turns.start(read, "reader")
    for _ in range(20):
        turns.pass_time_until_something_is_due(STALL_SECONDS)
        while turns.go_on():
            pass
    turns.end()
    assert [one.cause for one in told] == [Cause.STALLED]


@pytest.mark.sim
def test_the_newest_document_holds_however_they_come() -> None:
    live(lives("documents"))
