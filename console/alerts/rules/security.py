"""Rules about trust between processes. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts.conditions import security
from console.alerts.rules.rule import Rule, Scope, Severity

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="control-plaintext",
        title="Plaintext control APIs allowed",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        description="TIDEGATE_PLAIN_CONTROL is set. Tokens, org secrets and keys may cross the network "
        "unencrypted.",
        suggested_fix="Update the processes in the evidence, let them join with a key, then unset it.",
        condition=security.plaintext_control,
        keep_firing_seconds=0,
        every_seconds=60,
        ignores_missing_data=True,
    ),
    Rule(
        slug="root-replacement-stalled",
        title="Root replacement stalled",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        description="The replacement of the root certificate waits for a process. Until it continues, "
        "the old root is still trusted.",
        suggested_fix="Check the process's log for why it gets no certificate, or stop the process.",
        condition=security.root_replacement_stalled,
        pending_seconds=300,
        keep_firing_seconds=0,
        ignores_missing_data=True,
    ),
)
