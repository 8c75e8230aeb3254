"""Policies that take over later and give way again, and one change for many orgs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.audit.models import AuditEntry
from console.operations.services import StalePlan
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import bulk, schedule, services
from console.policies.documents import ClusterPolicies, Limits
from console.policies.models import PolicyVersion, ScheduledPolicy
from swdriver_shim.policy import OrgPolicies, Policy
from tests.conftest import People
from tests.live import wait_until
from tests.locks import somebody_waits

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
PER_ORG = 13  # statements: a version, an audit entry, an event and a change, in this order of locks


def save(people: People, slug: str = "acme", **policy: Any) -> None:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        wanted = OrgPolicies(policy=Policy(**policy))
        services.set_policy(admin, orgs.for_change(admin, slug), wanted, reason="asked for")


def tonight(people: People, lasts: timedelta | None = 48 * HOUR, **policy: Any) -> datetime:
    principal = people.principal("org_admin")
    starts_at = timezone.now() + HOUR
    with transaction.atomic():
        schedule.schedule(
            principal,
            orgs.for_change(principal, "acme"),
            OrgPolicies(policy=Policy(**policy)),
            starts_at=starts_at,
            lasts=lasts,
            reason="an audit of theirs",
        )
    return starts_at


def ttl(people: People) -> int | None:
    return services.active_policy(people.acme).policy.ttl_last_use_seconds


def state() -> str:
    return ScheduledPolicy.objects.get().state


def test_it_begins_and_ends_by_itself_and_what_was_before_is_back_byte_for_byte(people: People) -> None:
    save(people, ttl_last_use_seconds=600)
    before = services.active_policy(people.acme).document
    starts_at = tonight(people, ttl_last_use_seconds=60)
    assert schedule.run_due(starts_at - HOUR / 2) == 0
    assert ttl(people) == 600
    assert schedule.run_due(starts_at) == 1
    assert (ttl(people), state()) == (60, "in force")
    assert schedule.run_due(starts_at + HOUR) == 0
    assert schedule.run_due(starts_at + 48 * HOUR) == 1
    assert (services.active_policy(people.acme).document, state()) == (before, "done")
    newest = services.versions_of(people.acme)[0]
    assert (newest.number, newest.same_as, newest.author_name) == (3, 1, "system")
    assert "olga scheduled: an audit of theirs" in newest.reason
    assert schedule.run_due(starts_at + 99 * HOUR) == 0


def test_without_an_end_it_stays(people: People) -> None:
    starts_at = tonight(people, lasts=None, ttl_last_use_seconds=60)
    schedule.run_due(starts_at)
    assert (ttl(people), state()) == (60, "done")


def test_what_somebody_saves_meanwhile_stays(people: People) -> None:
    starts_at = tonight(people, ttl_last_use_seconds=60)
    schedule.run_due(starts_at)
    save(people, ttl_last_use_seconds=30)
    schedule.run_due(starts_at + 48 * HOUR)
    assert (ttl(people), state()) == (30, "overtaken")


def test_new_limits_refuse_it_and_say_so(people: People) -> None:
    starts_at = tonight(people, priority=90)
    told = ClusterPolicies(limits=Limits(priority_max=50))
    services.set_cluster(people.principal("platform_admin"), told, reason="a contract")
    schedule.run_due(starts_at)
    assert state() == "refused"
    assert "limit" in ScheduledPolicy.objects.get().note


@pytest.mark.parametrize("after", [timedelta(0), HOUR], ids=["before", "while in force"])
def test_it_can_be_taken_back(after: timedelta, people: People) -> None:
    starts_at = tonight(people, ttl_last_use_seconds=60)
    schedule.run_due(starts_at - HOUR + after)
    principal = people.principal("org_admin")
    with transaction.atomic():
        org = orgs.for_change(principal, "acme")
        schedule.take_back(principal, org, ScheduledPolicy.objects.get().pk)
    assert (ttl(people), state()) == (3600, "cancelled")
    assert schedule.run_due(starts_at + 48 * HOUR) == 0
    assert AuditEntry.objects.filter(action="policy.unschedule").count() == 1


def test_nobody_begins_what_is_over_already(people: People) -> None:
    starts_at = tonight(people, ttl_last_use_seconds=60)
    schedule.run_due(starts_at + 99 * HOUR)
    assert (ttl(people), state(), PolicyVersion.objects.count()) == (3600, "done", 0)


@pytest.mark.django_db(transaction=True)
def test_however_many_clocks_there_are_it_begins_once(people: People) -> None:
    starts_at = tonight(people, ttl_last_use_seconds=60)
    start = threading.Barrier(3)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            start.wait(30)
            schedule.run_due(starts_at)
        except BaseException as error:  # noqa: BLE001 - it is told in the test's own thread
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert PolicyVersion.objects.count() == 1
    assert AuditEntry.objects.filter(action="policy.set").count() == 1


@pytest.mark.django_db(transaction=True)
def test_who_saves_while_limits_are_being_lowered_is_held_to_the_new_ones(people: People) -> None:
    told: list[dict[str, list[str]]] = []

    def run() -> None:
        try:
            save(people, ttl_last_use_seconds=600)
        except ValidationError as error:
            told.append(error.message_dict)
        finally:
            connection.close()

    saving = threading.Thread(target=run)
    with transaction.atomic():
        policies = ClusterPolicies(
            default=Policy(ttl_last_use_seconds=60), limits=Limits(ttl_last_use_seconds_max=60)
        )
        services.set_cluster(people.principal("platform_admin"), policies, reason="GDPR")
        saving.start()
        wait_until(
            "somebody waits, or was not held up", lambda: somebody_waits() or not saving.is_alive()
        )
    saving.join(60)
    assert [list(fields) for fields in told] == [["policy/ttl_last_use_seconds"]]
    assert services.active_policy(people.acme).number == 0


def test_it_is_planned_listed_and_taken_back_over_rest(
    people: People, api_of: Callable[..., Client]
) -> None:
    olga = api_of(people.org_admin)
    body = {
        "policy": {"ttl_last_use_seconds": 60},
        "starts_at": (timezone.now() + HOUR).isoformat(),
        "lasts_seconds": 3600,
        "reason": "tonight",
    }
    path, headers = "/api/v1/orgs/acme/policy/scheduled", {"Idempotency-Key": "k"}
    made = olga.post(path, body, content_type="application/json", headers=headers)
    assert made.status_code == 201, made.content
    [listed] = olga.get(path).json()["items"]
    assert (listed["state"], listed["in_words"][:18]) == ("waiting", "Prompts are stored")
    assert olga.delete(f"{path}/{listed['id']}").status_code == 204
    assert olga.delete(f"{path}/{listed['id']}").status_code == 404
    past = {**body, "starts_at": "2020-01-01T00:00:00Z"}
    headers = {"Idempotency-Key": "past"}
    refused = olga.post(path, past, content_type="application/json", headers=headers)
    assert refused.json()["errors"][0]["pointer"] == "/body/starts_at"


@pytest.mark.parametrize("written", ["0", "0 s", "0 h"])
def test_no_duration_at_all_is_refused_and_is_not_for_good(
    written: str, people: People, browser_of: Callable[..., Client]
) -> None:
    form = {"version": 0, "tiers": "dram", "share": 100, "priority": 35, "displacement": "default"}
    form |= {"reason": "tonight", "lasts": written}
    starts_at = (timezone.now() + HOUR).strftime("%Y-%m-%dT%H:%M")
    refused = browser_of(people.org_admin).post("/orgs/acme/policy/", form | {"starts_at": starts_at})
    assert refused.status_code == 200
    assert f"&#x27;{written}&#x27; is not from 1 s to" in refused.content.decode()
    browser_of(people.org_admin).post("/orgs/acme/policy/", form | {"starts_at": ""})
    assert (ScheduledPolicy.objects.count(), PolicyVersion.objects.count()) == (0, 0)


# Many at once


def test_one_change_for_many_is_made_for_all_or_for_none(people: People) -> None:
    admin = people.principal("platform_admin")
    save(people, "acme", priority=40)
    changes = {"ttl_last_use_seconds": 60}
    planned = bulk.plan(admin, ["globex", "acme"], changes)
    assert [(one.org.slug, len(one.differences)) for one in planned] == [("acme", 1), ("globex", 1)]
    saved = bulk.save(admin, ["globex", "acme"], changes, reason="for all", token=bulk.token_of(planned))
    assert [one.active.policy.ttl_last_use_seconds for one in saved] == [60, 60]
    assert [one.active.policy.priority for one in saved] == [40, 35]
    with pytest.raises(StalePlan):
        bulk.save(admin, ["acme"], changes, reason="late", token=bulk.token_of(planned))
    told = ClusterPolicies(limits=Limits(priority_max=39), default=Policy())
    services.set_cluster(admin, told, reason="a contract")
    before = PolicyVersion.objects.count()
    with pytest.raises(ValidationError, match="Acme: At most 39"):
        bulk.save(admin, ["acme", "globex"], {"share": 7}, reason="for all")
    assert PolicyVersion.objects.count() == before


def test_an_org_for_which_a_change_changes_nothing_goes_on_to_follow_the_default(people: People) -> None:
    admin = people.principal("platform_admin")
    save(people, "globex", share=9)
    for changes in ({}, {"share": services.cluster().policies.default.share}):
        [acme, globex] = bulk.save(admin, ["acme", "globex"], changes, reason="for all")
        assert (acme.differences, acme.active.number, acme.active.own) == ([], 0, None)
    assert globex.active.number == 2
    services.set_cluster(admin, ClusterPolicies(default=Policy(share=70)), reason="a contract")
    assert services.active_policy(people.acme).policy.share == 70


@pytest.mark.usefixtures("contexts_of_pages")
def test_the_page_says_for_how_many_orgs_something_was_changed(
    people: People, browser_of: Callable[..., Client]
) -> None:
    save(people, "globex", priority=40)
    ada = browser_of(people.platform_admin)
    form = {"org": ["acme", "globex"], "priority": Policy().priority, "reason": "for all"}
    for said in ("Saved for 1 of 2 orgs. It is sent", "Saved for 0 of 2 orgs. It changes nothing."):
        token = ada.post("/policies/bulk/", form | {"look": ""}).context["token"]
        saved = ada.post("/policies/bulk/", form | {"token": token, "save": ""}, follow=True)
        assert said in saved.content.decode()


def test_many_over_rest(people: People, api_of: Callable[..., Client]) -> None:
    admin = api_of(people.platform_admin)
    body: dict[str, Any] = {"orgs": ["acme", "globex"], "changes": {"share": 7}, "reason": "for all"}

    def ask(client: Client, told: dict[str, Any], key: str, query: str = "") -> Any:
        headers = {"Idempotency-Key": key}
        path = f"/api/v1/policies/bulk{query}"
        return client.post(path, told, content_type="application/json", headers=headers)

    dry = ask(admin, body, "a", "?validate_only=true").json()
    assert [one["changes"] for one in dry["orgs"]] == [[["Share of memory", "100", "7"]]] * 2
    assert PolicyVersion.objects.count() == 0
    done = ask(admin, {**body, "plan_token": dry["plan_token"]}, "b")
    assert done.status_code == 200, done.content
    assert PolicyVersion.objects.count() == 2
    assert ask(admin, {**body, "plan_token": dry["plan_token"]}, "c").status_code == 412
    refused = ask(api_of(people.org_admin), body, "d")
    assert refused.status_code == 404, "globex is not theirs to know"
    assert refused.json()["detail"] == "There is no org “globex”."
    wrong = ask(admin, {**body, "changes": {"shares": 7}}, "e")
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (422, "/body/changes")


def test_many_are_answered_with_the_versions_that_they_have_now(
    people: People, api_of: Callable[..., Client]
) -> None:
    save(people, priority=40)
    olga, kind = api_of(people.org_admin), "application/json"
    body = {"orgs": ["acme"], "changes": {"share": 7}, "reason": "for all"}
    path, headers = "/api/v1/policies/bulk", {"Idempotency-Key": "a"}
    [done] = olga.post(path, body, content_type=kind, headers=headers).json()["orgs"]
    assert (done["version"], done["changes"]) == (2, [["Share of memory", "100", "7"]])
    match = f'"{done["version"]}"'
    assert olga.get("/api/v1/orgs/acme/policy")["ETag"] == match
    wanted = {"policy": {"share": 8}, "reason": "r"}
    headers = {"Idempotency-Key": "b", "If-Match": match}
    put = olga.put("/api/v1/orgs/acme/policy", wanted, content_type=kind, headers=headers)
    assert put.status_code == 200, put.content
    headers = {"Idempotency-Key": "c"}
    [same] = olga.post(
        path, body | {"changes": {"share": 8}}, content_type=kind, headers=headers
    ).json()["orgs"]
    assert (same["version"], same["changes"]) == (3, [])


@pytest.mark.parametrize("query", ["?validate_only=true", ""], ids=["dry run", "save"])
def test_many_take_few_statements(query: str, people: People, api_of: Callable[..., Client]) -> None:
    ada, counts = api_of(people.platform_admin), []
    Org.objects.bulk_create([Org(slug=f"org-{n:02}", name="Org") for n in range(22)])
    for slugs in (["org-00"], ["org-01"], [f"org-{n:02}" for n in range(2, 22)]):
        body = {"orgs": slugs, "changes": {"share": 7}, "reason": "for all"}
        headers = {"Idempotency-Key": slugs[0]}
        with CaptureQueriesContext(connection) as queries:
            path = f"/api/v1/policies/bulk{query}"
            done = ada.post(path, body, content_type="application/json", headers=headers)
        assert done.status_code == 200, done.content
        assert [one["version"] for one in done.json()["orgs"]] == [0 if query else 1] * len(slugs)
        counts.append(len(queries))
    each = (counts[2] - counts[1]) / 19
    assert each == 0 if query else each <= PER_ORG, counts


@pytest.mark.django_db(transaction=True)
def test_what_is_planned_for_many_is_read_when_nobody_else_can_change_it(people: People) -> None:
    """Somebody saves while the many wait for an org: their version is what the change builds on."""
    admin, done = people.principal("platform_admin"), []

    def run() -> None:
        try:
            done.extend(bulk.save(admin, ["acme", "globex"], {"share": 7}, reason="for all"))
        finally:
            connection.close()

    saving = threading.Thread(target=run)
    with transaction.atomic():
        org = orgs.for_change(admin, "globex")
        wanted = OrgPolicies(policy=Policy(priority=40))
        services.set_policy(admin, org, wanted, reason="asked for")
        saving.start()
        wait_until("it waits, or is done", lambda: somebody_waits() or not saving.is_alive())
    saving.join(60)
    assert [(one.active.number, one.active.policy.priority) for one in done] == [(1, 35), (2, 40)]
    assert [one.active.policy.share for one in done] == [7, 7]


@pytest.mark.usefixtures("contexts_of_pages")
def test_many_are_edited_in_a_browser(people: People, browser_of: Callable[..., Client]) -> None:
    ada = browser_of(people.platform_admin)
    form = {"org": ["acme", "globex"], "ttl_last_use_seconds": "5 min", "reason": "for all"}
    looked = ada.post("/policies/bulk/", {**form, "look": ""})
    assert looked.status_code == 200
    assert b"<ins>5 min</ins>" in looked.content
    token = looked.context["token"]
    refused = ada.post("/policies/bulk/", {**form, "token": "x" * 64, "save": ""})
    assert b"made from has changed" in refused.content
    saved = ada.post("/policies/bulk/", {**form, "token": token, "save": ""})
    assert (saved.status_code, saved["Location"]) == (302, "/policies/")
    assert {version.reason for version in PolicyVersion.objects.all()} == {"for all"}


@pytest.mark.usefixtures("contexts_of_pages")
@pytest.mark.parametrize(
    ("written", "before", "after"),
    [("0", None, 0), ("100", 50, 100), ("none", 50, None), ("", 50, 50)],
)
def test_redundancy_in_tier_2_is_set_for_many_and_taken_back(
    people: People,
    browser_of: Callable[..., Client],
    written: str,
    before: int | None,
    after: int | None,
) -> None:
    save(people, redundant_from_priority=before)
    form = {"org": ["acme", "globex"], "redundant_from_priority": written, "share": 7, "reason": "so"}
    looked = browser_of(people.platform_admin).post("/policies/bulk/", {**form, "look": ""})
    form["token"] = looked.context["token"]
    saved = browser_of(people.platform_admin).post("/policies/bulk/", {**form, "save": ""})
    assert saved.status_code == 302, saved.content
    held = services.active_policy(people.acme).policy
    assert (held.redundant_from_priority, held.share) == (after, 7)


def test_no_priority_is_refused_in_a_sentence(people: People, browser_of: Callable[..., Client]) -> None:
    form = {"org": ["acme"], "redundant_from_priority": "101", "reason": "so"}
    refused = browser_of(people.platform_admin).post("/policies/bulk/", {**form, "look": ""})
    assert b"A priority, up to 100." in refused.content
