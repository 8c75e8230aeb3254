"""The agents of a replay: a few that are started for it, or one that runs already.

    with fleet.started(layout, columns=4096, agents=2) as agents:
        driver = Driver(layout, "emulated", agents.shards())

Shards are named after the driver, their group and their number: `replay.full.0`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import kvss_agent
from kvss_agent.client import Credentials
from kvss_agent.http.answers import Unanswered
from swdriver_shim.data_plane import grants
from swdriver_shim.data_plane.agent_control import AgentControl, PullResult
from swdriver_shim.data_plane.homes import Home
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.layout import Layout
from telemetry import leash
from telemetry.stop import ends_clean, undisturbed

DRIVER: Final = "replay"
START_SECONDS_MAX: Final = 30.0
STOP_SECONDS_MAX: Final = 20.0
PAUSE_SECONDS: Final = 0.02

Shards = list[list[Shard]]  # of each group


class NoAgent(Exception):
    """An agent can't be reached or used. The message is a sentence for the user."""


def at(address: str, layout: Layout, credentials: Credentials) -> Shards:
    """All shards of a layout at one agent. Raises NoAgent."""
    return _connected(layout, credentials, lambda name: address)  # noqa: ARG005 - all at the same one


class Move(NamedTuple):
    """How many slots were pulled from one agent to another, and when."""

    slots: int
    began: float
    ended: float


@contextlib.contextmanager
def started(layout: Layout, columns: int, agents: int, tier2_bytes: int = 0) -> Iterator[Fleet]:
    """Agents as processes, with room for so many columns; shards are assigned in turn. With a tier 2 of
    so many bytes each, in one directory. They are stopped and all data is removed at the end, which
    SIGTERM and SIGHUP are, too. Raises NoAgent."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ends_clean())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-replay-"))
        tier2 = {"kind": "posix", "path": f"{scratch}/tier2", "cap_bytes": tier2_bytes}
        each = [
            stack.enter_context(Agent(Path(scratch) / f"agent{index}", tier2 if tier2_bytes else None))
            for index in range(agents)
        ]
        yield Fleet(layout, columns, each)


class Fleet:
    """Running agents, and which of them is each shard's home."""

    def __init__(self, layout: Layout, columns: int, agents: Sequence[Agent]) -> None:
        self._layout = layout
        self._columns = columns
        self._credentials = Credentials(DRIVER, secrets.token_bytes(32))
        self._agents = agents
        self._homes: dict[str, int] = {}
        for place, (name, *_) in enumerate(_names(layout, DRIVER)):
            self._homes[name] = place % len(agents)
        for agent in range(len(agents)):
            self._apply(agent, self._at(agent))

    def shards(self) -> Shards:
        """All shards, newly connected. Raises NoAgent."""
        return _connected(
            self._layout, self._credentials, lambda name: self._agents[self._homes[name]].address
        )

    def move(self, shard: Shard, to: int) -> Move:
        """Move a shard with its bytes to another agent. Raises NoAgent if it can't be moved."""
        name, pulled = shard.name, 0
        source, target = self._homes[name], self._agents[to]
        self._apply(to, self._at(to) | {name: shard.count_from()})

        def pull(slots: Sequence[int], after: int) -> PullResult:
            nonlocal pulled
            address = self._agents[source].address
            found = target.control.pull(name, address, name, DRIVER, after, slots)
            pulled += len(slots) * found.done
            return found

        size = next(size for each, _, _, size in _names(self._layout, DRIVER) if each == name)
        began = time.monotonic()
        if not shard.move(Home(target.address, name, lambda: self._credentials, size), pull):
            raise NoAgent(f"Shard {name} can't be moved to {target.address}.")
        ended = time.monotonic()
        self._homes[name] = to
        self._apply(source, self._at(source))
        return Move(pulled, began, ended)

    def _at(self, agent: int) -> dict[str, int]:
        """The shards of an agent, and where their counts begin, which matters for new ones only."""
        return {name: 0 for name, home in self._homes.items() if home == agent}

    def _apply(self, agent: int, shards: Mapping[str, int]) -> None:
        secret = base64.b64encode(self._credentials.secret or b"").decode()
        self._agents[agent].apply(
            [
                {
                    "name": name,
                    "driver": DRIVER,
                    "slot_bytes": size,
                    "slots": self._layout.groups[group].slots_of(self._columns),
                    "part": name,
                    "applied": shards[name],
                }
                for name, group, _, size in _names(self._layout, DRIVER)
                if name in shards
            ],
            [{"name": DRIVER, "secret": secret}],
        )


def _names(layout: Layout, driver: str) -> Iterator[tuple[str, int, int, int]]:
    """Name, group, index and slot size of every shard."""
    for group, of in enumerate(layout.groups):
        for index, slot_bytes in enumerate(of.slot_bytes):
            yield f"{driver}.{of.name}.{index}", group, index, slot_bytes


def _connected(layout: Layout, credentials: Credentials, address_of: Callable[[str], str]) -> Shards:
    made: Shards = [[] for _ in layout.groups]
    for name, group, _, slot_bytes in _names(layout, credentials.driver):
        shard = Shard(name, Home(address_of(name), name, lambda: credentials, slot_bytes))
        made[group].append(shard)
        if not shard.open():
            for each in (one for of in made for one in of):
                each.close()
            raise NoAgent(f"Shard {name} can't be used: {shard.lost_because}")
    return made


class Agent:
    """One agent as a process of its own, in a directory of its own."""

    def __init__(self, directory: Path, tier2: Mapping[str, Any] | None) -> None:
        self._directory = directory
        self._tier2 = tier2
        self._generation = 0
        self.address = f"unix:{directory / 'data.sock'}"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True)
        try:
            with self._log.open("w") as log, undisturbed():
                self._process = subprocess.Popen(
                    [
                        # It ends with this process also if that is killed.
                        *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid())),
                        *(sys.executable, "-m", "kvss_agent", "--control", "127.0.0.1:0"),
                        *("--state-dir", str(self._directory), "--drain-seconds", "0"),
                    ],
                    cwd=Path(kvss_agent.__file__).parent.parent,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the replay, which stops them itself
                )
            self._wait_for_start(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def apply(self, shards: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]]) -> None:
        """Apply a document with these shards and peers. Returns when it is in effect."""
        self._generation += 1
        document = {
            "generation": self._generation,
            "shards": shards,
            "peers": peers,
            "tier2": self._tier2,
        }
        try:
            with contextlib.closing(self.control.exchange()) as agent:
                grants.apply(self.control, agent, document)
        except (grants.NotGranted, Unanswered, ValueError) as error:
            raise NoAgent(f"An agent can't be used: {error}") from error

    @property
    def control(self) -> AgentControl:
        token = (self._directory / "token").read_text().strip()
        return AgentControl(f"http://127.0.0.1:{self._port}", token)

    def _listens(self) -> bool:
        found = re.search(r"control on 127\.0\.0\.1:(\d+)", self._log.read_text())
        self._port = int(found[1]) if found else 0
        return found is not None

    def _wait_for_start(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._listens():
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoAgent(
                    f"An agent did not start. The end of its log: {self._log.read_text()[-500:]}"
                )
            time.sleep(PAUSE_SECONDS)

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _log(self) -> Path:
        return self._directory / "log"
