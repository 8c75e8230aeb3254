"""An evil agent: joins like a real one, has a real certificate, and answers whatever it is told to."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Self

import httpx

from kvss_agent.data_plane import constants
from kvss_agent.process.membership import credential
from kvss_agent.security.certificates import Role
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.security.trust import Trust
from telemetry.version import tidegate_version
from tests.hostile.answers import Answer, Asked, holds, says_json
from tests.hostile.engine import UNVERIFIED

TOKEN: Final = "evil-" + "e" * 40  # as which the console knows it
HEAD_BYTES_MAX: Final = 1 << 16
ASKED_MAX: Final = 10_000


class Peer:
    """A control API at a port of its own; each connection is answered in a thread, once.

    `answer` is what it says to whatever it is asked; `by_path` what it says to paths that begin so;
    with `is_mute` it does not even begin TLS. All may be changed at any time. `asked` is what it was
    asked.
    """

    def __init__(self, answer: Answer = holds) -> None:
        self.answer = answer
        self.by_path: dict[str, Answer] = {}
        self.asked: deque[Asked] = deque(maxlen=ASKED_MAX)
        self.tls: ssl.SSLContext | None = None
        self.is_mute = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._open: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="evil peer", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        scheme = "https" if self.tls else "http"
        return f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        connection = plain
        with contextlib.suppress(OSError, ValueError):
            self._open.add(plain)
            try:
                plain.settimeout(30)
                if self.is_mute:
                    holds(Asked("", "", {}, b""), plain)
                    return
                if self.tls:
                    connection = self.tls.wrap_socket(plain, server_side=True)
                asked = read_request(connection)
                self.asked.append(asked)
                path = next((path for path in self.by_path if asked.path.startswith(path)), None)
                answer = self.by_path[path] if path is not None else self.answer
                answer(asked, connection)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
            finally:
                self._open.discard(plain)
                connection.close()
                plain.close()


def read_request(connection: socket.socket) -> Asked:
    """One whole request with a Content-Length. Raises ValueError for anything else."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        piece = connection.recv(1 << 16)
        if not piece or len(raw) > HEAD_BYTES_MAX:
            raise ValueError("no request")
        raw += piece
    first, _, rest = raw.partition(b"\r\n\r\n")
    request, *lines = first.decode("latin-1").split("\r\n")
    method, path, _ = request.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    while len(rest) < length:
        piece = connection.recv(1 << 20)
        if not piece:
            break
        rest += piece
    return Asked(method, path, headers, rest)


@dataclass
class EvilAgent:
    """`peer` answers, with a certificate of the console's once it is part of the fleet; `enter` makes it
    that; `beat` keeps it alive there. Its key is kept in `directory`: it is the same one again later."""

    console: str
    name: str
    directory: Path
    peer: Peer = field(default_factory=Peer)
    token: str = TOKEN
    kind: str = "nodes"
    role: Role = Role.NODE

    def __post_init__(self) -> None:
        self.trust = Trust.load(ProcessIdentity.load(self.directory / self.name, self.topic))
        self.peer.tls = self.trust.for_control

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.__exit__()

    @property
    def topic(self) -> str:
        return f"{self.role}:{self.name}"

    def facts(self) -> dict[str, Any]:
        return {
            "control_url": self.peer.url,
            "data_address": "tcp:127.0.0.1:9",
            "software_version": tidegate_version(),
            "protocol_min": constants.VERSION_MIN,
            "protocol_max": constants.VERSION,
            "memory_bytes": 1 << 40,
            "cpus": 64,
        }

    def once(self) -> dict[str, Any]:
        return {"nics": [{"name": "eth0", "leaf": "leaf-evil"}]}

    def enter(self, join_token: str) -> None:
        """Join, or come back as who it is there already; get a certificate, and say so."""
        if self.beat().status_code == HTTPStatus.UNAUTHORIZED:
            request = {"certificate_request": self.trust.identity.certificate_request()}
            told = {**self.facts(), **self.once(), **request, "control_token": self.token}
            self._post("join", join_token, told).raise_for_status()
        self.certify()
        self.beat().raise_for_status()

    def certify(self) -> None:
        request = {"certificate_request": self.trust.identity.certificate_request()}
        answer = self._post("certificate", self._credential, request)
        answer.raise_for_status()
        told = answer.json()
        self.trust.accept(told["certificate"], told["authorities"], told["digest"])

    def beat(self, **other: Any) -> httpx.Response:
        trusts = {"trusts": self.trust.digest} if self.trust.digest else {}
        return self._post("heartbeat", self._credential, {**self.facts(), **trusts, **other})

    @property
    def _credential(self) -> str:
        return credential(self.token, self.topic)

    def _post(self, verb: str, bearer: str, told: Mapping[str, Any]) -> httpx.Response:
        address = f"{self.console}/api/v1/{self.kind}/{self.name}/{verb}"
        headers = {"authorization": f"Bearer {bearer}"}
        return httpx.post(address, json=dict(told), headers=headers, timeout=30, verify=UNVERIFIED)


@contextlib.contextmanager
def beating(agent: EvilAgent, seconds: float = 2.0) -> Iterator[EvilAgent]:
    """It is alive for as long as this lasts, so that it is asked again and again."""
    ends = threading.Event()

    def beat() -> None:
        while not ends.wait(seconds):
            with contextlib.suppress(httpx.HTTPError):
                agent.beat()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield agent
    finally:
        ends.set()
        thread.join(40)


def well_behaved(generation: int = 0) -> Answer:
    """What an agent says that has nothing and was told nothing."""
    return says_json(
        {"generation": generation, "observed_generation": generation, "shards": [], "ready": True}
    )
