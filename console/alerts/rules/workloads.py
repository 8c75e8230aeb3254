"""Rules about workloads, and about what looks after them. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts.conditions import workloads
from console.alerts.rules.rule import Rule, Scope, Severity, Threshold

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="workload-not-ready",
        title="Workload not ready",
        severity=Severity.PAGE,
        scope=Scope.WORKLOAD,
        description="A workload has not been ready for a while: it has fewer ready replicas than it "
        "should have, or none.",
        unit="seconds",
        suggested_fix="Act on the reason in the evidence; the logs of its instances say more.",
        page="workloads",
        condition=workloads.not_ready,
        own_thresholds=(
            Threshold("not_ready_seconds", 600, "Threshold: time without being ready.", high=86_400),
        ),
        ignores_missing_data=True,
    ),
    Rule(
        slug="rollout-stopped",
        title="Rollout paused or rolled back",
        severity=Severity.TICKET,
        scope=Scope.WORKLOAD,
        description="A rollout was paused or rolled back because the new revision is worse, or did not "
        "become ready.",
        suggested_fix="Compare the two revisions, and see the logs of the new one's instances. Then "
        "resume the rollout, or change the workload.",
        page="workloads",
        condition=workloads.rollout_stopped,
        own_thresholds=(
            Threshold(
                "told_seconds",
                4 * 3600,
                "How long a rollout that was rolled back is told of.",
                high=7 * 86_400,
            ),
        ),
        ignores_missing_data=True,
    ),
    Rule(
        slug="no-orchestrator",
        title="No orchestrator leads",
        severity=Severity.PAGE,
        scope=Scope.FLEET,
        description="No orchestrator is the leader. Workloads continue to serve, but failed instances "
        "are not replaced, and changes wait.",
        suggested_fix="Start `manage.py orchestrate`, or see why it ends.",
        page="workloads",
        condition=workloads.nobody_leads,
        pending_seconds=60,
        ignores_missing_data=True,
    ),
    Rule(
        slug="cluster-server-silent",
        title="Cluster Server silent",
        severity=Severity.PAGE,
        scope=Scope.FLEET,
        description="The Cluster Server does not report to the orchestrator. Instances continue to "
        "serve, but none is started or ended.",
        unit="seconds",
        suggested_fix="Start the Cluster Server, or repair the network or the certificates.",
        page="workloads",
        condition=workloads.cluster_silent,
        own_thresholds=(Threshold("silent_seconds", 60, "Threshold: silence.", high=86_400),),
        ignores_missing_data=True,
    ),
)
