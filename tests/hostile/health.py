"""What an attack must not move: memory, descriptors, reconcile lag, alert lag, errors in logs.

Sampled in a thread beside the attack. `Health.report()` is plain numbers.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Self

import httpx
import psutil

from console.stack.remembered import Remembered
from tests.hostile.scene import DRIVER, ORGS, Scene
from tests.stack.sessions import members

SAMPLE_SECONDS: Final = 1.0
CHANGE_SECONDS: Final = 5.0  # between two changes of policy, each of which is timed
TRACEBACK: Final = re.compile(r"^(?:\S+Z )?Traceback \(most recent call last\)", re.MULTILINE)


@dataclass
class Used:
    """Of one process and its children: the first sample, the highest, the last."""

    first: int = -1
    most: int = 0
    last: int = 0

    def add(self, value: int) -> None:
        self.first = value if self.first < 0 else self.first
        self.most = max(self.most, value)
        self.last = value


@dataclass
class Health:
    scene: Scene
    rss: dict[str, Used] = field(default_factory=lambda: defaultdict(Used))
    descriptors: dict[str, Used] = field(default_factory=lambda: defaultdict(Used))
    reconcile_seconds: list[float] = field(default_factory=list)
    alert_age_seconds: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)  # of asking the console itself
    _ends: threading.Event = field(default_factory=threading.Event)
    _changed_at: float | None = None
    _version: int = 0

    def __enter__(self) -> Self:
        self._logs, self._pids = self._tracebacks(), _pids(self.scene)
        self._api = self.scene.api(self.scene.admin_token)
        self._threads = [
            threading.Thread(target=self._every, args=(SAMPLE_SECONDS, self._sample), daemon=True),
            threading.Thread(target=self._every, args=(0.1, self._lag), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(70)
        if self._changed_at is not None:  # the last one never arrived
            self.reconcile_seconds.append(time.monotonic() - self._changed_at)
        self._api.close()

    def new_tracebacks(self) -> dict[str, int]:
        """By log: how many since the block was entered."""
        more = {name: count - self._logs.get(name, 0) for name, count in self._tracebacks().items()}
        return {name: count for name, count in more.items() if count > 0}

    def restarted(self) -> list[str]:
        """Services that are another process than when the block was entered."""
        now = _pids(self.scene)
        return [name for name, pid in self._pids.items() if now.get(name) not in (pid, None)]

    # Inside

    def _every(self, seconds: float, do: Callable[[], None]) -> None:
        while not self._ends.wait(seconds):
            try:
                do()
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.problems[type(error).__name__] += 1

    def _sample(self) -> None:
        for name, pids in processes(self.scene):
            alive = []
            for pid in pids:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    alive.append((process.memory_info().rss, process.num_fds()))
            if alive:
                self.rss[name].add(sum(rss for rss, _ in alive))
                self.descriptors[name].add(sum(count for _, count in alive))
        evaluated = self._api.get("/overview").json()["evaluated_at"]
        if evaluated:
            age = datetime.now(UTC) - datetime.fromisoformat(evaluated)
            self.alert_age_seconds.append(age.total_seconds())

    def _lag(self) -> None:
        """Change a policy, and see when the good driver has it; then wait a while and do it again."""
        path = f"/orgs/{ORGS[0]}/policy"
        if self._changed_at is None:
            self._version += 1
            told = {"policy": {"ttl_last_use_seconds": 3600 + self._version}, "reason": "watching"}
            headers = {"If-Match": "*", "Idempotency-Key": f"watch-{time.time_ns()}"}
            self._api.put(path, json=told, headers=headers).raise_for_status()
            self._changed_at = time.monotonic()
            return
        lagging = self._api.get(path).json()["applied"]["lagging"]
        if DRIVER not in {one["driver"] for one in lagging}:
            self.reconcile_seconds.append(time.monotonic() - self._changed_at)
            self._changed_at = None
            self._ends.wait(CHANGE_SECONDS)

    def _tracebacks(self) -> dict[str, int]:
        logs = [*(self.scene.whole.state / "logs").glob("*.log")]
        logs += [process.log_file for process in self.scene.processes.values()]
        return {
            f"{path.parent.name}/{path.name}": len(TRACEBACK.findall(path.read_text(errors="replace")))
            for path in logs
            if path.exists()
        }


def _pids(scene: Scene) -> dict[str, int]:
    return {name: row.pid for name, row in scene.whole.rows().items() if row.pid is not None}


def processes(scene: Scene) -> Iterator[tuple[str, Iterable[int]]]:
    """Every process of the stack, by what it is called, with all that it has started."""
    for name, fact in Remembered(scene.whole.state / "run").facts().items():
        yield name, members(fact.pid)
    for name, process in scene.processes.items():
        yield name, [process.pid]
