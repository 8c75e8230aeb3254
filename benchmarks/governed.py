"""A vLLM that a console governs, for `make bench-engines`: how soon it follows, and what that costs."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Row, progress
from tests.engines.governed import Governed, governed_stack

ORG: Final = "acme"
MEMORY: Final = "1G"
CHANGES, QUICK_CHANGES = 100, 20
RESIZES, QUICK_RESIZES = 5, 1
REACH_SECONDS_MAX: Final = 2.0
START_SECONDS: Final = 60.0
TOKENS: Final = 1024
PROMPTS: Final = range(3_000_000, 3_000_004)
Ask = Callable[[int, int], dict[str, Any]]  # an engine, for a prompt by its number, of so many tokens


def stage_of(its: contextlib.ExitStack, scratch: Path) -> Governed:
    home = scratch / "governed"
    home.mkdir()
    return its.enter_context(governed_stack(home, MEMORY))


def give_job(stage: Governed) -> dict[str, Any]:
    """Start its job. What requests carry then."""
    [group] = stage.driver()["model"]["groups"]
    stage.start_session(sum(group["bytes_per_token"]))
    stage.start_job()
    return {"tidegate": stage.claim(ORG)}


def rows(stage: Governed, ask: Ask, *, quick: bool) -> Iterator[Row]:
    took = list(_policy_changes(stage, QUICK_CHANGES if quick else CHANGES))
    p99 = statistics.quantiles(took, n=100, method="inclusive")[-1]
    limit = f"at most {REACH_SECONDS_MAX:g} s, p50 {statistics.median(took):.2f} s"
    yield Row("governed.policy_reach.p99", p99, "s", limit, REACH_SECONDS_MAX / p99, 1.0)
    asked, failed = _resized(stage, ask, QUICK_RESIZES if quick else RESIZES)
    yield Row("resize.engine.failed", failed, "requests", f"of {asked}", float(not failed), 1.0)


def _policy_changes(stage: Governed, count: int) -> Iterator[float]:
    """Seconds from Save until the engine follows it."""
    for number in range(count):
        progress(f"policy change {number + 1} of {count}")
        began = time.perf_counter()
        stage.set_policy(ORG, priority=number % 100)
        _await(lambda: stage.reached(ORG) == (1, 1))
        yield time.perf_counter() - began


def _await(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + START_SECONDS
    while not holds():
        if time.monotonic() > until:
            raise RuntimeError("the engine does not follow")
        time.sleep(0.005)


def _resized(stage: Governed, ask: Ask, count: int) -> tuple[int, int]:
    """Requests while its session grows and shrinks: how many, and how many of them failed or were
    answered otherwise than before."""
    right = {number: ask(number, TOKENS)["token"] for number in PROMPTS}
    ends, asked, failed = threading.Event(), 0, 0

    def ask_on() -> None:
        nonlocal asked, failed
        while not ends.is_set():
            for number, token in right.items():
                asked += 1
                try:
                    failed += ask(number, TOKENS)["token"] != token
                except Exception:  # noqa: BLE001 - whatever it is, a request has failed
                    failed += 1

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        for number in range(count):
            progress(f"resize {number + 1} of {count}")
            for boxes in (2, 1):
                stage._run("/sessions/chat/resize", {"boxes": boxes, "wait_seconds": 60})  # noqa: SLF001
    finally:
        ends.set()
        asking.join()
    return asked, failed
