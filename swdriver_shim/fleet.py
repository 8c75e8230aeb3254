"""Where a replay's bytes go: a few agents that are started for it, or one that runs already.

Shards are named after the driver, their group and their number: `replay.full.0`.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import kvss_agent
from kvss_agent.client import Credentials, Lost, ShardClient, connect
from swdriver_shim.layout import Layout
from swdriver_shim.moving import Shard

DRIVER: Final = "replay"
START_SECONDS_MAX: Final = 30.0
GRANT_SECONDS_MAX: Final = 300.0  # many gigabytes of memory take a while
STOP_SECONDS_MAX: Final = 20.0
PAUSE_SECONDS: Final = 0.02
ANSWER_SECONDS_MAX: Final = 30.0

Shards = list[list[Shard]]  # of each group


class NoAgent(Exception):
    """An agent is not there or not as it has to be. A sentence for whoever asked for it."""


def at(address: str, layout: Layout, credentials: Credentials) -> Shards:
    """All shards of a layout at one agent. Raises NoAgent where they are not there."""
    return _connected(layout, credentials, lambda index: address)  # noqa: ARG005 - all at the same one


@contextlib.contextmanager
def started(layout: Layout, slots: int, agents: int, tier2_bytes: int = 0) -> Iterator[Shards]:
    """Agents of so many slots, as processes, with the shards dealt out to them in turn; with a tier 2 of
    so many bytes each, in one directory. They and all they kept are gone at the end. Raises NoAgent."""
    credentials = Credentials(DRIVER, secrets.token_bytes(32))
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-replay-"))
        fleet = [_Agent(Path(scratch) / f"agent{index}") for index in range(agents)]
        tier2 = {"kind": "posix", "path": f"{scratch}/tier2", "cap_bytes": tier2_bytes}
        for agent in fleet:
            stack.enter_context(agent)
        for index, agent in enumerate(fleet):
            told = _document(layout, slots, credentials, lambda shard: shard % agents == index)  # noqa: B023
            agent.be({**told, "tier2": tier2} if tier2_bytes else told)
        yield _connected(layout, credentials, lambda index: fleet[index % agents].address)


def _names(layout: Layout, driver: str) -> Iterator[tuple[str, int, int, int]]:
    """Name, group, index and slot size of every shard."""
    for group, of in enumerate(layout.groups):
        for index, slot_bytes in enumerate(of.slot_bytes):
            yield f"{driver}.{of.name}.{index}", group, index, slot_bytes


def _document(
    layout: Layout, slots: int, credentials: Credentials, is_meant: Callable[[int], bool]
) -> dict[str, Any]:
    secret = base64.b64encode(credentials.secret or b"").decode()
    shards = [
        {"name": name, "driver": credentials.driver, "slot_bytes": size, "slots": slots, "part": name}
        for name, _, index, size in _names(layout, credentials.driver)
        if is_meant(index)
    ]
    peers = [{"name": credentials.driver, "secret": secret}]
    return {"generation": 1, "shards": shards, "peers": peers}


def _connected(layout: Layout, credentials: Credentials, address_of: Callable[[int], str]) -> Shards:
    made: Shards = [[] for _ in layout.groups]
    for name, group, index, slot_bytes in _names(layout, credentials.driver):
        shard = Shard(name, _connector(address_of(index), name, slot_bytes, credentials))
        made[group].append(shard)
        if not shard.open():
            for each in (one for of in made for one in of):
                each.close()
            raise NoAgent(f"Shard {name} can't be used: {shard.lost_because}")
    return made


def _connector(
    address: str, name: str, slot_bytes: int, credentials: Credentials
) -> Callable[[], ShardClient]:
    def connector() -> ShardClient:
        client = connect(address, name, credentials)
        if client.slot_bytes != slot_bytes:
            client.close()
            raise Lost(f"its slots have {client.slot_bytes} bytes; the layout wants {slot_bytes}")
        return client

    return connector


class _Agent:
    """One agent as a process of its own, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.address = f"unix:{directory / 'data.sock'}"
        self._port = 0

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvss_agent", "--control", "127.0.0.1:0"),
                    *("--state-dir", str(self._directory), "--drain-seconds", "0"),
                ],
                cwd=Path(kvss_agent.__file__).parent.parent,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the replay, which stops them itself
            )
        try:
            self._wait("did not start", START_SECONDS_MAX, self._listens)
        except NoAgent:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def be(self, document: dict[str, Any]) -> None:
        """What the document says. Returns when all of it is there."""
        status, answer = self._ask("PUT", "/v1/desired", json.dumps(document))
        if status != http.client.ACCEPTED:
            raise NoAgent(f"An agent refuses what it is told: {answer}")
        self._wait("was not granted its memory", GRANT_SECONDS_MAX, self._has_all)

    def _listens(self) -> bool:
        found = re.search(r"control on 127\.0\.0\.1:(\d+)", self._log.read_text())
        self._port = int(found[1]) if found else 0
        return found is not None

    def _has_all(self) -> bool:
        _, observed = self._ask("GET", "/v1/observed")
        for shard in observed["shards"]:
            if shard["state"] == "refused":
                raise NoAgent(f"An agent can't have shard {shard['name']}: {shard['reason']}")
        return bool(observed["observed_generation"] == 1 and observed["ready"])

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, dict[str, Any]]:
        token = (self._directory / "token").read_text().strip()
        control = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS_MAX)
        try:
            control.request(method, path, body, {"Authorization": f"Bearer {token}"})
            answer = control.getresponse()
            return answer.status, json.loads(answer.read())
        except OSError as error:
            raise NoAgent(f"An agent does not answer: {error}") from error
        finally:
            control.close()

    def _wait(self, otherwise: str, seconds: float, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NoAgent(f"An agent {otherwise}. Its last words: {self._log.read_text()[-500:]}")
            time.sleep(PAUSE_SECONDS)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _log(self) -> Path:
        return self._directory / "log"
