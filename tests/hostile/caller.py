"""An evil caller: has the token of one org, and turns against the driver and its other orgs."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
from typing import Final, NamedTuple

from tests.hostile.engine import LINK, connect
from tests.hostile.scene import EACH
from tests.hostile.tenant import Caller, tokens_of

PIECE_BYTES: Final = 1 << 18


class HalfStore(NamedTuple):
    connection: socket.socket
    sent_bytes: int


def half_store(address: str, token: str, length: int, most: int) -> HalfStore:
    """Begin a store of so many bytes, and send at most so many of them."""
    head = json.dumps({"tokens": list(range(length // EACH))[:1000]}).encode()
    told = struct.pack("<I", len(head)) + head
    connection = connect(address)
    connection.sendall(
        f"POST /v1/store HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {length}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
    )
    sent, piece = len(told), bytes(PIECE_BYTES)
    connection.settimeout(2.0)  # a driver may well stop reading
    with contextlib.suppress(OSError):
        connection.sendall(told)
        while sent < most:
            LINK.take(len(piece))
            connection.sendall(piece)
            sent += len(piece)
    return HalfStore(connection, sent)


def delete_something(caller: Caller) -> None:
    """A delete of a prompt that nobody has stored."""
    begin = secrets.randbelow(1 << 30)
    caller.ask("delete", tokens=list(range(begin, begin + 256)))


def steal(caller: Caller, prompts: int = 32) -> int:
    """Ask for prompts of another org, token by token the same. How many tokens were given."""
    return sum(caller.load(tokens_of(prompt))[0] for prompt in range(prompts))


def other_verbs(caller: Caller) -> dict[str, int]:
    """The controller's verbs, and other orgs', with a caller's token: the status of each answer."""
    tried = {
        "GET /v1/observed": caller.http.get("/v1/observed"),
        "GET /v1/stats": caller.http.get("/v1/stats"),
        "GET /v1/reuse?org=victim": caller.http.get("/v1/reuse?org=victim"),
        "GET /v1/requests?org=victim": caller.http.get("/v1/requests?org=victim"),
        "GET /metrics": caller.http.get("/metrics"),
        "PUT /v1/desired": caller.http.put("/v1/desired", json={}),
        "POST /v1/purges": caller.ask("purges", org="victim"),
        "POST /v1/explain_org": caller.ask("explain_org", org="victim", tokens=[1]),
    }
    return {what: answer.status_code for what, answer in tried.items()}
