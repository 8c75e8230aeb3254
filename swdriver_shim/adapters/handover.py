"""A driver's identity, handed from one engine to the next while both run.

Of the engines that share a driver's state directory, the one that holds its lock is the driver: it alone
writes to the shards. The others wait, and serve without a cache. Whoever runs an engine tells it in a
folder of that engine's own what it is to do, and reads there how it is:

    handover.set_goal(Goal.RELEASE)     # stop the driver, leave its note, free the lock; go on serving
    handover.state()                    # HandoverState(cache=CacheState.RELEASED, …)

Two files, each replaced as a whole and looked at again and again. So either side may be started anew at
any time, and nothing is lost that was said between.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from telemetry.decoder import Malformed, decode

FILE_BYTES_MAX: Final = 16 << 10


class Goal(StrEnum):
    ATTACH = "attach"
    RELEASE = "release"


class CacheState(StrEnum):
    WAITING = "waiting"  # for the identity, which another process has; or its start has failed
    ATTACHED = "attached"  # it is the driver
    RELEASED = "released"  # it was told to let go


class HandoverState(msgspec.Struct, frozen=True):
    """How the driver of an engine is. `ready`: all of its shards are open, where the document wants
    them. `generation`: of the document that it follows; 0 without one. `reason`: why it could not
    start."""

    cache: CacheState
    pid: int
    since: float
    ready: bool = False
    generation: int = 0
    reason: str = ""

    @property
    def is_settled(self) -> bool:
        """It is the driver, and what it takes over is there: its shards, if it was told of any."""
        return self.cache is CacheState.ATTACHED and (self.ready or not self.generation)


class Handover:
    """The folder of one engine. Raises OSError where it can't be written."""

    def __init__(self, folder: Path) -> None:
        self._goal = folder / "goal"
        self._state = folder / "state"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def goal(self) -> Goal:
        """Attach, unless somebody has said otherwise."""
        said = _read(self._goal).decode(errors="replace").strip()
        return Goal.RELEASE if said == Goal.RELEASE else Goal.ATTACH

    def set_goal(self, goal: Goal) -> None:
        _replace(self._goal, goal.value.encode())

    def state(self) -> HandoverState | None:
        """As said last; None if nothing was said yet."""
        try:
            return decode(_read(self._state), HandoverState)
        except Malformed:
            return None

    def set_state(self, state: HandoverState) -> None:
        _replace(self._state, msgspec.json.encode(state))

    def forget_state(self) -> None:
        """Before another engine is started: what the last one said is no longer so."""
        self._state.unlink(missing_ok=True)


class Users:
    """Who uses a driver at the moment: it is stopped once nobody does, and nobody begins meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._is_closed = False

    @contextlib.contextmanager
    def one(self) -> Iterator[bool]:
        """Use it while this lasts. False: it is being stopped, and must not be used."""
        with self._changed:
            may = not self._is_closed
            self._count += may
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    self._count -= 1
                    self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Nobody begins from here on. Wait until all have ended, at most so long; whether they have."""
        with self._changed:
            self._is_closed = True
            return self._changed.wait_for(lambda: not self._count, seconds)

    def open(self) -> None:
        with self._changed:
            self._is_closed = False


def same_but_for_time(one: HandoverState | None, other: HandoverState) -> bool:
    return one is not None and structs.replace(one, since=other.since) == other


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX)
    except FileNotFoundError:
        return b""


def _replace(path: Path, raw: bytes) -> None:
    """Not to disk at once: after a crash of the machine there is no engine that it would matter to."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.write_bytes(raw)
    fresh.replace(path)
