"""How requests fare, as verdicts are made from it, among any number of other models."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from console.workloads.leader.health import STEP, Counted, compared, question, traffic
from console.workloads.leader.verdicts import BUSIER_MAX, compare
from console.workloads.leader.world import Rules, Traffic
from inference_brain import metrics as brain
from telemetry.cells import sparse
from telemetry.histogram import BOUNDS
from telemetry.ingest.folder import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.queries import Fold
from telemetry.shapes import Series, Shape
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from telemetry.topics import FLEET

FIRST, SECOND = "chat-0", "chat-1"
BOTH = frozenset({FIRST, SECOND})


def asked(replica: str, numbers: Mapping[int, float], result: str = "ok") -> list[Counted]:
    labels = {"replica": replica, "result": result}
    return [Counted(replica, float(at), labels, number) for at, number in numbers.items()]


def test_only_series_of_the_model_are_asked_for() -> None:
    asked = question("example/chat", brain.REPLICA_TTFT, Fold.P50, ("replica",), 1000.0)
    assert asked.where == {"model": "example/chat"}


@pytest.mark.django_db
def test_requests_count_as_brains_report_them() -> None:
    """Counts of requests are whole numbers, and medians are not."""
    labels = ("model", "example/chat"), ("replica", FIRST)
    failed, ok = (
        Series(Kind.COUNTER, brain.REPLICA_RESULTS.name, (*labels, ("result", result)))
        for result in ("failed", "ok")
    )
    waited = Series(Kind.HISTOGRAM, brain.REPLICA_TTFT.name, labels)
    shape, at = Shape([failed, ok, waited]), bucket_of(time.time()) - 60
    cells = shape.cells({failed: 30, ok: 70, waited: sparse([0] * 60 + [100], 9.0)})
    copy_in(FRESH, Names().stored([Row(FLEET, at, shape, cells)], day_of(at)))
    new, old = traffic("example/chat", {FIRST: at - 100.0}, BOTH, 50)
    assert (new.requests, new.errors) == (100, 30)
    assert new.ttft_seconds == pytest.approx(BOUNDS[60], rel=0.1)
    assert old == Traffic()


def test_before_the_switch_is_the_old_one_and_its_step_is_nobodys() -> None:
    found = asked(FIRST, {0: 10, 10: 20, 20: 40, 30: 80}) + asked(FIRST, {0: 1, 30: 8}, "failed")
    new, old = compared(found, [], {FIRST: 25.0}, BOTH, 10)
    assert (new.requests, new.errors) == (88, 8)
    assert (old.requests, old.errors) == (31, 1)


def test_the_old_one_is_what_served_beside_the_new_one_if_anything_did() -> None:
    """The load doubled when the first replica had been switched: for both of them."""
    requests = asked(FIRST, {0: 10, 10: 10, 20: 20, 30: 20}) + asked(
        SECOND, {0: 10, 10: 10, 20: 20, 30: 20}
    )
    waited = asked(FIRST, {0: 0.1, 10: 0.1, 20: 0.3, 30: 0.3}) + asked(
        SECOND, {0: 0.1, 10: 0.1, 20: 0.3, 30: 0.3}
    )
    new, old = compared(requests, waited, {FIRST: 20.0}, BOTH, 10)
    assert (new.requests, old.requests) == (40, 40)
    assert (new.ttft_seconds, old.ttft_seconds) == (0.3, 0.3)
    assert new.per_second == old.per_second == 20 / STEP


def test_too_little_beside_it_does_not_hide_what_came_before() -> None:
    """Both served for one step only. Then the new one fails everything."""
    found = asked(FIRST, {0: 100, 10: 100}) + asked(SECOND, {0: 100, 10: 100, 20: 8})
    found += asked(FIRST, {20: 9, 30: 50}) + asked(FIRST, {40: 60}, "failed")
    new, old = compared(found, [], {FIRST: 20.0, SECOND: 30.0}, BOTH, 10)
    assert (new.requests, new.errors) == (119, 60)
    assert old.requests == 408


def test_of_who_is_no_replica_any_more_nothing_counts() -> None:
    found = asked("chat-7", {0: 10}) + asked(FIRST, {0: 5})
    new, old = compared(found, asked("chat-7", {0: 9.0}), {}, BOTH, 10)
    assert (new, old.requests, old.ttft_seconds) == (Traffic(), 5, None)


@pytest.mark.parametrize(("times", "reason"), [(1.0, "FirstTokenSlower"), (BUSIER_MAX * 1.1, None)])
def test_growing_load_is_no_reason_to_go_back(times: float, reason: str | None) -> None:
    """With one replica all that the new one can be compared with came before."""
    old = Traffic(requests=1000, ttft_seconds=0.1, per_second=5.0)
    new = Traffic(requests=1000, ttft_seconds=0.5, per_second=5.0 * times)
    found = compare(new, old, Rules())
    assert (found and found.reason) == reason


def test_errors_count_however_large_the_load_is() -> None:
    old = Traffic(requests=1000, errors=1, per_second=5.0)
    new = Traffic(requests=1000, errors=300, per_second=50.0)
    found = compare(new, old, Rules())
    assert found
    assert found.reason == "ErrorRateWorse"
