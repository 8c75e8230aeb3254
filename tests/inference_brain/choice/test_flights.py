"""What replicas have to do: what was sent, less what is done by now."""

from __future__ import annotations

import random

import pytest

from inference_brain.choice import Asked, Candidate, Choice, Flights, Load, ModelRates, Rates, choose
from inference_brain.choice.candidates import IDLE


def sent(tokens: int = 10_000, name: str = "r1", at: float = 0.0) -> Choice:
    return choose(Asked(tokens), [Candidate(name, Rates())], at, random.Random(1))


def test_a_request_waits_then_runs_then_is_gone() -> None:
    flights = Flights()
    flights.begin("one", sent(), 0.0)
    flights.begin("two", sent(2_000), 0.0)
    load = flights.load("r1", 0.0)
    assert (load.waiting_tokens, load.waiting, load.running) == (12_000, 2, 0)
    flights.first_token("one", 1.0)
    load = flights.load("r1", 1.0)
    assert (load.waiting_tokens, load.waiting, load.running) == (2_000, 1, 1)
    flights.end("one")
    flights.end("two")
    assert flights.load("r1", 2.0) == IDLE
    assert len(flights) == 0


def test_what_would_be_done_by_now_does_not_wait() -> None:
    flights, choice = Flights(), sent()
    turn = choice.chosen.fetch_seconds + choice.chosen.compute_seconds
    flights.begin("one", choice, 0.0)
    flights.begin("two", choice, 0.0)
    half = flights.load("r1", turn / 2)
    assert half.waiting_tokens == pytest.approx(15_000)
    assert half.overdue_seconds == 0
    late = flights.load("r1", 3 * turn)
    assert late.waiting_tokens == pytest.approx(10_000)
    assert late.overdue_seconds == pytest.approx(2 * turn)
    flights.first_token("one", 3 * turn)
    assert flights.load("r1", 3 * turn).waiting_tokens == pytest.approx(10_000)


def test_a_replica_that_stalls_is_left() -> None:
    """No first token comes from it, so its rates never say so."""
    rates, flights, rng = ModelRates(), Flights(), random.Random(3)
    chosen = []
    for number in range(200):
        now = number * 0.5
        names = ("stalled", "good")
        candidates = [Candidate(one, rates.of(one), load=flights.load(one, now)) for one in names]
        choice = choose(Asked(2_000, number.to_bytes(2, "big")), candidates, now, rng)
        flights.begin(str(number), choice, now)
        if choice.replica == "good":
            flights.first_token(str(number), now + 0.2)
            flights.end(str(number))
        chosen.append(choice.replica)
    assert chosen[20:].count("stalled") <= 5  # trials


def test_ends_and_first_tokens_come_once_or_more_often() -> None:
    flights = Flights()
    flights.begin("one", sent(), 0.0)
    with pytest.raises(ValueError, match="in flight already"):
        flights.begin("one", sent(), 0.0)
    for _ in range(2):
        flights.first_token("one", 1.0)
    assert flights.load("r1", 1.0).running == 1
    for _ in range(2):
        flights.end("one")
    flights.first_token("one", 2.0)
    assert flights.load("r1", 2.0) == IDLE


def test_replicas_that_are_not_served_are_forgotten_when_they_are_idle() -> None:
    flights = Flights()
    flights.begin("one", sent(), 0.0)
    flights.keep_only(frozenset())
    assert set(flights.loads(0.0)) == {"r1"}
    flights.end("one")
    flights.keep_only(frozenset())
    assert not flights.loads(0.0)


def test_loads_of_brains_add_up() -> None:
    one, other = Load(100.0, 1, 2, 50.0, 0.5), Load(10.0, 3, 4, 5.0, 2.0)
    assert one.plus(other) == Load(110.0, 4, 6, 55.0, 2.0) == other.plus(one)
