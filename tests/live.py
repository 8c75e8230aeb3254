"""A console that really runs: its own database, its own server process, asked over its socket."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg

from console.environment import PROJECT

START_SECONDS_MAX = 30.0


@dataclass
class LiveConsole:
    address: str
    username: str
    password: str
    environment: dict[str, str]
    serve: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes]

    def restart(self) -> None:
        """Another server process, on the same socket, in which connections wait meanwhile."""
        self.stop()
        self.process = self.serve()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)

    def token(self, *, read_only: bool = False) -> str:
        """A token of the admin's, made as a person makes it: log in, then post the form."""
        with httpx.Client(base_url=self.address, follow_redirects=True) as browser:
            browser.get("/log-in/")
            form = {"username": self.username, "password": self.password}
            browser.post("/log-in/", data={**form, **self._csrf(browser)})
            made = browser.post(
                "/api/v1/tokens",
                json={"name": "live", "read_only": read_only},
                headers={"X-CSRFToken": browser.cookies["tidegate_csrf"]},
            )
            made.raise_for_status()
            return str(made.json()["token"])

    @staticmethod
    def _csrf(browser: httpx.Client) -> dict[str, str]:
        return {"csrfmiddlewaretoken": browser.cookies["tidegate_csrf"]}


@contextlib.contextmanager
def live_console(
    directory: Path, settings: dict[str, str] | None = None, health_headers: dict[str, str] | None = None
) -> Iterator[LiveConsole]:
    """Serve a fresh console, its first admin made, until the block ends. `settings` by their names."""
    with database() as database_url:
        environment = {
            **os.environ,
            "DATABASE_URL": database_url,
            "TIDEGATE_STATIC_DIR": str(directory / "static"),
            **(settings or {}),
        }
        prepared = subprocess.run(
            [sys.executable, "manage.py", "prepare"],
            cwd=PROJECT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        facts = [json.loads(line) for line in prepared.stdout.splitlines()]
        admin = next(fact["admin"] for fact in facts if "admin" in fact)
        with listening() as listener, (directory / "server.log").open("wb") as log:

            def serve() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    [sys.executable, "-m", "console.serve", "--fd", str(listener.fileno())],
                    cwd=PROJECT,
                    env=environment,
                    pass_fds=(listener.fileno(),),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            console = LiveConsole(
                address, admin["username"], admin["password"], environment, serve, serve()
            )
            try:
                # The socket listens already, so this waits in it until the server is there.
                health = httpx.get(
                    f"{address}/-/health", timeout=START_SECONDS_MAX, headers=health_headers
                )
                health.raise_for_status()
                yield console
            finally:
                console.stop()


@contextlib.contextmanager
def database() -> Iterator[str]:
    """The URL of an empty database beside the tests' own, dropped at the end."""
    server = os.environ["DATABASE_URL"]
    name = f"live_{secrets.token_hex(6)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield listener


def wait_until(what: str, holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Ask `holds` until it is true; fail with `what` when it takes too long."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)
