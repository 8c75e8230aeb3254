"""Who counts as lost, and who does not because nobody was there to hear."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from console.celery import app
from console.fleet import tasks
from console.fleet.membership import liveness
from console.fleet.models import Driver, Node, Watch
from telemetry.models import Event, Source
from tests.console.fleet.worlds import World, refreshed


def hear(now: datetime, *, since: float) -> None:
    """A web process is there, since so many seconds."""
    Source.objects.update_or_create(
        name="web@here",
        defaults={
            "kind": "web",
            "topic": "web:here",
            "version": "0.1.0",
            "host": "here",
            "process_id": 1,
            "started_at": now - timedelta(seconds=since),
            "sequence": 1,
            "seen_at": now,
        },
    )


@pytest.fixture(autouse=True)
def _moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test is one moment, from which it counts the seconds: none goes by in it."""
    now = timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: now)


def look(seconds: float, *, web_since: float = 1000) -> int:
    """Look so many seconds after now."""
    now = timezone.now() + timedelta(seconds=seconds)
    hear(now, since=web_since)
    return liveness.find_lost(now)


@pytest.fixture
def listening(db: None) -> None:
    """The console has listened for a long time."""
    now = timezone.now()
    Watch.objects.create(pk=1, listening_since=now - timedelta(hours=1), swept_at=now)


def test_who_is_silent_for_too_long_is_lost_once_with_an_event(world: World, listening: None) -> None:
    Driver.objects.create(
        name="job-7",
        control_url="http://x",
        heartbeat_sha256=bytes(32),
        joined_at=timezone.now(),
        last_heartbeat_at=timezone.now(),
    )
    assert look(5) == 0
    assert look(20) == 0
    assert look(31) == 2
    assert look(32) == 0
    node = refreshed(world.here)
    assert (node.state, node.held_state) == ("lost", "ready")
    assert "30 s" in node.state_reason
    assert Driver.objects.get().lost_at is not None
    assert sorted(Event.objects.filter(kind__endswith=".lost").values_list("kind", flat=True)) == [
        "driver.lost",
        "node.lost",
    ]


def test_who_beats_is_not_lost(
    world: World, listening: None, age_heartbeats: Callable[[float], None]
) -> None:
    age_heartbeats(-25)
    assert look(15) == 0
    assert look(31) == 0


def test_a_node_in_maintenance_may_be_silent(world: World, listening: None) -> None:
    Node.objects.filter(name="ax-1").update(state="maintenance")
    assert look(15) == 0
    assert look(31) == 0
    assert refreshed(world.here).state == "maintenance"


def test_nobody_is_lost_because_the_console_did_not_look(world: World, listening: None) -> None:
    assert look(600) == 0  # for ten minutes nobody has looked
    assert look(615) == 0
    assert look(629) == 0
    assert look(631) == 1


def test_nobody_is_lost_because_no_web_process_was_there_to_hear(world: World, listening: None) -> None:
    assert look(15) == 0
    assert look(30, web_since=2) == 0
    Source.objects.all().delete()
    now = timezone.now()
    assert liveness.find_lost(now + timedelta(seconds=45)) == 0
    assert look(60) == 0
    assert look(74) == 0
    assert look(76) == 1


def test_a_clock_that_is_set_back_delays_who_is_lost_by_no_more_than_the_time_to_listen(
    world: World, listening: None, age_heartbeats: Callable[[float], None]
) -> None:
    now = timezone.now()
    ahead = now + timedelta(hours=6)
    Watch.objects.update(listening_since=ahead, swept_at=ahead)
    age_heartbeats(60)
    assert look(0, web_since=-6 * 3600) == 0, "it began by the clock that was ahead"
    assert look(15, web_since=-6 * 3600) == 0
    assert look(31, web_since=-6 * 3600) == 1


@pytest.mark.parametrize("ahead", [-60, 60])
def test_the_clock_of_who_looks_makes_no_difference(
    world: World,
    listening: None,
    age_heartbeats: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    ahead: int,
) -> None:
    now = timezone.now()
    hear(now, since=1000)
    for age, state in ((0, "ready"), (31, "lost")):
        age_heartbeats(age)
        with monkeypatch.context() as worker:
            worker.setattr(timezone, "now", lambda: now + timedelta(seconds=ahead))
            tasks.find_who_is_lost()
        assert refreshed(world.here).state == state


def test_the_task_looks(world: World, listening: None, age_heartbeats: Callable[[float], None]) -> None:
    hear(timezone.now(), since=1000)
    age_heartbeats(60)
    tasks.find_who_is_lost()
    assert refreshed(world.here).state == "lost"
    assert app.conf.beat_schedule["find-who-is-lost"]["task"] == tasks.find_who_is_lost.name
