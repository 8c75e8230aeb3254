"""What beat asks for: one tick plans, evaluates, plans again, and hands each channel's work out."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
import redis
from django.conf import settings
from django.db import OperationalError
from django.utils import timezone

from console.alerts import tasks
from console.alerts.delivery import notifications
from console.alerts.models import Evaluation, Notification
from console.alerts.rules.catalogue import RULES
from console.alerts.state import evaluation
from console.celery import app
from tests.console.alerts.receivers import hook
from tests.console.alerts.things import make_alert, make_channel

# Redis has a list for each priority; what is sent to others goes last.
QUEUE = f"tidegate:celery:celery\x06\x16{settings.ASKS_OTHERS}"


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(settings.REDIS_URL, decode_responses=True)
    client.flushdb()
    yield client
    client.flushdb()
    client.close()


@pytest.mark.django_db
def test_a_tick_evaluates_all_rules_and_hands_out_what_is_due(
    broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "GROUPING", timedelta(hours=1))  # a tick takes its time
    channel = make_channel("hook", "http://127.0.0.1:9/x")
    make_channel("nothing to say", "http://127.0.0.1:9/y", matchers=["rule=ttl-exceeded"])
    make_alert("queue-deep", "node:ax-7")
    tasks.tick()
    assert set(Evaluation.objects.values_list("rule", flat=True)) == {rule.slug for rule in RULES}
    assert not Evaluation.objects.exclude(problem="").exists()
    assert broker.llen(QUEUE) == 0, "what fires together is told together, a little later"
    Notification.objects.update(next_try_at=timezone.now() - timedelta(seconds=1))
    tasks.tick()
    assert broker.llen(QUEUE) == 1
    assert notifications.due_channels(timezone.now()) == [channel.pk]


@pytest.mark.django_db
def test_what_is_due_is_handed_out_although_the_evaluation_fails(
    broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_at: datetime) -> int:
        raise OperationalError("too long")

    make_channel("hook", "http://127.0.0.1:9/x")
    make_alert("queue-deep", "node:ax-7")
    notifications.plan(timezone.now() - timedelta(minutes=1))
    monkeypatch.setattr(evaluation, "tick", fails)
    with pytest.raises(OperationalError):
        tasks.tick()
    assert broker.llen(QUEUE) == 1


@pytest.mark.django_db
def test_a_channels_work_is_done_by_its_task() -> None:
    with hook() as receiver:
        channel = make_channel("hook", receiver.address)
        make_alert("queue-deep", "node:ax-7")
        notifications.plan(timezone.now() - timedelta(minutes=1))
        tasks.deliver(channel.pk)
    assert [body["what"] for body in receiver.bodies] == ["firing"]
    tasks.deliver(channel.pk + 1)  # it was deleted meanwhile


def test_beat_asks_for_it() -> None:
    entry = app.conf.beat_schedule["alerts"]
    assert entry["task"] == tasks.tick.name
    assert entry["schedule"] == 10.0
