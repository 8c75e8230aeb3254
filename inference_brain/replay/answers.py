"""Reads the answers of any server with OpenAI's API, as streams of events or whole. Without I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from telemetry.decoder import ANSWER, Malformed, decode, excerpt

EVENT_BYTES_MAX: Final = 16 << 20
_DONE: Final = b"[DONE]"
# Of a chat's delta: that any of these is not empty means that a token has come.
_WITH_TOKENS: Final = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


class Unreadable(Exception):
    """What came is no answer. A sentence."""


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None

    @property
    def has_tokens(self) -> bool:
        said = self.delta or self.message or {}
        return bool(self.text) or any(said.get(name) for name in _WITH_TOKENS)


class Part(msgspec.Struct):
    """An answer, or one event of it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def has_tokens(self) -> bool:
        return any(choice.has_tokens for choice in self.choices)


_PART: Final = msgspec.json.Decoder(Part)


def whole(raw: bytes) -> Part:
    """Raises Unreadable, also for what is an error."""
    try:
        part = decode(raw, _PART, ANSWER)
    except Malformed as error:
        raise Unreadable(f"the answer can't be read: {error}") from None
    if part.error is not None:
        raise Unreadable(f"the server failed: {complaint(raw)}")
    return part


def complaint(raw: bytes) -> str:
    """What an answer with an error says, in OpenAI's form or another."""
    try:
        said = decode(raw, dict[str, Any], ANSWER)
    except Malformed:
        return excerpt(raw[:400].decode("utf-8", "replace"), 200)
    error = said.get("error", said)
    told = error.get("message", error) if isinstance(error, dict) else error
    return excerpt(str(told), 200)


class EventReader:
    """Puts pieces of a stream together. `is_done`: the server has said that it is at its end."""

    def __init__(self) -> None:
        self._left = b""
        self.is_done = False

    def feed(self, piece: bytes) -> Iterator[Part]:
        """The events that are complete with it. Raises Unreadable."""
        *lines, self._left = (self._left + piece).split(b"\n")
        if len(self._left) > EVENT_BYTES_MAX:
            raise Unreadable(f"an event has more than {EVENT_BYTES_MAX} bytes")
        for line in lines:
            name, _, data = line.strip().partition(b":")
            if name != b"data":
                continue
            data = data.strip()
            if data == _DONE:
                self.is_done = True
            else:
                yield whole(data)
