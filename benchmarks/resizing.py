"""What jobs notice when their session changes under them: a session of real agents and a real driver is
grown, shrunk and moved off a node, and another node's agent is killed, while requests never stop.

`resize.hit_dip` is the hit rate from the beginning of the growing to the end of the shrinking, to that
before; `resize.failed` counts the requests of the whole story that failed or gave wrong bytes. It is
drawn as the hit rate over all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.harness import Row
from tests.live import wait_until

if TYPE_CHECKING:
    from tests.console.sessions.loads import Load

DIP: Final = 0.9
STEP_SECONDS: Final = 0.5
BAR: Final = 40  # characters of a hit rate of 100 %
WAIT_SECONDS: Final = 120.0


@dataclass
class Story:
    """What was done when, under which load."""

    load: Load
    more: int  # requests after each stage, so that one sees what came of it
    stages: list[tuple[str, float, float]] = field(default_factory=list)  # name, begin, end

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.stages.append((name, began, time.monotonic()))
        wanted = self.load.requests + self.more
        wait_until("the load goes on", lambda: self.load.requests >= wanted, WAIT_SECONDS)

    def drawn(self) -> Iterator[str]:
        """The hit rate step by step, and what was begun in each."""
        first, last = self.load.served[0].at, self.load.served[-1].at
        at = first
        while at < last:
            rate = self.load.hit_rate(at, at + STEP_SECONDS)
            begun = ", ".join(name for name, began, _ in self.stages if at <= began < at + STEP_SECONDS)
            drawn = "no traffic" if rate is None else f"{'█' * round(BAR * rate):{BAR}} {rate:4.0%}"
            yield f"{at - first:5.1f} s  {drawn}  {begun}".rstrip()
            at += STEP_SECONDS


def resize_rows(directory: Path, requests: int) -> tuple[list[Row], str]:
    """The rows, and the drawing."""
    from console.accounts.principal import SYSTEM
    from console.fleet.models import Node
    from console.orgs import services as orgs
    from console.policies import callers
    from console.sessions import services
    from console.sessions.changes import drains, jobs, sizes
    from console.sessions.models import Stream
    from tests.console.sessions.loads import Load
    from tests.console.sessions.planes import plane

    org = orgs.create_org(SYSTEM, slug="acme", name="Acme")
    _, token = callers.add_caller(SYSTEM, org, name="engine")

    def resize(boxes: int) -> None:
        do(lambda: sizes.resize(SYSTEM, services.for_change(SYSTEM, "chat"), boxes))

    directory.mkdir()
    with plane(directory, nodes=3, boxes=8) as fleet:
        do(lambda: sizes.create(SYSTEM, sizes.new_session("chat", org, 2, bytes_per_token=512)))
        driver = fleet.add_driver("job7")
        do(lambda: jobs.start_job(SYSTEM, services.for_change(SYSTEM, "chat"), "serve", driver))
        with Load(fleet.drivers["job7"], token) as load:
            story = Story(load, more=max(40, requests // 5))
            wait_until("the load begins", lambda: load.requests >= requests, WAIT_SECONDS)
            before = load.hit_rate(since=load.served[requests // 2].at)
            with story.stage("grow to 4 boxes"):
                resize(4)
            with story.stage("shrink to 2"):
                resize(2)
            moved = next(name for name in ("ax2", "ax3") if fleet.slots(name))
            with story.stage(f"drain {moved}"):
                do(lambda: drains.drain(SYSTEM, moved))
            dead = Stream.objects.values_list("node__name", flat=True)[0]
            with story.stage(f"kill -9 {dead}"):
                fleet.agents[dead].kill()
                Node.objects.filter(name=dead).update(state="lost", held_state="ready")
            with story.stage(f"drain {dead}, which is lost"):
                do(lambda: drains.drain(SYSTEM, dead))
    (_, began, _), (_, _, ended), *_ = story.stages
    during = load.hit_rate(since=began, until=ended)
    assert before
    assert during is not None
    wrong = len(load.failed) + len(load.wrong)
    more = {"requests": float(load.requests), "seconds": ended - began}
    rows = [
        Row("resize.hit_dip", during / before, "of before", "before", during / before, DIP, more=more),
        Row("resize.failed", wrong, "requests", "none", 1.0 if wrong == 0 else 0.0, 1.0, more=more),
    ]
    return rows, "\n".join(story.drawn())


def do(begin: Callable[[], Any]) -> None:
    """Begin an operation so, and carry it out."""
    from django.db import transaction

    from tests.console.sessions.planes import run

    with transaction.atomic():
        operation = begin()
    ended = run(operation)
    assert ended.state == "succeeded", ended.message
