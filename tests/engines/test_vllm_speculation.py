"""vLLM that guesses ahead, by n-grams, a draft model or EAGLE, answers as it does without Tidegate."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.engines.prompts import prompt
from tests.engines.running import Place, vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

GUESSES: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    "draft": {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3},
}


ANSWER_TOKENS = 310  # the last whole column of both conversations ends well before


class Asked(NamedTuple):
    """Two conversations, of which one begins with what repeats itself."""

    starts: list[list[int]]
    answers: list[list[int]]
    grown: list[list[int]]  # both together
    after: list[list[int]]  # and what is answered to that


@pytest.fixture(scope="module")
def asked(models: Any) -> Asked:
    """Of an engine that neither guesses nor caches."""
    starts = [prompt(0, 70) * 4, prompt(1, 300)]
    with vllm(models) as engine:
        answers = engine.answer_all(starts, None, tokens=ANSWER_TOKENS)
        grown = [[*start, *answer] for start, answer in zip(starts, answers, strict=True)]
        return Asked(starts, answers, grown, engine.answer_all(grown, None))


@pytest.mark.parametrize("how", GUESSES)
def test_only_what_is_verified_is_stored(place: Place, asked: Asked, how: str) -> None:
    """And columns that are damaged are computed anew in the step that wanted them: their blocks are not
    looked at, though vLLM asks what came before its draft has computed."""
    with place.engine(speculative_config=dict(GUESSES[how])) as engine:
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
