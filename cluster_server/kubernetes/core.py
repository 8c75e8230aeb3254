"""What is done next with one instance, and what is shown of it: pure.

An instance is one pod for all its life, under its own name, which is never used again. Kubernetes keeps
no two pods of one name, and gives one up only when the kubelet has confirmed its end: so there are never
two managers of an instance. A pod that others have ended is not made anew: the instance is gone, and
whoever has planned it plans another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

import msgspec

from cluster_server.checks import SECONDS_MAX
from cluster_server.kubernetes import names
from cluster_server.kubernetes.api import Document
from cluster_server.kubernetes.objects import CONTAINER
from cluster_server.processes.core import Goal
from telemetry.decoder import MESSAGE, Malformed, decode, excerpt

SIGNAL_STATUS: Final = 128
EVICTED: Final = "Evicted"


class Step(StrEnum):
    CREATE = "create"  # its pod
    NOTE = "note"  # that its pod was made
    SETTLE = "settle"  # that it has ended for good
    END = "end"  # delete its pod, with its grace period
    FORGET = "forget"  # delete its ConfigMap, and with it its Secret
    WAIT = "wait"


class Outcome(msgspec.Struct, frozen=True):
    """How it has ended for good. Its ConfigMap says so: anybody may remove a pod that has ended."""

    reason: str
    sentence: str
    ended_at: float


@dataclass(frozen=True, slots=True)
class PodSeen:
    uid: str
    phase: str = "Pending"
    created_at: float = 0.0
    scheduled_at: float = 0.0  # when it got its node
    node: str = ""
    address: str = ""
    is_deleted: bool = False  # it is being ended
    deleted_at: float = 0.0
    is_running: bool = False  # its container
    has_exited: bool = False  # its container, which is not started again
    has_others: bool = False  # containers of its template that run
    restarts: int = 0
    exit_status: int | None = None  # of its container's last run
    exit_reason: str = ""
    exited_at: float = 0.0
    waits_for: tuple[str, str] = ("", "")  # why its container does not run: a reason, a sentence
    failed_for: tuple[str, str] = ("", "")  # why the pod has failed as a whole

    @property
    def has_ended(self) -> bool:
        """Also where other containers of it run on: then its phase tells nothing."""
        return self.has_exited or self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class RecordSeen:
    """What the ConfigMap of the instance says."""

    uid: str
    grace_seconds: int = 0  # 0: it is not known
    pod_uid: str = ""  # the pod that was made for it
    outcome: Outcome | None = None


def next_step(wanted: Goal | None, record: RecordSeen | None, pod: PodSeen | None) -> Step:
    """`wanted`: None for one that should not be there. A goal that has changed is handed on by whoever
    follows the runner."""
    if wanted is None:
        if pod is not None:
            return Step.WAIT if pod.is_deleted else Step.END
        return Step.FORGET if record else Step.WAIT
    if record is None or record.outcome:
        return Step.WAIT
    if pod is None:
        return Step.SETTLE if record.pod_uid or wanted is Goal.DRAIN else Step.CREATE
    if pod.has_ended:
        return Step.SETTLE
    return Step.NOTE if record.pod_uid != pod.uid else Step.WAIT


def outcome(wanted: Goal, pod: PodSeen | None, last: PodSeen | None, now: float) -> Outcome:
    """Of one that has ended. `last`: its pod as it was seen last, by a server that saw it."""
    is_deleted = pod is None or pod.is_deleted  # by others, who let it end first
    if pod and pod.phase == "Failed" and (pod.failed_for[0] or not is_deleted):
        reason, sentence = pod.failed_for
        if not reason:
            reason, sentence = "PodFailed", f"Its pod has failed{how(pod.exit_status)}."
        return Outcome(excerpt(reason, 100), excerpt(sentence, 500), pod.exited_at or now)
    if wanted is Goal.DRAIN:
        return Outcome("Drained", "It has drained and ended.", (pod and pod.exited_at) or now)
    if pod and not is_deleted:
        return Outcome("Ended", "Its manager has given up: see its log.", pod.exited_at or now)
    seen = pod or last
    where = f" on node {seen.node}" if seen and seen.node else ""
    sentence = f"Its pod{where} was deleted by others, as a drain of a node does."
    return Outcome(EVICTED, sentence, now)


def own_word(pod: PodSeen | None) -> tuple[str, str]:
    """A reason and a sentence for an instance whose manager says nothing."""
    if pod is None:
        return "Starting", "Its pod is being made."
    if pod.exit_status is not None and not pod.has_ended:
        if pod.exit_reason == "OOMKilled":
            return "OutOfMemory", "Its container has used all its memory; it starts again."
        return "ManagerEnded", f"Its manager has ended{how(pod.exit_status)}; it starts again."
    reason, sentence = pod.waits_for
    if reason:
        return reason, sentence
    return "Starting", "Its manager is being started."


def how(exit_status: int | None) -> str:
    if exit_status is None:
        return ""
    if exit_status > SIGNAL_STATUS:
        return f" by signal {exit_status - SIGNAL_STATUS}"
    return f" with exit status {exit_status}"


# Reading


def read_record(document: Document) -> RecordSeen:
    metadata = document["metadata"]
    said = metadata.get("annotations", {})
    raw = said.get(names.OUTCOME)
    return RecordSeen(
        metadata["uid"],
        _grace_seconds(said.get(names.GRACE, "")),
        said.get(names.POD_UID, ""),
        _outcome(raw.encode()) if raw else None,
    )


def _grace_seconds(said: str) -> int:
    """Nothing that nobody could have asked for, whoever has written it."""
    seconds = int(said) if said.isdecimal() and len(said) <= len(str(SECONDS_MAX)) else 0
    return min(seconds, SECONDS_MAX)


def _outcome(raw: bytes) -> Outcome:
    """What somebody has damaged says all the same that it is over."""
    try:
        return decode(raw, Outcome, MESSAGE)
    except Malformed:
        return Outcome("Ended", "It has ended; how is not known any more.", 0.0)


def read_pod(document: Document) -> PodSeen:
    metadata, spec, status = document["metadata"], document["spec"], document.get("status", {})
    containers = {one["name"]: one for one in status.get("containerStatuses", ())}
    container = containers.pop(CONTAINER, {})
    state = container.get("state", {})
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
    deleted_at = 0.0
    if when := metadata.get("deletionTimestamp"):
        # It says when its grace period is over.
        deleted_at = _seconds(when) - metadata.get("deletionGracePeriodSeconds", 0)
    return PodSeen(
        uid=metadata["uid"],
        phase=status.get("phase", "Pending"),
        created_at=_seconds(metadata["creationTimestamp"]) if "creationTimestamp" in metadata else 0.0,
        scheduled_at=_scheduled_at(status),
        node=spec.get("nodeName", ""),
        address=status.get("podIP", ""),
        is_deleted="deletionTimestamp" in metadata,
        deleted_at=deleted_at,
        is_running="running" in state,
        has_exited=_has_exited(spec.get("restartPolicy", "Always"), state),
        has_others=any("running" in one.get("state", {}) for one in containers.values()),
        restarts=container.get("restartCount", 0),
        exit_status=ended.get("exitCode"),
        exit_reason=ended.get("reason", ""),
        exited_at=_seconds(ended["finishedAt"]) if ended.get("finishedAt") else 0.0,
        waits_for=_waits_for(status, state),
        failed_for=_failed_for(status),
    )


def _has_exited(policy: str, state: Document) -> bool:
    """For good. `policy`: when the kubelet starts it again."""
    ended = state.get("terminated")
    if not ended:
        return False
    return policy == "Never" or (policy == "OnFailure" and ended.get("exitCode") == 0)


def _scheduled_at(status: Document) -> float:
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "True":
            return (
                _seconds(condition["lastTransitionTime"]) if condition.get("lastTransitionTime") else 0.0
            )
    return 0.0


def _waits_for(status: Document, state: Document) -> tuple[str, str]:
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            sentence = f"Kubernetes' scheduler finds no node: {condition.get('message', '')}"
            # The orchestrator knows this reason: waiting helps, and no roll-back.
            return "WaitingForCapacity", excerpt(sentence, 500)
    waiting = state.get("waiting", {})
    reason = waiting.get("reason", "")
    if not reason or reason == "ContainerCreating":
        return "", ""
    said = waiting.get("message") or "the kubelet gives no reason"
    return excerpt(reason, 100), excerpt(f"Its container does not start: {said}", 500)


def _failed_for(status: Document) -> tuple[str, str]:
    reason = status.get("reason", "")
    return reason, f"Its pod has failed: {status.get('message') or reason}" if reason else ""


def _seconds(when: str) -> float:
    return datetime.fromisoformat(when).timestamp()
