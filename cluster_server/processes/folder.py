"""The folder of one instance or job: what its process is told, and what a server has to know of it
after a crash. Each file is written as a whole or not at all, and what decides something is on disk
before it is acted upon.

    spec.json, secrets.json     what the process is told
    goal                        RUN, RELEASE_CACHE or DRAIN: of an instance
    about.json                  what the server knows of it beside that
    pid.json                    the process that was started: its number, and what makes it unique
    memory.json                 `core.Memory`
    status.json                 the last status that its manager has told
    manager.sock, log           made by the process, and for it
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from cluster_server.processes.core import Goal, Memory
from kvss_agent.process.durable_file import sync_directory, write_durably
from telemetry.decoder import Limits, Malformed, decode

DOCUMENT_BYTES_MAX: Final = 8 << 20
_OWN: Final = Limits(DOCUMENT_BYTES_MAX)
_PLAIN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # it is not ours alone
T = TypeVar("T")


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Which process this is: numbers are used again, but not within one tick of one boot."""

    pid: int
    started_ticks: int
    boot: str
    started_at: float = 0.0  # by the clock of the server that recorded it
    group: str = ""  # the control group that it was put into


class About(msgspec.Struct, frozen=True):
    """What the server knows of an instance whose workload may be forgotten already, or of a job."""

    workload: str = ""
    grace_seconds: float = 0.0
    boxes: tuple[str, ...] = ()
    submitted_at: float = 0.0
    request: bytes = b""  # of a job: its specification, without secrets
    secrets_digest: str = ""  # of a job: by which it is known again


class Folder:
    """All methods may be called from any thread, for one folder by one at a time. They raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def log(self) -> Path:
        return self.path / "log"

    def exists(self) -> bool:
        return self.path.is_dir()

    def make(self, about: About, spec: bytes, secrets: Mapping[str, bytes]) -> None:
        """All of it, or nothing. Nothing is changed where it exists."""
        if self.exists():
            return
        fresh = self.path.with_name(f".{self.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        made = Folder(fresh)
        made.write("about.json", msgspec.json.encode(about))
        made.write("spec.json", spec)
        if secrets:
            # Of values that are JSON already.
            told = {name: msgspec.Raw(value) for name, value in sorted(secrets.items())}
            made.write("secrets.json", msgspec.json.encode(told))
        fresh.rename(self.path)
        sync_directory(self.path.parent)

    def remove(self) -> None:
        """It is gone at once: what is left of it by a crash has a name that `sweep` knows."""
        if self.exists():
            gone = self.path.with_name(f".{self.name}.gone")
            _delete(gone)
            self.path.rename(gone)
            sync_directory(gone.parent)
            _delete(gone)

    def about(self) -> About:
        return self._read("about.json", About) or About()

    def goal(self) -> Goal | None:
        try:
            return Goal((self.path / "goal").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def tell(self, goal: Goal) -> None:
        self.write("goal", goal.encode())

    def process(self) -> ProcessIdentity | None:
        return self._read("pid.json", ProcessIdentity)

    def record(self, process: ProcessIdentity) -> None:
        self.write("pid.json", msgspec.json.encode(process))

    def memory(self) -> Memory:
        return self._read("memory.json", Memory) or Memory()

    def remember(self, memory: Memory) -> None:
        self.write("memory.json", msgspec.json.encode(memory))

    def settle(self, memory: Memory) -> None:
        """Remember it, and then that there is no process any more. A crash in between settles it again:
        its end counts twice."""
        self.remember(memory)
        (self.path / "pid.json").unlink(missing_ok=True)
        sync_directory(self.path)

    def read(self, name: str, bytes_max: int = DOCUMENT_BYTES_MAX) -> bytes | None:
        """What its process has written; None without it, or if there is too much of it, or where it is
        no plain file."""
        try:
            with os.fdopen(os.open(self.path / name, _PLAIN), "rb") as file:
                found = file.read(bytes_max + 1)
        except OSError:
            return None
        return found if len(found) <= bytes_max else None

    def write(self, name: str, raw: bytes) -> None:
        write_durably(self.path / name, raw)

    def write_note(self, name: str, raw: bytes) -> None:
        """Something that may be lost with the machine's power, but not with the server."""
        fresh = self.path / f".{name}.new"
        with contextlib.suppress(FileNotFoundError):  # it is being removed
            fresh.write_bytes(raw)
            fresh.replace(self.path / name)

    def _read(self, name: str, kind: type[T]) -> T | None:
        """What a server has written. Raises OSError, also if it is damaged: nobody can say then what
        runs, so a person has to look."""
        try:
            return decode((self.path / name).read_bytes(), kind, _OWN)
        except FileNotFoundError:
            return None
        except Malformed as error:
            raise OSError(f"{self.path / name} is damaged: {error}") from None


def _delete(path: Path) -> None:
    """Also what its process has locked against entering. Nothing of it runs any more."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except PermissionError:
        path.chmod(0o700)
        for parent, folders, _ in os.walk(path):  # which enters them after that
            for folder in folders:
                if not (one := Path(parent, folder)).is_symlink():
                    one.chmod(0o700)
        shutil.rmtree(path)


def sweep(parent: Path) -> None:
    """Remove what a crash has left of folders that were being made or removed."""
    for one in parent.iterdir():
        if one.name.startswith("."):
            with contextlib.suppress(OSError):
                _delete(one)
