"""Tokens for many requests at once: short work is done at once, long work by threads, in turns by org.

Threads tokenize without Python's lock. An org that sends many long prompts waits for itself: the next
work is that of the org whose turn it is. What was uploaded does its work in a process of its own, and
nothing is kept of its conversations.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from inference_brain.tokens.lanes import Lanes
from inference_brain.tokens.messages import Chat, has_media
from inference_brain.tokens.tokenizer import Added, PromptTokenizer
from inference_brain.tokens.turns import Piece, Place, Tokens, Turns, cut
from inference_brain.tokens.uploaded import UploadedTokenizer

RENDERED_AT_ONCE: Final = 256 << 10  # characters: a millisecond
MESSAGE_CHARACTERS: Final = 1 << 10  # take as long to render as a message does, or a part of one
JSON_WEIGHT: Final = 8  # so many times as long takes what a template goes through, or writes as JSON
TOKENIZED_AT_ONCE: Final = 4 << 10
SWEEP_SECONDS: Final = 60.0
THREADS: Final = max(2, (os.cpu_count() or 1) // 2)
T = TypeVar("T")
AnyTokenizer = PromptTokenizer | UploadedTokenizer
_NOTHING_ADDED: Final = Added((), ())


class TokenService:
    """One in a process, for all models and orgs. Its methods are for one event loop.

    `clock`: seconds that only grow, by which what is unused is forgotten.
    """

    def __init__(
        self,
        turns: Turns | None = None,
        threads: int = THREADS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.turns = turns or Turns()
        self._clock = clock
        self._lanes = Lanes(threads)
        self._sweep_at = clock() + SWEEP_SECONDS

    async def chat(
        self, tokenizer: AnyTokenizer, org: str, chat: Chat, tokens_max: int | None = None
    ) -> Tokens | None:
        """The tokens of a chat's prompt; None if it has images or the like. Raises TokensError."""
        if has_media(chat.messages):
            return None
        if isinstance(tokenizer, UploadedTokenizer):
            return self.given(await tokenizer.chat(org, chat, tokens_max))

        forgotten = self.turns.forgotten

        def render() -> bytes:
            return tokenizer.raw(tokenizer.render(chat, tokens_max))

        raw = await self._lanes.run(org, render) if _is_long(chat) else render()
        return await self._tokens(tokenizer, org, raw, _NOTHING_ADDED, forgotten, tokens_max)

    async def text(
        self,
        tokenizer: AnyTokenizer,
        org: str,
        text: str,
        tokens_max: int | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Tokens:
        """The tokens of a completion's prompt. Raises TokensError."""
        if isinstance(tokenizer, UploadedTokenizer):
            adds = add_special_tokens
            return self.given(await tokenizer.text(org, text, tokens_max, add_special_tokens=adds))
        tokenizer.check_length(text, tokens_max)
        added = tokenizer.added if add_special_tokens else _NOTHING_ADDED
        if added is None:  # it depends on the text as a whole
            encode = partial(tokenizer.encode, text, tokens_max, add_special_tokens=True)
            return self.given(await self._lanes.run(org, encode))
        raw, forgotten = tokenizer.raw(text), self.turns.forgotten
        return await self._tokens(tokenizer, org, raw, added, forgotten, tokens_max)

    async def run(self, org: str, do: Callable[[], T]) -> T:
        """Other long work of an org, in its turn."""
        return await self._lanes.run(org, do)

    async def decode(self, tokenizer: AnyTokenizer, org: str, ids: Sequence[int]) -> str:
        """The text of tokens. Raises TokensError."""
        if isinstance(tokenizer, UploadedTokenizer):
            return await tokenizer.decode(org, ids)
        return await self.run(org, partial(tokenizer.decode, ids))

    async def decode_each(self, tokenizer: AnyTokenizer, org: str, ids: Sequence[int]) -> list[str]:
        """The text of each token, special ones too. Raises TokensError."""
        if isinstance(tokenizer, UploadedTokenizer):
            return await tokenizer.decode_each(org, ids)
        return await self.run(org, partial(tokenizer.decode_each, ids))

    def given(self, ids: Sequence[int]) -> Tokens:
        """Of a prompt of which nothing is kept, or that came as tokens."""
        return Tokens(self.turns, array("I", ids).tobytes(), 0, None)

    def close(self) -> None:
        """What is being done is finished; nothing further is begun."""
        self._lanes.close()

    async def _tokens(
        self,
        tokenizer: PromptTokenizer,
        org: str,
        raw: bytes,
        added: Added,
        forgotten: int,
        tokens_max: int | None,
    ) -> Tokens:
        now = self._clock()
        if now >= self._sweep_at:  # of orgs that ask nothing any more
            self._sweep_at = now + SWEEP_SECONDS
            self.turns.sweep_all(now)
        place = Place(org, tokenizer.number, added.before)
        begun = self.turns.begin(place, raw, tokenizer.cuts)

        def cut_rest() -> list[Piece]:
            return cut(raw, tokenizer.cuts, begun.end)

        is_long = len(raw) - begun.end > RENDERED_AT_ONCE
        pieces = await self._lanes.run(org, cut_rest) if is_long else cut_rest()
        found = self.turns.find(place, begun, pieces)
        left = [one for one in pieces if one.start >= found.end]

        def encode() -> list[array[int]]:
            texts = [raw[one.start : one.end].decode() for one in left]
            made = tokenizer.encode_each(texts, tokens_max)
            if not found.end:
                made[0] = array("I", added.before) + made[0]
            made[-1].extend(added.after)
            return made

        is_long = len(raw) - found.end > TOKENIZED_AT_ONCE
        new = await self._lanes.run(org, encode) if is_long else encode()
        return self.turns.add(place, raw, found, left, new, self._clock(), forgotten)


def _is_long(chat: Chat) -> bool:
    """Whether it takes longer to render than others may wait. No more of it is looked at than is needed
    to tell."""
    size = 0
    for weight in _weights(chat):
        size += weight
        if size > RENDERED_AT_ONCE:
            return True
    return False


def _weights(chat: Chat) -> Iterator[int]:
    """Of its parts, those first that are quickly looked at: about how many characters of a message take
    as long to render."""
    yield MESSAGE_CHARACTERS * len(chat.messages)
    for value in (chat.tools, chat.documents, chat.template_kwargs):
        yield _weight_of_json(value)
    contents = [one.get("content") for one in chat.messages]
    yield sum([len(content) for content in contents if isinstance(content, str)])
    for one, content in zip(chat.messages, contents, strict=True):
        if isinstance(content, list):
            yield MESSAGE_CHARACTERS * len(content)
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            yield sum(len(text) for text in texts if isinstance(text, str))
        if len(one) > 2:  # calls of tools, say
            for name, value in one.items():
                if name not in ("role", "content"):
                    yield _weight_of_json(value)


def _weight_of_json(value: object) -> int:
    return JSON_WEIGHT * len(msgspec.json.encode(value)) if value else 0
