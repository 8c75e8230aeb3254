"""Which orgs a driver is told of: who may say so, what it is told, and who counts it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.http import Http404
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.accounts.principal import Refused
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.control import documents
from console.control.documents import Compiler
from console.control.models import Change, Target
from console.fleet.models import Driver, Node
from console.fleet.services import for_change, visible_drivers
from console.operations import services as operations
from console.operations.core import State
from console.operations.models import Operation
from console.orgs.models import Membership, Org
from console.policies import org_keys
from console.policies.desired import orgs as orgs_part
from console.policies.rollout import reach
from console.policies.services import active_policy
from console.sessions import driver_orgs
from console.sessions.changes import jobs
from console.sessions.changes.sizes import new_session
from console.sessions.driver_orgs import Orgs
from console.sessions.models import DriverOrg, Job, Session
from console.sessions.services import for_change as session_for_change
from tests.conftest import People
from tests.console.control.targets import save
from tests.console.operations.runs import run
from tests.console.sessions.fleets import arrive, make_driver, make_fleet
from tests.console.sessions.requests import create

pytestmark = pytest.mark.django_db
ORGS = "/api/v1/drivers/job7/orgs"


@pytest.fixture
def driver(people: People) -> Driver:
    """It serves acme, and was told so."""
    made = make_driver("job7")
    put(people, [people.acme])
    Target.objects.update_or_create(kind="driver", name="job7", defaults={"generation": 1})
    return made


def put(people: People, orgs: Orgs, name: str = "job7") -> driver_orgs.Changed:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        held = for_change(admin, visible_drivers, name, Role.PLATFORM_ADMIN)
        return driver_orgs.set_orgs(admin, held, orgs, reason="asked for")


def told(name: str = "job7") -> list[str]:
    return [one["name"] for one in msgspec.json.decode(orgs_part()(name)["orgs"])]


def shared(people: People, **session: Any) -> Session:
    made = new_session("shared", None, 1, **session)
    made.save()
    return made


# What it is told


def test_a_driver_is_told_its_orgs_and_not_a_byte_of_the_others(people: People, driver: Driver) -> None:
    assert told() == ["acme"]
    raw = bytes(orgs_part()("job7")["orgs"])
    keys = org_keys.keys_of([people.acme, people.globex])
    ours, theirs = keys[people.acme.pk], keys[people.globex.pk]
    assert base64.b64encode(bytes(ours.secret)) in raw
    for secret in (theirs.secret, theirs.data_key):
        assert base64.b64encode(bytes(secret)) not in raw
    assert people.globex.slug.encode() not in raw


def test_all_is_also_who_comes_later_and_named_is_not(people: People, driver: Driver) -> None:
    make_driver("job8")
    Org.objects.create(slug="initech", name="Initech")
    assert told() == ["acme"]
    assert told("job8") == ["acme", "globex", "initech"]
    put(people, [])
    assert told() == []


def test_documents_of_many_drivers_are_joined_of_parts_that_are_made_once(people: People) -> None:
    for number in range(3):
        make_driver(f"d{number}")
    told("d0")  # keys are made
    part = orgs_part()
    first = part("d0")["orgs"]
    with CaptureQueriesContext(connection) as asked:
        assert [part(f"d{number}")["orgs"] for number in (1, 2)] == [first, first]
    assert len(asked) == 2, "which orgs each may serve, and nothing else"


# Who may say so


def test_a_session_of_an_org_is_of_that_org_and_a_shared_one_has_to_say(people: People) -> None:
    admin = people.principal("platform_admin")
    own = new_session("own", people.acme, 1)
    assert driver_orgs.resolve(admin, own, None) == [people.acme]
    assert driver_orgs.resolve(admin, own, "session") == [people.acme]
    with pytest.raises(ValidationError, match="Session shared has no org of its own"):
        driver_orgs.resolve(admin, shared(people), None)
    assert driver_orgs.resolve(admin, own, "all") is None
    assert driver_orgs.resolve(admin, own, ["globex", "acme"]) == [people.acme, people.globex]
    with pytest.raises(ValidationError, match="no org of one of these names"):
        driver_orgs.resolve(admin, own, ["acme", "nobody"])


def test_an_org_is_let_onto_a_driver_by_its_own_admin_and_all_are_by_the_platforms(
    people: People,
) -> None:
    own = new_session("own", people.acme, 1)
    olga = people.principal("org_admin")
    assert driver_orgs.resolve(olga, own, None) == [people.acme]
    with pytest.raises(Refused):
        driver_orgs.resolve(olga, own, "all")
    with pytest.raises(ValidationError, match="no org of one of these names"):
        driver_orgs.resolve(olga, own, ["acme", "globex"])  # she does not learn that there is one
    Membership.objects.create(org=people.globex, user=people.org_admin, role=Role.VIEWER)
    with pytest.raises(Refused):
        driver_orgs.resolve(people.principal("org_admin"), own, ["acme", "globex"])


# Changing


def test_who_was_told_keeps_count_of_an_org_until_it_has_confirmed(
    people: People, driver: Driver
) -> None:
    changed = put(people, [people.globex])
    assert [org.slug for org in changed.plan.removed] == ["acme"]
    assert [one.sentence for one in changed.operations] == [f"Remove {people.acme.name} from a driver"]
    assert changed.operations[0].org_id == people.acme.pk
    assert told() == ["globex"]
    assert [one.name for one in driver_orgs.drivers_told(people.acme)] == ["job7"], "a purge asks it"
    assert not driver_orgs.drivers_serving(people.acme).exists()
    again = put(people, [people.acme, people.globex])
    assert again.operations == []
    assert told() == ["acme", "globex"]
    assert driver_orgs.leaving_of(driver) == []


def test_who_was_never_told_anything_has_nothing_to_confirm(people: People) -> None:
    make_driver("job7")
    changed = put(people, [people.globex])
    assert changed.operations == []
    assert not DriverOrg.objects.filter(is_leaving=True).exists()
    assert told() == ["globex"]


def test_of_all_orgs_those_leave_that_there_are(people: People) -> None:
    make_driver("job7")
    Target.objects.create(kind="driver", name="job7", generation=1)
    changed = put(people, [people.globex])
    assert [org.slug for org in changed.plan.removed] == ["acme"]
    assert put(people, None).operations == []
    assert not DriverOrg.objects.filter(is_leaving=True).exists(), "it serves all again"


def test_more_than_can_be_followed_are_not_taken_off_at_once(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_driver("job7")
    Target.objects.create(kind="driver", name="job7", generation=1)
    monkeypatch.setattr(driver_orgs, "LEAVING_MAX", 1)
    with pytest.raises(ValidationError, match="2 orgs off the driver"):
        put(people, [])
    assert told() == ["acme", "globex"]


def test_a_change_of_orgs_is_on_the_trail_of_the_platform_and_of_each_org(
    people: People, driver: Driver
) -> None:
    before = AuditEntry.objects.count()
    put(people, [people.globex])
    made = {one.action: one for one in AuditEntry.objects.order_by("pk")[before:]}
    assert set(made) == {"driver.orgs", "org.driver_add", "org.driver_remove"}
    whole = made["driver.orgs"]
    assert (whole.before, whole.after) == ({"orgs": ["acme"]}, {"orgs": ["globex"]})
    assert whole.org_id is None, "it names orgs to each other"
    assert made["org.driver_add"].org_id == people.globex.pk
    assert made["org.driver_add"].after == {"driver": driver_orgs.NOT_OWN}
    assert made["org.driver_remove"].org_id == people.acme.pk
    count = AuditEntry.objects.count()
    put(people, [people.globex])
    assert AuditEntry.objects.count() == count, "the same orgs again change nothing"


def test_a_policy_reaches_the_drivers_that_serve_the_org(people: People, driver: Driver) -> None:
    make_driver("job8")
    put(people, [people.globex], "job8")
    Target.objects.update_or_create(kind="driver", name="job8", defaults={"generation": 1})
    change = save(people, ttl_last_use_seconds=60)
    assert change.targets == [["driver", "job7"]]
    staff = people.principal("platform_admin")
    assert [one.name for one in reach(staff, active_policy(people.acme)).standings] == ["job7"]
    put(people, [people.acme, people.globex], "job8")
    there = reach(staff, active_policy(people.acme)).standings
    assert [one.name for one in there] == ["job7", "job8"], "also who serves it since"
    assert Change.objects.get(pk=change.pk).targets == [["driver", "job7"]]


def test_a_job_lets_its_driver_serve_what_was_said(people: People) -> None:
    make_fleet()
    make_driver("job7")
    admin = people.principal("platform_admin")
    arrive(create(people, "chat", 1))
    Session.objects.get(name="chat").boxes.update(ready=True)
    Operation.objects.all().delete()
    with transaction.atomic():
        held = session_for_change(admin, "chat")
        jobs.start_job(admin, held, "serve", Driver.objects.get(name="job7"), orgs=["globex"])
    assert told() == ["globex"]
    assert Job.objects.filter(driver__name="job7").exists()


# REST and pages


def test_a_job_that_is_taken_back_leaves_its_driver_with_the_orgs_from_before(people: People) -> None:
    make_fleet()
    driver = make_driver("job7")
    put(people, [])
    run(create(people, boxes=2))
    admin = people.principal("platform_admin")

    def start() -> Operation:
        with transaction.atomic():
            return jobs.start_job(admin, session_for_change(admin, "chat"), "serve", driver)

    starting = start()
    assert driver_orgs.orgs_of(driver) == [people.acme]
    operations.cancel(admin, starting.pk)
    assert run(starting).state == State.CANCELLED
    assert driver_orgs.orgs_of(driver) == []
    starting = start()
    put(people, [people.acme, people.globex])
    operations.cancel(admin, starting.pk)
    assert run(starting).state == State.CANCELLED
    assert driver_orgs.orgs_of(driver) == [people.acme, people.globex], "somebody has said so since"


def test_orgs_are_read_planned_and_set_over_rest(
    people: People, api_of: Callable[..., Client], driver: Driver
) -> None:
    ada = api_of(people.platform_admin)
    found = ada.get(ORGS)
    assert found.json() == {"driver": "job7", "orgs": ["acme"], "leaving": [], "operations": []}
    headers = {"Idempotency-Key": "1", "If-Match": found["ETag"]}

    def patch(query: str = "", **more: Any) -> Any:
        sent = {"reason": "asked for", **more}
        return ada.patch(f"{ORGS}{query}", sent, content_type="application/json", headers=headers)

    dry = patch("?validate_only=true", orgs="all").json()
    assert (dry["before"], dry["after"], dry["added"]) == (["acme"], "all", ["globex"])
    assert "all orgs" in dry["warning"]
    assert told() == ["acme"], "nothing has changed"
    headers["Idempotency-Key"] = "2"
    done = patch(orgs=["globex"])
    assert done.status_code == 202, done.content
    assert done.json()["orgs"] == ["globex"]
    [operation] = done.json()["operations"]
    assert operation["kind"] == "driver.remove-org"
    assert patch(orgs=["globex"])["Idempotency-Replayed"] == "true"
    assert ada.get(ORGS).json()["leaving"] == ["acme"]
    headers["Idempotency-Key"] = "3"
    assert patch(orgs=["acme"]).status_code == 412
    headers["If-Match"] = done["ETag"]
    assert patch(orgs=["nobody"]).json()["errors"][0]["pointer"] == "/body/orgs"
    assert patch(orgs="session").status_code == 422, "it has no job"
    assert patch(orgs="everybody").status_code == 422


def test_a_shared_session_is_asked_which_orgs(people: People, api_of: Callable[..., Client]) -> None:
    made = shared(people)
    make_driver("job7")
    answer = api_of(people.platform_admin).post(
        "/api/v1/sessions/shared/jobs?validate_only=true",
        {"name": "serve", "driver": "job7"},
        content_type="application/json",
        headers={"Idempotency-Key": "1", "If-Match": f'"{made.version}"'},
    )
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["pointer"] == "/body/orgs"
    assert "Session shared has no org of its own. Set orgs to" in error["detail"]


def test_pages_of_driver_and_org_say_who_serves_whom(
    people: People, browser_of: Callable[..., Client], driver: Driver
) -> None:
    make_driver("job8")
    ada, vic = browser_of(people.platform_admin), browser_of(people.viewer)
    assert '<a href="/orgs/acme/">acme</a>' in ada.get("/fleet/drivers/job7/").content.decode()
    every = ada.get("/fleet/drivers/job8/").content.decode()
    assert "all orgs" in every
    assert "whoever steals it can read what every org stores" in every.replace("\n", " ")
    assert "2 of other sessions" in vic.get("/orgs/acme/").content.decode()
    assert "job7" not in vic.get("/orgs/acme/").content.decode()
    assert "job7" in ada.get("/orgs/acme/").content.decode()


def test_the_page_previews_and_saves_orgs(
    people: People, browser_of: Callable[..., Client], driver: Driver
) -> None:
    page, ada = "/fleet/drivers/job7/orgs/", browser_of(people.platform_admin)
    version = Driver.objects.get(name="job7").version
    assert 'value="acme"' in ada.get(page).content.decode()
    form = {"orgs": "globex", "version": version, "reason": "x"}
    preview = ada.post(page, {**form, "preview": "1"}).content.decode()
    assert "Removed, with what the driver stores of them:" in preview
    assert told() == ["acme"]
    stale = ada.post(page, {**form, "version": version - 1}).content.decode()
    assert "It has changed since you opened the form" in stale
    assert "Now: acme." in stale
    assert f'name="version" value="{version}"' in stale, "who saves again has seen what that replaces"
    sent = ada.post(page, form)
    operation = Operation.objects.get(kind="driver.remove-org")
    assert sent["Location"] == f"/operations/{operation.pk}/"
    assert told() == ["globex"]
    assert "short name" in ada.post(page, {**form, "orgs": "Ä"}).content.decode().lower()


def test_a_document_with_all_its_parts_names_its_orgs_only(
    people: People, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = {"group": "full", "index": 0, "address": "unix:/x", "shard": "s"}
    homes = [{**home, "index": index} for index in range(4)]
    monkeypatch.setitem(documents._parts, "driver", [lambda _name: {"homes": homes}])
    base = {"driver": "job7", "secret": b"s" * 32, "model": driver.model}
    whole = Compiler("driver").compile("job7", base)
    assert [one["name"] for one in json.loads(whole.of_generation(1))["orgs"]] == ["acme"]


# Idle drivers


@pytest.fixture
def chat(people: People) -> Session:
    """A session of acme, with a box."""
    make_fleet()
    arrive(create(people, "chat", 1))
    Operation.objects.all().delete()
    session = Session.objects.get(name="chat")
    session.boxes.update(ready=True)
    return session


def started(client: Client, driver: str, query: str = "") -> Any:
    return client.post(
        f"/api/v1/sessions/chat/jobs{query}",
        {"name": "serve", "driver": driver},
        content_type="application/json",
        headers={"Idempotency-Key": f"{driver}{query}", "If-Match": "*"},
    )


def test_an_idle_driver_of_another_org_is_as_one_that_there_is_not(
    people: People,
    chat: Session,
    driver: Driver,
    api_of: Callable[..., Client],
    browser_of: Callable[..., Client],
) -> None:
    make_driver("job8")  # which the page offers
    for orgs in ([people.globex], [people.acme, people.globex]):
        put(people, orgs)
        for query in ("", "?validate_only=true"):
            refused, unknown = (
                started(api_of(people.org_admin), name, query) for name in ("job7", "job9")
            )
            assert (refused.status_code, unknown.status_code) == (404, 404)
            assert refused.json()["detail"] == unknown.json()["detail"].replace("job9", "job7")
        form = {"name": "serve", "wait_minutes": 0}
        pages = [
            browser_of(people.org_admin).post("/sessions/chat/new-job/", {**form, "driver": name})
            for name in ("job7", "job9")
        ]
        for page in pages:
            assert "Select a valid choice" in page.content.decode()
        assert told() == sorted(org.slug for org in orgs)
    assert not Job.objects.exists()


@pytest.mark.parametrize("orgs", ["none", "all", "own", "left"])
def test_an_idle_driver_of_nobody_else_is_an_org_admins_to_use(
    people: People, chat: Session, driver: Driver, api_of: Callable[..., Client], orgs: str
) -> None:
    if orgs == "left":  # globex is leaving it
        put(people, [people.globex, people.acme])
    put(people, {"none": [], "all": None}.get(orgs, [people.acme]))
    assert started(api_of(people.org_admin), "job7").status_code == 202
    assert told() == ["acme"]


def test_who_sees_the_fleet_may_use_an_idle_driver_of_another_org(
    people: People, chat: Session, driver: Driver, api_of: Callable[..., Client]
) -> None:
    put(people, [people.globex])
    assert started(api_of(people.platform_admin), "job7").status_code == 202
    assert told() == ["acme"]


def test_a_driver_that_was_set_aside_is_not_taken_by_a_request_from_before(
    people: People, chat: Session, driver: Driver
) -> None:
    olga = people.principal("org_admin")
    stale = Driver.objects.get(name="job7")
    put(people, [people.globex])
    with transaction.atomic(), pytest.raises(Http404):
        jobs.start_job(olga, session_for_change(olga, "chat"), "serve", stale)
    assert told() == ["globex"]


def test_a_driver_that_is_set_aside_is_not_taken_by_a_job_that_waits(
    people: People, chat: Session, driver: Driver
) -> None:
    olga = people.principal("org_admin")
    Node.objects.update(state="cordoned")
    with transaction.atomic():
        starting = jobs.start_job(
            olga, session_for_change(olga, "chat"), "serve", driver, wait_seconds=3600
        )
    assert run(starting).state == "running"
    put(people, [people.globex])
    Node.objects.update(state="ready")
    assert run(starting).state == "failed"
    assert starting.message == "Driver job7 has been given other orgs meanwhile."
    assert told() == ["globex"]
