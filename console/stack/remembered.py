"""Which processes were started, for whoever comes after a supervisor that was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import psutil

from console.environment import PROJECT
from console.stack.keys import write_private
from console.stack.leftovers import is_running, send, wait_until_gone

CREATED_TOLERANCE_SECONDS = 1.0
STOP_SECONDS_MAX = 15.0
KILL_SECONDS_MAX = 5.0


@dataclass(frozen=True)
class Fact:
    """One process: a process id may be given to somebody else, but not with the same birthday."""

    pid: int
    created: float
    stop_signal: int

    def process(self) -> psutil.Process | None:
        """The process itself, if it still lives."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) < CREATED_TOLERANCE_SECONDS:
                return process
        return None

    def orphans(self) -> Iterator[psutil.Process]:
        """What it left in its session, of which it was the first process.

        As long as anything of that session lives, its id is given to nobody else. To be sure that it is
        not a later session under the same id, whose first process ended too, its members must be
        younger than ours was and stand in our directory.
        """
        first = self.process()
        if first and is_running(first):
            return
        if first is None and psutil.pid_exists(self.pid):
            return  # the id is somebody else's by now, so nothing of that session lives
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                if (
                    os.getsid(process.pid) == self.pid
                    and process.create_time() > self.created - CREATED_TOLERANCE_SECONDS
                    and Path(process.cwd()) == PROJECT
                ):
                    yield process


class Remembered:
    """A file per process in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def remember(self, name: str, pid: int, stop_signal: signal.Signals) -> None:
        """Note a process. On a full disk it is not noted: it has to run all the same."""
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            fact = Fact(pid, psutil.Process(pid).create_time(), int(stop_signal))
            write_private(self._path(name), json.dumps(asdict(fact)), lasting=False)

    def forget(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def facts(self) -> dict[str, Fact]:
        found = {}
        for path in sorted(self.directory.glob("*.json")):
            with contextlib.suppress(ValueError, TypeError, OSError):
                found[path.stem] = Fact(**json.loads(path.read_text(encoding="utf-8")))
        return found

    def stop_all(self) -> list[str]:
        """Stop whatever still runs, and forget it; the names of what did.

        Each is asked in its own way, and killed with all that it has started when it does not listen.
        """
        facts = self.facts()
        left = {name: _living(fact.process()) for name, fact in facts.items()}
        for name, fact in facts.items():
            send(left[name], signal.Signals(fact.stop_signal))
            send(left[name], signal.SIGCONT)  # for whom somebody has stopped in the middle
        wait_until_gone(_all(left), STOP_SECONDS_MAX)
        for name, fact in facts.items():
            for process in _living(fact.process()):
                left[name] += process.children(recursive=True)
            left[name] += fact.orphans()
            send(left[name], signal.SIGKILL)
        wait_until_gone(_all(left), KILL_SECONDS_MAX)
        for name in left:
            self.forget(name)
        return [name for name, processes in left.items() if processes]

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"


def _living(process: psutil.Process | None) -> list[psutil.Process]:
    return [process] if process and is_running(process) else []


def _all(groups: Mapping[str, list[psutil.Process]]) -> list[psutil.Process]:
    return list(chain.from_iterable(groups.values()))
