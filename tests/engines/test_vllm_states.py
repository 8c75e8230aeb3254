"""Models with layers that keep a state, in the real vLLM: it goes on from stored states, and answers as
if it had computed all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from tests.engines.prompts import prompt
from tests.engines.running import Place, Vllm, vllm
from tests.engines.vllm_process import STATEFUL
from tests.live import wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

EACH: Final = 256  # states are this far apart, and one is at the last block's end of a prompt
LAST: Final = 960  # of 1000 tokens
STATES: Final = [256, 512, 768, LAST]
# vLLM's CPU kernels of Mamba 2 can't write a state in the middle of a step, as it wants for the last
# whole block of a prompt. With steps of one block there is no middle.
STEPS: Final[dict[str, Any]] = {
    "enable_prefix_caching": True,
    "block_size": 64,
    "prefix_cache_retention_interval": EACH,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
}


class Answers:
    """What the engine answers by itself, without any cache, by model and seed of the prompt."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._made: dict[str, list[list[int]]] = {}

    def __getitem__(self, asked: tuple[str, int]) -> list[int]:
        kind, seed = asked
        if kind not in self._made:
            with vllm(self._models, model=kind) as engine:
                self._made[kind] = [engine.answer(prompt(each), None) for each in range(2)]
        return self._made[kind][seed]


@pytest.fixture(scope="module")
def answers(models: Path) -> Answers:
    return Answers(models)


def forget(engine: Vllm) -> None:
    """vLLM's own cache, once all is stored: what hits from here on was stored by Tidegate."""

    def has_forgotten() -> bool:
        engine.answer(prompt(9, 20), None)  # in a step, blocks whose saves are over become free
        return bool(engine.ask("settle") and engine.ask("forget_blocks"))

    wait_until("nothing is cached", has_forgotten)


@pytest.mark.parametrize("kind", list(STATEFUL))
def test_the_same_answers_from_states_as_without_them(place: Place, answers: Answers, kind: str) -> None:
    with place.engine(kind, **STEPS) as engine:
        for seed in range(2):
            assert engine.answer(prompt(seed), "acme") == answers[kind, seed]
            assert engine.cached == [0]
        forget(engine)
        assert set(engine.ask("states")) >= set(STATES[-1:])
        both = [prompt(0), prompt(1)]
        assert engine.answer_all(both, "acme") == [answers[kind, 0], answers[kind, 1]]
        assert engine.cached == [LAST, LAST]
        forget(engine)
        assert engine.answer(prompt(0), "globex") == answers[kind, 0]
        assert engine.cached == [0], "another org's"
        forget(engine)
        short = prompt(0)[: LAST + 2]  # the state is all that there is of what came before
        right = engine.answer(short, "acme")
        assert engine.cached == [LAST]
        forget(engine)
        engine.ask("exchange_states")
        assert engine.answer(short, "acme") != right, "a wrong state would be seen"
        assert engine.cached == [LAST]


def test_what_is_missing_or_damaged_is_computed(place: Place, answers: Answers) -> None:
    with place.engine("granite", **STEPS) as engine:
        assert engine.answer(prompt(0), "acme") == answers["granite", 0]
        forget(engine)
        assert engine.ask("states") == STATES
        longer = [*prompt(0)[:700], *prompt(1)[:300]]
        engine.answer(longer, "acme")
        assert engine.cached == [512], "the last state before they differ"
        forget(engine)
        assert engine.ask("lose_states", LAST) == 2
        assert engine.answer(prompt(0), "acme") == answers["granite", 0]
        assert engine.cached == [768], "from the state before the lost one"
        forget(engine)
        assert engine.answer(prompt(0), "acme") == answers["granite", 0]
        assert engine.cached == [LAST], "it was stored anew"
        forget(engine)
        engine.ask("fail_loads_of_states")
        assert engine.answer(prompt(0), "acme") == answers["granite", 0]
        assert engine.cached == [0]
        forget(engine)
        place.agent.process.kill()
        place.agent.process.wait()
        assert engine.answer(prompt(0), "acme") == answers["granite", 0]


