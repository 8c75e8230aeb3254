"""Judges of who believes whom. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from console.alerts.life import Verdict
from console.alerts.rules import Finding, LimitsOf, Tables, World
from telemetry.topics import FLEET


def plain_control(_tables: Tables, world: World, _limits: LimitsOf) -> Iterator[Finding]:
    """A breach while the setting is there, whether or not anybody is asked so by now: somebody could
    be, who says so with a heartbeat."""
    count = len(world.in_the_open)
    said = f"TIDEGATE_PLAIN_CONTROL is set; {count or 'no'} processes are asked over plain HTTP"
    verdict = Verdict.BREACH if world.plain_control else Verdict.FINE
    evidence = {"asked_over_plain_http": ", ".join(world.in_the_open)}
    yield Finding(FLEET, verdict, said, count, 0, evidence=evidence)


def root_not_followed(_tables: Tables, world: World, _limits: LimitsOf) -> Iterator[Finding]:
    """A breach for each process that is alive and has not followed the step of a replacement."""
    since = world.root_replaced_since
    if since is None:
        return
    for_seconds = max(0.0, (world.at - since).total_seconds())
    evidence = {"step_since": f"{since:%Y-%m-%d %H:%M:%S} UTC", "seconds": round(for_seconds)}
    for process in world.root_not_followed:
        said = f"{process} does not follow the replacement of the root, which waits for it"
        labels = {"process": process}
        yield Finding(FLEET, Verdict.BREACH, said, None, None, labels, evidence)
