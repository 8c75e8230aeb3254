"""Rules of who believes whom: control in plain text, and roots that are not followed. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts import trust
from console.alerts.rules import Rule, Scope, Severity

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="control-plain",
        title="Control APIs may be asked in plain text",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        means="TIDEGATE_PLAIN_CONTROL is set: tokens, secrets of orgs and keys can be read on the way.",
        remedy="Update the processes in the evidence, let them join with a key, and unset it.",
        runbook="control-plain.md",
        judge=trust.plain_control,
        fine_seconds=0,
        every_seconds=60,
        outlives_silence=True,
    ),
    Rule(
        slug="root-not-followed",
        title="A process does not follow the replacement of the root",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        means="The next step waits for it. Until then the root that is to go is still believed.",
        remedy="See in its log why it gets no certificate; or stop it, which lets the others go on.",
        runbook="root-not-followed.md",
        judge=trust.root_not_followed,
        breach_seconds=300,
        fine_seconds=0,
        outlives_silence=True,
    ),
)
