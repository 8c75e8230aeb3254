"""How requests fare, as verdicts are made from it, among any number of other models."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.workloads.leader.health import SECONDS, STEP, Counted, Waited, compared, question, traffic
from console.workloads.leader.verdicts import BUSIER_MAX, REFUSED_ENOUGH, compare, judge
from console.workloads.leader.world import Intent, Revision, Seen, Traffic
from console.workloads.spec import RolloutSpec
from inference_brain import metrics as brain
from telemetry.cells import sparse
from telemetry.histogram import BOUNDS, Histogram
from telemetry.ingest.folder import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.queries import Fold
from telemetry.shapes import Series, Shape
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from telemetry.topics import FLEET

FIRST, SECOND = "chat-0", "chat-1"
BOTH = frozenset({FIRST, SECOND})


def asked(replica: str, numbers: Mapping[int, int], result: str = "ok") -> list[Counted]:
    labels = {"replica": replica, "result": result}
    return [Counted(replica, float(at), labels, number) for at, number in numbers.items()]


def answered(replica: str, times: Mapping[int, Sequence[float]]) -> list[Waited]:
    found = []
    for at, each in times.items():
        histogram = Histogram()
        for seconds in each:
            histogram.record(seconds)
        found.append(Waited(replica, float(at), histogram.counts))
    return found


def test_only_series_of_the_model_are_asked_for() -> None:
    asked = question("example/chat", brain.REPLICA_TTFT, Fold.HEATMAP, ("replica",), 1000.0)
    assert asked.where == {"model": "example/chat"}


@pytest.mark.django_db
def test_requests_count_as_brains_report_them() -> None:
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
    times = {0: [0.1] * 10, 10: [0.1] * 10, 20: [0.3] * 20, 30: [0.3] * 20}
    waited = answered(FIRST, times) + answered(SECOND, times)
    new, old = compared(requests, waited, {FIRST: 20.0}, BOTH, 10)
    assert (new.requests, old.requests) == (40, 40)
    assert new.ttft_seconds == old.ttft_seconds == pytest.approx(0.3, rel=0.1)
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
    new, old = compared(found, answered("chat-7", {0: [9.0]}), {}, BOTH, 10)
    assert (new, old.requests, old.ttft_seconds) == (Traffic(), 5, None)


@pytest.mark.parametrize(("times", "reason"), [(1.0, "FirstTokenSlower"), (BUSIER_MAX * 1.1, None)])
def test_growing_load_is_no_reason_to_go_back(times: float, reason: str | None) -> None:
    """With one replica all that the new one can be compared with came before."""
    old = Traffic(requests=1000, ttft_seconds=0.1, per_second=5.0)
    new = Traffic(requests=1000, ttft_seconds=0.5, per_second=5.0 * times)
    found = compare(new, old, RolloutSpec())
    assert (found and found.reason) == reason


def test_errors_count_however_large_the_load_is() -> None:
    old = Traffic(requests=1000, errors=1, per_second=5.0)
    new = Traffic(requests=1000, errors=300, per_second=50.0)
    found = compare(new, old, RolloutSpec())
    assert found
    assert found.reason == "ErrorRateWorse"


@pytest.mark.parametrize(
    ("refused", "of", "reason"),
    [(10, 10, "ErrorRateWorse"), (9, 9, None), (10, 49, None), (0, 10, None)],
)
def test_a_replica_that_is_ejected_needs_no_more_requests(
    refused: int, of: int, reason: str | None
) -> None:
    """It gets one now and then, and others answer what it fails. Where nobody does, it may have lost its
    node with all that it had."""
    old = Traffic(requests=1000, errors=100, per_second=5.0)
    new = Traffic(requests=of, errors=refused or of, refused=refused, per_second=0.1)
    found = compare(new, old, RolloutSpec())
    assert (found and found.reason) == reason


def test_what_another_replica_had_to_answer_is_a_failure() -> None:
    found = asked(FIRST, {30: 5}) + asked(FIRST, {30: 7}, brain.REFUSED) + asked(SECOND, {30: 12})
    new, old = compared(found, [], {FIRST: 20.0}, BOTH, 10)
    assert (new.requests, new.errors, new.refused) == (12, 7, 7)
    assert (old.requests, old.errors) == (12, 0)


def test_what_a_later_brain_says_is_neither_served_nor_failed() -> None:
    """It counted as served, and hid the failures of a bad revision."""
    requests = asked(FIRST, {0: 10}) + asked(FIRST, {0: 990}, "melted") + asked(FIRST, {0: 10}, "failed")
    new, _ = compared(requests, [], {FIRST: -60.0}, BOTH, 10)
    assert (new.requests, new.errors) == (20, 10)


def test_an_answer_that_breaks_off_is_a_failure() -> None:
    new, _ = compared(asked(FIRST, {0: 30}, "broken"), [], {FIRST: -60.0}, BOTH, 10)
    assert (new.requests, new.errors) == (30, 30)


def test_one_org_alone_does_not_undo_a_rollout() -> None:
    """Its requests may be such that one replica fails them by chance, and another one serves them."""
    found = asked(FIRST, {30: 5}) + asked(FIRST, {30: 500}, brain.REFUSED_AGAIN)
    found += asked(SECOND, {30: 600})
    new, old = compared(found, [], {FIRST: 20.0}, BOTH, 10)
    assert (new.requests, new.errors, new.refused) == (5, 0, 0)
    assert compare(new, old, RolloutSpec()) is None
    new, old = compared(found + asked(FIRST, {40: 5}, brain.REFUSED), [], {FIRST: 20.0}, BOTH, 10)
    assert (new.requests, new.errors, new.refused) == (15, 10, 10), "others are refused, too"
    assert compare(new, old, RolloutSpec())


def test_a_replica_that_is_full_is_not_broken_unless_it_always_is() -> None:
    old = asked(SECOND, {30: 100})
    found = asked(FIRST, {30: 60}) + asked(FIRST, {30: 60}, brain.FULL)
    new, _ = compared(found + old, [], {FIRST: 20.0}, BOTH, 10)
    assert (new.requests, new.errors, new.refused) == (60, 0, 0)
    found = asked(FIRST, {30: 1}) + asked(FIRST, {30: 60}, brain.FULL)
    new, before = compared(found + old, [], {FIRST: 20.0}, BOTH, 10)
    assert (new.requests, new.errors, new.refused) == (60, 59, 59)
    worse = compare(new, before, RolloutSpec())
    assert worse
    assert worse.reason == "ErrorRateWorse"


def test_a_replica_that_is_always_full_is_not_excused_by_another_one_of_its_revision() -> None:
    """As one whose device is broken while the others of its revision serve."""
    third = "chat-2"
    found = asked(FIRST, {30: 60}) + asked(third, {30: 60}, brain.FULL) + asked(SECOND, {30: 100})
    new, old = compared(found, [], {FIRST: 20.0, third: 20.0}, BOTH | {third}, 10)
    assert (new.requests, new.errors, new.refused) == (120, 60, 60)
    assert compare(new, old, RolloutSpec())


def test_what_does_not_count_is_not_enough_beside_the_new_revision() -> None:
    """Else there would be nothing to compare with, and a bad revision would stay."""
    found = asked(FIRST, {40: 60}, "error") + asked(SECOND, {10: 60, 40: 5})
    found += asked(SECOND, {40: 50}, brain.REFUSED_AGAIN)
    new, old = compared(found, [], {FIRST: 20.0}, BOTH, RolloutSpec().requests_min)
    assert (old.requests, old.errors) == (65, 0)
    assert compare(new, old, RolloutSpec())


@pytest.mark.parametrize("other", [SECOND, "chat-0-of-another-workload"])
def test_what_every_replica_fails_is_no_fault_of_the_new_one(other: str) -> None:
    found = asked(FIRST, {30: 5, 40: 5}) + asked(SECOND, {30: 90, 40: 90})
    found += asked(FIRST, {30: 60, 40: 60}, brain.UNANSWERED) + asked(other, {30: 60}, brain.UNANSWERED)
    new, _ = compared(found, [], {FIRST: 20.0}, BOTH, 10)
    assert (new.requests, new.errors) == (70, 60), "in a step in which only new ones failed"


def test_new_ones_that_fail_everything_are_found_without_an_old_one_beside_them() -> None:
    found = asked(FIRST, {0: 100}) + asked(SECOND, {0: 100})
    found += asked(FIRST, {30: 60}, brain.UNANSWERED) + asked(SECOND, {30: 60}, brain.UNANSWERED)
    worse = compare(*compared(found, [], {FIRST: 20.0, SECOND: 20.0}, BOTH, 50), RolloutSpec())
    assert worse
    assert worse.reason == "ErrorRateWorse"


def rolled_out(seed: int, a_step: int, failing: float, *, more: float = 0.0, slower: float = 1.0) -> str:
    """Why a rollout of two replicas is undone, in ten minutes; nothing if it is not. Times to first
    token differ as they do between prompts. `more` and `slower`: what the new revision is worse by."""
    chance, switched = random.Random(seed), {FIRST: 300.0, SECOND: 450.0}
    found: list[Counted] = []
    waited: list[Waited] = []
    for at in range(0, 900, STEP):
        for replica, since in switched.items():
            requests = max(0, round(chance.gauss(a_step, math.sqrt(a_step))))
            is_new = at >= since
            failed = sum(chance.random() < failing + more * is_new for _ in range(requests))
            times = [0.3 * math.exp(chance.gauss(0, 1.2)) for _ in range(requests - failed)]
            found += asked(replica, {at: requests - failed}) + asked(replica, {at: failed}, "failed")
            waited += answered(replica, {at: [one * (slower if is_new else 1.0) for one in times]})
    for now in range(310, 900, STEP):
        told = {replica: since for replica, since in switched.items() if since <= now}
        recent = [one for one in found if now - SECONDS <= one.at < now]
        took = [one for one in waited if now - SECONDS <= one.at < now]
        if verdict := compare(*compared(recent, took, told, BOTH, 50), RolloutSpec()):
            return verdict.reason
    return ""


@pytest.mark.parametrize(("a_step", "failing"), [(3, 0.0), (6, 0.03), (15, 0.1)])
def test_what_is_no_worse_is_not_undone_by_chance(a_step: int, failing: float) -> None:
    assert {rolled_out(seed, a_step, failing) for seed in range(20)} == {""}


def test_what_is_worse_is_undone() -> None:
    assert {rolled_out(seed, 15, 0.01, more=0.2) for seed in range(10)} == {"ErrorRateWorse"}
    assert {rolled_out(seed, 15, 0.01, slower=4.0) for seed in range(10)} == {"FirstTokenSlower"}


counts = st.integers(0, 100_000)
traffics = st.builds(
    lambda ok, failed, refused, seconds, per_second: Traffic(
        requests=ok + failed + refused,
        errors=failed + refused,
        refused=refused,
        ttft_seconds=seconds,
        per_second=per_second,
    ),
    counts,
    counts,
    counts,
    st.none() | st.floats(1e-6, 60),
    st.floats(0, 1000),
)


@given(traffics, traffics, st.integers(1, 1000))
def test_few_requests_and_better_ones_are_no_reason(new: Traffic, old: Traffic, least: int) -> None:
    found = compare(new, old, RolloutSpec(requests_min=least))
    if old.requests < least or (new.requests < least and new.refused < REFUSED_ENOUGH):
        assert found is None
    if found and found.reason == "ErrorRateWorse":
        assert new.error_rate > old.error_rate + RolloutSpec().error_rate_margin
    if found and found.reason == "FirstTokenSlower":
        assert new.ttft_seconds
        assert old.ttft_seconds
        assert new.ttft_seconds > old.ttft_seconds * RolloutSpec().ttft_ratio_max


@pytest.mark.parametrize(("epoch", "reason"), [(1, "FirstTokenSlower"), (2, None)])
def test_who_begins_with_an_empty_cache_may_be_slower(epoch: int, reason: str | None) -> None:
    """Another model, or another layout of its cache: each such rollout would be undone."""
    intent = Intent(
        name="chat",
        replicas=1,
        revision=Revision(number=2, digest="b", epoch=epoch),
        stable=Revision(number=1, digest="a", epoch=1),
    )
    old = Traffic(requests=1000, ttft_seconds=0.1, per_second=5.0)
    new = Traffic(requests=1000, ttft_seconds=0.5, per_second=5.0)
    verdict = judge(intent, Seen(new=new, old=old), 0.0).verdict
    assert (verdict and verdict.reason) == reason
