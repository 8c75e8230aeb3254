"""Receivers of notifications: a real HTTP server and a real mail server, in threads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller


@dataclass
class Hook:
    """What it got, and what it will answer: the first of `statuses` while there are any, then 200."""

    address: str = ""
    got: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    may_answer: threading.Event = field(default_factory=threading.Event)

    @property
    def bodies(self) -> list[Any]:
        return [body for _, body in self.got]


@contextlib.contextmanager
def hook() -> Iterator[Hook]:
    told = Hook()
    told.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.got.append((dict(self.headers), json.loads(body)))
            told.arrived.set()
            told.may_answer.wait(60)
            status = told.statuses.pop(0) if told.statuses else 200
            with contextlib.suppress(OSError):  # who was killed hears no answer
                self.send_response(status)
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                self.wfile.write(b"thank you for " + self.path.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.address = f"http://127.0.0.1:{server.server_address[1]}/hook/s3cret"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield told
    finally:
        told.may_answer.set()
        server.shutdown()
        thread.join(30)
        server.server_close()


@dataclass
class Mailbox:
    url: str = ""
    mails: list[Any] = field(default_factory=list)
    refuses: bool = False

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
        if self.refuses:
            return "451 try again later"
        self.mails.append(envelope)
        return "250 taken"


class _AnyPort(Controller):
    def _trigger_server(self) -> None:
        """It says hello to itself, and has to know by now where it listens."""
        assert isinstance(self.server, asyncio.Server)
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def mailbox() -> Iterator[Mailbox]:
    box = Mailbox()
    controller = _AnyPort(box, hostname="127.0.0.1", port=0)
    controller.start()
    try:
        box.url = f"smtp://127.0.0.1:{controller.port}"
        yield box
    finally:
        controller.stop()
