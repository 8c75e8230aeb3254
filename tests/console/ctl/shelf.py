"""A person at a command line: `tidegatectl` with a home of its own, in this process or as one."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from console.ctl.command import main
from console.environment import PROJECT
from tests.live import ANSWER_SECONDS_MAX, LiveConsole

FLEET = """
stamps:
  east:
    leaves: {leaf-1: {spine_links: {up-1: {spine: spine-1, gbits: 400}}}, leaf-2: {}}
    nodes: {ax-1: {nics: {eth0: {leaf: leaf-1}}}, ax-2: {nics: {eth0: {leaf: leaf-2}}}}
    boxes: {cs-1: {domains: [{wio: 8, leaves: [leaf-1]}, {wio: 8, leaves: [leaf-2]}]}}
"""
NODE = {
    "control_url": "http://127.0.0.1:8410",
    "control_token": "t" * 32,
    "data_address": "tcp:127.0.0.1:8411",
    "software_version": "0.1.0",
    "protocol_min": 1,
    "protocol_max": 2,
    "memory_bytes": 1 << 40,
    "cpus": 64,
}
SECONDS_MAX = 30


@dataclass(frozen=True)
class Done:
    code: int
    output: str
    errors: str

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    @property
    def value(self) -> Any:
        return json.loads(self.output)


@dataclass
class Person:
    """`run` in this process, with what it reads from standard input; `process` as one of its own."""

    home: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
        own = {"XDG_CONFIG_HOME": str(self.home), "PYTHONPATH": str(PROJECT), "TERM": "xterm"}
        return {**kept, **own, **self.variables}

    def run(self, *words: str, told: str = "") -> Done:
        output, errors = io.StringIO(), io.StringIO()
        given = io.TextIOWrapper(io.BytesIO(told.encode()))
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            mock.patch.object(sys, "stdin", given),
            redirect_stdout(output),
            redirect_stderr(errors),
        ):
            try:
                code = main(words)
            except SystemExit as ended:  # of argparse
                code = int(ended.code or 0)
        return Done(int(code), output.getvalue(), errors.getvalue())

    def output_of(self, *words: str, told: str = "") -> str:
        done = self.run(*words, told=told)
        assert done.code == 0, done.errors + done.output
        return done.output

    def process(self, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(
            [sys.executable, "-m", "console.ctl", *words],
            cwd=PROJECT,
            **{"env": self.environment, **pipes, **more},
        )

    @contextlib.contextmanager
    def terminal(self, *words: str, columns: int = 100, **variables: str) -> Iterator[Terminal]:
        """The command at a terminal of so many columns, until the block ends."""
        main_end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {**self.environment, **variables}
        with os.fdopen(main_end, "rb", buffering=0) as opened:
            process = self.process(
                *words,
                env=environment,
                stdin=other,
                stdout=other,
                stderr=other,
                start_new_session=True,
            )
            os.close(other)
            try:
                yield Terminal(process, opened)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait(SECONDS_MAX)


@dataclass
class Terminal:
    process: subprocess.Popen[bytes]
    end: Any
    shown: str = ""

    def until(self, text: str) -> str:
        """All that has been shown, when it has this text in it."""
        deadline = time.monotonic() + SECONDS_MAX
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.shown!r}"
            self._read()
        return self.shown

    def all(self) -> str:
        """All that is shown until the command ends."""
        while self._read():
            pass
        self.process.wait(SECONDS_MAX)
        return self.shown

    def type(self, text: str) -> None:
        os.write(self.end.fileno(), text.encode())

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(SECONDS_MAX)

    def _read(self) -> bool:
        ready, _, _ = select.select([self.end], [], [], 1)
        if not ready:
            return self.process.poll() is None
        try:
            found = self.end.read(1 << 16)
        except OSError:  # nobody has the other end any more
            return False
        self.shown += found.decode(errors="replace")
        return bool(found)


def furnished(console: LiveConsole) -> None:
    """An org, a fleet of two nodes that have joined, and a box."""
    with api_of(console) as api:
        api.put("/fleet/description", json={"yaml": FLEET}).raise_for_status()
    join(console, "ax-1", "ax-2")


def join(console: LiveConsole, *nodes: str) -> None:
    with api_of(console) as api:
        for name in nodes:
            token = api.post("/join-tokens", json={"kind": "node"}).json()["token"]
            joined = httpx.post(
                f"{api.base_url}nodes/{name}/join",
                json=NODE,
                headers={"Authorization": f"Bearer {token}"},
                timeout=ANSWER_SECONDS_MAX,
            )
            joined.raise_for_status()


@contextlib.contextmanager
def api_of(console: LiveConsole) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {console.token()}", "If-Match": "*"}
    with httpx.Client(base_url=f"{console.address}/api/v1", headers=headers, timeout=30) as api:
        yield api
