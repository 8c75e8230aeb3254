"""One question to another process over HTTP, for a thread that waits for the answer. See `exchange`.

    peer = BlockingExchange("https://10.0.0.1:8410", trusted, server_name=…)
    reply = peer.ask("GET", "/v1/observed", token, Budget(5.0))          # Unanswered, or a Reply

It is bounded as there: a whole exchange has one deadline, from connecting to the last byte, in however
small pieces that comes (only looking up a name takes as long as the system lets it), a body is not
received beyond its limit, nothing is decompressed, no redirection is followed and no proxy used.
Connections are kept and used again. What httpx offers to threads bounds each wait, and not all of them
together; so this is `http.client` on a socket that does.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvss_agent.dialing import connected_to
from kvss_agent.http.answers import (
    COMPRESSED,
    PLAIN,
    Budget,
    Fault,
    Reply,
    Unanswered,
    too_long,
    unreached,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

CONNECT_SECONDS_MAX: Final = 5.0
IDLE_MAX: Final = 16  # connections that are kept
PIECE_BYTES: Final = 1 << 20
JSON: Final = "application/json"


class BlockingExchange:
    """Questions to one process. May be used from any thread."""

    def __init__(self, url: str, trusted: ssl.SSLContext | None = None, server_name: str = "") -> None:
        """`trusted`: whose certificates are believed and which one is shown, where the system's are not.
        `server_name`: whose certificate it has to show, where that is not the host of the address.
        Raises ValueError for an address that is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address of an HTTP server")
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._trusted = (trusted or _system()) if parts.scheme == "https" else None
        self._server_name = server_name or self._host
        self._idle = deque[_Connection]()
        self._closed = False

    def close(self) -> None:
        """Questions that are under way are answered; nothing is kept after them."""
        self._closed = True
        with contextlib.suppress(IndexError):  # there is none left
            while True:
                self._idle.pop().close()

    def ask(
        self,
        method: str,
        path: str,
        token: str,
        budget: Budget,
        content: bytes | None = None,
        media_type: str = JSON,
    ) -> Reply:
        """Raises Unanswered, and nothing else, whatever the other does."""
        connection = self._connection()
        connection.ends = time.monotonic() + budget.seconds
        headers = {"Authorization": f"Bearer {token}", "Accept": "*/*", "User-Agent": "Tidegate"}
        if content is not None:
            headers["Content-Type"] = media_type
        try:
            connection.request(method, self._prefix + path, content, headers)
            with connection.getresponse() as answer:
                reply = _received(answer, budget.bytes_max)
        except TimeoutError:
            raise Unanswered(Fault.LATE, f"It has not answered within {budget.seconds:g} s.") from None
        except ssl.SSLError as error:  # that of a certificate is a ValueError, too
            raise unreached(error) from None
        except (http.client.InvalidURL, ValueError) as error:  # a header or a name that can't be sent
            raise Unanswered(Fault.UNREACHED, f"Cannot reach it: {error}.") from None
        except http.client.HTTPException as error:
            why = str(error) or type(error).__name__
            raise Unanswered(
                Fault.BROKEN, f"The connection broke, or it does not speak HTTP: {why}."
            ) from None
        except OSError as error:
            raise unreached(error) from None
        else:
            self._keep(connection)
            return reply
        finally:
            if not connection.is_kept:
                connection.close()

    def _connection(self) -> _Connection:
        """One that is kept and that the other side has not closed; otherwise a new one."""
        with contextlib.suppress(IndexError):
            while True:
                kept = self._idle.pop()
                if kept.is_quiet():
                    kept.is_kept = False
                    return kept
                kept.close()
        return _Connection(self._host, self._port, self._trusted, self._server_name)

    def _keep(self, connection: _Connection) -> None:
        if connection.sock is None or len(self._idle) >= IDLE_MAX:
            return  # the other side ends it with its answer, or there are enough
        connection.is_kept = True
        self._idle.append(connection)
        if self._closed:
            self.close()


class _Connection(http.client.HTTPConnection):
    """No wait on it is longer than what is left until `ends`."""

    def __init__(self, host: str, port: int, trusted: ssl.SSLContext | None, server_name: str) -> None:
        super().__init__(host, port)
        self.ends = 0.0
        self.is_kept = False
        self._trusted, self._server_name = trusted, server_name

    def left(self) -> float:
        """Raises TimeoutError when there is nothing left."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def connect(self) -> None:
        sock = connected_to(self.host, self.port, min(self.left(), CONNECT_SECONDS_MAX))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._trusted:
                sock.settimeout(self.left())  # a handshake has one deadline by itself
                sock = self._trusted.wrap_socket(sock, server_hostname=self._server_name)
        except BaseException:
            sock.close()
            raise
        self.sock = _BoundedSocket(sock, self.left)

    def is_quiet(self) -> bool:
        """Nothing has come on it, not even its end."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)


class _BoundedSocket:
    """What `http.client` uses of a socket. Each wait has as long as is left."""

    def __init__(self, connected: socket.socket, left: Callable[[], float]) -> None:
        self._socket, self._left = connected, left

    def sendall(self, data: ReadableBuffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            self._socket.settimeout(self._left())
            view = view[self._socket.send(view) :]

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Answer(self._socket, self._left))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class _Answer(io.RawIOBase):
    """The bytes of one answer. A socket that is closed meanwhile is so for good when this is."""

    def __init__(self, connected: socket.socket, left: Callable[[], float]) -> None:
        self._socket, self._left = connected, left
        self._bytes = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, into: WriteableBuffer) -> int | None:
        self._socket.settimeout(self._left())
        return self._bytes.readinto(into)

    def close(self) -> None:
        self._bytes.close()
        super().close()


def _received(answer: http.client.HTTPResponse, bytes_max: int) -> Reply:
    if (answer.getheader("content-encoding") or "").strip().lower() not in PLAIN:
        raise Unanswered(Fault.COMPRESSED, COMPRESSED)
    if answer.length is not None:
        if answer.length > bytes_max:
            raise too_long(bytes_max, str(answer.length))
        return Reply(answer.status, answer.read())  # at once, without a copy
    pieces, left = list[bytes](), bytes_max
    while left >= 0 and (piece := answer.read(PIECE_BYTES)):
        pieces.append(piece)
        left -= len(piece)
    if left < 0:
        raise too_long(bytes_max)
    return Reply(answer.status, b"".join(pieces))


@cache
def _system() -> ssl.SSLContext:
    return ssl.create_default_context()
