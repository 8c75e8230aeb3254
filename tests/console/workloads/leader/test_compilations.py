"""Compile jobs: what they are told, and what becomes of their results."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.fleet.models import Box
from console.workloads import buckets, changes
from console.workloads.leader import compilations, rendering
from console.workloads.models import Condition, Revision, Rollout, Workload
from telemetry.decoder import decode
from tests.console.sessions.fleets import make_fleet
from tests.console.workloads.buckets import CREDENTIALS, stored
from tests.console.workloads.leader.clusters import FakeCluster
from tests.console.workloads.leader.leaders import QUICK, WITHOUT_CACHE, Leader, condition, is_complete
from tests.console.workloads.workloads import an_instance, locked, make_workload, wanted
from workload_manager import preparation
from workload_manager import spec as instance_spec
from workload_manager.compiler import spec as compile_spec

pytestmark = pytest.mark.slow


def test_what_can_not_be_compiled_is_said_and_rolled_back(leader: Leader, redis_url: str) -> None:
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    bad = {"engine": {"kind": "emulator", "arguments": ["--no"]}}
    changes.update(SYSTEM, locked(SYSTEM), wanted(**bad, **WITHOUT_CACHE, **QUICK))
    leader.until("it is rolled back", lambda: Rollout.objects.filter(phase="undone").exists())
    assert "It has no such option." in Rollout.objects.get(phase="undone").sentence
    leader.until("it is what it was", is_complete)


def test_what_was_denied_is_compiled_with_other_credentials_and_each_instance_has_them(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    cluster.key = b"right"
    make_workload(weights={"source": "s3://models/chat"}, **WITHOUT_CACHE, **QUICK)
    bucket = stored(None, "wrong")
    denied = Condition.objects.filter(type="Compiled", status="False", message="Denied.")
    leader.until("it is denied", denied.exists)
    secrets = {**CREDENTIALS, "secret_access_key": "right"}
    buckets.replace(SYSTEM, bucket, secrets=secrets)
    leader.until("it is rolled out", is_complete)
    [name] = cluster.statuses()
    assert decode(cluster.specs[name].secrets["weights"], dict[str, str]) == secrets
    buckets.replace(SYSTEM, bucket, secrets=CREDENTIALS)
    changes.restart(SYSTEM, locked(SYSTEM))
    leader.until("it is restarted", lambda: name not in cluster.statuses() and is_complete())
    [other] = cluster.statuses()
    assert decode(cluster.specs[other].secrets["weights"], dict[str, str]) == CREDENTIALS


@pytest.mark.parametrize(
    "result",
    [
        b'{"sha256": 12, "layout": null}',
        b'{"sha256": "' + b"a" * 5000 + b'"}',
        b'{"sha256": "' + b"a" * 64 + b'", "layout": "none"}',
        b'{"sha256": "' + b"a" * 64 + b'", "layout": {"a": "\\u0000"}}',
        b'{"sha256": "' + b"a" * 64 + b'", "layout": {"\\u0000": 1}}',
    ],
)
def test_no_result_of_a_compile_job_ends_a_leader(
    leader: Leader, cluster: FakeCluster, redis_url: str, result: bytes
) -> None:
    cluster.result = result
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is refused", lambda: condition("Ready")[1] == "CompileFailed")
    assert leader.orchestrator.figures.led == 1


def test_what_failed_is_compiled_again_for_an_equal_revision_and_after_a_restart(db: None) -> None:
    make_fleet(boxes=4)
    workload = make_workload(**QUICK)
    revision = workload.revisions.get()
    names = {rendering.compile_name(revision)}
    revision.workload.restarts += 1
    names.add(rendering.compile_name(revision))
    revision.made_at += timedelta(seconds=1)  # as one with the same number after a database was restored
    names.add(rendering.compile_name(revision))
    assert len(names) == 3


def test_a_compile_job_is_told_what_the_largest_box_has_once_all_boxes_say_it(db: None) -> None:
    make_fleet(boxes=2)
    workload = make_workload(**QUICK)
    revision = workload.revisions.get()

    def told() -> int | None:
        return compile_spec.parse(rendering.compile_spec(workload, revision)).box_memory_bytes

    assert told() is None
    [first, second] = Box.objects.all()
    Box.objects.filter(pk=first.pk).update(memory_bytes=44 << 30)
    assert told() is None
    Box.objects.filter(pk=second.pk).update(memory_bytes=22 << 30)
    assert told() == 44 << 30
    Revision.objects.filter(pk=revision.pk).update(epoch=1, artifact="a" * 64, layout={"groups": []})
    instance = an_instance(workload, boxes=["cs1"], revision=workload.revisions.get())
    job = preparation.compile_job(instance_spec.parse(rendering.instance_spec(workload, instance)))
    asked = compile_spec.parse(rendering.compile_spec(workload, revision))
    assert job.inputs({}) == asked.inputs({}), "a manager looks where the compile job has put it"


INTERRUPTIONS: tuple[dict[str, Any], ...] = (
    {"state": pb.JOB_FAILED, "reason": "PodGone", "sentence": "Its pod was deleted by others."},
    {"state": pb.JOB_CANCELLED, "reason": "Cancelled", "sentence": "It was cancelled."},
    {"state": pb.JOB_FAILED, "reason": "Unreachable", "sentence": "s3://b can't be reached."},
)


def test_a_compile_job_that_others_have_ended_is_no_fault_of_the_revision(
    leader: Leader, cluster: FakeCluster
) -> None:
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    cluster.is_slow = True
    changes.update(SYSTEM, locked(SYSTEM), wanted(tokens_max=1000, **WITHOUT_CACHE, **QUICK))
    for count, interruption in enumerate(INTERRUPTIONS, 2):
        leader.until("it is compiled", lambda count=count: len(cluster.jobs) == count)  # type: ignore[misc]
        job = list(cluster.jobs.values())[-1]
        for name, value in {**interruption, "ended_at": time.time() + leader.ahead}.items():
            setattr(job, name, value)
        again = f"Revision 2 is compiled again in a moment: {interruption['sentence']}"
        leader.until("it is said", Condition.objects.filter(type="Compiled", message=again).exists)
        assert len(cluster.jobs) == count, "not before a while"
        leader.ahead += 60.0
    cluster.is_slow = False
    leader.until("it is rolled out", lambda: Workload.objects.get().stable.number == 2)  # type: ignore[union-attr]
    assert not Rollout.objects.filter(phase="undone").exists()


def test_a_compile_job_that_is_ended_time_and_again_is_given_up(
    leader: Leader, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilations, "ATTEMPTS_MAX", 2)
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    cluster.is_slow = True
    changes.update(SYSTEM, locked(SYSTEM), wanted(tokens_max=1000, **WITHOUT_CACHE, **QUICK))
    for count in (2, 3):
        leader.until("it is compiled", lambda count=count: len(cluster.jobs) == count)  # type: ignore[misc]
        job = list(cluster.jobs.values())[-1]
        job.state, job.reason, job.sentence = pb.JOB_FAILED, "Evicted", "Its node has no memory left."
    leader.until("it is rolled back", lambda: Workload.objects.get().revision.number == 3)  # type: ignore[union-attr]
    undone = Rollout.objects.get(phase="undone")
    assert undone.sentence == "It could not be compiled: Its node has no memory left."


def test_a_compile_job_that_takes_too_long_is_the_fault_of_the_revision(
    leader: Leader, cluster: FakeCluster
) -> None:
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    cluster.is_slow = True
    changes.update(SYSTEM, locked(SYSTEM), wanted(tokens_max=1000, **WITHOUT_CACHE, **QUICK))
    leader.until("it is compiled", lambda: len(cluster.jobs) == 2)
    job = list(cluster.jobs.values())[-1]
    job.state, job.reason, job.sentence = pb.JOB_FAILED, "DeadlineExceeded", "It took too long."
    leader.until("it is rolled back", lambda: Workload.objects.get().revision.number == 3)  # type: ignore[union-attr]
    assert len(cluster.jobs) == 2, "an hour is not tried five times"


def test_a_compile_job_that_nobody_waits_for_is_cancelled(leader: Leader, cluster: FakeCluster) -> None:
    cluster.is_slow = True
    workload = make_workload(**WITHOUT_CACHE, **QUICK)
    first = rendering.compile_name(workload.revisions.get())
    leader.until("it compiles", lambda: first in cluster.jobs)
    changes.update(SYSTEM, locked(SYSTEM), wanted(tokens_max=999, **WITHOUT_CACHE, **QUICK))
    leader.until("it is cancelled", lambda: cluster.jobs[first].state == pb.JOB_CANCELLED)
    second = rendering.compile_name(Workload.objects.get().revisions.latest("number"))
    assert second != first
    leader.until("the next one compiles", lambda: second in cluster.jobs)
    assert cluster.jobs[second].state == pb.JOB_RUNNING
    changes.delete(SYSTEM, locked(SYSTEM))
    leader.until("that ends too", lambda: cluster.jobs[second].state == pb.JOB_CANCELLED)
    leader.until("it is gone", lambda: not Workload.objects.exists())


def test_the_same_inputs_are_not_compiled_again(leader: Leader, cluster: FakeCluster) -> None:
    made = []
    for _ in range(2):
        workload = make_workload(**WITHOUT_CACHE, **QUICK)
        leader.until("it is rolled out", is_complete)
        made.append(workload.revisions.get().artifact)
        changes.delete(SYSTEM, locked(SYSTEM))
        leader.until("it is gone", lambda: not Workload.objects.exists())
    assert made[0] == made[1]
    assert len(cluster.jobs) == 1
