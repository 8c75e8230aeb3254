"""How workloads and instances look: a kind of status, and words."""

from __future__ import annotations

from dataclasses import dataclass

from console.workloads.leader.world import Goal, State
from console.workloads.models import (
    ConditionStatus,
    Instance,
    Rollout,
    RolloutPhase,
    Workload,
)
from console.workloads.services import ConditionRead, ready_of


@dataclass(frozen=True, slots=True)
class Look:
    kind: str  # ok, warn, bad or off
    text: str
    detail: str = ""


def of_workload(workload: Workload) -> Look:
    """From its condition `Ready`. Of a workload of `visible_workloads`."""
    if workload.deleting:
        return Look("warn", "being deleted")
    ready = ready_of(workload.conditions_read)
    if ready is None:
        return Look("off", "not known")
    if ready["status"] == ConditionStatus.TRUE:
        return Look("ok", "ready")
    if ready["status"] == ConditionStatus.UNKNOWN:
        return Look("off", "pending", ready["message"])
    serves = bool(workload.ready_count)
    return Look("warn" if serves else "bad", "degraded" if serves else "not ready", ready["message"])


def of_condition(condition: ConditionRead) -> Look:
    kinds = {ConditionStatus.TRUE: "ok", ConditionStatus.FALSE: "bad"}
    status = ConditionStatus(condition.status)
    return Look(kinds.get(status, "off"), status.label)


def of_instance(instance: Instance) -> Look:
    if instance.ended_at is not None or instance.state == State.GONE:
        return Look("off", "ended", instance.end_reason)
    if instance.state == State.READY:
        if instance.serving:
            return Look("ok", "serving", instance.sentence)
        return Look("warn", "ready", instance.sentence)
    if instance.goal == Goal.DRAIN or instance.state == State.DRAINING:
        return Look("warn", "draining", instance.sentence)
    return Look("warn", str(instance.get_state_display()), instance.sentence)


_PHASES = {
    RolloutPhase.RUNNING: "warn",
    RolloutPhase.PAUSED: "bad",
    RolloutPhase.DONE: "ok",
    RolloutPhase.FAILED: "bad",
    RolloutPhase.UNDONE: "bad",
}


def of_rollout(rollout: Rollout) -> Look:
    phase = RolloutPhase(rollout.phase)
    return Look(_PHASES.get(phase, "off"), str(phase.label), rollout.sentence)
