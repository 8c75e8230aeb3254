"""Names of requests: our own id, and the client's trace (W3C Trace Context)."""

from __future__ import annotations

import os
import re
from typing import Final

from inference_brain.api.exchange import Exchange

_TRACE: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_PRINTABLE: Final = re.compile(r"[\x20-\x7e]+")
_WORD: Final = re.compile(r"[\x21-\x7e]+")  # what may stand in a line of fields
TRACE_STATE_MAX: Final = 512
CLIENT_ID_MAX: Final = 128
DRAWN_BYTES: Final = 4096


class _Random:
    """Random bytes, drawn for many names at once: each call of the system costs more than
    all else about a name. Used from one thread."""

    def __init__(self) -> None:
        self._bytes = b""
        self._at = 0

    def hex(self, size: int) -> str:
        if self._at + size > len(self._bytes):
            self._bytes, self._at = os.urandom(DRAWN_BYTES), 0
        start, self._at = self._at, self._at + size
        return self._bytes[start : self._at].hex()


_RANDOM: Final = _Random()


def new_id() -> str:
    """Of a request: it is in the answer's `x-request-id`, in logs, and what the engine calls it."""
    return f"req-{_RANDOM.hex(12)}"


def client_id(exchange: Exchange) -> str:
    """What the client calls its request; empty if it does not say, or nothing that can be logged."""
    for header in (b"x-client-request-id", b"x-request-id"):
        name = exchange.header(header)
        if name and len(name) <= CLIENT_ID_MAX and _WORD.fullmatch(name):
            return name
    return ""


def trace_headers(exchange: Exchange) -> dict[str, str]:
    """For the engine: the client's trace, or a new one."""
    parent = exchange.header(b"traceparent").strip()
    if not _TRACE.fullmatch(parent):
        drawn = _RANDOM.hex(24)
        return {"traceparent": f"00-{drawn[:32]}-{drawn[32:]}-00"}
    state = exchange.header(b"tracestate").strip()
    if state and len(state) <= TRACE_STATE_MAX and _PRINTABLE.fullmatch(state):
        return {"traceparent": parent, "tracestate": state}
    return {"traceparent": parent}
