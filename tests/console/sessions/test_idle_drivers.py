"""Nobody waits for a driver whose job has ended, and it gets the document of its next job."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from django.db import transaction
from django.utils import timezone

from console.control.models import Change, Target
from console.control.services import Reach, applied
from console.fleet.models import Driver
from console.operations.core import State
from console.operations.models import Operation
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies.evidence import purges
from console.policies.models import PurgeConfirmation, PurgeReceipt
from console.policies.org_keys import keys_of
from console.policies.rollout import applied_on
from console.policies.services import active_policy
from console.sessions import driver_orgs, services
from console.sessions.changes import jobs
from tests.conftest import People
from tests.console.control.targets import save, target
from tests.console.sessions.planes import Plane, plane, push, run
from tests.console.sessions.requests import create, start_job
from tests.swdriver_shim.daemons import stored_bytes

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture
def ended(people: People, tmp_path: Path) -> Iterator[Plane]:
    """A session whose job has ended. Its driver, `job7`, is alive."""
    with plane(tmp_path) as made:
        assert run(create(people, boxes=2, bytes_per_token=512)).state == State.SUCCEEDED
        assert run(start_job(people, made.add_driver("job7"))).state == State.SUCCEEDED
        end_job(people)
        yield made


def end_job(people: People) -> None:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        ending = jobs.end_job(admin, services.for_change(admin, "chat"), "serve")
    assert run(ending).state == State.SUCCEEDED


def reach(people: People) -> Reach:
    return applied_on(active_policy(people.acme))


@pytest.mark.parametrize("is_lost", [False, True], ids=["alive", "lost"])
def test_a_policy_does_not_wait_for_a_driver_whose_job_has_ended(
    people: People, ended: Plane, *, is_lost: bool
) -> None:
    if is_lost:
        ended.drivers["job7"].kill()
        Driver.objects.update(lost_at=timezone.now())
    other = ended.add_driver("job8")
    assert run(start_job(people, other)).state == State.SUCCEEDED
    change = save(people, ttl_last_use_seconds=60)
    push()
    assert [(one.name, one.has_it) for one in reach(people).standings] == [("job8", True)]
    found = applied(Change.objects.get(pk=change.pk))
    assert found.seconds is not None, "the time until all had it is known, though one is idle"
    assert target("job7").problem == "It has no job: register one in a session."


def test_it_has_the_newest_policy_when_its_next_job_starts(people: People, ended: Plane) -> None:
    save(people, ttl_last_use_seconds=60)
    push()
    assert not reach(people).standings
    assert run(start_job(people, Driver.objects.get(name="job7"))).state == State.SUCCEEDED
    assert not Target.objects.filter(is_idle=True).exists()
    assert [(one.name, one.has_it) for one in reach(people).standings] == [("job7", True)]
    change = save(people, ttl_last_use_seconds=30)
    assert [one.has_it for one in reach(people).standings] == [False], "it is waited for again"
    push()
    assert applied(Change.objects.get(pk=change.pk)).seconds is not None


def test_an_org_is_taken_off_it_and_can_come_back(people: People, ended: Plane) -> None:
    """No document comes to it: it leaves the org out by itself, until a document names it again."""
    driver = Driver.objects.get(name="job7")
    admin = people.principal("platform_admin")

    def serve(*served: Org) -> list[Operation]:
        with transaction.atomic():
            return driver_orgs.set_orgs(admin, driver, served, reason="asked for").operations

    assert knows(ended, "job7", people.acme)
    [withdrawal] = serve(people.globex)
    assert run(withdrawal).state == State.SUCCEEDED, withdrawal.message
    payload = PurgeConfirmation.objects.get(identity="driver:job7").payload
    said = msgspec.json.decode(payload)
    assert (said["withdrawn"], said["shards"]) == (True, [])
    assert not knows(ended, "job7", people.acme)

    assert serve(people.acme, people.globex) == []
    assert run(start_job(people, driver)).state == State.SUCCEEDED
    push()
    assert knows(ended, "job7", people.acme), "its document says what the last one said"


def knows(plane: Plane, driver: str, org: Org) -> bool:
    """Whether the document that the driver has kept has the org's secret."""
    secret = base64.b64encode(bytes(keys_of([org])[org.pk].secret))
    return any(secret in one for one in stored_bytes(plane.directory / driver))


def test_it_confirms_a_purge_and_speaks_of_no_shard(people: People, ended: Plane) -> None:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        purging = purges.purge(people.principal("org_admin"), org, reason="asked for")
    assert run(purging).state == State.SUCCEEDED, purging.message
    assert PurgeReceipt.objects.get().places["drivers"]
    payload = PurgeConfirmation.objects.get(identity="driver:job7").payload
    assert msgspec.json.decode(payload)["shards"] == [], "what it had there, agents speak for"
