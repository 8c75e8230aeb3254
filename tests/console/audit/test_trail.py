"""Promise 9: every change has one audit row; undo restores what was; the trail can't be changed."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, connection, transaction
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from console.accounts.models import User
from console.accounts.roles import Role
from console.audit import services as audit
from console.audit.diff import changes
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Filters, Subject
from console.orgs import services as orgs
from console.orgs.models import Membership, Org
from tests.conftest import People

pytestmark = pytest.mark.django_db


def rename(people: People, name: str, by: str = "org_admin", reason: str = "") -> AuditEntry:
    principal = people.principal(by)
    with transaction.atomic():
        orgs.update_org(principal, orgs.for_change(principal, "acme"), name=name, reason=reason)
    return AuditEntry.objects.latest("id")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_auditentry SET reason = 'x'",
        "DELETE FROM audit_auditentry",
        "TRUNCATE audit_auditentry CASCADE",
    ],
)
def test_the_database_refuses_to_change_the_trail(
    statement: str, people: People, rows_of_audit: Callable[[], int]
) -> None:
    rename(people, "Acme Ltd", reason="kept")
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        connection.cursor().execute(statement)
    assert rows_of_audit() == 1
    assert AuditEntry.objects.get().reason == "kept"


def test_an_entry_says_who_when_from_where_why_and_what(
    people: People, api_of: Callable[..., Client]
) -> None:
    api_of(people.org_admin).patch(
        "/api/v1/orgs/acme",
        {"name": "Acme Ltd", "reason": "merger"},
        content_type="application/json",
        headers={"If-Match": '"1"', "X-Request-ID": "req-42"},
    )
    entry = AuditEntry.objects.get(action="org.update")
    assert entry.actor_name == "olga by token test"
    assert (entry.actor_id, entry.means) == (people.org_admin.pk, "token")
    assert (entry.address, entry.request_id, entry.reason) == ("127.0.0.1", "req-42", "merger")
    assert entry.changes == [("name", "Acme", "Acme Ltd")]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("org.update", 1),
        ("org", 1),
        ("Org: update", 1),
        ("org: UPDATE", 1),
        ("Org: up", 0),
        ("Org: update(", 0),
        ("Policy: default and limits", 0),
    ],
)
def test_an_action_is_asked_for_by_its_name_or_as_pages_call_it(
    asked: str, found: int, people: People
) -> None:
    rename(people, "Acme Ltd")
    assert Filters(action=asked).apply(AuditEntry.objects.all()).count() == found


def test_a_change_that_changes_nothing_leaves_no_entry(
    people: People, rows_of_audit: Callable[[], int]
) -> None:
    principal = people.principal("org_admin")
    with transaction.atomic():
        orgs.update_org(principal, orgs.for_change(principal, "acme"), name="Acme")
    assert rows_of_audit() == 0


def test_a_change_that_fails_leaves_no_entry(people: People, rows_of_audit: Callable[[], int]) -> None:
    principal = people.principal("platform_admin")

    def change_and_fail() -> None:
        with transaction.atomic():
            orgs.create_org(principal, slug="new", name="New")
            raise RuntimeError("after the change")

    with pytest.raises(RuntimeError):
        change_and_fail()
    assert rows_of_audit() == 0
    assert not Org.objects.filter(slug="new").exists()


@pytest.mark.django_db(transaction=True)
def test_recording_outside_of_a_transaction_is_a_bug_that_is_told(people: People) -> None:
    with pytest.raises(RuntimeError, match="transaction"):
        audit.record(people.principal("viewer"), "x", Subject("x", 1, "x"))


def test_the_name_of_the_actor_is_frozen(people: People) -> None:
    entry = rename(people, "Acme Ltd")
    User.objects.filter(username="olga").update(username="olga2")
    entry.refresh_from_db()
    assert entry.actor_name == "olga"


def test_undo_restores_and_is_itself_on_the_trail(people: People) -> None:
    entry = rename(people, "Acme Ltd")
    undone = audit.undo(people.principal("org_admin"), entry, "typo")
    assert Org.objects.get(slug="acme").name == "Acme"
    assert (undone.before, undone.after) == (entry.after, entry.before)
    assert (undone.undoes_id, undone.reason) == (entry.pk, "typo")


def test_an_entry_is_undone_once(people: People) -> None:
    entry = rename(people, "Acme Ltd")
    audit.undo(people.principal("org_admin"), entry, "")
    entry = AuditEntry.objects.get(pk=entry.pk)
    with pytest.raises(CannotUndo, match="taken back already"):
        audit.undo(people.principal("org_admin"), entry, "")


def test_what_changed_since_is_not_overwritten_by_undo(people: People) -> None:
    entry = rename(people, "Acme Ltd")
    rename(people, "Acme Inc")
    with pytest.raises(CannotUndo, match="changed again"):
        audit.undo(people.principal("org_admin"), entry, "")
    assert Org.objects.get(slug="acme").name == "Acme Inc"


@pytest.mark.parametrize("change", ["add", "change", "remove"])
def test_membership_changes_are_undone(change: str, people: People) -> None:
    principal = people.principal("org_admin")

    def members() -> list[tuple[str, int]]:
        return sorted(Membership.objects.filter(org=people.acme).values_list("user__username", "role"))

    before = members()
    with transaction.atomic():
        org = orgs.for_change(principal, "acme")
        match change:
            case "add":
                orgs.set_member(principal, org, "sam", Role.VIEWER)
            case "change":
                orgs.set_member(principal, org, "vic", Role.ON_CALL)
            case _:
                orgs.remove_member(principal, org, "vic")
    assert members() != before
    audit.undo(principal, AuditEntry.objects.latest("id"), "")
    assert members() == before


def test_some_changes_have_no_way_back_and_say_so(people: People) -> None:
    orgs.create_org(people.principal("platform_admin"), slug="new", name="New")
    entry = AuditEntry.objects.get()
    assert not audit.can_undo(entry)
    with pytest.raises(CannotUndo, match="can't be taken back"):
        audit.undo(people.principal("platform_admin"), entry, "")


def test_people_see_the_part_of_the_trail_that_concerns_them(people: People) -> None:
    entry = rename(people, "Acme Ltd")
    seen_by = {
        name: audit.visible_entries(people.principal(name)).filter(pk=entry.pk).exists()
        for name in ("platform_admin", "platform_on_call", "org_admin", "on_call", "viewer", "stranger")
    }
    assert seen_by == {
        "platform_admin": True,
        "platform_on_call": True,
        "org_admin": True,
        "on_call": True,
        "viewer": False,
        "stranger": False,
    }


def test_page_csv_and_api_have_the_same_filters(
    people: People, browser_of: Callable[[User], Client], api_of: Callable[..., Client]
) -> None:
    rename(people, "Acme Ltd", reason="merger")
    rename(people, "Acme Inc", reason="again")
    browser = browser_of(people.org_admin)
    page = browser.get("/audit/?q=merger").content.decode()
    assert "Acme Ltd" in page
    assert "again" not in page
    assert "Org: update" in page
    rows = list(csv.DictReader(io.StringIO(_text(browser.get("/audit/export.csv?q=merger")))))
    assert [(row["reason"], row["action"]) for row in rows] == [("merger", "org.update")]
    items = api_of(people.org_admin).get("/api/v1/audit?q=merger").json()["items"]
    assert [item["reason"] for item in items] == ["merger"]


def test_a_csv_that_does_not_hold_all_entries_says_so(
    people: People, browser_of: Callable[[User], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    rename(people, "Acme Ltd", reason="merger")
    rename(people, "Acme Inc", reason="again")
    browser = browser_of(people.org_admin)
    monkeypatch.setattr("console.audit.views.CSV_ROWS_MAX", 2)
    assert "newest" not in _text(browser.get("/audit/export.csv"))
    monkeypatch.setattr("console.audit.views.CSV_ROWS_MAX", 1)
    [row, end] = csv.DictReader(io.StringIO(_text(browser.get("/audit/export.csv"))))
    assert row["reason"] == "again"
    assert end["id"] == "These are the newest 1 entries. Filter by time for older ones."


def test_a_spreadsheet_runs_nothing_of_the_csv(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    rename(people, "Acme Ltd", reason='=HYPERLINK("http://evil.example")')
    text = _text(browser_of(people.org_admin).get("/audit/export.csv"))
    [row] = csv.DictReader(io.StringIO(text))
    assert row["reason"].startswith("'=")


def test_nonsense_in_the_filters_is_told_and_not_ignored(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    browser = browser_of(people.org_admin)
    assert "Enter a valid date/time" in browser.get("/audit/?since=yesterday").content.decode()
    assert browser.get("/audit/export.csv?since=yesterday").status_code == 400
    assert browser.get("/audit/?q=%00").status_code == 200


def test_the_number_of_queries_does_not_grow_with_the_trail(
    people: People, browser_of: Callable[[User], Client], django_assert_max_num_queries: Any
) -> None:
    for number in range(30):
        rename(people, f"Acme {number}")
    browser = browser_of(people.org_admin)
    with django_assert_max_num_queries(8):
        browser.get("/audit/")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_nothing_changed_is_no_change(value: dict[str, Any]) -> None:
    assert changes(value, value) == []


def test_the_diff_names_every_leaf_that_differs() -> None:
    before = {"ttl": {"mode": "last_use", "seconds": 600}, "tiers": ["dram"]}
    after = {"ttl": {"mode": "last_use", "seconds": 900}, "tiers": ["dram", "nvme"]}
    assert changes(before, after) == [
        ("tiers", ["dram"], ["dram", "nvme"]),
        ("ttl.seconds", 600, 900),
    ]


def _text(response: Any) -> str:
    async def collect() -> bytes:
        return b"".join([part async for part in response])

    return async_to_sync(collect)().decode()


# What can't be undone


def test_two_that_undo_one_entry_at_once_undo_it_once(people: People) -> None:
    """The second has read the entry before the first undid it; and the change was made once more."""
    entry = audit.get_entry(people.principal("org_admin"), rename(people, "Acme Ltd").pk)
    audit.undo(people.principal("org_admin"), AuditEntry.objects.get(pk=entry.pk), "")
    rename(people, "Acme Ltd")
    assert not hasattr(entry, "undone_by"), "as it was read"
    with pytest.raises(CannotUndo, match="taken back already"), transaction.atomic():
        audit.undo(people.principal("org_admin"), entry, "")
    assert Org.objects.get(slug="acme").name == "Acme Ltd"


@pytest.mark.parametrize(
    ("before", "sentence"),
    [("", "This field cannot be blank."), ("Acme", "It is so already: undoing would change nothing.")],
)
def test_an_undo_that_the_service_refuses_is_told_on_the_page_and_over_rest(
    people: People,
    browser_of: Callable[[User], Client],
    api_of: Callable[..., Client],
    before: str,
    sentence: str,
) -> None:
    snapshot = people.acme.snapshot()
    entry = AuditEntry.objects.create(
        action="org.update",
        object_type="org",
        object_id="acme",
        org_id=people.acme.pk,
        before={**snapshot, "name": before},
        after=snapshot,
    )
    answer = api_of(people.org_admin).post(
        f"/api/v1/audit/{entry.pk}/undo", {"reason": ""}, content_type="application/json"
    )
    assert (answer.status_code, answer.json()["reason"]) == (409, "CannotUndo")
    assert answer.json()["detail"] == sentence
    page = browser_of(people.org_admin).post(f"/audit/{entry.pk}/undo/", follow=True)
    assert page.status_code == 200
    assert sentence in page.content.decode()
    assert AuditEntry.objects.filter(action="org.update").count() == 1
