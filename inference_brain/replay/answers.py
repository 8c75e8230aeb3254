"""Reads the answers of any server with OpenAI's API, as streams of events or whole. Without I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from telemetry.decoder import ANSWER, Count, Malformed, decode, excerpt

EVENT_BYTES_MAX: Final = 16 << 20
_DONE: Final = b"[DONE]"
# Of a chat's delta: that any of these is not empty means that a token has come.
_WITH_TOKENS: Final = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


class Unreadable(Exception):
    """What came is no answer. A sentence."""


class Details(msgspec.Struct):
    cached_tokens: Count | None = None


class Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
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

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: Any = None

    @property
    def has_tokens(self) -> bool:
        return any(choice.has_tokens for choice in self.choices or ())

    @property
    def is_error(self) -> bool:
        """In OpenAI's form, or in that of vLLM."""
        return self.error is not None or self.object == "error"


_PART: Final = msgspec.json.Decoder(Part)


def whole(raw: bytes) -> Part:
    """Raises Unreadable, also for what is an error."""
    try:
        part = decode(raw, _PART, ANSWER)
    except Malformed as error:
        raise Unreadable(f"the answer can't be read: {error}") from None
    if part.is_error:
        raise _failed(raw)
    return part


def _failed(raw: bytes) -> Unreadable:
    return Unreadable(f"the server failed: {complaint(raw)}")


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
        self._kind = b""
        self.is_done = False

    def feed(self, piece: bytes) -> Iterator[Part]:
        """The events that are complete with it. Raises Unreadable."""
        *lines, self._left = (self._left + piece).split(b"\n")
        if len(self._left) > EVENT_BYTES_MAX:
            raise Unreadable(f"an event has more than {EVENT_BYTES_MAX} bytes")
        for line in lines:
            name, _, data = line.strip().partition(b":")
            data = data.strip()
            if not name:
                self._kind = b""
            elif name == b"event":
                self._kind = data
            elif name == b"data":
                if self._kind == b"error":
                    raise _failed(data)
                if data == _DONE:
                    self.is_done = True
                    return
                yield whole(data)
