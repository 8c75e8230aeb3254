"""What is done next with an instance: it has one pod in its life, and what was wanted is reached."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_server.checks import SECONDS_MAX
from cluster_server.kubernetes import names
from cluster_server.kubernetes.core import (
    Outcome,
    PodSeen,
    RecordSeen,
    Step,
    next_step,
    outcome,
    own_word,
    read_pod,
    read_record,
)
from cluster_server.processes.core import Goal

HAPPENINGS = (
    "runs",
    "fails",
    "gives up",
    "evicted",
    "kubelet",
    "drain",
    "unwanted",
    "forced",
    "restart",
)


@dataclass
class Model:
    """A cluster with one instance, and a server that may be replaced after any step."""

    wanted: Goal | None = Goal.RUN
    record: RecordSeen | None = field(default_factory=lambda: RecordSeen("record"))
    pod: PodSeen | None = None
    last: PodSeen | None = None
    made: int = 0

    def step(self) -> Step:
        step = next_step(self.wanted, self.record, self.pod)
        match step:
            case Step.CREATE:
                assert self.pod is None
                self.made += 1
                self.pod = PodSeen(f"pod-{self.made}")
            case Step.NOTE if self.record and self.pod:
                self.record = replace(self.record, pod_uid=self.pod.uid)
            case Step.SETTLE if self.record and self.wanted:
                self.record = replace(
                    self.record, outcome=outcome(self.wanted, self.pod, self.last, 1.0)
                )
            case Step.END if self.pod:
                self.pod = replace(self.pod, is_deleted=True)
            case Step.FORGET:
                assert self.pod is None
                self.record = None
        return step

    def settle(self) -> None:
        """All that can be done is done."""
        for _ in range(10):
            if self.step() is Step.WAIT:
                return
        raise AssertionError("there is no end to it")

    def happen(self, what: str) -> None:
        pod = self.pod
        match what:
            case "runs" if pod and not pod.has_ended:
                self.pod = replace(pod, phase="Running", is_running=True)
            case "fails" if pod and pod.is_running:
                self.pod = replace(pod, restarts=pod.restarts + 1, exit_status=137)
            case "gives up" if pod and pod.is_running:
                self.pod = replace(pod, phase="Succeeded", is_running=False, exit_status=0)
            case "evicted" if pod:
                self.pod = replace(pod, is_deleted=True)
            case "kubelet" if pod and pod.is_deleted:
                self.last, self.pod = pod, None
            case "forced" if pod:
                self.last, self.pod = pod, None
            case "drain" if self.wanted:
                self.wanted = Goal.DRAIN
            case "unwanted":
                self.wanted = None
            case "restart":
                self.last = None


@given(st.lists(st.sampled_from(HAPPENINGS), max_size=25))
def test_an_instance_has_one_pod_in_its_life(happenings: list[str]) -> None:
    model = Model()
    model.settle()
    for one in happenings:
        model.happen(one)
        model.settle()
        assert model.made == 1
    model.happen("unwanted")
    model.settle()
    model.happen("kubelet")
    model.settle()
    assert (model.record, model.pod) == (None, None)


@given(st.lists(st.sampled_from(HAPPENINGS), max_size=25))
def test_what_is_over_stays_over(happenings: list[str]) -> None:
    model = Model()
    model.settle()
    model.happen("forced")
    model.settle()
    over = outcome_of(model)
    assert over
    for one in happenings:
        model.happen(one)
        model.settle()
        assert outcome_of(model) in (None, over)
        assert model.made == 1


def outcome_of(model: Model) -> Outcome | None:
    return model.record.outcome if model.record else None


def test_how_an_instance_has_ended() -> None:
    ended = PodSeen("pod", phase="Succeeded", exit_status=0, exited_at=7.0)
    assert outcome(Goal.RUN, ended, None, 9.0).reason == "Ended"
    assert outcome(Goal.DRAIN, ended, None, 9.0) == Outcome("Drained", "It has drained and ended.", 7.0)
    gone = outcome(Goal.RUN, None, PodSeen("pod", node="node-7"), 9.0)
    assert (gone.reason, gone.ended_at) == ("Evicted", 9.0)
    assert "on node node-7" in gone.sentence
    for ends in (replace(ended, phase="Running", has_exited=True), replace(ended, phase="Failed")):
        evicted = outcome(Goal.RUN, replace(ends, is_deleted=True, node="node-7"), None, 9.0)
        assert evicted.reason == "Evicted", "its manager has ended because its pod was deleted"
        assert "on node node-7" in evicted.sentence
    failed = PodSeen("pod", phase="Failed", failed_for=("Evicted", "Its pod has failed: DiskPressure"))
    assert outcome(Goal.RUN, failed, None, 9.0).sentence == "Its pod has failed: DiskPressure"


def test_why_an_instance_does_not_run() -> None:
    assert own_word(None)[0] == "Starting"
    assert own_word(PodSeen("pod", exit_status=137)) == (
        "ManagerEnded",
        "Its manager has ended by signal 9; it starts again.",
    )
    assert "with exit status 3" in own_word(PodSeen("pod", exit_status=3))[1]
    assert own_word(PodSeen("pod", exit_status=137, exit_reason="OOMKilled"))[0] == "OutOfMemory"
    unscheduled = read_pod(
        {
            "metadata": {"uid": "u"},
            "spec": {},
            "status": {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
                ]
            },
        }
    )
    reason, sentence = own_word(unscheduled)
    assert reason == "WaitingForCapacity"
    assert sentence == "Kubernetes' scheduler finds no node: 0/3 nodes are available"


def test_a_grace_period_that_nobody_could_have_asked_for() -> None:
    def read(said: str) -> int:
        record = {"metadata": {"uid": "u", "annotations": {names.GRACE: said}}}
        return read_record(record).grace_seconds

    assert read("77") == 77
    assert read("999999") == SECONDS_MAX
    assert [read(one) for one in ("", "-5", "x", "9" * 400, "9" * 5000)] == [0] * 5


def test_reading_a_pod_that_was_started_again() -> None:
    ended = {"exitCode": 137, "reason": "Error", "finishedAt": "2026-01-01T00:00:07Z"}
    pod = read_pod(
        {
            "metadata": {
                "uid": "u",
                "deletionTimestamp": "2026-01-01T00:01:00Z",
                "deletionGracePeriodSeconds": 30,
            },
            "spec": {"nodeName": "node-1"},
            "status": {
                "phase": "Running",
                "podIP": "10.1.0.7",
                "containerStatuses": [
                    {"name": "sidecar", "state": {"waiting": {"reason": "ErrImagePull"}}},
                    {
                        "name": "manager",
                        "restartCount": 2,
                        "state": {"running": {}},
                        "lastState": {"terminated": ended},
                    },
                ],
            },
        }
    )
    assert (pod.node, pod.address, pod.restarts, pod.exit_status) == ("node-1", "10.1.0.7", 2, 137)
    assert pod.is_running
    assert pod.is_deleted
    assert pod.exited_at - pod.deleted_at == 7 - 30


@pytest.mark.parametrize(
    ("policy", "exit_code", "expected"),
    [
        ("OnFailure", 0, Step.SETTLE),
        ("OnFailure", 1, Step.WAIT),
        ("Never", 0, Step.SETTLE),
        ("Never", 137, Step.SETTLE),
    ],
)
def test_a_pod_whose_template_has_another_container_ends_with_its_own(
    policy: str, exit_code: int, expected: Step
) -> None:
    states = [
        {"name": "sidecar", "state": {"running": {}}},
        {"name": "manager", "state": {"terminated": {"exitCode": exit_code}}},
    ]
    pod = read_pod(
        {
            "metadata": {"uid": "u"},
            "spec": {"restartPolicy": policy},
            "status": {"phase": "Running", "containerStatuses": states},
        }
    )
    assert pod.has_others
    assert next_step(Goal.RUN, RecordSeen("record", pod_uid="u"), pod) is expected
