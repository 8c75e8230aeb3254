"""A whole stack as `make up` starts it, with a state directory of its own, for the tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from console.environment import PROJECT
from console.stack import endpoint, snapshot
from console.stack.privileges import launcher
from console.stack.remembered import Remembered
from kvss_agent.native.builder import Unavailable, newest_build
from tests import late
from tests.live import ANSWER_SECONDS_MAX, wait_until
from tests.prepared import DIRECTORY, directory_of_run, once
from tests.stack.sessions import is_running, members

OURS = ("web", "worker", "beat", "ingest", "rollup", "cluster", "orchestrator")
SERVERS = ("postgres", "redis", "telemetry")
COMMAND = (sys.executable, "-m", "console.stack")
UP_SECONDS_MAX = 600.0  # ten on a machine that does nothing else
PATIENCE_SECONDS = 100.0  # a supervisor whose servers write to a slow disk may take 75 to stop
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")


def until(holds: Callable[[], object], seconds_max: float = PATIENCE_SECONDS) -> None:
    wait_until("what the test waits for", holds, seconds_max)


@dataclass
class Whole:
    """One stack; `up` may be called again after an end."""

    state: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    first_password: str = ""  # where its data is a copy; otherwise it says it
    # In front of every command, to be somebody or somewhere else. A killed test run leaves no stack.
    launch: tuple[str, ...] = tuple(launcher(dies_with_us=signal.SIGTERM))

    @property
    def environment(self) -> dict[str, str]:
        """What a newcomer's shell has, and nothing of what the test run itself was started with."""
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        ours = {"TIDEGATE_STATE_DIR": str(self.state), "TIDEGATE_PORT": str(self.port)}
        # Of the demo there is a test of its own.
        return {**kept, **late.told(), **ours, "TIDEGATE_DEMO": "0"}

    @property
    def said_file(self) -> Path:
        return self.state.with_name(f"{self.state.name}.said.{self.starts}")

    @property
    def said(self) -> str:
        return self.said_file.read_text() if self.said_file.exists() else ""

    @property
    def address(self) -> str:
        found = re.search(r"http://[0-9.]+:\d+", self.said)
        assert found, self.said
        return found[0]

    @property
    def brain_address(self) -> str:
        """Where clients ask the demo's brain."""
        found = re.search(r"Models +(http://[0-9.]+:\d+)/v1", self.said)
        assert found, self.said
        return found[1]

    @property
    def password(self) -> str:
        if self.first_password:
            return self.first_password
        found = re.search(r"Password +(\S+)", self.said)
        assert found, self.said
        return found[1]

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A verb of the command line, to its end."""
        return subprocess.run(
            [*self.launch, *COMMAND, *arguments],
            cwd=PROJECT,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=UP_SECONDS_MAX,
            check=False,
        )

    def up(self, *arguments: str, **more: str) -> None:
        """Start it and wait until it says that it is up."""
        self._take_native_build()
        self.starts += 1
        with self.said_file.open("wb") as output:
            self.process = subprocess.Popen(
                [*self.launch, *COMMAND, "up", *arguments],
                cwd=PROJECT,
                env={**self.environment, **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until(lambda: "Tidegate is up" in self.said or self.has_ended(), UP_SECONDS_MAX)
        assert not self.has_ended(), self.said
        until(lambda: "Stop" in self.said and "╰" in self.said)

    def _take_native_build(self) -> None:
        """Give it the checkout's build of the compiled mover. Its processes would compile one for two
        seconds of a processor."""
        with contextlib.suppress(Unavailable):
            if (built := newest_build()) and not (folder := self.state / "native").exists():
                folder.mkdir(mode=0o755, parents=True)
                shutil.copy2(built, folder)

    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        assert self.process
        return self.process.wait(PATIENCE_SECONDS)

    def rows(self) -> Mapping[str, snapshot.Row]:
        return {row.name: row for row in snapshot.read(self.state / "status")}

    def pid(self, name: str) -> int:
        """The process of a service, as soon as it is ready: one that leans on another that was just
        killed may be on its way back itself."""
        until(lambda: self.rows()[name].state == "ready" and self.rows()[name].pid is not None)
        pid = self.rows()[name].pid
        assert pid is not None
        return pid

    def is_back(self, name: str, former_pid: int) -> bool:
        row = self.rows().get(name)
        return row is not None and row.state == "ready" and row.pid not in (None, former_pid)

    def is_healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.address}/-/health", timeout=5).status_code == httpx.codes.OK
        return False

    def pids(self) -> list[int]:
        """All processes of all services."""
        firsts = [fact.pid for fact in Remembered(self.state / "run").facts().values()]
        return [pid for first in firsts for pid in members(first)]

    def assert_nothing_is_left(self, pids: list[int]) -> None:
        until(lambda: not [pid for pid in pids if is_running(pid)])
        assert not [path for path in self.state.rglob("*") if path.is_socket()]
        assert not list((self.state / "run").iterdir())
        assert not (self.state / "env").exists()
        assert not self.is_healthy_without_asking()

    def is_healthy_without_asking(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{self.address}/-/health/live", timeout=2)
            return True
        return False


@dataclass(frozen=True)
class Ended:
    """A stack that was up once and was told to end: its data, what it said, and how it ended."""

    state: str
    said: str
    password: str
    processes: int
    exit_code: int


def ended() -> Ended:
    """One for all workers of the run."""
    return Ended(**json.loads(once("ended.json", _end_one)))


def _end_one() -> str:
    # Of its own: data of an attempt that failed would keep the next one from saying a password.
    with whole_stack(directory_of_run(f"ended-{secrets.token_hex(4)}")) as stack:
        stack.up()
        pids = stack.pids()
        stack.signal(signal.SIGINT)
        code = stack.end()
        stack.assert_nothing_is_left(pids)
        made = Ended(str(stack.state), stack.said, stack.password, len(pids), code)
        return json.dumps(asdict(made))


@contextlib.contextmanager
def whole_stack(directory: Path) -> Iterator[Whole]:
    """A stack that is not up yet; whatever is left of it at the end is killed."""
    whole = Whole(directory / "state", endpoint.free_port())
    try:
        yield whole
    finally:
        if not whole.has_ended():
            whole.signal(signal.SIGTERM)
            whole.end()
        if whole.pids():
            whole.run("down")


@contextlib.contextmanager
def prepared_stack(directory: Path) -> Iterator[Whole]:
    """One that was up before: its data is a copy, which takes three seconds of a processor less than to
    make it. Outside of a run of tests there is nothing to copy."""
    with whole_stack(directory) as stack:
        if DIRECTORY in os.environ:
            before = ended()
            subprocess.run(["/bin/cp", "-a", before.state, stack.state], check=True)  # owners as well
            stack.first_password = before.password
        yield stack


@contextlib.contextmanager
def browser_of(stack: Whole, password: str) -> Iterator[httpx.Client]:
    """A browser in which the first admin has logged in, if the password is right."""
    with httpx.Client(
        base_url=stack.address, follow_redirects=True, timeout=ANSWER_SECONDS_MAX
    ) as browser:
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', browser.get("/log-in/").text)
        assert token
        form = {"username": "admin", "password": password, "csrfmiddlewaretoken": token[1]}
        browser.post("/log-in/", data=form, headers={"Referer": stack.address + "/log-in/"})
        yield browser


def new_token(browser: httpx.Client) -> str:
    """As the page Tokens makes one that may read and write."""
    headers = {"X-CSRFToken": browser.cookies["tidegate_csrf"]}
    made = browser.post("/api/v1/tokens", json={"name": "tutorial", "read_only": False}, headers=headers)
    assert made.status_code == httpx.codes.CREATED, made.text
    return str(made.json()["token"])


def log_in(stack: Whole, password: str) -> httpx.Response:
    """What the home page answers to whoever has logged in with the password of the first start."""
    with browser_of(stack, password) as browser:
        return browser.get("/")
