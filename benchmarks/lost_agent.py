"""What jobs notice of a lost agent: real agents with one tier 2 that they share, and a real driver under
requests that never stop. One agent is killed with `kill -9`, and nobody does anything about it.

The console's rounds (heartbeats, looks at lost nodes, operations, documents) run in this process once a
second. `lost_agent.hits_back` is the time from the kill to the first request with a hit;
`lost_agent.hit_rate_after` is the hit rate of the requests from then on, to that before the kill.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.harness import Row, limited, options, percentile, progress, show
from benchmarks.own_console import own_console
from benchmarks.resizing import do

if TYPE_CHECKING:
    from tests.console.sessions.loads import Load
    from tests.console.sessions.planes import Plane

GRACE_SECONDS: Final = 20
HITS_BACK_SECONDS: Final = 30.0
RATE: Final = 0.9
ROUND_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 180.0
GRANT_PERCENT: Final = 60  # of the fair share, so that two of three nodes have room for all


class Told(NamedTuple):
    """Of one kill."""

    hits_back_seconds: float
    before: float
    after: float
    requests: int
    wrong: int  # requests that failed or gave wrong bytes


def lose_one(directory: Path, token: str, requests: int) -> Told:
    from console.accounts.principal import SYSTEM
    from console.orgs.models import Org
    from console.sessions import services
    from console.sessions.changes import jobs, sizes
    from console.sessions.models import Stream
    from tests.console.sessions.loads import Load
    from tests.console.sessions.planes import plane

    directory.mkdir()
    org = Org.objects.get(slug="acme")
    with plane(directory, nodes=3, boxes=2, tier2=directory / "tier2") as fleet:
        do(lambda: sizes.create(SYSTEM, sizes.new_session("chat", org, 2, bytes_per_token=512)))
        driver = fleet.add_driver("job7")
        do(lambda: jobs.start_job(SYSTEM, services.for_change(SYSTEM, "chat"), "serve", driver))
        with Load(fleet.drivers["job7"], token) as load:
            _tend(fleet, lambda: load.requests >= requests)
            before = load.hit_rate(since=load.served[requests // 2].at)
            killed = time.monotonic()
            fleet.agents[Stream.objects.order_by("pk")[0].node.name].kill()
            gone = killed + 1.0  # what was on its way has ended
            _tend(fleet, lambda: _first_hit(load, gone) is not None)
            back = _first_hit(load, gone)
            assert back is not None
            seen = load.requests
            _tend(fleet, lambda: load.requests >= seen + requests)
            after = load.hit_rate(since=back)
    assert before
    assert after is not None
    wrong = len(load.failed) + len(load.wrong)
    return Told(back - killed, before, after, load.requests, wrong)


def _first_hit(load: Load, since: float) -> float | None:
    return next((one.at for one in load.served if one.at > since and one.hit), None)


def _tend(fleet: Plane, holds: Callable[[], bool]) -> None:
    """What a running console does, until this holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"It did not come so far in {WAIT_SECONDS:g} s.")
        began = time.monotonic()
        fleet.tend()
        time.sleep(max(0.0, ROUND_SECONDS - (time.monotonic() - began)))


def rows_of(told: list[Told]) -> list[Row]:
    p50 = percentile([one.hits_back_seconds for one in told], 0.5)
    after = percentile([one.after / one.before for one in told], 0.5)
    wrong = sum(one.wrong for one in told)
    more = {"kills": float(len(told)), "requests": float(sum(one.requests for one in told))}
    return [
        limited("lost_agent.hits_back.p50", p50, "s", HITS_BACK_SECONDS, more),
        Row("lost_agent.hit_rate_after", after, "of before", "before", after, RATE, more=more),
        Row("lost_agent.failed", wrong, "requests", "none", 0.0 if wrong else 1.0, 1.0, more=more),
    ]


def main() -> None:
    given = options(__doc__)
    kills, requests = (1, 300) if given.quick else (5, 1_000)
    with own_console() as directory:
        from benchmarks.sessions import forget
        from console.accounts.principal import SYSTEM
        from console.orgs import services as orgs
        from console.sessions.models import RuleSet
        from tests.console.sessions.loads import engine_with_tier2

        orgs.create_org(SYSTEM, slug="acme", name="Acme")
        token = engine_with_tier2("acme")
        RuleSet.objects.create(grant_percent=GRANT_PERCENT, replace_lost_after_seconds=GRACE_SECONDS)
        told = []
        for number in range(1, kills + 1):
            progress(f"kill {number} of {kills}")
            told.append(lose_one(directory / f"plane{number}", token, requests))
            forget()
    show("A lost agent", rows_of(told), given.json)


if __name__ == "__main__":
    main()
