"""What operations cost in this version and in another one, by turns: both run all the time, and only one
of them measures. What the machine is busy with meets both alike, and of processor time only what others
take from caches and memory counts; so a few hundredths show, where seconds of separate runs differ by
tenths.

    git worktree add --detach ../before COMMIT && make -C ../before dev-environment
    make bench NAME=versions ARGS="--base ../before"

Each version is measured by its own interpreter and packages, with the same lines (`benchmarks.costs`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from benchmarks import costs
from benchmarks.costs import Costs
from benchmarks.harness import Row, parser, progress, show
from console.environment import PROJECT

AS_FAST: Final = 0.98  # two in a hundred more is the most that a version may cost
TURNS, TURNS_QUICK = 25, 5


class Version:
    """A checkout that measures when it is asked to."""

    def __init__(self, checkout: Path, subject: str) -> None:
        self._checkout, self._subject = checkout.resolve(), subject

    def __enter__(self) -> Self:
        python = self._checkout / ".venv" / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"{self._checkout} has no environment: run `make dev-environment` there.")
        self._process = subprocess.Popen(
            [python, "-P", costs.__file__, self._subject],
            cwd=self._checkout,
            env={**os.environ, "PYTHONPATH": str(self._checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # its input has ended, and so does it

    def get_ready(self) -> None:
        self._answer()

    def turn(self) -> Costs:
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer: Costs = json.loads(self._answer())
        return answer

    def _answer(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self._checkout} can't measure {self._subject}: see above.")
        return line


def rows_of(subject: str, base: Path, turns: int) -> Iterator[Row]:
    with Version(PROJECT, subject) as ours, Version(base, subject) as theirs:
        both = (ours, theirs)
        for one in both:
            one.get_ready()
        each: tuple[list[Costs], list[Costs]] = ([], [])
        for number in range(turns):
            for place in (0, 1) if number % 2 else (1, 0):
                each[place].append(both[place].turn())
    yield from compared(*each)


def compared(ours: list[Costs], theirs: list[Costs]) -> Iterator[Row]:
    """By name. `ratio`: theirs over ours, of turns one after the other, the one in the middle. What the
    base does not have is compared with what is nearest to it there: the name without its last part."""
    for name in ours[0]:
        values = [turn[name] for turn in ours]
        peer = name if name in theirs[0] else name.rpartition(".")[0]
        before = [turn[peer] for turn in theirs]
        ratio = statistics.median(old / new for old, new in zip(before, values, strict=True))
        yield Row(
            name,
            statistics.median(values),
            "µs",
            f"{statistics.median(before):,.2f} µs" + (f" of `{peer}`" if peer != name else ""),
            ratio,
            AS_FAST,
            {"least": min(values), "least before": min(before)},
        )


def main() -> None:
    to_tell = parser(__doc__, f"{TURNS_QUICK} turns instead of {TURNS}")
    to_tell.add_argument("--base", type=Path, required=True, metavar="PATH", help="the other checkout")
    to_tell.add_argument("--turns", type=int, metavar="N", help="or so many")
    to_tell.add_argument("--only", nargs="+", choices=costs.SUBJECTS, default=costs.SUBJECTS)
    given = to_tell.parse_args()
    rows: list[Row] = []
    for subject in given.only:
        progress(subject)
        rows += rows_of(subject, given.base, given.turns or (TURNS_QUICK if given.quick else TURNS))
    show("This version and another", rows, given.json)


if __name__ == "__main__":
    main()
