"""Consoles that answer as no console should: over HTTP, and with certificates that nobody knows."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = bytes | Iterable[bytes]  # the latter piece by piece, until the caller has enough
Answer = tuple[int, dict[str, str], Body]
Answering = Callable[[str, str, Message], Answer]


@contextlib.contextmanager
def peer(answer: Answering, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server that answers each method, path and headers so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            status, headers, body = answer(self.command, self.path, self.headers)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if isinstance(body, bytes):
                self.send_header("Content-Length", str(len(body)))
                body = [body]
            else:
                self.send_header("Connection", "close")
            self.end_headers()
            with contextlib.suppress(OSError):
                for piece in body:
                    self.wfile.write(piece)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - as the library asks

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls:
            listening = server.socket
            server.socket = tls.wrap_socket(listening, server_side=True, do_handshake_on_connect=False)
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # a refused handshake
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
