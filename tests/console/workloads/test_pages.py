"""Pages of workloads, as people use them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.accounts.models import User
from console.sessions.models import Session
from console.workloads import changes
from console.workloads.models import SEEN_SECONDS, Rollout, Workload
from tests.conftest import People
from tests.console.sessions.fleets import make_fleet
from tests.console.workloads.workloads import (
    TEXT,
    TRAFFIC,
    a_rollout,
    a_workload,
    an_instance,
    locked,
    make_workload,
    settle,
    wanted,
)
from tests.html import compact


@pytest.fixture
def admin(people: People, browser_of: Callable[[User], Client]) -> Client:
    make_fleet(boxes=4)
    return browser_of(people.org_admin)


def test_an_empty_list_says_what_to_do_next(
    admin: Client, people: People, browser_of: Callable[[User], Client]
) -> None:
    page = compact(admin.get("/workloads/"))
    assert "No workloads yet." in page
    assert "POST" in page
    assert "Ask an admin" in compact(browser_of(people.viewer).get("/workloads/"))
    assert "No workload matches these filters." in compact(admin.get("/workloads/?q=x"))


def test_a_new_form_proposes_a_name_that_is_free(admin: Client) -> None:
    assert "name: chat\n" in admin.get("/new-workload/").content.decode()
    a_workload(name="chat")
    a_workload(name="chat-2")
    page = admin.get("/new-workload/").content.decode()
    assert "name: chat-3\n" in page
    assert "already" not in page


def test_its_session_names_it_and_is_not_resized_beside_it(admin: Client, people: People) -> None:
    make_workload(people.principal("org_admin"), org="acme", replicas=2)
    link = '<a href="/workloads/talk/">talk</a>'
    shown = admin.get("/sessions/talk/").content.decode()
    assert link in shown
    assert '<a class="button button--main" href="/workloads/talk/scale/">Scale talk</a>' in shown
    page = "/sessions/talk/resize/"
    assert page not in shown
    assert link in admin.get(page).content.decode()
    said = {"boxes": "3", "wait_minutes": "0", "version": "1"}
    for how in ({"preview": "1"}, {}):
        refused = compact(admin.post(page, {**said, **how}))
        assert "belongs to workload talk, which sets its size. Scale the workload instead." in refused
    resized = admin.generic(
        "POST",
        "/api/v1/sessions/talk/resize",
        data='{"boxes": 3}',
        content_type="application/json",
        headers={"If-Match": "*", "Idempotency-Key": "once"},
    )
    assert (resized.status_code, resized.json()["reason"]) == (409, "Conflict")
    assert Session.objects.get().boxes_desired == 2
    assert admin.post(page, {**said, "boxes": "2"}).status_code == 302, "which divides memory anew"


def test_a_workload_is_previewed_created_edited_scaled_and_deleted(admin: Client) -> None:
    page = admin.get("/new-workload/").content.decode()
    assert "org: acme" in page
    said = {"spec": f"{TEXT}org: acme\nreplicas: 2\n", "wait_minutes": "0"}
    preview = compact(admin.post("/new-workload/", {**said, "preview": "1"}))
    assert "Create talk. It takes 2 boxes. 2 boxes stay free." in preview
    assert "room for" in preview
    assert not Workload.objects.exists()
    assert admin.post("/new-workload/", said)["Location"] == "/workloads/talk/"
    settle()
    form = admin.get("/workloads/talk/edit/").content.decode()
    assert "tokens_max: 32768" in form
    edited = {**said, "spec": f"{TEXT}org: acme\nreplicas: 2\n".replace("32768", "4096"), "version": "1"}
    part = admin.post("/workloads/talk/edit/", edited, headers={"HX-Request": "true"})
    assert "Make revision 2 and roll it out." in compact(part)
    assert admin.post("/workloads/talk/edit/", edited).status_code == 302
    stale = compact(admin.post("/workloads/talk/edit/", {**edited, "spec": said["spec"]}))
    assert "It has changed since you opened the form." in stale
    assert "with “tokens_max: 4096”" in stale
    assert (
        admin.post("/workloads/talk/scale/", {"replicas": "3", "wait_minutes": "0"}).status_code == 302
    )
    admin.post("/workloads/talk/delete/", {"typed": "wrong"})
    assert not Workload.objects.get().deleting
    admin.post("/workloads/talk/delete/", {"typed": "talk"})
    assert "being deleted" in compact(admin.get("/workloads/talk/"))


def test_what_is_wrong_is_told_with_its_line(admin: Client) -> None:
    said = {"spec": f"{TEXT}shape: 1\n", "wait_minutes": "0"}
    assert "line 7, shape: There is no such field." in compact(admin.post("/new-workload/", said))
    more = {"spec": f"{TEXT}org: acme\nreplicas: 9\n", "wait_minutes": "0"}
    page = compact(admin.post("/new-workload/", more))
    assert "<b>Never.</b>" in page
    shared = compact(admin.post("/new-workload/", {"spec": TEXT, "wait_minutes": "0"}))
    assert "Only a platform admin may do this." in shared


def test_a_page_shows_replicas_conditions_rollout_and_events(people: People, admin: Client) -> None:
    workload = a_workload(people.acme)
    seen = timezone.now()
    an_instance(workload, 0, state="ready", serving=True, url="http://10.0.0.1:8000", cache="attached")
    an_instance(
        workload,
        1,
        state="loading",
        seen_at=seen,
        progress_done=1,
        progress_total=4,
        sentence="Weights.",
    )
    an_instance(workload, 1, state="gone", ended_at=workload.created_at, end_reason="It failed.")
    a_rollout(workload, switched=1)
    page = compact(admin.get("/workloads/talk/"))
    for text in ("1 of 2 replicas switched", "25 %", "Weights.", "degraded", "It failed.", "attached"):
        assert text in page
    assert "Requests of revision" not in page
    Rollout.objects.update(traffic=TRAFFIC)
    page = compact(admin.get("/workloads/talk/"))
    for text in (
        "Requests of revision 1",
        "1,200",
        "45 ms",
        "2.5 per second",
        "—",
        "2 %",
        "from 50 requests",
    ):
        assert text in page
    live = compact(admin.get("/workloads/talk/", headers={"HX-Request": "true"}))
    assert "<html" not in live
    assert "1 of 2 replicas switched" in live
    Rollout.objects.update(phase="paused", reason="Worse", sentence="Errors are 4 % instead of 1 %.")
    assert "Errors are 4 % instead of 1 %." in compact(admin.get("/workloads/talk/"))
    instance = compact(admin.get("/workloads/talk/instances/talk-1-r1-0001/"))
    assert "talk-1-1" in instance
    for shown in (page, instance):
        stale = [int(seconds) for seconds in re.findall(r'data-stale="(\d+)"', shown)]
        assert min(stale) > SEEN_SECONDS, "one that is seen all the time and has no news looks alive"
    assert admin.get("/workloads/talk/instances/none/").status_code == 404
    assert "1 of 2" in compact(admin.get("/workloads/"))


def test_revisions_are_compared_and_rolled_back(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    make_fleet(boxes=4)
    principal = people.principal("platform_admin")
    make_workload(principal, org="acme")
    changes.update(principal, locked(principal), wanted(org="acme", tokens_max=1024))
    browser = browser_of(people.on_call)
    page = compact(browser.get("/workloads/talk/revisions/2/"))
    assert "tokens_max" in page
    assert "<del>32768</del>" in page
    assert "It is the first revision." in compact(browser.get("/workloads/talk/revisions/1/"))
    assert browser.get("/workloads/talk/revisions/2/?with=9").status_code == 404
    a_rollout(Workload.objects.get(), phase="undone", sentence="It fails.", ended_at=timezone.now())
    browser.post("/workloads/talk/undo/", {"revision": "1"})
    page = compact(browser.get("/workloads/talk/"))
    assert "Roll talk back to revision 2? Its rollout was rolled back: It fails." in page
    assert "Rolling back: revision 3 equals revision 1." in page
    assert "same as revision 1" in page
    for action in ("restart", "pause", "resume"):
        assert browser.post(f"/workloads/talk/{action}/").status_code == 302
    assert Workload.objects.get().restarts == 1


def test_variables_of_engines_are_hidden_from_viewers(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    make_fleet(boxes=4)
    make_workload(org="acme", engine={"environment": {"TOKEN": "hush"}})
    for person, is_shown in ((people.viewer, False), (people.org_admin, True)):
        browser = browser_of(person)
        assert ("hush" in browser.get("/workloads/talk/revisions/1/").content.decode()) == is_shown
        assert "hush" not in browser.get("/workloads/talk/").content.decode()


def test_a_page_takes_as_many_queries_for_many_replicas_as_for_one(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    browser = browser_of(people.platform_admin)
    workload = a_workload(people.acme)

    def queries(path: str) -> int:
        with CaptureQueriesContext(connection) as captured:
            assert browser.get(path).status_code == 200
        return len(captured)

    an_instance(workload)
    a_rollout(workload)
    queries("/workloads/talk/")
    before = [queries(path) for path in ("/workloads/talk/", "/workloads/")]
    for number in range(1, 5):
        an_instance(workload, number)
        other = a_workload(people.acme, f"w{number}")
        an_instance(other)
        changes._new_revision(people.principal("platform_admin"), workload, wanted().template, note="x")
    assert [queries(path) for path in ("/workloads/talk/", "/workloads/")] == before
