"""What is done next with a wsjob: it runs once, and its end is stored before its runner may go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster_server.kubernetes.core import PodSeen
from cluster_server.kubernetes.job import Next, Step, conditions, ending, next_step
from cluster_server.kubernetes.names import FINALIZER
from cluster_server.kubernetes.objects import WsJob
from cluster_server.pod.runner import JobReport
from cluster_server.proto import cluster_pb2 as pb

JOB = WsJob(
    name="compile-1",
    object="compile-1",
    is_submitted=True,
    uid="u",
    version="1",
    kind=pb.COMPILE,
    config_map="inputs",
    secret="",
    boxes=(),
    deadline_seconds=0,
    is_cancelled=False,
    is_deleted=False,
    finalizers=(FINALIZER,),
    digest="",
    submitted_at=100.0,
    status={},
)
BEGUN_NOW = replace(JOB, status={"startedAt": "1970-01-01T00:01:40+00:00"})
BEGUN = replace(JOB, status={"startedAt": "2026-01-01T00:00:00Z"})
DONE = replace(JOB, status={"startedAt": "2026-01-01T00:00:00Z", "endedAt": "2026-01-01T00:00:01Z"})
NEW, RUNS = PodSeen("pod"), PodSeen("pod", phase="Running", is_running=True, address="10.1.0.7")
LEAVES, OVER = replace(RUNS, is_deleted=True), replace(RUNS, phase="Failed", is_running=False)
WORKS, RESULT = JobReport(), JobReport(exit_status=0, result="{}")


def step(job: WsJob, pod: PodSeen | None, report: JobReport | None = None, **more: Any) -> Next:
    return next_step(job, pod, report, 105.0, **{"may_start": True, "has_inputs": True, **more})


@pytest.mark.parametrize(
    ("job", "pod", "report", "expected"),
    [
        (JOB, None, None, Step.CREATE),
        (replace(JOB, finalizers=()), None, None, Step.HOLD),
        (JOB, NEW, None, Step.WAIT),
        (JOB, RUNS, None, Step.BEGIN),
        (JOB, replace(NEW, scheduled_at=-794.0), None, Step.WAIT),
        (JOB, replace(NEW, scheduled_at=-795.0), None, Step.SETTLE),  # its volumes are never there
        (BEGUN, replace(NEW, scheduled_at=-795.0), None, Step.WAIT),
        (BEGUN, RUNS, WORKS, Step.WAIT),
        (BEGUN, RUNS, RESULT, Step.SETTLE),
        (JOB, RUNS, RESULT, Step.SETTLE),  # it was so quick that nobody saw it begin
        (DONE, RUNS, RESULT, Step.LET_GO),
        (DONE, LEAVES, RESULT, Step.WAIT),
        (DONE, OVER, None, Step.RELEASE),
        (replace(DONE, finalizers=()), OVER, None, Step.WAIT),
        (DONE, replace(OVER, has_others=True), None, Step.END),  # or it would stay for as long as those
        (DONE, replace(OVER, has_others=True, is_deleted=True), None, Step.WAIT),
        (BEGUN, None, None, Step.SETTLE),  # it is not made anew
        (BEGUN, OVER, None, Step.SETTLE),
        (replace(BEGUN, is_cancelled=True), RUNS, WORKS, Step.END),
        (replace(BEGUN, is_cancelled=True), LEAVES, WORKS, Step.WAIT),
        (replace(BEGUN, is_cancelled=True), None, None, Step.SETTLE),
        (replace(BEGUN_NOW, deadline_seconds=4), RUNS, WORKS, Step.END),
        (replace(BEGUN_NOW, deadline_seconds=6), RUNS, WORKS, Step.WAIT),
        (replace(JOB, deadline_seconds=4), None, None, Step.CREATE),  # while it waited it had none
        (replace(JOB, deadline_seconds=4), replace(NEW, created_at=100.0), None, Step.SETTLE),
        (replace(JOB, deadline_seconds=4), replace(RUNS, created_at=100.0), None, Step.BEGIN),
        (replace(BEGUN, is_deleted=True), RUNS, WORKS, Step.END),
        (replace(BEGUN, is_deleted=True), LEAVES, WORKS, Step.WAIT),
        (replace(DONE, is_deleted=True), None, None, Step.RELEASE),
        (replace(DONE, is_deleted=True, finalizers=()), None, None, Step.WAIT),
    ],
)
def test_what_is_next(job: WsJob, pod: PodSeen | None, report: JobReport | None, expected: Step) -> None:
    assert step(job, pod, report).step is expected


def test_it_waits_for_its_turn_and_for_its_inputs() -> None:
    assert step(JOB, None, may_start=False).step is Step.WAIT
    waits = step(JOB, None, has_inputs=False)
    assert (waits.step, waits.wake_at) == (Step.WAIT, 110.0)  # to look again
    assert next_step(JOB, None, None, 160.0, may_start=True, has_inputs=False).step is Step.SETTLE
    assert step(replace(JOB, deadline_seconds=9), None, may_start=False).wake_at == float("inf")
    assert step(replace(JOB, deadline_seconds=9), replace(NEW, created_at=104.0)).wake_at == 114.0


def test_how_it_has_ended() -> None:
    def reason(job: WsJob, pod: PodSeen | None, report: JobReport | None) -> tuple[str, str]:
        found = ending(job, pod, report, 105.0)
        return found.state, found.reason

    assert reason(BEGUN, RUNS, RESULT) == ("Succeeded", "Succeeded")
    # It was done before it was cancelled.
    assert reason(replace(BEGUN, is_cancelled=True), RUNS, RESULT) == ("Succeeded", "Succeeded")
    assert reason(replace(BEGUN, is_cancelled=True), None, None) == ("Cancelled", "Cancelled")
    assert reason(replace(BEGUN_NOW, deadline_seconds=1), None, None) == ("Failed", "DeadlineExceeded")
    assert reason(BEGUN, RUNS, JobReport(exit_status=0)) == ("Failed", "NoResult")
    assert reason(BEGUN, RUNS, JobReport(exit_status=1, reason="TooLarge")) == ("Failed", "TooLarge")
    assert reason(BEGUN, None, None) == ("Failed", "PodGone")
    killed = ending(BEGUN, RUNS, JobReport(exit_status=-9, said_last="x"), 105.0)
    assert killed.sentence == "It has ended by signal 9. It said last: x"
    lacks = ending(JOB, None, None, 160.0, lacks="There is no ConfigMap x.")
    assert (lacks.reason, lacks.sentence) == ("NoInputs", "There is no ConfigMap x.")
    waits = replace(NEW, waits_for=("FailedMount", "Its container does not start: no volume"))
    assert ending(JOB, waits, None, 160.0).reason == "NotStarted"


def test_what_a_job_says_is_bounded() -> None:
    """Beside its runner a program of strangers runs, and its end has to be stored all the same."""
    many = JobReport(exit_status=0, result="\ufffd" * (1 << 20))  # 3 MiB of UTF-8
    found = ending(replace(BEGUN, is_cancelled=True), RUNS, many, 105.0)
    assert (found.state, found.reason, found.result) == ("Failed", "ResultTooLarge", None)
    said = JobReport(exit_status=1, reason="r\n" * 1000, sentence="s" * 10_000)
    found = ending(BEGUN, RUNS, said, 105.0)
    assert (len(found.reason), len(found.sentence)) == (100, 500)
    assert found.reason.isprintable()
    found = ending(BEGUN, RUNS, JobReport(exit_status=1, said_last="x" * 10_000), 105.0)
    assert len(found.sentence) < 400


def test_a_condition_keeps_the_time_of_its_last_transition() -> None:
    first = conditions([], {"state": "Running"}, "t1")
    second = conditions(first, {"state": "Succeeded", "endedAt": "t2"}, "t2")
    assert [(one["type"], one["status"], one["lastTransitionTime"]) for one in second] == [
        ("Started", "True", "t1"),
        ("Complete", "True", "t2"),
    ]
