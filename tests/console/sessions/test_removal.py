"""Removing a driver from the fleet: what ends with it, who waits no longer, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.audit.models import AuditEntry
from console.control.documents import Compiler
from console.control.models import Target
from console.control.rounds import ASKED_FOR
from console.control.services import secret_of
from console.fleet.membership import joins, tokens
from console.fleet.models import TOLD_AFTER_LOST, Driver, Node, Removed
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.core import State
from console.operations.models import Operation
from console.operations.services import StalePlan
from console.orgs import services as orgs
from console.policies.evidence import confirmations, purges
from console.policies.models import PurgeReceipt
from console.policies.org_keys import keys_of
from console.sessions import services
from console.sessions.changes import driver_removal, jobs, moves
from console.sessions.models import DriverOrg, Job, Phase, Session, Stream
from console.sessions.steps import machines
from kvss_agent.process.membership import credential
from kvss_agent.security.identity import ProcessIdentity
from tests.conftest import People
from tests.console.control.drivers import join
from tests.console.fleet.worlds import CONTROL_TOKEN, DRIVER_FACTS, new_token
from tests.console.sessions.fleets import make_across, make_driver, make_fleet, run_job
from tests.console.sessions.planes import Plane, plane, push, run
from tests.console.sessions.requests import create, resize
from tests.html import compact

pytestmark = pytest.mark.django_db

Browser = Callable[..., Client]
OURS = credential(CONTROL_TOKEN, "driver:job7")


@pytest.fixture
def two_nodes(db: None, tmp_path: Path) -> Iterator[Plane]:
    with plane(tmp_path) as made:
        yield made


def remove(people: People, **more: Any) -> Operation:
    return driver_removal.remove(people.principal("platform_admin"), "job7", **more)


def advanced(operation: Operation) -> Operation:
    """As far as it comes without waiting."""
    while operations.advance(operation.pk):
        pass
    operation.refresh_from_db()
    return operation


def test_a_driver_is_removed_with_its_job(people: People) -> None:
    session = make_across(people.acme)
    secret = secret_of("driver", "job7")
    operation = remove(people, reason="its machine burned")
    assert not Driver.objects.exists()
    assert not Job.objects.exists()
    assert not Stream.objects.exists()
    assert Session.objects.get().version == session.version + 1
    told = Compiler("node").compile("ax1", {}).content
    assert b'"shards":[]' in told, "agents give its memory back,"
    assert b'"peers":[]' in told, "and let it in no more"
    assert secret_of("driver", "job7") != secret
    assert (operation.target, operation.org_id) == ("session:chat#job/serve", people.acme.pk)
    entry = AuditEntry.objects.get(action="driver.remove")
    assert (entry.object_name, entry.reason) == ("job7", "its machine burned")
    assert entry.before is not None
    assert (entry.before["session"], entry.before["job"]) == ("chat", "serve")


def test_nothing_is_removed_while_something_else_changes_its_session(people: People) -> None:
    make_across(people.acme)
    admin = people.principal("platform_admin")
    with transaction.atomic():
        ending = jobs.end_job(admin, services.for_change(admin, "chat"), "serve")
    with pytest.raises(operations.Busy, match=ending.sentence):
        remove(people)
    assert Driver.objects.filter(name="job7").exists()


def move_that_waits(people: People) -> Operation:
    """A stream of the job is being moved, and its driver was told so; since then it does not answer."""
    make_across(people.acme)
    admin = people.principal("platform_admin")
    with transaction.atomic():
        moving = moves.restore_rails(admin, services.for_change(admin, "chat"))
    assert Stream.objects.filter(operation=moving).update(phase=Phase.MOVING) == 1
    assert advanced(moving).message.endswith("Driver job7 does not answer.")
    return moving


def test_a_move_that_waits_for_a_driver_ends_with_the_driver(
    people: People, browser_of: Browser
) -> None:
    moving = move_that_waits(people)
    found = driver_removal.consequences(Driver.objects.get())
    assert (found.moving, found.in_the_way) == ((moving,), None)
    page = compact(browser_of(people.platform_admin).get("/fleet/drivers/job7/remove/"))
    assert "changes its streams and continues without them" in page
    assert "No purge waits for it" in page
    removing = remove(people, plan_token=found.token)
    assert removing.target == "session:chat#job/serve", "nobody starts a job of that name meanwhile"
    assert not Job.objects.exists()
    assert advanced(moving).state == State.FAILED
    assert moving.message == "Their job has ended: nothing is left to move."
    assert operations.running_on("session:chat") is None


def test_a_move_that_is_stuck_because_of_a_driver_ends_with_the_driver(people: People) -> None:
    moving = move_that_waits(people)
    operations.cancel(people.principal("platform_admin"), moving.pk)
    assert advanced(moving).state == State.UNDOING
    Operation.objects.filter(pk=moving.pk).update(step_since=timezone.now() - 2 * machines.COPYING)
    assert advanced(moving).state == State.STUCK
    remove(people)
    assert advanced(moving).state == State.CANCELLED


def test_a_resize_goes_on_without_the_streams_of_a_driver_that_was_removed(people: People) -> None:
    make_fleet()
    advanced(create(people, boxes=1))
    run_job(people, make_driver("job7"))
    resized = advanced(resize(people, 2))
    assert not resized.done
    remove(people)
    assert advanced(resized).state == State.SUCCEEDED
    assert (resized.response, Job.objects.count()) == ({"session": "chat", "boxes": ["cs1", "cs2"]}, 0)


def test_a_job_that_waits_for_room_is_given_up_where_its_driver_was_removed(people: People) -> None:
    make_fleet()
    advanced(create(people, boxes=1))
    Node.objects.update(state="cordoned")
    admin, driver = people.principal("platform_admin"), make_driver("job7")
    with transaction.atomic():
        session = services.for_change(admin, "chat")
        starting = jobs.start_job(admin, session, "serve", driver, wait_seconds=3600)
    assert advanced(starting).state == State.RUNNING
    remove(people)
    assert advanced(starting).state == State.FAILED
    assert starting.message == "Driver job7 was removed from the fleet."


def test_what_somebody_decides_on_is_what_they_have_seen(people: People) -> None:
    make_across(people.acme)
    seen = driver_removal.consequences(Driver.objects.get())
    Job.objects.all().delete()
    with pytest.raises(StalePlan):
        remove(people, plan_token=seen.token)
    now = driver_removal.consequences(Driver.objects.get())
    assert advanced(remove(people, plan_token=now.token)).state == State.SUCCEEDED


def test_one_that_was_removed_comes_back_with_a_new_join_token_only(people: People) -> None:
    old = new_token("driver")
    joins.join_driver(old, "job7", CONTROL_TOKEN, DRIVER_FACTS)
    remove(people)
    assert not joins.beats("job7", OURS, DRIVER_FACTS)
    assert "job7 was removed from the fleet on" in joins.why_unknown("driver", "job7", OURS)
    assert "removed" not in joins.why_unknown("driver", "job7", "of somebody else")
    with pytest.raises(Impossible, match=r"removed from the fleet.*make a new one"):
        joins.join_driver(old, "job7", CONTROL_TOKEN, DRIVER_FACTS)
    # The same token lets in others, also another machine under this name.
    joins.join_driver(old, "job8", "another token" * 3, DRIVER_FACTS)
    joins.join_driver(new_token("driver"), "job7", CONTROL_TOKEN, DRIVER_FACTS)
    assert joins.beats("job7", OURS, DRIVER_FACTS)


def test_the_process_hears_why_it_is_refused(people: People, client: Client) -> None:
    expires_at = timezone.now() + timedelta(hours=1)
    admin = people.principal("platform_admin")
    _, text = tokens.issue(admin, kind="driver", uses=9, expires_at=expires_at)
    told = {"control_url": "http://127.0.0.1:9", "software_version": "0.1.0"}

    def asks(verb: str, bearer: str, **more: str) -> tuple[int, str]:
        answer = client.post(
            f"/api/v1/drivers/job7/{verb}",
            {**told, **more},
            content_type="application/json",
            headers={"Authorization": f"Bearer {bearer}"},
        )
        return answer.status_code, answer.json().get("detail", "")

    assert asks("join", text, control_token=CONTROL_TOKEN)[0] == 200
    remove(people)
    status, said = asks("heartbeat", OURS)
    assert (status, "was removed from the fleet" in said) == (401, True)
    status, said = asks("join", text, control_token=CONTROL_TOKEN)
    assert (status, "make a new one" in said) == (409, True)


def test_its_key_is_refused_under_another_name_too(tmp_path: Path) -> None:
    own = ProcessIdentity.load(tmp_path, "driver:job7")
    asks = own.certificate_request()
    old = new_token("driver")
    Removed.of(joins.join_driver(old, "job7", CONTROL_TOKEN, DRIVER_FACTS, None, asks)).save()
    with pytest.raises(Impossible, match="job7 was removed"):
        joins.join_driver(old, "job8", "another token" * 3, DRIVER_FACTS, None, asks)


def purge_that_waits(people: People) -> Operation:
    join("job7", "http://127.0.0.1:1")
    Target.objects.create(kind="driver", name="job7", generation=1)
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        purging = purges.purge(people.principal("org_admin"), org, reason="ended")
    return advanced(purging)


def test_a_purge_goes_on_without_it_and_its_receipt_says_so(people: People, browser_of: Browser) -> None:
    purging = purge_that_waits(people)
    assert "drivers of other sessions" in purging.message
    assert driver_removal.consequences(Driver.objects.get()).waiting == (purging,)
    remove(people)
    assert advanced(purging).state == State.SUCCEEDED
    receipt = PurgeReceipt.objects.get()
    [told] = receipt.places["removed"]
    assert (told["kind"], told["name"]) == ("driver", ""), "it worked for nobody of acme"
    assert receipt.places["drivers"] == {}
    assert receipt.data_key_destroyed_at is None, "its state directory may still have it"
    page = compact(browser_of(people.org_admin).get("/orgs/acme/retention/"))
    assert "before it confirmed" in page
    assert "job7" not in page


def purge(people: People) -> tuple[Operation, PurgeReceipt]:
    """To its end, with everybody confirming who is still there."""
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        purging = purges.purge(people.principal("org_admin"), org, reason="stolen")
    assert advanced(purging).state == State.SUCCEEDED, purging.message
    return purging, PurgeReceipt.objects.get(operation_id=purging.pk)


def test_a_purge_after_a_theft_names_the_driver_that_has_the_key(
    people: People, browser_of: Browser
) -> None:
    """As the docs say: remove the stolen driver, then purge the orgs that its page listed."""
    keys_of([people.acme])
    join("job7", "http://127.0.0.1:1")
    Target.objects.create(kind="driver", name="job7", generation=1)
    remove(people)
    _, receipt = purge(people)
    assert receipt.data_key_destroyed_at is None, "the thief's copy still has it"
    [told] = receipt.places["removed"]
    assert (told["kind"], told["name"]) == ("driver", "")
    page = compact(browser_of(people.org_admin).get("/orgs/acme/retention/"))
    assert "data key may still exist" in page
    assert "its state directory may still have the data key" in page
    _, later = purge(people)
    assert later.data_key_destroyed_at is not None, "that key was told nobody who is gone"
    assert "removed" not in later.places


def test_a_driver_that_never_served_the_org_is_not_named(people: People) -> None:
    keys_of([people.acme])
    driver = join("job7", "http://127.0.0.1:1")
    driver.orgs.update(org=people.globex)
    remove(people)
    _, receipt = purge(people)
    assert receipt.data_key_destroyed_at is not None
    assert "removed" not in receipt.places


def test_a_driver_that_was_lost_before_the_key_was_made_never_had_it(people: People) -> None:
    keys_of([people.acme])
    join("job7", "http://127.0.0.1:1")
    Driver.objects.update(lost_at=timezone.now() - 2 * TOLD_AFTER_LOST)
    Target.objects.create(kind="driver", name="job7", generation=1)
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        first = purges.purge(people.principal("org_admin"), org, reason="ended")
    assert not advanced(first).done
    remove(people)
    assert advanced(first).state == State.SUCCEEDED
    assert PurgeReceipt.objects.get().data_key_destroyed_at is None
    _, second = purge(people)
    assert second.data_key_destroyed_at is not None
    assert ASKED_FOR < TOLD_AFTER_LOST, "whoever tells it meanwhile has given up by then"


def test_a_driver_whose_machine_has_deleted_what_it_was_told_is_not_named(people: People) -> None:
    """As with every replica of a workload that was deleted or scaled down."""
    keys_of([people.acme])
    driver = joins.join_driver(new_token("driver"), "job7", CONTROL_TOKEN, DRIVER_FACTS)
    DriverOrg.objects.create(driver=driver, org=people.acme)
    assert joins.is_removed_driver("job7", OURS, erased=True) is False, "it is still there"
    driver_removal.remove(SYSTEM, "job7")
    assert joins.is_removed_driver("job7", "of somebody else", erased=True) is None
    assert joins.is_removed_driver("job7", OURS, erased=False) is True
    assert Removed.objects.get().erased_at is None
    assert joins.is_removed_driver("job7", OURS, erased=True) is True
    _, receipt = purge(people)
    assert receipt.data_key_destroyed_at is not None
    assert "removed" not in receipt.places


def test_a_thief_can_not_say_that_a_driver_has_nothing_left(people: People) -> None:
    """It has the token that the state directory's machine shows."""
    keys_of([people.acme])
    driver = joins.join_driver(new_token("driver"), "job7", CONTROL_TOKEN, DRIVER_FACTS)
    DriverOrg.objects.create(driver=driver, org=people.acme)
    remove(people)
    assert joins.is_removed_driver("job7", OURS, erased=True) is True
    assert purge(people)[1].data_key_destroyed_at is None


