"""What the tests cost in processor time, theirs and that of all processes that they start.

    .venv/bin/python -m pytest -p tests.costs --costs costs.jsonl -n 4 --dist loadgroup
    .venv/bin/python -m tests.costs costs.jsonl

On a machine that does other work as well, wall-clock time says little, and a test's own process does
little of the work: it starts others. So each worker has a control group of its own, which counts all
that it and its descendants use, also of those that nobody waits for. That takes root and Linux.
PostgreSQL and Redis of the run belong to the process that starts the workers, and are not counted.
The file has to be in the project: workers would look for `pyproject.toml` beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from time import monotonic  # by its own name: tests replace `time.monotonic`
from typing import Final, NamedTuple

import pytest

VERSION_1: Final = Path("/sys/fs/cgroup/cpuacct")
VERSION_2: Final = Path("/sys/fs/cgroup")
ROWS: Final = 40


class Group:
    """A control group with this process and all that it starts."""

    def __init__(self, name: str) -> None:
        self.path = (VERSION_1 if VERSION_1.is_dir() else VERSION_2) / name
        self.path.mkdir()
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def seconds(self) -> float:
        """Processor time that was used in it since it was made."""
        if VERSION_1.is_dir():
            return int((self.path / "cpuacct.usage").read_text()) / 1e9
        return int((self.path / "cpu.stat").read_text().split()[1]) / 1e6

    def leave(self) -> None:
        """Remove it, if no descendant is left in it."""
        (self.path.parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            self.path.rmdir()


class Costs:
    """Writes a line for each phase of each test."""

    def __init__(self, file: Path) -> None:
        self.worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.group = Group(f"tidegate-tests-{os.getpid()}")
        self.output = file.open("a", buffering=1)

    def write(self, phase: str, test: str, seconds: float, wall_seconds: float) -> None:
        row = {"test": test, "phase": phase, "seconds": seconds, "wall_seconds": wall_seconds}
        self.output.write(json.dumps({"worker": self.worker, **row}) + "\n")

    def measured(self, phase: str, test: str) -> Generator[None, object, object]:
        before, began = self.group.seconds(), monotonic()
        try:
            return (yield)
        finally:
            self.write(phase, test, self.group.seconds() - before, monotonic() - began)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        return (yield from self.measured("collection", ""))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self.measured("setup", item.nodeid))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self.measured("call", item.nodeid))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self.measured("teardown", item.nodeid))

    def pytest_unconfigure(self) -> None:
        self.output.close()
        self.group.leave()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FILE", help="add what each test costs to this file")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("costs"):
        config.pluginmanager.register(Costs(file.absolute()))


class Row(NamedTuple):
    worker: str
    test: str
    phase: str
    seconds: float
    wall_seconds: float


def table(rows: Iterable[Row], name: Callable[[Row], str]) -> Iterable[str]:
    """Lines, the most expensive first: processor time, wall-clock time, name."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        entry = sums[name(row)]
        entry[0] += row.seconds
        entry[1] += row.wall_seconds
    for what, (seconds, wall_seconds) in sorted(sums.items(), key=lambda one: -one[1][0])[:ROWS]:
        yield f"{seconds:9.1f} s {wall_seconds:9.1f} s  {what}"


def show(file: Path) -> Iterable[str]:
    with file.open() as lines:
        rows = [Row(**json.loads(line)) for line in lines]
    tests = [row for row in rows if row.test]
    yield "Processor time, wall-clock time"
    for title, kind, name in (
        ("phases", rows, lambda row: row.phase),
        ("files", tests, lambda row: row.test.partition("::")[0]),
        ("tests", tests, lambda row: row.test.partition("@")[0]),
    ):
        yield f"\n{title}"
        yield from table(kind, name)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in show(Path(sys.argv[1])))
