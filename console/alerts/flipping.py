"""A flip happens once, however many evaluators see its cause.

Each of them decides from a row as it read it, and writes by an UPDATE that names the `observed_at` of
that. Only one such UPDATE finds the row; the others change nothing, and look again at their next tick.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from django.db import transaction

from console.alerts.life import OPEN, Life, Patience, State, Verdict, after
from console.alerts.models import SENTENCE_CHARACTERS_MAX, Alert, Flip
from console.alerts.rules import Finding, Rule
from console.orgs.models import Org
from telemetry.events import note
from telemetry.topics import ALERTS

LONG_AGO: Final = datetime(2000, 1, 1, tzinfo=UTC)  # before anything was observed


def fingerprint(rule: str, topic: str, labels: Mapping[str, str]) -> str:
    """What an instance is known by. The same everywhere."""
    text = json.dumps([rule, topic, sorted(labels.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def observe(alert: Alert, finding: Finding, patience: Patience, at: datetime) -> bool:
    """Take down what is known of `at`; whether it was this call that made the state change.

    `alert` is as it was read. Nothing happens where another evaluator has written since, or has seen a
    later moment.
    """
    if at <= alert.observed_at:
        return False
    life = after(alert.life, finding.verdict, patience, at)
    flips = life.state is not State(alert.state)
    begins = life.state in OPEN and not alert.is_open
    with transaction.atomic():
        written = Alert.objects.filter(pk=alert.pk, observed_at=alert.observed_at).update(
            **_values(alert, life, finding, at, begins=begins), flips_made=alert.flips_made + flips
        )
        if written and flips:
            _note(alert, life, finding, at, alert.episode + begins)
    return bool(written) and flips


def first_seen(rule: Rule, finding: Finding, org: Org | None, at: datetime) -> Alert | None:
    """The row of an instance that had none, quiet as yet; whoever comes first makes it. None where all
    is well: of that there are no rows."""
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
        episode=0,
        begun_at=at,
        state_since=LONG_AGO,
        observed_at=LONG_AGO,
        sentence=finding.sentence[:SENTENCE_CHARACTERS_MAX],
    )
    Alert.objects.bulk_create([quiet], ignore_conflicts=True)
    return Alert.objects.get(fingerprint=mark)


def _values(
    alert: Alert, life: Life, finding: Finding, at: datetime, *, begins: bool
) -> dict[str, object]:
    """What a row becomes. Of an instance of which nothing is known, the last that was is kept."""
    values: dict[str, object] = {
        "state": life.state,
        "begun_at": life.begun_at,
        "fired_at": life.fired_at,
        "fine_since": life.fine_since,
        "observed_at": at,
    }
    if life.state is not State(alert.state):
        values["state_since"] = at
    if finding.verdict is Verdict.BREACH:
        values |= {
            "value": finding.value,
            "threshold": finding.threshold,
            "sentence": finding.sentence[:SENTENCE_CHARACTERS_MAX],
            "evidence": dict(finding.evidence),
        }
    if begins:
        values |= {
            "episode": alert.episode + 1,
            "acknowledged_at": None,
            "acknowledged_by": "",
            "assignee": None,
            "hidden_by": None,
        }
    return values


def _note(alert: Alert, life: Life, finding: Finding, at: datetime, episode: int) -> None:
    """A flip, and an event of those whom it concerns. What is only pending is none of those."""
    Flip.objects.create(
        alert=alert,
        number=alert.flips_made + 1,
        episode=episode,
        at=at,
        before=alert.state,
        after=life.state,
        sentence=finding.sentence[:SENTENCE_CHARACTERS_MAX],
    )
    if life.state in (State.PENDING, State.QUIET):
        return
    said = f"{alert.title}: {life.state.replace('_', ' ')}: {finding.sentence}"
    data = {"alert": alert.pk, "rule": alert.rule, "state": life.state, "severity": alert.severity}
    note(f"alert.{life.state}", [ALERTS, alert.topic], said, data, at)
