"""Which jobs may run: a few at once, one of a workload, and a workload that has had its turn waits
behind others. Pure, and the same for all backends."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

# As the orchestrator names them: of a workload, a revision, and what it is compiled again for.
_OF_WORKLOAD: Final = re.compile(r"compile-(.+)-r[0-9]+-[0-9]+-[0-9]+(-b[0-9]+-[0-9]+)?")


class Job(Protocol):
    """`ended_at`: 0 before."""

    @property
    def name(self) -> str: ...
    @property
    def submitted_at(self) -> float: ...
    @property
    def ended_at(self) -> float: ...
    @property
    def has_begun(self) -> bool: ...
    @property
    def has_ended(self) -> bool: ...


T = TypeVar("T", bound=Job)


def workload_of(name: str) -> str:
    """Of a compile job. Any other job stands for itself."""
    found = _OF_WORKLOAD.fullmatch(name)
    return f"workload {found[1]}" if found else f"job {name}"


def may_run(jobs: Iterable[T], at_once: int) -> list[T]:
    """Those that run, and those whose turn it is. `jobs`: all that are known, in the order in which they
    were submitted; also what has ended, by which is known who had a turn."""
    turns: dict[str, float] = {}  # when a workload's last job has ended
    running: list[T] = []
    waiting: dict[str, T] = {}  # the first of each workload
    for job in jobs:
        workload = workload_of(job.name)
        if job.has_ended:
            turns[workload] = max(turns.get(workload, 0.0), job.ended_at)
        elif job.has_begun:
            running.append(job)
        else:
            waiting.setdefault(workload, job)
    for job in running:
        waiting.pop(workload_of(job.name), None)
    line = sorted(
        waiting.items(), key=lambda one: (max(one[1].submitted_at, turns.get(one[0], 0.0)), one[1].name)
    )
    return running + [job for _, job in line[: max(at_once - len(running), 0)]]