def test_what_an_earlier_version_removed_may_have_any_key(people: People) -> None:
    keys_of([people.acme])
    Removed.objects.create(kind="driver", name="job7")
    assert purge(people)[1].data_key_destroyed_at is None


def test_a_receipt_names_stores_that_nobody_looks_after(people: People, browser_of: Browser) -> None:
    long_ago = people.acme.created_at - timedelta(days=1)
    Removed.objects.create(kind="node", name="ax-8", stores=["s3:eu/old"], removed_at=long_ago)
    Removed.objects.create(kind="node", name="ax-9", stores=["s3:eu/kv"])
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        purging = purges.purge(people.principal("org_admin"), org, reason="ended")
    assert advanced(purging).state == State.SUCCEEDED
    [told] = PurgeReceipt.objects.get().places["removed"]
    assert (told["kind"], told["name"]) == ("store", "ax-9"), "the other went before there was an acme"
    page = compact(browser_of(people.platform_admin).get("/orgs/acme/retention/"))
    assert "store of node ax-9" in page


def test_a_receipt_names_a_driver_of_the_orgs_own_session(people: People) -> None:
    make_across(people.acme)
    Target.objects.create(kind="driver", name="job7", generation=1)
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        purging = purges.purge(people.principal("org_admin"), org, reason="ended")
    assert not advanced(purging).done
    remove(people)
    assert advanced(purging).state == State.SUCCEEDED
    assert [one["name"] for one in PurgeReceipt.objects.get().places["removed"]] == ["job7"]


