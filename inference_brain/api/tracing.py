"""Names of requests: our own id, and the client's trace (W3C Trace Context)."""

from __future__ import annotations

import re
import secrets
from typing import Final

from inference_brain.api.exchange import Exchange

_TRACE: Final = re.compile(r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$")
_PRINTABLE: Final = re.compile(r"^[\x20-\x7e]+$")
TRACE_STATE_MAX: Final = 512
CLIENT_ID_MAX: Final = 128


def new_id() -> str:
    """Of a request: it is in the answer's `x-request-id`, in logs, and what the engine calls it."""
    return f"req-{secrets.token_hex(12)}"


def client_id(exchange: Exchange) -> str:
    """What the client calls its request; empty if it does not say, or nothing that can be logged."""
    for header in (b"x-client-request-id", b"x-request-id"):
        name = exchange.header(header)
        if name and len(name) <= CLIENT_ID_MAX and _PRINTABLE.match(name):
            return name
    return ""


def trace_headers(exchange: Exchange) -> dict[str, str]:
    """For the engine: the client's trace, or a new one."""
    parent = exchange.header(b"traceparent").strip()
    if not _TRACE.match(parent):
        made = secrets.token_hex(24)
        return {"traceparent": f"00-{made[:32]}-{made[32:]}-00"}
    state = exchange.header(b"tracestate").strip()
    if state and len(state) <= TRACE_STATE_MAX and _PRINTABLE.match(state):
        return {"traceparent": parent, "tracestate": state}
    return {"traceparent": parent}
