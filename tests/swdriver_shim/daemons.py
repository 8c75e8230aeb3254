"""A driver's daemon with its agent, and requests to it."""

from __future__ import annotations

import base64
import json
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from console.environment import PROJECT
from swdriver_shim.daemon.stored_document import StoredDocument
from swdriver_shim.desired import Desired, token_hash
from swdriver_shim.keys import COLUMN_TOKENS
from tests.control_api import Tls, control_client
from tests.kvss_agent.plane import DRIVER, SECRET
from tests.kvss_agent.process import AgentProcess
from tests.live import wait_until
from tests.processes import Process, start

C = COLUMN_TOKENS
CONTROL = "c" * 40
ACME, GLOBEX = "a" * 40, "g" * 40
EACH = 64  # bytes per token


def told(agents: list[AgentProcess], generation: int = 1, **more: Any) -> dict[str, Any]:
    where = more.pop("where", agents[0])
    home = {"group": "full", "index": 0, "address": f"unix:{where.directory}/data.sock", "shard": "s"}
    token = (where.directory / "token").read_text().strip()
    home["control"] = {"url": str(where.http.base_url), "token": token}
    return {
        "generation": generation,
        "driver": DRIVER,
        "secret": base64.b64encode(SECRET).decode(),
        "model": {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [EACH]}]},
        "homes": [home],
        "orgs": [org("acme", ACME), org("globex", GLOBEX)],
        **more,
    }


def org(name: str, token: str, **policy: Any) -> dict[str, Any]:
    secret = base64.b64encode(name.encode().ljust(32, b"!")).decode()
    return {
        "name": name,
        "secret": secret,
        "tokens": [token_hash(token)],
        "policies": {"policy": policy},
    }


def stored_document(state_dir: Path) -> Desired:
    """What a daemon has stored, opened with the token of its API."""
    token = (state_dir / "token").read_text().strip()
    stored = StoredDocument(state_dir / "desired.json", token).read()
    assert stored
    return stored.document


def stored_bytes(state_dir: Path) -> list[bytes]:
    """All files of a daemon's state directory, and what is in the sealed ones."""
    token = (state_dir / "token").read_text().strip()
    sealed = [state_dir / "desired.json", state_dir / "notes" / "followed"]
    opened = [StoredDocument(path, token).read() for path in sealed]
    return [
        *(path.read_bytes() for path in state_dir.rglob("*") if path.is_file()),
        *(msgspec.json.encode(one.document) for one in opened if one),
    ]


class Daemon:
    """A driver's daemon, as a process of its own; see `AgentProcess`."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        launch: Sequence[str] = (),
        is_fresh: bool = False,
        host: str = "127.0.0.1",
        tls: Tls | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.log = directory / "log"
        token = directory / "token"
        token.write_text(CONTROL)
        where = ("--state-dir", str(directory), "--control", f"{host}:0")
        command = ("swdriver_shim", "serve", *where, *options)
        self.process: Process
        with self.log.open("w") as log:
            if launch or is_fresh:
                self.process = subprocess.Popen(
                    [*launch, sys.executable, "-m", *command], cwd=PROJECT, stderr=log
                )
            else:
                self.process = start(*command, descriptors={2: log.fileno()})
        wait_until("it listens", lambda: "Listening" in self.log.read_text())
        found = re.search(rf"Listening on ({re.escape(host)}:\d+)", self.log.read_text())
        assert found
        self.http = control_client(found[1], tls=tls, seconds=60)

    def stop(self) -> int:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()

    def is_ready(self) -> bool:
        return self.http.get("/-/health").status_code == 200

    def ask(self, token: str, path: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        return self.http.post(f"/v1/{path}", json=body, headers=headers)

    def control(self, path: str, document: dict[str, Any] | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {CONTROL}"}
        if document is None:
            return self.http.get(f"/v1/{path}", headers=headers)
        return self.http.put(f"/v1/{path}", json=document, headers=headers)

    def shard(self) -> dict[str, Any]:
        [shard] = self.control("observed").json()["shards"]
        assert isinstance(shard, dict)
        return shard

    def store(self, token: str, tokens: list[int], kv: bytes, **more: Any) -> httpx.Response:
        header = json.dumps({"tokens": tokens, **more}).encode()
        body = struct.pack("<I", len(header)) + header + kv
        return self.http.post("/v1/store", content=body, headers={"authorization": f"Bearer {token}"})

    def load(self, token: str, tokens: list[int]) -> tuple[int, bytes]:
        answer = self.ask(token, "load", tokens=tokens)
        assert answer.status_code == 200, answer.text
        (length,) = struct.unpack_from("<I", answer.content)
        header = json.loads(answer.content[4 : 4 + length])
        return header["tokens"], answer.content[4 + length :]


def kv(tokens: int, seed: int = 0) -> bytes:
    return bytes((seed + n) % 251 for n in range(tokens * EACH))