def test_one_that_joins_under_the_name_is_asked_for_itself(people: People) -> None:
    purging = purge_that_waits(people)
    remove(people)
    join("job7", "http://127.0.0.1:1")
    Target.objects.create(kind="driver", name="job7", generation=1)
    assert not advanced(purging).done
    assert [one["name"] for one in purging.notes["removed"]] == ["job7"]
    assert not purging.notes["drivers"]["job7"]["done"]


def test_a_purge_that_was_given_up_is_tried_again(people: People) -> None:
    purging = purge_that_waits(people)
    Operation.objects.filter(pk=purging.pk).update(
        step_since=timezone.now() - 2 * confirmations.PATIENCE, wake_at=timezone.now()
    )
    assert advanced(purging).state == State.STUCK
    remove(people)
    assert advanced(purging).state == State.SUCCEEDED


def test_the_page_says_what_becomes_of_it_and_removes_it(people: People, browser_of: Browser) -> None:
    make_across(people.acme)
    Driver.objects.update(lost_at=None)
    address = "/fleet/drivers/job7/remove/"
    assert browser_of(people.platform_on_call).get(address).status_code == 403
    assert browser_of(people.org_admin).get(address).status_code == 404
    admin = browser_of(people.platform_admin)
    assert address in compact(admin.get("/fleet/drivers/job7/"))
    page = compact(admin.get(address))
    for said in (
        "It is still alive",
        "Job serve of session",
        "4 streams",
        "160 KiB",
        "No purge waits for it",
    ):
        assert said in page
    token = driver_removal.consequences(Driver.objects.get()).token
    assert token in page
    refused = admin.post(address, {"typed": "job8", "plan_token": token})
    assert "Type “job7”" in compact(refused)
    stale = admin.post(address, {"typed": "job7", "plan_token": "0"}, follow=True)
    assert "made from has changed" in compact(stale)
    assert Driver.objects.exists()
    done = admin.post(address, {"typed": "job7", "plan_token": token, "reason": "burned"}, follow=True)
    assert "Remove driver job7" in compact(done)
    assert not Driver.objects.exists()
    assert admin.get(address).status_code == 404


