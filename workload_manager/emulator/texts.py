"""Prompts as tokens, and answers, which are always the same to the same prompt."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any, Final, Protocol

from telemetry.decoder import excerpt

ANSWERED_TOKENS: Final = 32  # of the prompt's end, on which the answer depends
_TEXT: Final = (
    "a the this each of in on for with from to and or but so when model request prompt answer token "
    "cache column driver agent replica shard slot policy memory byte second minute small large fast "
    "slow warm cold is has reads stores loads sends keeps finds moves waits begins ends again once "
    "never always often here there now then one two three many most first last next other same new old"
)
_WORDS: Final = _TEXT.split()
_LETTERS: Final = b"etaoin shrdlu "


class NotTokens(ValueError):
    """A prompt that has no tokens. A sentence."""


class Texts(Protocol):
    """What an engine needs of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]: ...
    def chat(self, body: Mapping[str, Any]) -> Sequence[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def answer(self, prompt: Sequence[int], count: int) -> Sequence[int]: ...


def randomness_of(prompt: Sequence[int]) -> Random:
    """Of a prompt's answer: by its length and its end."""
    last = " ".join(map(str, prompt[-ANSWERED_TOKENS:]))
    return Random(f"{len(prompt)} {last}")  # noqa: S311 - made-up text, no secret


def answer_of_numbers(prompt: Sequence[int], count: int, below: int) -> list[int]:
    """An answer of any tokens below a number."""
    randomness = randomness_of(prompt)
    return [randomness.randrange(below) for _ in range(count)]


def answer_of_words(prompt: Sequence[int], words: int) -> str:
    """An answer of English words, which is no sentence."""
    randomness = randomness_of(prompt)
    return "".join(f" {randomness.choice(_WORDS)}" for _ in range(words))


class BytesAsTokens:
    """Without a tokenizer: a token is a byte of UTF-8."""

    def encode(self, text: str) -> Sequence[int]:
        try:
            return array("I", list(text.encode()))
        except UnicodeEncodeError:
            raise NotTokens("The prompt has half a character, which is no text") from None

    def chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        said = [f"{one.get('role')}: {_content(one.get('content'))}\n" for one in body["messages"]]
        return self.encode("".join((*said, "assistant:")))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token & 0xFF for token in tokens).decode(errors="replace")

    def answer(self, prompt: Sequence[int], count: int) -> Sequence[int]:
        randomness = randomness_of(prompt)
        return array("I", (randomness.choice(_LETTERS) for _ in range(count)))


def _content(content: object) -> str:
    """Of a message: text, or parts of which some are text."""
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list):
        parts = [one for one in islice(content, 10_000) if isinstance(one, Mapping)]
        return "".join(str(one.get("text") or "") for one in parts)
    raise NotTokens(f"A message's content is text or a list of parts, not {excerpt(repr(content))}")
