"""Saved views: whose they are, who sees them, and that they lead nowhere but to our own pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.test import Client

from console.accounts.models import User
from console.audit.models import AuditEntry
from console.saved import services
from console.saved.models import SavedView
from telemetry.models import Event
from tests.conftest import People
from tests.html import compact

pytestmark = pytest.mark.django_db

PAGE = "/latency/?topic=org:acme&range=6h&compare=day"


@pytest.fixture
def save(api_of: Callable[..., Client]) -> Callable[..., Any]:
    def save(user: User, name: str = "Refills", **more: Any) -> Any:
        body = {"name": name, "address": PAGE, **more}
        return api_of(user).post("/api/v1/views", body, content_type="application/json")

    return save


def names(client: Client) -> list[str]:
    return [one["name"] for one in client.get("/api/v1/views").json()["items"]]


def test_a_view_is_saved_from_a_page_found_there_again_and_deleted(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    browser = browser_of(people.viewer)
    page = browser.get(PAGE).content.decode()
    link = '<a href="/views/?of=%2Flatency%2F%3Ftopic%3Dorg%3Aacme%26range%3D6h%26compare%3Dday">'
    assert link in page
    assert "Save this page" in browser.get("/views/", {"of": PAGE}).content.decode()
    kept = browser.post("/views/", {"name": "Refills", "address": PAGE, "share": "org:acme"})
    assert kept["Location"] == PAGE
    assert "Refills</a></li>" in compact(browser.get("/latency/?topic=org:acme"))
    assert "Refills</a></li>" not in compact(browser.get("/orgs/acme/")), "of that page only"
    again = browser.post("/views/", {"name": "Refills", "address": PAGE})
    assert "You have a view of that name" in again.content.decode()
    view = SavedView.objects.get()
    entry = AuditEntry.objects.get(action="view.save")
    assert (entry.after or {})["share"] == "org:acme"
    assert not Event.objects.filter(kind="view.save").exists(), "charts would mark it"
    assert browser.post(f"/views/{view.pk}/delete/").status_code == 302
    assert not SavedView.objects.exists()
    assert (AuditEntry.objects.get(action="view.delete").before or {})["address"] == PAGE
    assert "No saved views yet" in browser.get("/views/").content.decode()


def test_what_is_private_is_ones_own_and_what_is_shared_is_theirs_it_is_shared_with(
    people: People, save: Callable[..., Any], api_of: Callable[..., Client]
) -> None:
    assert save(people.viewer, "private").status_code == 201
    assert save(people.viewer, "of acme", share="org:acme").status_code == 201
    assert save(people.platform_viewer, "of all", share="platform").status_code == 201
    assert names(api_of(people.viewer)) == ["private", "of acme"]
    assert names(api_of(people.on_call)) == ["of acme"]
    assert names(api_of(people.stranger)) == []
    assert names(api_of(people.platform_on_call)) == ["of acme", "of all"]
    assert names(api_of(people.viewer, org=people.acme)) == ["of acme"], "a token of an org"


def test_who_may_delete_what_others_share(
    people: People, save: Callable[..., Any], api_of: Callable[..., Client]
) -> None:
    def deleted(user: User, number: int) -> int:
        return api_of(user).delete(f"/api/v1/views/{number}").status_code

    private = save(people.viewer, "private").json()["id"]
    shared = save(people.viewer, "shared", share="org:acme").json()["id"]
    of_all = save(people.platform_viewer, "of all", share="platform").json()["id"]
    assert deleted(people.stranger, shared) == 404
    assert deleted(people.on_call, shared) == 403
    assert deleted(people.org_admin, private) == 404
    assert deleted(people.org_admin, shared) == 204
    assert deleted(people.platform_on_call, of_all) == 403
    assert deleted(people.platform_admin, of_all) == 204
    assert deleted(people.viewer, private) == 204


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"address": "https://elsewhere.example/"}, 422),
        ({"address": "//elsewhere.example/"}, 422),
        ({"address": "/\\elsewhere.example/"}, 422),
        ({"address": "/no-such-page/"}, 422),
        ({"address": "/api/v1/orgs"}, 422),
        ({"address": "javascript:alert(1)"}, 422),
        ({"share": "everybody"}, 422),
        ({"share": "org:globex"}, 404),
        ({"share": "platform"}, 403),
        ({"name": " "}, 422),
    ],
    ids=str,
)
def test_what_is_no_page_or_not_theirs_to_share_with_is_refused(
    more: dict[str, str], status: int, people: People, save: Callable[..., Any]
) -> None:
    assert save(people.viewer, **more).status_code == status
    assert not SavedView.objects.exists()


def test_there_is_an_end_to_them(
    people: People, save: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "VIEWS_MAX", 1)
    assert save(people.viewer).status_code == 201
    assert "At most 1" in save(people.viewer, "another").json()["detail"]


@pytest.mark.parametrize(
    "wrong", [{"address": "//x/"}, {"address": "x"}, {"on_platform": True}], ids=str
)
def test_the_database_refuses_it_too(wrong: dict[str, Any], people: People) -> None:
    fields = {"owner": people.viewer, "name": "x", "address": "/", "org": people.acme, **wrong}
    with pytest.raises(IntegrityError), transaction.atomic():
        SavedView.objects.create(**fields)
