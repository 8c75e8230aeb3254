"""Managers as processes, with a tiny engine each, and what the Cluster Server would ask them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from console.environment import PROJECT
from tests.live import wait_until
from tests.processes import Process, start

KEY = "k" * 32
SECONDS = 120.0  # on a machine that is busy


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("manager", timeout=90)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(90)
        self.sock.connect(str(self._path))


@dataclass
class Running:
    """A manager, and the folder of its instance."""

    folder: Path
    state_dir: Path
    options: tuple[str, ...] = ()
    seconds: float = SECONDS  # to wait for a state
    process: Process = field(init=False)

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self.process = start(
                *("workload_manager", "run", "--folder", str(self.folder)),
                *("--state-dir", str(self.state_dir), *self.options),
                environment={**os.environ, "PYTHONPATH": str(PROJECT)},
                descriptors={1: log.fileno(), 2: log.fileno()},
                directory=self.folder,
            )

    @property
    def log_file(self) -> Path:
        return self.folder / "log"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def status(self, after: int = 0, wait: float = 0.0) -> dict[str, Any]:
        """Raises OSError while nobody answers."""
        code, body = self.ask(f"/status?after={after}&wait={wait}")
        assert code == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def ask(self, path: str) -> tuple[int, str]:
        """Status and body, by the manager's socket. Raises OSError."""
        with contextlib.closing(UnixConnection(self.folder / "manager.sock")) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def wait_for(self, state: str, reason: str = "", **more: Any) -> dict[str, Any]:
        """Until it is so, by polls as the Cluster Server has them."""
        found: dict[str, Any] = {}

        def holds() -> bool:
            nonlocal found
            assert self.process.poll() is None, self.log[-3000:]
            with contextlib.suppress(OSError, http.client.HTTPException):
                found = self.status(found.get("version", 0), 5.0)
            wanted = {"state": state, **more, **({"reason": reason} if reason else {})}
            return all(found.get(name) == value for name, value in wanted.items())

        try:
            wait_until(f"it is {state} {reason} {more}", holds, self.seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it says {found}; its log:\n{self.log[-3000:]}") from None
        return found

    def client(self, key: str = KEY) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.status()["url"], headers=headers, timeout=60)

    def client_when_ready(self) -> httpx.Client:
        self.wait_for("ready")
        return self.client()

    def set_goal(self, goal: str) -> None:
        fresh = self.folder / ".goal"
        fresh.write_text(goal)
        fresh.replace(self.folder / "goal")

    @property
    def seen(self) -> list[str]:
        """What its engines have seen."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "seen").read_text().splitlines()
        return []

    @property
    def engines(self) -> list[int]:
        """The processes of its engines so far."""
        return [int(line.split()[1]) for line in self.seen if line.startswith("started")]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ends(self, seconds: float = SECONDS) -> int:
        return self.process.wait(seconds)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def manager(
    directory: Path,
    name: str = "chat-0-r1-aaaa",
    *,
    state_dir: Path | None = None,
    options: tuple[str, ...] = (),
    secrets: dict[str, Any] | None = None,
    begins: bool = True,
    seconds: float = SECONDS,
    **more: Any,
) -> Iterator[Running]:
    """`more`: fields of its specification. `begins`: it is started here."""
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "workload": "chat",
        "replica": "chat-0",
        "instance": name,
        "revision": 1,
        "model": "tiny",
        "tokens_max": 4096,
        "grace_seconds": 20.0,
        **more,
    }
    spec.setdefault(
        "engine",
        {
            "kind": "command",
            "command": [
                *(sys.executable, "-m", "tests.workload_manager.tiny_engine"),
                *("{port}", str(folder)),
            ],
            "environment": {"PYTHONPATH": str(PROJECT)},
        },
    )
    (folder / "spec.json").write_text(json.dumps(spec))
    (folder / "secrets.json").write_text(json.dumps({"api_key": KEY} if secrets is None else secrets))
    made = Running(folder, state_dir or directory / "state", options, seconds)
    if begins:
        made.start()
    try:
        yield made
    finally:
        if begins and made.process.poll() is None:
            made.process.terminate()
            try:
                made.process.wait(30)
            except subprocess.TimeoutExpired:
                made.kill()
        for pid in made.engines:
            with contextlib.suppress(ProcessLookupError):
                if is_alive(pid) and b"tiny_engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
