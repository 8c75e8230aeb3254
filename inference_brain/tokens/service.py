"""Tokens for many requests at once: short work is done at once, long work by threads, in turns by org.

Threads tokenize without Python's lock. An org that sends many long prompts waits for itself: the next
work is that of the org whose turn it is.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from inference_brain.tokens.lanes import Lanes
from inference_brain.tokens.messages import Chat, has_media
from inference_brain.tokens.tokenizer import Added, PromptTokenizer
from inference_brain.tokens.turns import Cut, Tokens, Turns, cut

RENDERED_AT_ONCE: Final = 256 << 10  # characters: a millisecond
TOKENIZED_AT_ONCE: Final = 4 << 10
SWEEP_SECONDS: Final = 60.0
THREADS: Final = max(2, (os.cpu_count() or 1) // 2)
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
        self, tokenizer: PromptTokenizer, org: str, chat: Chat, tokens_max: int | None = None
    ) -> Tokens | None:
        """The tokens of a chat's prompt; None if it has images or the like. Raises TokensError."""
        if has_media(chat.messages):
            return None

        def render() -> Cut:
            return cut(tokenizer.render(chat, tokens_max), tokenizer.cuts)

        is_long = _size(chat) > RENDERED_AT_ONCE
        made = await self._lanes.run(org, render) if is_long else render()
        return await self._tokens(tokenizer, org, made)

    async def text(
        self,
        tokenizer: PromptTokenizer,
        org: str,
        text: str,
        tokens_max: int | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Tokens:
        """The tokens of a completion's prompt. Raises TokensError."""
        tokenizer.check_length(text, tokens_max)
        added = tokenizer.added if add_special_tokens else _NOTHING_ADDED
        if added is None:  # it depends on the text as a whole
            ids = await self._lanes.run(org, lambda: tokenizer.encode(text, add_special_tokens=True))
            return Tokens(self.turns, ids, 0, [])
        if len(text) > RENDERED_AT_ONCE:
            made = await self._lanes.run(org, lambda: cut(text, tokenizer.cuts, added.before))
        else:
            made = cut(text, tokenizer.cuts, added.before)
        return await self._tokens(tokenizer, org, made, added)

    def given(self, ids: Sequence[int]) -> Tokens:
        """Of a prompt that came as tokens."""
        return Tokens(self.turns, array("I", ids), 0, [])

    def close(self) -> None:
        """What is being done is finished; nothing further is begun."""
        self._lanes.close()

    async def _tokens(
        self,
        tokenizer: PromptTokenizer,
        org: str,
        prompt: Cut,
        added: Added = _NOTHING_ADDED,
    ) -> Tokens:
        now = self._clock()
        if now >= self._sweep_at:  # of orgs that ask nothing any more
            self._sweep_at = now + SWEEP_SECONDS
            self.turns.sweep_all(now)
        found = self.turns.find(org, tokenizer.number, prompt.pieces, now)

        def encode() -> list[array[int]]:
            made = tokenizer.encode_each(prompt.texts(found.pieces))
            if not found.pieces:
                made[0] = array("I", added.before) + made[0]
            made[-1].extend(added.after)
            return made

        is_long = len(prompt.raw) - prompt.pieces[found.pieces].start > TOKENIZED_AT_ONCE
        new = await self._lanes.run(org, encode) if is_long else encode()
        return self.turns.add(org, tokenizer.number, prompt.pieces, found, new, self._clock())


def _size(chat: Chat) -> int:
    """About how many characters its messages have."""
    return sum(
        len(content) if isinstance(content := one.get("content"), str) else _size_of_parts(content)
        for one in chat.messages
    )


def _size_of_parts(content: object) -> int:
    if not isinstance(content, list):
        return 0
    return sum(len(text) for one in content if isinstance(one, dict) and (text := one.get("text")))
