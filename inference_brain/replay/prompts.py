"""Prompts for the requests of a trace, which has their lengths and which blocks are equal, but no text.

Equal blocks become equal text, or equal tokens, whatever trace or run they are in; so what a cache could
reuse, it can reuse here. Text is of common words, most of which are one token of most tokenizers: a
prompt has about as many tokens as its request had. As tokens, it has exactly as many.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from swdriver_shim.replay.traces import Request

Form = Literal["chat", "completions", "tokens"]
PATHS: Final[dict[Form, str]] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "tokens": "/completions",
}
TOKENS_FROM: Final = 1000  # below are bytes, and tokens that end an answer
TOKENS_UP_TO: Final = 30_000  # which all models have
BLOCKS_MAX: Final = 4096
_TEXT: Final = (
    "the of and to in is you that it was for on are as with his they at be this have from or one had "
    "by word but not what all were we when your can said there use an each which she do how their if "
    "will up other about out many then them these so some her would make like him into time has look "
    "two more write go see number no way could people my than first water been call who oil its now "
    "find long down day did get come made may part"
)
_WORDS: Final = _TEXT.split()


class PromptMaker:
    """The bodies of requests. `salt`: another one makes other prompts, which no cache has yet."""

    def __init__(self, model: str, form: Form, salt: str = "", *, words_per_token: float = 1.0) -> None:
        self._model = model
        self._form = form
        self._salt = salt
        self._words_per_token = words_per_token
        self._blocks: dict[tuple[str, int], Sequence[Any]] = {}
        self.path = PATHS[form]

    def body(
        self, request: Request, number: int, output_tokens: int, more: dict[str, Any]
    ) -> dict[str, Any]:
        """Of the request with this number in its trace. `more`: fields besides."""
        asked = {"model": self._model, "max_tokens": max(1, output_tokens), "temperature": 0}
        if self._form == "tokens":
            return {**asked, "prompt": self.tokens(request, number), **more}
        if self._form == "completions":
            return {**asked, "prompt": self.text(request, number), **more}
        return {**asked, "messages": [{"role": "user", "content": self.text(request, number)}], **more}

    def text(self, request: Request, number: int) -> str:
        return " ".join(" ".join(words) for words in self._parts(request, number, self._words))

    def tokens(self, request: Request, number: int) -> list[int]:
        return [token for part in self._parts(request, number, self._numbers) for token in part]

    def _parts(
        self,
        request: Request,
        number: int,
        make: Callable[[str, int], Sequence[Any]],
    ) -> Iterator[Sequence[Any]]:
        """What is made for each of its blocks, the last of which may be cut short, and for the rest."""
        left = request.input_tokens
        for block in request.blocks:
            whole = self._kept(f"{request.source} {block}", request.block_tokens, make)
            size = min(left, request.block_tokens)
            yield (
                whole
                if size == request.block_tokens
                else whole[: len(whole) * size // request.block_tokens]
            )
            left -= size
        if left > 0:
            yield make(f"{request.source} own {number}", left)

    def _words(self, name: str, tokens: int) -> Sequence[str]:
        count = max(1, round(tokens * self._words_per_token))
        return [_WORDS[at] for at in _below(self._source(name, tokens), count, len(_WORDS))]

    def _numbers(self, name: str, tokens: int) -> Sequence[int]:
        span = TOKENS_UP_TO - TOKENS_FROM
        return array("I", [TOKENS_FROM + at for at in _below(self._source(name, tokens), tokens, span)])

    def _source(self, name: str, tokens: int) -> random.Random:
        """What a prompt of this name is made with: equal for everybody, each time."""
        return random.Random(f"{self._salt} {name} {tokens}")  # noqa: S311

    def _kept(self, name: str, tokens: int, make: Callable[[str, int], Sequence[Any]]) -> Sequence[Any]:
        """A block. Those that were used last are kept: to make a long prompt anew would take longer than
        to send it."""
        key = (name, tokens)
        found = self._blocks.pop(key, None)
        if found is None:
            found = make(name, tokens)
            if len(self._blocks) >= BLOCKS_MAX:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[key] = found
        return found


def _below(source: random.Random, count: int, bound: int) -> list[int]:
    """So many numbers below a bound. In one draw: `choices` would take ten times as long."""
    drawn = array("I", source.randbytes(4 * count))
    if sys.byteorder == "big":  # the same on every machine
        drawn.byteswap()
    return [one % bound for one in drawn]
