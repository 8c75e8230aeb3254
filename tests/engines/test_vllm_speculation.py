"""vLLM that guesses ahead, in one of five ways, answers as it does without Tidegate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.engines.prompts import prompt
from tests.engines.running import Place, vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

GUESSES: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    "draft": {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
}
TARGETS = dict.fromkeys(GUESSES, "llama") | {"mtp": "mimo"}  # whose tokens are guessed

ANSWER_TOKENS = 310  # the last whole column of both conversations ends well before


class Asked(NamedTuple):
    """Two conversations, of which one begins with what repeats itself."""

    starts: list[list[int]]
    answers: list[list[int]]
    grown: list[list[int]]  # both together
    after: list[list[int]]  # and what is answered to that


@pytest.fixture(scope="module")
def asked_of(models: Any) -> Callable[[str], Asked]:
    """Of an engine with this model, that neither guesses nor caches."""

    @functools.cache
    def asked(model: str) -> Asked:
        starts = [prompt(0, 70) * 4, prompt(1, 300)]
        with vllm(models, model=model) as engine:
            answers = engine.answer_all(starts, None, tokens=ANSWER_TOKENS)
            grown = [[*start, *answer] for start, answer in zip(starts, answers, strict=True)]
            return Asked(starts, answers, grown, engine.answer_all(grown, None))

    return asked


@pytest.mark.parametrize("how", GUESSES)
def test_only_what_is_verified_is_stored(
    place: Place, asked_of: Callable[[str], Asked], how: str
) -> None:
    """And columns that are damaged are computed anew in the step that wanted them: their blocks are not
    looked at, though vLLM asks what came before its draft has computed."""
    asked = asked_of(TARGETS[how])
    with place.engine(TARGETS[how], speculative_config=dict(GUESSES[how])) as engine:
        assert engine.answer_all(asked.starts, "acme", tokens=ANSWER_TOKENS) == asked.answers
        assert engine.ask("settle")
        assert engine.answer_all(asked.grown, "acme") == asked.after
        assert engine.cached == [(len(one) - 1) // 64 * 64 for one in asked.grown]
        made, right = engine.ask("guesses")
        assert made > right
        assert right or how != "draft", "the only one that knows the model"
        engine.ask("fail_loads")
        assert engine.answer_all(asked.grown, "acme") == asked.after
        assert engine.answer_all(asked.grown, "globex") == asked.after