def test_the_api_says_what_would_be_and_removes(people: People, api_of: Browser) -> None:
    purging = purge_that_waits(people)
    admin, address = api_of(people.platform_admin), "/api/v1/drivers/job7/remove"

    def post(query: str = "", key: str = "k", **body: str) -> Any:
        headers = {"Idempotency-Key": key}
        return admin.post(address + query, body, content_type="application/json", headers=headers)

    seen = post("?validate_only=true", "v").json()
    assert (seen["alive"], seen["job"], seen["waiting"]) == (True, None, [str(purging.pk)])
    assert post("", "s", plan_token="0" * 32).json()["type"].endswith("StalePlan")
    begun = post("", plan_token=seen["plan_token"], reason="burned")
    assert begun.status_code == 202
    assert post("", plan_token=seen["plan_token"], reason="burned").json() == begun.json()
    assert admin.get(begun["Location"]).json()["kind"] == "driver.remove"
    assert admin.get("/api/v1/drivers/job7").status_code == 404


@pytest.mark.slow
def test_agents_give_the_memory_back_and_the_session_takes_another_driver(
    people: People, two_nodes: Plane
) -> None:
    run(create(people, boxes=2, bytes_per_token=512))
    driver = two_nodes.add_driver("job7")
    admin = people.principal("platform_admin")
    with transaction.atomic():
        run_on = services.for_change(admin, "chat")
        starting = jobs.start_job(admin, run_on, "serve", driver)
    assert run(starting).state == State.SUCCEEDED
    assert sum(map(len, (two_nodes.slots("ax1"), two_nodes.slots("ax2")))) == 4
    removed = run(remove(people))
    assert removed.state == State.SUCCEEDED, removed.message
    assert removed.response == {"driver": "job7", "session": "chat", "job": "serve"}
    assert two_nodes.slots("ax1") == two_nodes.slots("ax2") == {}
    push()
    assert not Target.objects.filter(kind="driver").exists()
    assert Node.objects.filter(state="ready").count() == 2
    with transaction.atomic():
        starting = jobs.start_job(
            admin, services.for_change(admin, "chat"), "serve", two_nodes.add_driver("job8")
        )
    assert run(starting).state == State.SUCCEEDED
