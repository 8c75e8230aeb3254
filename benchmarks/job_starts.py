"""How soon a job runs whose engine has joined: from the request to the end of its operation, when agents
have made its streams and its driver is attached to all of them.

Real agents and drivers, a worker and a beat of their own; requests are made in this process.
`job.start.p50` is one job at a time, `job.start_5.p50` each of five that start at once on boxes of one
session; `job.end_5.p50` the same of their ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.children import running
from benchmarks.harness import Row, limited, options, percentile, progress, show
from benchmarks.own_console import own_console

if TYPE_CHECKING:
    from console.fleet.models import Driver
    from console.operations.models import Operation
    from tests.console.sessions.planes import Plane

AT_ONCE: Final = 5
START_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.005
WAIT_SECONDS: Final = 60.0
CELERY: Final = ("-m", "celery", "--quiet", "-A", "console.celery")
WORKER: Final = (*CELERY, "worker", "--pool", "prefork", "--concurrency", "2", "--loglevel", "WARNING")


@contextlib.contextmanager
def _beating(fleet: Plane) -> Iterator[None]:
    """The heartbeats of agents and drivers."""
    from django.db import connection

    ends = threading.Event()

    def beat() -> None:
        while not ends.wait(1.0):
            fleet.beat()
        connection.close()

    fleet.beat()
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _took(begins: Sequence[Callable[[], Operation]]) -> list[float]:
    """Of each of these requests, made one after the other without a pause, until its operation's end."""
    from django.db import transaction

    from console.operations.models import Operation

    began = {}
    for begin in begins:
        at = time.perf_counter()
        with transaction.atomic():
            operation = begin()
        began[operation.pk] = at
    took = []
    deadline = time.monotonic() + WAIT_SECONDS
    while began:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Operations did not end in {WAIT_SECONDS:g} s.")
        time.sleep(LOOK_SECONDS)
        for one in Operation.objects.filter(pk__in=began, done=True):
            assert one.state == "succeeded", one.message
            took.append(time.perf_counter() - began.pop(one.pk))
    return took


def measure(directory: Path, rounds: int) -> list[Row]:
    from console.accounts.principal import SYSTEM
    from console.fleet.models import Driver
    from console.orgs.models import Org
    from console.sessions import services
    from console.sessions.changes import jobs, sizes
    from tests.console.sessions.planes import plane

    org = Org.objects.get(slug="acme")
    numbers = range(1, AT_ONCE + 1)
    with plane(directory, nodes=2, boxes=AT_ONCE) as fleet, _beating(fleet):

        def create() -> Operation:
            session = sizes.new_session("chat", org, AT_ONCE, bytes_per_token=512)
            return sizes.create(SYSTEM, session)

        def starts(name: str) -> list[Callable[[], Operation]]:
            """Of a job on each box, with drivers that have just joined."""
            drivers = [fleet.add_driver(f"{name}-{number}") for number in numbers]
            return [
                partial(start, number, driver) for number, driver in zip(numbers, drivers, strict=True)
            ]

        def start(number: int, driver: Driver) -> Operation:
            session = services.for_change(SYSTEM, "chat")
            return jobs.start_job(SYSTEM, session, f"serve-{number}", driver, [f"cs{number}"])

        def end_all() -> list[float]:
            took = _took([end(number) for number in numbers])
            for daemon in fleet.drivers.values():
                daemon.stop()
            fleet.drivers.clear()
            Driver.objects.all().delete()
            return took

        def end(number: int) -> Callable[[], Operation]:
            return lambda: jobs.end_job(SYSTEM, services.for_change(SYSTEM, "chat"), f"serve-{number}")

        _took([create])
        alone, together, ended = [], [], []
        for one in range(rounds):
            progress(f"round {one + 1} of {rounds}")
            for begin in starts(f"alone{one}"):
                alone += _took([begin])
            end_all()
            together += _took(starts(f"together{one}"))
            ended += end_all()
    return [
        _row("job.start.p50", alone),
        _row(f"job.start_{AT_ONCE}.p50", together),
        _row(f"job.end_{AT_ONCE}.p50", ended),
    ]


def _row(name: str, took: list[float]) -> Row:
    more = {"p95": percentile(took, 0.95), "max": max(took), "jobs": float(len(took))}
    return limited(name, percentile(took, 0.5), "s", START_SECONDS, more)


def main() -> None:
    given = options(__doc__)
    with own_console() as directory:
        from console.accounts.principal import SYSTEM
        from console.orgs import services as orgs

        orgs.create_org(SYSTEM, slug="acme", name="Acme")
        beat = (*CELERY, "beat", "--pidfile=", "-s", directory / "beat")
        with running(WORKER), running(beat):
            rows = measure(directory / "plane", rounds=2 if given.quick else 10)
    show("Starts and ends of jobs", rows, given.json)


if __name__ == "__main__":
    main()
