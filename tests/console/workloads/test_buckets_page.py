"""The pages of buckets: who uses each, and credentials that are stored, replaced and deleted there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.accounts.models import User
from console.workloads.models import Bucket, Workload
from tests.conftest import People
from tests.console.workloads.buckets import CREDENTIALS, of, stored, told
from tests.html import compact

PAGE = "/buckets/"


def post(browser: Client, path: str, **fields: str) -> str:
    """The page that follows, on which no credentials are."""
    page = compact(browser.post(path, fields, follow=True))
    assert "zqx" not in page
    return page


def test_credentials_are_stored_replaced_and_deleted(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    admin, viewer = browser_of(people.org_admin), browser_of(people.viewer)
    assert "No credentials yet." in compact(admin.get(PAGE))
    assert "Ask an admin of your org" in compact(viewer.get(PAGE))
    stored_page = post(admin, PAGE, name="models", org="acme", region="eu-central-1", **CREDENTIALS)
    assert "Credentials for s3://models are stored." in stored_page
    assert "Share with all orgs" not in stored_page
    bucket = Bucket.objects.get()
    path = f"{PAGE}{bucket.pk}/"
    workload = of(people.acme)
    assert told(workload) == {**CREDENTIALS, "region": "eu-central-1"}
    seen = compact(viewer.get(PAGE))
    assert '<a href="/workloads/talk/">talk</a>' in seen
    assert path not in seen
    assert viewer.get(path).status_code == 403
    page = compact(admin.get(path))
    assert "can be replaced, and not be deleted" in page
    assert "zqx" not in page
    fresh = {"access_key_id": "zqx-2", "secret_access_key": "zqx-secret-2"}
    stale = post(admin, path, version="7", **fresh, region="us-west-2")
    assert "It has changed since you opened the form" in stale
    assert "Now: eu-central-1." in stale
    assert 'name="version" value="1"' in stale, "who saves again has seen what that replaces"
    assert "This field is required." in post(admin, path, version="1", access_key_id="zqx-2")
    assert "are replaced." in post(admin, path, version="1", **fresh)
    assert told(workload) == fresh
    assert "are used by talk. Change these workloads first." in post(admin, f"{path}delete/")
    assert viewer.post(f"{path}delete/").status_code == 403
    Workload.objects.all().delete()
    assert "Credentials for s3://models are deleted." in post(admin, f"{path}delete/")
    assert not Bucket.objects.exists()


def test_the_form_says_why_it_is_refused(people: People, browser_of: Callable[[User], Client]) -> None:
    admin = browser_of(people.org_admin)
    said = {"name": "models", "org": "acme", **CREDENTIALS}
    assert "without s3://" in post(admin, PAGE, **{**said, "name": "s3://models"})
    assert "An address like" in post(admin, PAGE, **said, endpoint="nowhere")
    assert "letters, digits and dashes" in post(admin, PAGE, **said, region="x.example/")
    assert "Select a valid choice" in post(admin, PAGE, **{**said, "org": "globex"})
    assert "This field is required." in post(admin, PAGE, **{**said, "org": ""})  # not the platform's
    assert browser_of(people.viewer).post(PAGE, said).status_code == 403
    stored(people.acme)
    assert "There are credentials for s3://models already" in post(admin, PAGE, **said)
    # Sharing is not an org's to say.
    post(admin, PAGE, **{**said, "name": "more"}, shared="on")
    assert not Bucket.objects.filter(shared=True).exists()


def test_a_platform_admin_shares_credentials_with_all_orgs(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    platform, stranger = browser_of(people.platform_admin), browser_of(people.stranger)
    post(platform, PAGE, name="models", **CREDENTIALS)
    path = f"{PAGE}{Bucket.objects.get().pk}/"
    workload = of(people.acme)
    assert (told(workload), stranger.get(path).status_code) == ({}, 404)
    assert "platform: all orgs" in post(platform, path, version="1", shared="on", **CREDENTIALS)
    assert told(workload) == CREDENTIALS
    # Others see that it is there, and not who uses it.
    page = compact(stranger.get(PAGE))
    assert "none of yours" in page
    assert "/workloads/talk/" not in page
    assert stranger.get(path).status_code == 403
    assert "/workloads/talk/" in compact(platform.get(PAGE))


def test_the_page_takes_as_many_queries_for_many_as_for_one(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    browser = browser_of(people.platform_admin)

    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert browser.get(PAGE).status_code == 200
        return len(captured)

    def a_bucket(number: int, **more: Any) -> None:
        stored(people.acme, name=f"models-{number}", **more)
        of(people.acme, f"talk-{number}", source=f"s3://models-{number}/chat")

    a_bucket(0)
    few = queries()
    for number in range(1, 6):
        a_bucket(number)
    assert queries() == few
