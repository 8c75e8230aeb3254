"""Prompts by a model's own tokenizer and chat template, as brains have them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from inference_brain.tokens import Chat, load
from inference_brain.tokens.errors import TokensError
from workload_manager.emulator.texts import NotTokens, answer_of_numbers, answer_of_words

_WORDS_AT_ONCE: Final = 64


class Tokenized:
    def __init__(self, folder: Path, answer_tokens_below: int = 0) -> None:
        """Raises BadTokenizer and OSError."""
        self._tokenizer = load(folder)
        self._below = answer_tokens_below

    def encode(self, text: str) -> Sequence[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=True)
        except TokensError as error:
            raise NotTokens(str(error)) from None

    def chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        chat = Chat(
            body["messages"],
            body.get("tools"),
            body.get("documents"),
            body.get("add_generation_prompt") is not False,
            body.get("continue_final_message") is True,
            body.get("reasoning_effort"),
            body.get("chat_template_kwargs") or {},
        )
        try:
            return self._tokenizer.chat(chat)
        except TokensError as error:
            raise NotTokens(str(error)) from None

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def answer(self, prompt: Sequence[int], count: int) -> Sequence[int]:
        """Of words, tokenized as a whole: a client that sends the answer's text back in its next turn
        sends these tokens."""
        if self._below:
            return answer_of_numbers(prompt, count, self._below)
        words, answer = _WORDS_AT_ONCE, array("I")
        while len(answer) < count:
            answer = self._tokenizer.encode(answer_of_words(prompt, words))
            words *= 2
        return answer[:count]
