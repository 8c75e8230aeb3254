"""A replica's stream of events on its way to a client: what of it we need to know, and what changes.

Events are passed on as they come. Only those that may matter are looked into: the one with the usage,
which we always ask for and which is left out where the client did not, errors, and the end. Comments
are left out: a gateway keeps its connection alive with them before there is a token.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from inference_brain.api.errors import ApiError, of_event
from kvss_agent.http.client.client import WHOLE_BYTES_MAX
from kvss_agent.http.client.failures import Lost
from telemetry.decoder import ANSWER, Limits, Malformed, decode

EVENT_BYTES_MAX: Final = 16 << 20
DONE: Final = b"data: [DONE]\n\n"
_END: Final = re.compile(rb"\r?\n\r?\n")
_END_BYTES_BEFORE: Final = 3  # of an event's end, which may have come with the piece before
_DONE: Final = re.compile(rb"^data: ?\[DONE\]\s*$")
_TO_LOOK_INTO: Final = (b'"usage"', b'"error"', b"[DONE]")
_COMMENT: Final = re.compile(rb"(?::[^\r\n]*+(?:\r?\n|\Z))*+")  # only such lines


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """As engines tell it."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt; None where the engine does not say so."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Event(msgspec.Struct):
    usage: Usage | None = None
    choices: list[msgspec.Raw] | None = None
    error: Any = None


class _Whole(msgspec.Struct):
    usage: Usage | None = None


_EVENT: Final = msgspec.json.Decoder(_Event)
_WHOLE: Final = msgspec.json.Decoder(_Whole)
# Whatever of an answer is read at all: with what it is charged for comes what it takes.
_OF_WHOLE: Final = Limits(WHOLE_BYTES_MAX, WHOLE_BYTES_MAX, depth_max=64)


class Renaming:
    """The model in answers: as the client knows it, not as the engine does. The text that is looked for
    cannot be part of what was generated, where quotation marks are escaped."""

    def __init__(self, served_as: str, model: str) -> None:
        self._pattern: re.Pattern[bytes] | None = None
        if served_as != model:
            self._pattern = re.compile(rb'"model" ?: ?' + re.escape(msgspec.json.encode(served_as)))
            self._model = b'"model":' + msgspec.json.encode(model)

    def __bool__(self) -> bool:
        return self._pattern is not None

    def __call__(self, raw: bytes) -> bytes:
        return self._pattern.sub(lambda _: self._model, raw) if self._pattern else raw


class EventStream:
    """Of one answer. `is_done`: its end has come, as engines announce it. `failure`: what the engine has
    sent in place of more tokens. `passed`: how many events the client got that have a token at least.
    """

    __slots__ = ("_renaming", "_tail", "_wants_usage", "failure", "is_done", "passed", "usage")

    def __init__(self, renaming: Renaming, *, wants_usage: bool) -> None:
        self._renaming = renaming
        self._wants_usage = wants_usage
        self._tail = bytearray()
        self.is_done = False
        self.passed = 0
        self.failure: ApiError | None = None
        self.usage: Usage | None = None

    def feed(self, piece: bytes) -> bytes:
        """Take bytes of the replica's; returns those for the client, whole events. Raises Lost for an
        event without an end."""
        is_whole = not self._tail and piece.endswith(b"\n\n")
        is_plain = piece[:1] != b":" and b"\n:" not in piece  # has no comments
        if is_whole and is_plain and not self._renaming and not _matters(piece):
            self.passed += piece.count(b"\n\n")
            return piece
        # What came before has no end in it: a long event is not searched again with each of its pieces.
        if self._tail and not _END.search(bytes(self._tail[-_END_BYTES_BEFORE:]) + piece):
            self._keep(piece)
            return b""
        text = bytes(self._tail) + piece
        passed, start = [], 0
        for end in _END.finditer(text):
            event = text[start : end.start()]
            if self._passes(event):
                passed.append(self._renaming(event) + b"\n\n")
            start = end.end()
        self._tail.clear()
        self._keep(text[start:])
        self.passed += len(passed)
        return b"".join(passed)

    def _keep(self, piece: bytes) -> None:
        """For the rest of the event. Raises Lost."""
        self._tail += piece
        if len(self._tail) > EVENT_BYTES_MAX:
            raise Lost("The replica sent an event without an end.")

    def _passes(self, event: bytes) -> bool:
        if _COMMENT.fullmatch(event):
            return False
        if not _matters(event):
            return True
        if _DONE.match(event):
            self.is_done = True
            return False  # sent by us, when all is well
        _, _, data = event.partition(b":")
        try:
            told = decode(data, _EVENT, ANSWER)
        except Malformed:
            return True  # it is the engine's and the client's to understand
        if told.error is not None:
            self.failure = of_event(data, told.error)
            self.passed -= 1  # it is passed on, and has no token
            return True
        if told.usage is not None:
            self.usage = told.usage
            return bool(told.choices) or self._wants_usage
        return True


def _matters(piece: bytes) -> bool:
    return any(mark in piece for mark in _TO_LOOK_INTO)


def usage_of(raw: bytes) -> Usage | None:
    """Of an answer that is no stream."""
    try:
        return decode(raw, _WHOLE, _OF_WHOLE).usage
    except Malformed:
        return None
