"""State transitions of alerts: each happens once, however many evaluators see its cause.

An evaluator decides from a row as it read it, and writes with an UPDATE that names the `observed_at` of
that row. Only one such UPDATE matches; the others change nothing, and look again at their next tick.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from django.db import transaction

from console.alerts.conditions.condition import Finding
from console.alerts.models import TEXT_CHARACTERS_MAX, Alert, Transition
from console.alerts.rules.rule import Rule
from console.alerts.state.lifecycle import OPEN, Delays, Lifecycle, State, Verdict, advance
from console.orgs.models import Org
from telemetry.events import note
from telemetry.topics import ALERTS

CLOCKS_DIFFER: Final = timedelta(minutes=1)
LONG_AGO: Final = datetime(2000, 1, 1, tzinfo=UTC)  # before any evaluation


def fingerprint(rule: str, topic: str, labels: Mapping[str, str]) -> str:
    """Identifies an instance of a rule."""
    text = json.dumps([rule, topic, sorted(labels.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def observe(alert: Alert, finding: Finding, delays: Delays, at: datetime) -> bool:
    """Store a finding of a moment. Returns whether this call changed the alert's state.

    `alert` is as it was read. If another evaluator has written since, or has seen a later moment,
    nothing happens; unless that is later than clocks differ: then its clock was ahead.
    """
    if at <= alert.observed_at <= at + CLOCKS_DIFFER:
        return False
    now = advance(_until(at, alert.lifecycle), finding.verdict, delays, at)
    changes = now.state is not State(alert.state)
    begins = now.state in OPEN and not alert.is_open
    values = _values(alert, now, finding, at, begins=begins)
    values["transition_count"] = alert.transition_count + changes
    with transaction.atomic():
        unchanged = Alert.objects.filter(pk=alert.pk, observed_at=alert.observed_at)
        written = bool(unchanged.update(**values))
        if written and changes:
            _note(alert, now, finding, at, alert.episode + begins)
    return written and changes


def retire(alert: Alert) -> None:
    """What it is about is another org's by now, which has the name: it is found by its rule and topic no
    more. Receivers know it by the beginning of its fingerprint, which stays."""
    kept = alert.fingerprint[:16]
    alert.fingerprint = kept + fingerprint(alert.rule, alert.topic, {"retired": str(alert.pk)})[16:]
    Alert.objects.filter(pk=alert.pk).update(fingerprint=alert.fingerprint)


def first_seen(
    rule: Rule, finding: Finding, org: Org | None, at: datetime, episode: int = 0
) -> Alert | None:
    """The row of a new instance, in state quiet. None without a breach: such instances have no row.
    `episode`: the last of a row that was retired for it."""
    if finding.verdict is not Verdict.BREACH:
        return None
    mark = fingerprint(rule.slug, finding.topic, finding.labels)
    quiet = Alert(
        rule=rule.slug,
        topic=finding.topic,
        labels=dict(finding.labels),
        fingerprint=mark,
        org=org,
        severity=rule.severity,
        state=State.QUIET,
        episode=episode,
        begun_at=at,
        state_since=LONG_AGO,
        observed_at=LONG_AGO,
        sentence=finding.sentence[:TEXT_CHARACTERS_MAX],
    )
    Alert.objects.bulk_create([quiet], ignore_conflicts=True)
    return Alert.objects.get(fingerprint=mark)


def _until(at: datetime, told: Lifecycle) -> Lifecycle:
    """Nothing of it is later than now."""
    return Lifecycle(
        told.state,
        min(told.begun_at, at),
        told.fired_at and min(told.fired_at, at),
        told.fine_since and min(told.fine_since, at),
    )


def _values(
    alert: Alert, now: Lifecycle, finding: Finding, at: datetime, *, begins: bool
) -> dict[str, object]:
    """The new values of a row. Without a breach, the last breach's value and evidence are kept."""
    values: dict[str, object] = {
        "state": now.state,
        "begun_at": now.begun_at,
        "fired_at": now.fired_at,
        "fine_since": now.fine_since,
        "observed_at": at,
    }
    if now.state is not State(alert.state) or alert.state_since > at:
        values["state_since"] = at
    if finding.verdict is Verdict.BREACH:
        values |= {
            "value": finding.value,
            "threshold": finding.threshold,
            "sentence": finding.sentence[:TEXT_CHARACTERS_MAX],
            "evidence": dict(finding.evidence),
        }
    if begins:
        values |= {
            "episode": alert.episode + 1,
            "acknowledged_at": None,
            "acknowledged_by": "",
            "assignee": None,
            "suppressed_by": None,
        }
    return values


def _note(alert: Alert, now: Lifecycle, finding: Finding, at: datetime, episode: int) -> None:
    """Record a transition, and an event unless the alert is only pending."""
    Transition.objects.create(
        alert=alert,
        number=alert.transition_count + 1,
        episode=episode,
        at=at,
        before=alert.state,
        after=now.state,
        sentence=finding.sentence[:TEXT_CHARACTERS_MAX],
    )
    if now.state in (State.PENDING, State.QUIET):
        return
    sentence = f"{alert.title}: {now.state.replace('_', ' ')}: {finding.sentence}"
    data = {"alert": alert.pk, "rule": alert.rule, "state": now.state, "severity": alert.severity}
    note(f"alert.{now.state}", [ALERTS, alert.topic], sentence, data, at)
