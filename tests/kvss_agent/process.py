"""A real agent in a process of its own."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from console.environment import PROJECT
from kvss_agent.client import Credentials, ShardClient, Transport, connect
from kvss_agent.shard.arena import slot_bytes_for
from tests.control_api import Tls, control_client
from tests.kvss_agent.plane import DRIVER, PAYLOAD, READER, SECRET
from tests.live import wait_until
from tests.processes import Process, start


def spec(name: str = "s", slots: int = 8, payload: int = PAYLOAD, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "slot_bytes": slot_bytes_for(payload),
        "slots": slots,
        "driver": DRIVER,
        "readers": [READER],
        "part": name,
        **more,
    }


def document(generation: int, *shards: dict[str, Any], **more: Any) -> dict[str, Any]:
    secrets = {DRIVER: SECRET, READER: SECRET[::-1]}
    peers = [
        {"name": name, "secret": base64.b64encode(secret).decode()} for name, secret in secrets.items()
    ]
    return {"generation": generation, "shards": list(shards), "peers": peers, **more}


@dataclass
class AgentProcess:
    directory: Path
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    launch: tuple[str, ...] = ()  # before the command
    is_fresh: bool = False  # an interpreter of its own is started, not one that has imported all
    host: str = "127.0.0.1"
    tls: Tls | None = None  # with which it is asked
    process: Process = field(init=False)
    http: httpx.Client = field(init=False)
    tcp: int = 0

    def start(self) -> None:
        where = ("--state-dir", str(self.directory), "--control", f"{self.host}:0")
        command = ("kvss_agent", *where, *self.options)
        environment = {**os.environ, **self.environment}
        with self._log.open("w") as log:
            if self.launch or self.is_fresh:
                self.process = subprocess.Popen(
                    [*self.launch, sys.executable, "-m", *command],
                    cwd=PROJECT,
                    env=environment,
                    stderr=log,
                )
            else:
                self.process = start(*command, environment=environment, descriptors={2: log.fileno()})
        wait_until(
            "the agent listens", lambda: "Listening" in self.log or self.process.poll() is not None
        )
        assert self.process.poll() is None, self.log
        control = re.search(rf"control on ({re.escape(self.host)}:\d+)", self.log)
        assert control
        if tcp := re.search(r"drivers on \S+ and 127.0.0.1:(\d+)", self.log):
            self.tcp = int(tcp[1])
        token = (self.directory / "token").read_text().strip()
        self.http = control_client(control[1], token, self.tls)

    @property
    def _log(self) -> Path:
        return self.directory / "log"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def tell(self, told: dict[str, Any]) -> dict[str, Any]:
        """Give it a document, and wait until it has tried all of it."""
        answer = self.http.put("/v1/desired", json=told)
        assert answer.status_code == 202, answer.text
        wait_until(
            "the document is followed",
            lambda: self.observed()["observed_generation"] == told["generation"],
        )
        return self.observed()

    def observed(self) -> dict[str, Any]:
        answer = self.http.get("/v1/observed")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    @contextlib.contextmanager
    def client(
        self,
        kind: str = "unix",
        shard: str = "s",
        *,
        driver: str = DRIVER,
        write: bool = True,
        stall_seconds: float = 10.0,
    ) -> Iterator[ShardClient]:
        address = f"tcp:127.0.0.1:{self.tcp}" if kind == "tcp" else f"unix:{self.directory}/data.sock"
        transport: Transport = "shm" if kind == "shm" else "stream"
        secret = SECRET if driver == DRIVER else SECRET[::-1]
        credentials = Credentials(driver, secret, stall_seconds=stall_seconds)
        client = connect(address, shard, credentials, transport=transport, write=write)
        try:
            yield client
        finally:
            client.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextlib.contextmanager
def agent(
    directory: Path, *options: str, environment: dict[str, str] | None = None, **more: Any
) -> Iterator[AgentProcess]:
    directory.mkdir(exist_ok=True)
    made = AgentProcess(directory, options, environment or {}, **more)
    made.start()
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.kill()
        made.http.close()
