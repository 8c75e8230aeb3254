"""The tokenizer of the demo's models, as clients and brains read it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from console.demo import story, tokenizer
from inference_brain.tokens import Chat, PromptTokenizer, load
from workload_manager.emulator.tokenized import Tokenized


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("demo") / "tokenizer"
    tokenizer.write(made)
    return made


@pytest.fixture(scope="module")
def read(folder: Path) -> PromptTokenizer:
    return load(folder)


def test_a_token_of_the_story_is_a_word_and_the_word_is_the_token(read: PromptTokenizer) -> None:
    tokens = [0, 1, 31, 32, story.VOCABULARY - 1, 7]
    text = tokenizer.text(tokens)
    assert list(read.encode(text)) == tokens
    assert read.decode(tokens) == text
    assert len({tokenizer.word(token) for token in range(story.VOCABULARY)}) == story.VOCABULARY


def test_a_conversation_begins_with_all_tokens_of_the_turn_before(read: PromptTokenizer) -> None:
    first, second = story.answer_to([1, 2, 3], 5), story.answer_to([4], 5)
    text = tokenizer.text(first)
    both = read.encode(text + tokenizer.text(second))
    assert list(both) == [*read.encode(text), *second]


@pytest.mark.parametrize("served", story.SERVED, ids=lambda served: served.name)
def test_people_go_on_with_what_the_engine_has_answered(folder: Path, served: story.Served) -> None:
    """Else what a conversation hits ends at its last prompt, where brains' maps have no end."""
    engine = Tokenized(folder, served.emulator.answer_tokens_below)
    for ask in itertools.islice(story.asks(served), 20):
        prompt = engine.encode(tokenizer.text(ask.tokens))
        assert list(engine.answer(prompt, len(ask.answer))) == list(ask.answer)


def test_whatever_people_write_is_a_prompt_of_its_own(read: PromptTokenizer) -> None:
    for text in ("Hello, wörld!", " \n\ttabs", "日本語 🎉"):
        assert read.decode(read.encode(text)) == text
    chats = [Chat([{"role": "user", "content": text}]) for text in ("one", "two")]
    assert read.chat(chats[0]) != read.chat(chats[1])
