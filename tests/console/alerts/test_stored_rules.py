"""What was stored under the slugs that rules had before goes on under their new ones."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module

import pytest
from django.apps import apps
from django.utils import timezone

from console.alerts.models import Alert, Silence, Thresholds
from console.alerts.rules.catalogue import BY_SLUG
from console.alerts.services import WHY_NOT_A_RAIL
from console.alerts.state.transitions import fingerprint

pytestmark = pytest.mark.django_db
migration = import_module("console.alerts.migrations.0005_rule_slugs")
TOPIC, LABELS = "node:ax-7", {"node": "ax-7"}


def test_every_new_slug_is_a_rule() -> None:
    assert {slug for slug in migration.SLUGS.values() if "*" not in slug} <= BY_SLUG.keys()


def test_an_open_alert_is_the_one_that_its_rule_finds_again() -> None:
    now = timezone.now()
    Alert.objects.create(
        rule="agent-silent",
        topic=TOPIC,
        labels=LABELS,
        fingerprint=fingerprint("agent-silent", TOPIC, LABELS),
        severity="page",
        state="firing",
        begun_at=now,
        state_since=now,
        fired_at=now,
        observed_at=now,
        evidence={"why_not_better": "ax-1 is full"},
    )
    migration.rename(apps, None)
    [alert] = Alert.objects.all()
    assert alert.rule == "agent-not-reporting"
    assert alert.evidence == {WHY_NOT_A_RAIL: "ax-1 is full"}
    assert alert.fingerprint == fingerprint("agent-not-reporting", TOPIC, LABELS)


def test_thresholds_and_silences_keep_their_meaning() -> None:
    Thresholds.objects.create(rule="numbers-refused", values={"refused": 5, "breach_seconds": 60})
    now = timezone.now()
    Silence.objects.create(
        matchers=["rule=overstay", "rule!=numbers-*", "node=overstay"],
        starts_at=now,
        ends_at=now + timedelta(hours=1),
        author="olga",
        reason="known",
    )
    migration.rename(apps, None)
    [thresholds] = Thresholds.objects.all()
    assert thresholds.rule == "telemetry-rejected"
    assert thresholds.values == {"rejected": 5, "pending_seconds": 60}
    [silence] = Silence.objects.all()
    assert silence.matchers == ["rule=ttl-exceeded", "rule!=telemetry-*", "node=overstay"]
