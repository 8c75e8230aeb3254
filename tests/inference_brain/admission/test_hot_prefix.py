"""A prefix that one replica can't serve alone: estimates in seconds spread it by themselves."""

from __future__ import annotations

import random

import pytest

from inference_brain.choice import Asked, Candidate, Flights, ModelRates, choose

PREFIX = 8192
REST = 512
REPLICAS = tuple(f"r{number}" for number in range(4))


class Served:
    """Requests with one prefix, so many times as often as one replica that has it can serve."""

    def __init__(self, times: float, count: int = 300) -> None:
        self.having = {"r0"}
        self.waits: list[float] = []
        self.misses = 0
        rates, flights, rng = ModelRates(), Flights(), random.Random(1)
        free_at = dict.fromkeys(REPLICAS, 0.0)
        asked = Asked(PREFIX + REST, b"prefix", "acme", 100)
        hit = choose(asked, [Candidate("r0", rates.of("r0"), PREFIX)], 0.0, rng).chosen
        self.hit_seconds = hit.fetch_seconds + hit.compute_seconds
        now, running = 0.0, list[tuple[float, str, str]]()
        for number in range(count):
            now += rng.expovariate(times / self.hit_seconds)
            for ends_at, request, name in sorted(running):
                if ends_at <= now:
                    flights.first_token(request, ends_at)
                    flights.end(request)
                    self.having.add(name)
                    running.remove((ends_at, request, name))
            candidates = [
                Candidate(
                    name,
                    rates.of(name),
                    PREFIX if name in self.having else 0,
                    load=flights.load(name, now),
                )
                for name in REPLICAS
            ]
            choice = choose(asked, candidates, now, rng)
            chosen = choice.chosen
            self.misses += chosen.name not in self.having
            seconds = chosen.fetch_seconds + chosen.compute_seconds
            free_at[chosen.name] = max(free_at[chosen.name], now) + seconds
            request = f"{number}"
            flights.begin(request, choice, now)
            running.append((free_at[chosen.name], request, chosen.name))
            self.waits.append(free_at[chosen.name] - now)


def test_a_prefix_that_one_replica_can_serve_stays_there() -> None:
    served = Served(0.3)
    assert served.having == {"r0"}
    assert served.misses == 0


@pytest.mark.parametrize("times", [1.5, 3.0])
def test_a_prefix_that_one_replica_cannot_serve_comes_to_more(times: float) -> None:
    served = Served(times)
    assert len(served.having) > times
    assert served.misses <= 3 * len(served.having)
    late = served.waits[len(served.waits) // 2 :]
    assert sum(late) / len(late) < 6 * served.hit_seconds  # alone, it would be a hundred times as long
