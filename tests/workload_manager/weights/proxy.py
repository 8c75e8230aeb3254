"""A proxy before an S3 server, that counts what passes and fails on demand."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = b"a-key-that-came-with-it"
# As Amazon repeats what was wrong.
DENIAL = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>ExpiredToken</Code>'
    b"<AWSAccessKeyId>" + KEY + b"</AWSAccessKeyId><Message>Its token has expired.</Message>"
    b"<Token-0>" + KEY + b"</Token-0></Error>"
)


@dataclass
class Traffic:
    """`failing`: so many of the next ranges get status 503. `denying`: all that is asked for gets this
    status and `DENIAL`; 0: nothing.
    `cutting`: so many ranges end in the middle. `damaging`: so many have a wrong byte."""

    ranges: Counter[tuple[str, str]] = field(default_factory=Counter)
    denying: int = 0
    failing: int = 0
    cutting: int = 0
    damaging: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, fault: str) -> bool:
        with self.lock:
            left = getattr(self, fault)
            if left:
                setattr(self, fault, left - 1)
            return bool(left)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    traffic: Traffic
    port: int

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        if wanted:
            with self.traffic.lock:
                self.traffic.ranges[self.path.partition("?")[0], wanted] += 1
        if self.traffic.denying:
            self._answer(self.traffic.denying, {"content-length": str(len(DENIAL))}, DENIAL)
            return
        if wanted and self.traffic.take("failing"):
            self._answer(503, {"content-length": "0"}, b"")
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(upstream):
            upstream.request("GET", self.path, headers=dict(self.headers.items()))
            answer = upstream.getresponse()
            raw = answer.read()
        headers = {
            name: value
            for name, value in answer.getheaders()
            if name.lower()
            not in ("transfer-encoding", "connection", "content-length", "server", "date")
        }
        headers["content-length"] = str(len(raw))
        if wanted and self.traffic.take("damaging"):
            raw = bytes([raw[0] ^ 1]) + raw[1:]
        if wanted and self.traffic.take("cutting"):
            self._answer(answer.status, headers, raw[: len(raw) // 2])
            self.close_connection = True
            return
        self._answer(answer.status, headers, raw)

    def _answer(self, status: int, headers: dict[str, str], raw: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Tests look at `Traffic`."""


@contextlib.contextmanager
def before(port: int) -> Iterator[tuple[str, Traffic]]:
    """The proxy's address, and what passes."""
    traffic = Traffic()
    handler = type("Handler", (_Handler,), {"traffic": traffic, "port": port})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", traffic
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