def test_a_conversation_goes_on_from_a_state_of_its_answer(place: Place) -> None:
    with place.engine("granite", **STEPS) as engine:
        [said] = engine.answer_all([prompt(0, 500)], "acme", tokens=200)
        grown = [*prompt(0, 500), *said, *prompt(1, 50)]
        forget(engine)
        assert engine.ask("states") == [EACH, 448, 512]
        warm = engine.answer(grown, "acme")
        assert engine.cached == [512]
    with vllm(place.models, model="granite") as engine:
        assert engine.answer(grown, None) == warm


def test_many_at_once_with_what_they_have_in_common(place: Place) -> None:
    prompts = [[*prompt(0)[: 64 * (at + 1)], *prompt(at + 1)[:200]] for at in range(12)]
    with vllm(place.models, model="granite") as engine:
        alone = engine.answer_all(prompts, None)
    with place.engine("granite", **STEPS) as engine:
        for _ in range(3):
            assert engine.answer_all(prompts, "acme") == alone
            forget(engine)
        assert engine.answer_all(prompts, "acme") == alone
        assert sum(engine.cached) > sum(map(len, prompts)) / 2


def test_preempted_requests_go_on_from_what_they_had(place: Place) -> None:
    prompts = [prompt(seed, 300) for seed in range(6)]
    with vllm(place.models, model="granite") as engine:
        expected = engine.answer_all(prompts, None, tokens=260)
    # Room for about three of the six when they are done; blocks with states are others' soon.
    few = {"num_gpu_blocks_override": 40, "max_model_len": 1024}
    with place.engine("granite", **STEPS, **few) as engine:
        for _ in range(3):
            assert engine.answer_all(prompts, "acme", tokens=260) == expected
        assert engine.ask("preemptions") > 0


def test_blocks_as_those_of_a_device(place: Place, answers: Answers) -> None:
    with place.engine("granite", staged=True, **STEPS) as engine:
        for cached in (0, LAST):
            assert engine.answer(prompt(0), "acme") == answers["granite", 0]
            assert engine.cached == [cached]
            forget(engine)


def test_two_workers_each_with_its_part_of_the_states(place: Place, tmp_path: Path) -> None:
    apart = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    place.setting = replace(place.setting, state_dir=str(tmp_path / "state"))
    two: dict[str, Any] = {"tensor_parallel_size": 2, "environment": apart, **STEPS}
    with place.engine("falcon_h1", **two) as engine:
        cold = engine.answer(prompt(0), "acme")
        assert engine.cached == [0]
        assert {shard["name"] for shard in place.agent.observed()["shards"]} == {
            f"job7.{group}.{at}" for group in ("full", "state") for at in range(2)
        }
    with place.engine("falcon_h1", **two) as engine:
        assert engine.answer(prompt(0), "acme") == cold
        assert engine.cached == [LAST]


def test_after_a_restart_states_are_still_there(place: Place, answers: Answers, tmp_path: Path) -> None:
    place.setting = replace(place.setting, state_dir=str(tmp_path / "state"))
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    for cached in (0, LAST):
        with place.engine("granite", environment=apart, **STEPS) as engine:
            assert engine.answer(prompt(0), "acme") == answers["granite", 0]
            assert engine.cached == [cached]


def test_after_a_restart_the_last_state_in_tier_2_comes_back(place: Place, answers: Answers) -> None:
    place.allow_tier2(wait_seconds=20)
    with place.engine("granite", **STEPS) as engine:
        for _ in range(2):
            assert engine.answer(prompt(0), "acme") == answers["granite", 0]
            forget(engine)
        wait_until("KV and the state that was used are copied", lambda: len(place.files) >= 16)
    with place.engine("granite", **STEPS) as engine:
        assert engine.answer(prompt(0), "acme") == answers["granite", 0]
        assert engine.cached == [LAST]


GUESSES: Final = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "--mamba-cache-mode align and --enable-prefix-caching; here the mode is none"),
        ({**STEPS, "speculative_config": GUESSES}, "Speculation moves states between blocks"),
    ],
    ids=["no prefix cache", "speculation"],
)
def test_what_states_can_not_be_taken_from_is_refused_before_it_serves(
    place: Place, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(AssertionError, match=why), place.engine("granite", **options):
        raise RuntimeError("it began")
