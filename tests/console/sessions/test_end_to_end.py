"""A session is made, grown, shrunk, moved off an agent and loses another, while load never stops."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import transaction

from console.fleet.models import Node
from console.operations.core import State
from console.operations.models import Operation
from console.orgs import services as orgs
from console.policies import callers
from console.sessions.changes import drains
from console.sessions.models import Job, Session
from tests.conftest import People
from tests.console.sessions.loads import Load
from tests.console.sessions.planes import plane, push, run
from tests.console.sessions.requests import create, resize, shards, start_job
from tests.live import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(300)]

MORE = 40  # requests, so that each stage is under load


def done(operation: Operation) -> None:
    ended = run(operation)
    assert ended.state == State.SUCCEEDED, (ended.sentence, ended.message, ended.error)


def served_more(load: Load) -> None:
    begin = load.requests
    wait_until("more requests are served", lambda: load.requests >= begin + MORE, 60)


def test_no_request_fails_no_byte_is_wrong_and_no_job_ends(people: People, tmp_path: Path) -> None:
    admin, on_call = people.principal("platform_admin"), people.principal("platform_on_call")
    with transaction.atomic():
        org = orgs.for_change(admin, "acme")
        _, token = callers.add_caller(admin, org, name="engine")
    with plane(tmp_path, nodes=3, boxes=8) as fleet:
        done(create(people, boxes=2, bytes_per_token=512))
        done(start_job(people, fleet.add_driver("job7")))
        with Load(fleet.drivers["job7"], token) as load:
            served_more(load)
            warm = load.hit_rate()
            assert warm

            done(resize(people, 4))
            served_more(load)
            done(resize(people, 2))
            served_more(load)

            moved = next(name for name in ("ax2", "ax3") if fleet.slots(name))
            done(drains.drain(on_call, moved))
            assert fleet.slots(moved) == {}
            served_more(load)

            dead = next(shard.node.name for shard in shards())
            fleet.agents[dead].kill()
            Node.objects.filter(name=dead).update(state="lost", held_state="ready")
            served_more(load)
            done(drains.drain(on_call, dead))
            push()
            served_more(load)
            served_more(load)

        assert load.failed == []
        assert load.wrong == []
        assert {shard.node.name for shard in shards()}.isdisjoint({dead, moved})
        seen = fleet.drivers["job7"].control("observed").json()["shards"]
        assert {shard["state"] for shard in seen} == {"here"}
        again = load.hit_rate(since=load.served[-MORE].at)
        assert again, "what was lost with the agent is stored again"
        assert Job.objects.get().running
        assert Session.objects.get().boxes_desired == 2
