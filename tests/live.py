"""A console that really runs: its own database, its own server process, asked over its socket."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.prepared import database, prepare, prepared
from tests.processes import Process, run, start

START_SECONDS_MAX = 120.0  # two on a machine that does nothing else
STOP_SECONDS_MAX = 60.0  # five and a little are for requests that are being answered
ANSWER_SECONDS_MAX = 60.0  # of a console; httpx waits for five unless it is told
PAUSE_SECONDS = 0.05
PAUSE_SECONDS_MAX = 0.5
SOCKET = 3  # its descriptor in a console
SHELL = ("console.manage", "shell", "--no-imports", "-c")


@dataclass
class LiveConsole:
    address: str
    username: str
    password: str
    environment: dict[str, str]
    serve: Callable[[], Process]
    process: Process

    def restart(self) -> None:
        """Another server process, on the same socket, in which connections wait meanwhile."""
        self.stop()
        self.process = self.serve()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(STOP_SECONDS_MAX)

    def token(self, *, read_only: bool = False) -> str:
        """A token of the admin's, made as a person makes it: log in, then post the form."""
        with httpx.Client(
            base_url=self.address, follow_redirects=True, timeout=START_SECONDS_MAX
        ) as browser:
            browser.get("/log-in/").raise_for_status()
            form = {"username": self.username, "password": self.password}
            browser.post("/log-in/", data={**form, **self._csrf(browser)})
            made = browser.post(
                "/api/v1/tokens",
                json={"name": "live", "read_only": read_only},
                headers={"X-CSRFToken": browser.cookies["tidegate_csrf"]},
            )
            made.raise_for_status()
            return str(made.json()["token"])

    def manage(self, code: str, told: str = "") -> str:
        """What this prints, run in the console's own environment."""
        return run(*SHELL, code, environment=self.environment, told=told)

    @staticmethod
    def _csrf(browser: httpx.Client) -> dict[str, str]:
        return {"csrfmiddlewaretoken": browser.cookies["tidegate_csrf"]}


@contextlib.contextmanager
def live_console(
    directory: Path, settings: dict[str, str] | None = None, health_headers: dict[str, str] | None = None
) -> Iterator[LiveConsole]:
    """Serve a fresh console, its first admin made, until the block ends. `settings` by their names; with
    a directory for static files among them it collects its own."""
    before = prepared()
    with database(like=before.database) as database_url:
        environment = {**os.environ, "DATABASE_URL": database_url, **(settings or {})}
        if "TIDEGATE_STATIC_DIR" in (settings or {}):
            prepare(environment)
        with listening() as listener, (directory / "server.log").open("wb") as log:

            def serve() -> Process:
                descriptors = {1: log.fileno(), 2: log.fileno(), SOCKET: listener.fileno()}
                return start(
                    *("console.serve", "--fd", str(SOCKET)),
                    environment=environment,
                    descriptors=descriptors,
                )

            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            console = LiveConsole(address, before.username, before.password, environment, serve, serve())
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
def listening() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield listener


def wait_until(what: str, holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Ask `holds` until it is true; fail with `what` when it takes too long. The longer an answer takes,
    the less often is it asked for: what it waits for needs the processors."""
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if holds():
            return
        answered = time.monotonic()
        if answered > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(min(max(PAUSE_SECONDS, 3 * (answered - asked)), PAUSE_SECONDS_MAX))
