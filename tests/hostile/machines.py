"""The processors of this machine, divided as if they were machines of their own.

Tenant, driver, agents, console and attackers are on machines of their own. What one of them computes, or
its kernel receives, because of an attack costs a tenant only what it waits for in the driver: that is
what is judged. Without this half of what a tenant lost it lost before its request was sent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machines:
    """Processors by number. All are everybody's where nothing is divided."""

    driver: frozenset[int]  # and the tenant's, who waits for nobody there
    others: frozenset[int]  # console, agents, attackers and who watches
    are_divided: bool = True

    def __str__(self) -> str:
        if not self.are_divided:
            return "All processes share all processors."
        first, second = (", ".join(map(str, sorted(one))) for one in (self.driver, self.others))
        return (
            f"Processors {first}: driver, and the tenant before it. {second}: console, agents, who "
            "watches, and attackers with what is left."
        )


def undivided() -> Machines:
    here = frozenset(os.sched_getaffinity(0))
    return Machines(here, here, are_divided=False)


def divided() -> Machines:
    """Raises PermissionError where this user can't give the tenant its own; see `Apart`."""
    here = sorted(os.sched_getaffinity(0))
    half = len(here) // 2
    if not half:
        return undivided()
    if os.geteuid():
        raise PermissionError("only root can divide the processors of this machine")
    return Machines(frozenset(here[:half]), frozenset(here[half:]))


@contextlib.contextmanager
def on(processors: frozenset[int]) -> Iterator[None]:
    """What this thread starts meanwhile, processes too, runs on these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
