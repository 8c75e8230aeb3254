"""A real S3 server in a process of its own, that can be killed and started again."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
from collections.abc import Iterator

from console.stack.endpoint import free_port
from tests.live import wait_until

BUCKET = "columns"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "of-tier-2"}


class Server:
    """moto's server. It forgets everything when it is killed, as a bucket does that somebody removed."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **CREDENTIALS},
        )
        wait_until("the S3 server answers", self._answers)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def make_bucket(self, name: str = BUCKET) -> None:
        assert self._put(f"/{name}") == 200

    def keep_versions(self, name: str) -> None:
        enabled = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        assert self._put(f"/{name}?versioning", enabled) == 200

    def _put(self, path: str, body: str = "") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("PUT", path, body)
            return connection.getresponse().status

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/moto-api/")
            return connection.getresponse().status == 200
        return False


@contextlib.contextmanager
def running() -> Iterator[Server]:
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.kill()
