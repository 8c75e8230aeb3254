"""Rates are learned from first tokens: they follow the truth, and no single time spoils them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator

import pytest

from inference_brain.choice import (
    Asked,
    Candidate,
    Choice,
    Load,
    Mode,
    ModelRates,
    Outcome,
    Rates,
    choose,
)
from inference_brain.choice.choice import work
from inference_brain.choice.rates import (
    DECODE,
    EACH,
    EAGER,
    SIBLING,
    SIZE,
    SOLVE_SECONDS,
    TOKEN,
    Amounts,
    Traffic,
)
from tests.inference_brain.choice.worlds import Truth, World, error


@pytest.mark.parametrize("seed", range(3))
def test_estimates_converge(seed: int) -> None:
    world = World({f"r{index}": Truth(token=1e-4 * (1 + index % 3)) for index in range(4)}, seed)
    assert error(world.run(400)[300:]) < 0.15  # of which a twentieth part is the world's noise
    assert world.rates.mode is Mode.ESTIMATE


def test_estimates_follow_a_truth_that_drifts() -> None:
    truths = {f"r{index}": Truth() for index in range(4)}
    world = World(truths)
    world.run(300)
    for _ in range(300):
        for truth in truths.values():
            truth.token *= 1.003  # to two and a half times as much
        world.step()
    assert error(world.run(100)) < 0.2


def test_a_stalled_request_does_not_change_the_picture() -> None:
    world = World({"r0": Truth(), "r1": Truth()})
    world.run(300)
    rates = world.rates.of("r0")
    before = rates.seconds
    choice = next(choice for choice, _ in world.run(50) if choice.replica == "r0")
    world.rates.observe(choice, Outcome(600.0), world.now)
    assert rates.seconds[1] == pytest.approx(before[1], rel=0.3)


def test_a_new_replica_begins_as_the_others_are() -> None:
    world = World({f"r{index}": Truth(token=3e-3) for index in range(3)})
    world.run(200)
    assert world.rates.of("new").seconds[1] == pytest.approx(3e-3, rel=0.3)


def test_a_replica_that_lies_about_its_hits_only_loses() -> None:
    truths = {f"r{index}": Truth(token=5e-4) for index in range(4)}
    honest = World(truths, seed=1)
    honest.run(300)
    fair = [choice.replica for choice, _ in honest.run(300)].count("r0")
    lies = World(truths | {"r0": Truth(token=5e-4, says=0.0)}, seed=1)
    lies.run(300)
    steps = lies.run(300)
    assert [choice.replica for choice, _ in steps].count("r0") < fair
    assert lies.rates.of("r0").trust < 0.3
    assert lies.rates.of("r1").trust > 0.9
    assert error([step for step in steps if step[0].replica != "r0"]) < 0.15


def test_guesses_before_there_is_a_map_say_nothing_of_the_map() -> None:
    """As at a first start: engines answer before their drivers are there, and cache nothing until then.
    From the first map on estimates are right."""
    rates, rng = ModelRates(), random.Random(1)

    def asked(number: int, *, is_guess: bool) -> tuple[float, float]:
        """Seconds, expected and actual."""
        tokens, hit = rng.randrange(1_500, 3_000), 1_280
        one = Candidate("r0", rates.of("r0"), hit, is_guess=is_guess)
        choice = choose(Asked(tokens), [one], float(number), rng)
        cached = 0 if is_guess else hit
        seconds = 0.02 + 2e-4 * (tokens - cached)
        rates.observe(choice, Outcome(seconds, cached), float(number))
        return choice.chosen.seconds, seconds

    def off(steps: list[tuple[float, float]]) -> float:
        return sum(abs(expected - actual) for expected, actual in steps) / sum(
            actual for _, actual in steps
        )

    guessed = [asked(number, is_guess=True) for number in range(40)]
    assert rates.of("r0").guess_trust < 0.4, "what does not cache is not believed to"
    assert off(guessed[20:]) < 0.2
    served = [asked(40 + number, is_guess=False) for number in range(20)]
    assert off(served) < 0.1


def test_whole_answers_say_how_much_a_replica_can_take_and_not_where_it_is_better_to_be() -> None:
    world = World({"r0": Truth()})
    rates = world.rates.of("r0")
    before, assumed = rates.seconds, world.rates.pace("r0")
    choice = choose(Asked(2_000), [Candidate("r0", rates)], 0.0, world.rng)
    world.rates.answered(choice, 60.0)
    assert world.rates.pace("r0") == assumed
    world.rates.answered(choice, 0.004)
    assert world.rates.pace("r0") == pytest.approx(500_000)
    for _ in range(400):
        world.rates.answered(choice, 60.0)
    assert world.rates.pace("r0") == assumed
    assert rates.seconds == before
    world.rates.answered(choice, 0.004)
    world.rates.keep_only([])
    assert world.rates.pace("r0") == assumed


def learned(
    rates: ModelRates,
    rng: random.Random,
    seconds: Callable[[float, float], float],
    *,
    tokens: Callable[[], int],
    hit: float = 0.0,
    strange: float = 0.0,
    is_plain: bool = True,
    requests: int = 2000,
) -> list[tuple[bool, float]]:
    """So many requests, ten a second, to four replicas, of which each prompt has one as its home, with a
    part of it. Of `strange` of them the prompt is short, and the first token comes after 10 s. Returns
    of each whether it is one of the others and was sent away from its home, and the pace of the replica
    that is taken to be the fastest."""
    made = []
    for number in range(requests):
        now = number / 10
        rates.settle(now)
        is_strange = rng.random() < strange
        asked = Asked(
            rng.randint(20, 80) if is_strange else tokens(),
            rng.randbytes(8),
            is_plain=is_plain or not is_strange,
        )
        home = f"r{rng.randrange(4)}"
        candidates = [
            Candidate(name, rates.of(name), int(hit * asked.tokens) if name == home else 0)
            for name in ("r0", "r1", "r2", "r3")
        ]
        choice = choose(asked, candidates, now, rng, rates.mode)
        cached = 0 if is_strange else choice.chosen.candidate.hit_tokens
        took = rng.uniform(5, 15) if is_strange else seconds(*work(asked.tokens, cached))
        rates.observe(choice, Outcome(took, cached), now)
        fastest = max(rates.pace(one.name) for one in candidates)
        made.append((choice.replica != home and not is_strange, fastest))
    return made


def learned_beside_strange_ones(
    rates: ModelRates, strange: float, *, is_plain: bool = True
) -> list[tuple[bool, float]]:
    """Long prompts, most of which are cached somewhere, on replicas that are all alike."""
    rng = random.Random(1)
    return learned(
        rates,
        rng,
        lambda missed, pairs: (0.02 + 1e-4 * missed + 1e-9 * pairs) * rng.uniform(0.9, 1.1),
        tokens=lambda: rng.randint(4000, 16_000),
        hit=0.9,
        strange=strange,
        is_plain=is_plain,
    )


def test_a_token_takes_time_though_first_tokens_vary_more_than_prompts_do() -> None:
    """Else hits were worth nothing, and a replica took any number of prompts at once."""
    rates, rng = ModelRates(), random.Random(2)
    made = learned(
        rates,
        rng,
        lambda missed, _: 0.03 + 2e-5 * missed + rng.expovariate(1 / 0.03),
        tokens=lambda: int(10 + rng.lognormvariate(6.2, 0.8)),
    )
    assert max(pace for _, pace in made[200:]) < 10 / 2e-5


@pytest.mark.parametrize("strange", [0.05, 0.8])
def test_slow_first_tokens_of_short_prompts_do_not_make_replicas_seem_fast(strange: float) -> None:
    made = learned_beside_strange_ones(ModelRates(), strange)
    assert max(pace for _, pace in made) < 10 / 1e-4


def test_a_model_that_is_faster_than_any_that_is_expected_is_learned_to_be() -> None:
    world = World({f"r{index}": Truth(token=3e-6, pair=0.0) for index in range(4)})
    world.run(400)
    for index in range(4):
        assert world.rates.of(f"r{index}").seconds[TOKEN] == pytest.approx(3e-6, rel=0.3)
        assert 1e5 < world.rates.pace(f"r{index}") < 1e6


@pytest.mark.parametrize("strange", [0.05, 0.2, 0.8])
def test_requests_that_are_slow_by_themselves_send_no_others_away_from_their_cache(
    strange: float,
) -> None:
    rates = ModelRates()
    made = learned_beside_strange_ones(rates, strange, is_plain=False)
    assert sum(is_away for is_away, _ in made[1000:]) <= 5
    assert rates.mode is Mode.ESTIMATE
    for name in ("r0", "r1", "r2", "r3"):
        assert rates.of(name).seconds[TOKEN] == pytest.approx(1e-4, rel=0.4)
        assert rates.of(name).seconds[EACH] < 0.2


def test_where_no_request_is_plain_all_are_learned_from() -> None:
    rates, rng = ModelRates(), random.Random(1)
    for number in range(200):
        asked = Asked(rng.randint(100, 8000), is_plain=False)
        choice = choose(asked, [Candidate("r0", rates.of("r0"))], 0.0, rng)
        rates.observe(choice, Outcome(0.05 + 1e-3 * asked.tokens, 0), number / 10)
    assert rates.of("r0").seconds[TOKEN] == pytest.approx(1e-3, rel=0.3)
    assert rates.error.observations == 200


def test_what_ends_after_its_replica_was_removed_is_not_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inference_brain.choice.model_rates.REPLICAS_MAX", 1)
    world = World({"r0": Truth()})
    choice = choose(Asked(2_000), [Candidate("r0", world.rates.of("r0"))], 0.0, world.rng)
    world.rates.keep_only(["r1"])
    world.rates.of("r1")
    world.rates.observe(choice, Outcome(1.0, 0), 1.0)
    world.rates.answered(choice, 0.004)
    world.rates.settle(2.0)
    assert len(world.rates) == 1


def test_times_that_are_none_are_left_out() -> None:
    world = World({"r0": Truth()})
    [(choice, _)] = world.run(1)
    before = world.rates.of("r0").seconds
    for seconds in (None, float("nan"), float("inf"), -1.0):
        world.rates.observe(choice, Outcome(seconds), world.now)
    assert world.rates.of("r0").seconds == before


def test_a_busy_stream_of_requests_makes_work_cost_more_than_it_takes() -> None:
    idle, busy = Traffic(), Traffic()
    for number in range(200):
        idle.add(0.1, 4, 100.0 * number)
        busy.add(3.0, 4, float(number))  # each of four replicas is busy for three quarters of the time
    assert idle.pressure < 0.01
    assert busy.pressure == pytest.approx(0.25 / (2 * 0.25), rel=0.1)
    busy.add(1e6, 4, 201.0)
    assert busy.pressure < 2  # it is bounded


def test_a_prompt_stays_with_its_cache_where_others_would_wait_for_its_work() -> None:
    """It would have its own first token a little sooner at the idle replica."""

    def chosen(traffic: Traffic) -> str:
        candidates = [
            Candidate("has it", Rates(traffic=traffic), 20_000, load=Load(24_000)),
            Candidate("idle", Rates(traffic=traffic)),
        ]
        return choose(Asked(21_000), candidates, 0.0, random.Random(1)).replica

    assert chosen(Traffic()) == "idle"
    busy = Traffic()
    for number in range(200):
        busy.add(2.0, 4, float(number))
    assert chosen(busy) == "has it"


class EachTime(Rates):
    """Solves at each observation."""

    __slots__ = ()

    def observe(self, amounts: Amounts, seconds: float, now: float, *, is_plain: bool = True) -> None:
        super().observe(amounts, seconds, now, is_plain=is_plain)
        self._solve(now)


class Counted(Rates):
    __slots__ = ("solved_at",)

    def __init__(self) -> None:
        super().__init__()
        self.solved_at: list[float] = []

    def _solve(self, now: float) -> None:
        self.solved_at.append(now)
        super()._solve(now)


def busy(rng: random.Random, requests: int) -> Iterator[tuple[float, tuple[float, ...], float]]:
    """A thousand requests a second: when the first token of each came, of what, and after how long. The
    tokens of prompts take three times as long in the second half."""
    for number in range(requests):
        tokens, waiting = float(rng.randrange(100, 8_000)), float(rng.randrange(20_000))
        amounts = [0.0] * SIZE
        amounts[EACH], amounts[TOKEN], amounts[DECODE] = 1.0, tokens + waiting, float(rng.randrange(8))
        token = 2e-4 if number < requests / 2 else 6e-4
        seconds = 0.03 + token * amounts[TOKEN] + 1e-3 * amounts[DECODE]
        yield number / 1000, tuple(amounts), seconds * rng.uniform(0.95, 1.05)


def test_estimates_are_solved_now_and_then_and_are_as_if_solved_each_time() -> None:
    now_and_then, each_time = Counted(), EachTime()
    apart = []
    for at, amounts, seconds in busy(random.Random(5), 4_000):
        each_time.observe(amounts, seconds, at)
        now_and_then.observe(amounts, seconds, at)
        if at == now_and_then.solved_at[-1]:  # as fresh as the other
            apart.append(now_and_then.expected(amounts) / each_time.expected(amounts) - 1.0)
    assert len(now_and_then.solved_at) <= 4.0 / SOLVE_SECONDS + EAGER + 2
    assert max(map(abs, apart)) < 0.1
    assert statistics.mean(map(abs, apart)) < 0.01


def test_what_was_observed_last_is_in_the_next_decision() -> None:
    rates = ModelRates()
    choice = choose(Asked(4_000), [Candidate("r0", rates.of("r0"))], 0.0, random.Random(1))
    for number in range(60):
        rates.observe(choice, Outcome(0.5), number / 10)
    before = rates.of("r0").seconds
    for number in range(20):
        rates.observe(choice, Outcome(5.0), 5.9 + number / 1000)
    rates.settle(5.92)
    assert rates.of("r0").seconds == before  # it is as old as it may be
    rates.settle(6.0 + SOLVE_SECONDS)
    assert rates.of("r0").expected(choice.amounts()) > 1.0
    settled = rates.of("r0").seconds
    rates.settle(60.0)
    assert rates.of("r0").seconds == settled


def borrowing(rates: ModelRates) -> Choice:
    one = Candidate("r0", rates.of("r0"), 4_000, sibling_tokens=16_000, sibling="job-1")
    choice = choose(Asked(21_000), [one], 0.0, random.Random(1))
    assert choice.chosen.sibling
    return choice


def test_how_long_borrowing_takes_is_learned() -> None:
    rates, at, rng = ModelRates(), 0.0, random.Random(1)
    for _ in range(200):
        lent, missed = rng.randrange(2_000, 16_000), rng.randrange(100, 8_000)
        one = Candidate("r0", rates.of("r0"), sibling_tokens=lent, sibling="job-1")
        choice = choose(Asked(lent + missed), [one], at, rng)
        assert choice.chosen.sibling
        seconds = 0.02 + 1e-4 * missed + 1e-9 * choice.chosen.pairs + 3e-5 * lent
        rates.observe(choice, Outcome(seconds, lent), at)
        at += 1.0
    assert rates.of("r0").seconds[SIBLING] == pytest.approx(3e-5, rel=0.2)


def test_what_one_replica_has_learned_of_borrowing_the_others_are_told() -> None:
    rates, rng = ModelRates(), random.Random(1)
    for at in range(320):
        name = f"r{at % 4}"
        lent = rng.randrange(2_000, 16_000) if name == "r0" else 0
        one = Candidate(name, rates.of(name), sibling_tokens=lent, sibling="job-1" if lent else "")
        missed = rng.randrange(100, 8_000)
        choice = choose(Asked(lent + missed), [one], float(at), rng)
        assert choice.chosen.sibling_tokens == lent
        seconds = 0.02 + 1e-4 * missed + 1e-9 * choice.chosen.pairs + 3e-5 * lent
        rates.observe(choice, Outcome(seconds, lent), float(at))
    for name in ("r0", "r1", "r2", "r3"):
        assert rates.of(name).seconds[SIBLING] == pytest.approx(3e-5, rel=0.2)


def test_siblings_that_do_not_lend_are_trusted_less_and_the_map_is_not() -> None:
    rates = ModelRates()
    for number in range(20):
        rates.observe(borrowing(rates), Outcome(1.0, 4_000), float(number))
    assert rates.of("r0").trust == 1.0
    assert rates.of("r0").sibling_trust < 0.1
    assert borrowing(rates).chosen.sibling_tokens < 1_600, "requests hardly move for it"


def test_siblings_are_trusted_again_after_a_while_without_borrowing() -> None:
    rates = ModelRates()
    for number in range(20):
        rates.observe(borrowing(rates), Outcome(1.0, 4_000), float(number))
    alone = choose(Asked(21_000), [Candidate("r0", rates.of("r0"), 4_000)], 0.0, random.Random(1))
    for number in range(300):
        rates.observe(alone, Outcome(1.5, 4_000), 20.0 + number)
    assert rates.of("r0").sibling_trust > 0.9
