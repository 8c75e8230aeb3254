"""Conditions on trust between processes: plaintext control, and a root replacement that waits. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from console.alerts.conditions.condition import Finding, Snapshot, Tables, ValuesOf, verdict
from console.alerts.state.lifecycle import Verdict
from telemetry.topics import FLEET
from telemetry.units import counted


def plaintext_control(_tables: Tables, snapshot: Snapshot, _values: ValuesOf) -> Iterator[Finding]:
    """Breach while the setting is on, even if no process uses it now: any heartbeat could ask for it."""
    count = len(snapshot.plaintext_targets)
    processes = counted(count, "process", zero="no")
    sentence = f"TIDEGATE_PLAIN_CONTROL is set; {processes} called over plaintext HTTP"
    evidence = {"called_over_plaintext_http": ", ".join(snapshot.plaintext_targets)}
    found = verdict(breach=snapshot.plaintext_control)
    yield Finding(FLEET, found, sentence, count, 0, evidence=evidence)


def root_replacement_stalled(
    _tables: Tables, snapshot: Snapshot, _values: ValuesOf
) -> Iterator[Finding]:
    """Breach for each live process that has not completed the current step of a root replacement."""
    since = snapshot.root_replacement_since
    if since is None:
        return
    for_seconds = max(0.0, (snapshot.at - since).total_seconds())
    evidence = {"step_since": f"{since:%Y-%m-%d %H:%M:%S} UTC", "seconds": round(for_seconds)}
    for process in snapshot.root_replacement_pending:
        sentence = f"the root replacement waits for {process}"
        labels = {"process": process}
        yield Finding(FLEET, Verdict.BREACH, sentence, None, None, labels, evidence)
