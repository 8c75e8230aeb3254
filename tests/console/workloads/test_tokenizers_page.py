"""The page of tokenizers: who uses each, what an upload is refused for, and what may be deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.accounts.models import User
from console.workloads import changes
from console.workloads.models import Tokenizer, Workload
from tests.conftest import People
from tests.console.sessions.fleets import make_fleet
from tests.console.workloads.workloads import locked, make_workload, wanted
from tests.html import compact
from tests.workload_manager.tokenizers.archives import FILES, gzipped, tarred

PAGE = "/tokenizers/"


@pytest.fixture(autouse=True)
def folder(settings: Any, tmp_path: Path) -> Path:
    settings.TOKENIZERS = tmp_path / "tokenizers"
    return tmp_path / "tokenizers"


def upload(browser: Client, raw: bytes, name: str = "bytes", org: str = "acme") -> str:
    file = SimpleUploadedFile("tokenizer.tgz", raw)
    return compact(browser.post(PAGE, {"name": name, "org": org, "archive": file}, follow=True))


def test_a_tokenizer_is_uploaded_used_and_deleted_when_nothing_uses_it(
    people: People,
    browser_of: Callable[[User], Client],
    folder: Path,
    django_capture_on_commit_callbacks: Any,
) -> None:
    make_fleet(boxes=4)
    admin, viewer = browser_of(people.org_admin), browser_of(people.viewer)
    assert "No tokenizers yet." in compact(admin.get(PAGE))
    assert "Ask an admin of your org" in compact(viewer.get(PAGE))
    assert "bytes is stored." in upload(admin, gzipped(FILES))
    assert "It is there already, as bytes" in upload(admin, tarred(FILES), "again")
    tokenizer = Tokenizer.objects.get()
    page = compact(viewer.get(PAGE))
    assert tokenizer.sha256 in page
    assert "Upload tokenizer" not in page
    principal = people.principal("org_admin")
    make_workload(principal, org="acme", tokenizer={"sha256": tokenizer.sha256})
    assert '<a href="/workloads/talk/">talk</a>' in compact(viewer.get(PAGE))
    assert f"/tokenizers/{tokenizer.pk}/delete/" not in compact(admin.get(PAGE))
    assert 'href="/tokenizers/"' in compact(viewer.get("/workloads/talk/"))
    # Also a revision that is not the current one keeps it: it may be rolled back to.
    changes.update(principal, locked(principal), wanted(org="acme"))
    refused = compact(admin.post(f"/tokenizers/{tokenizer.pk}/delete/", follow=True))
    assert "bytes is used by revisions of talk: they may be rolled back to." in refused
    assert viewer.post(f"/tokenizers/{tokenizer.pk}/delete/").status_code == 403
    Workload.objects.get().delete()
    with django_capture_on_commit_callbacks(execute=True):
        deleted = admin.post(f"/tokenizers/{tokenizer.pk}/delete/", follow=True)
    assert "bytes is deleted." in compact(deleted)
    assert not (folder / "sha256" / tokenizer.sha256).exists()


def test_the_form_says_why_an_upload_is_refused(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    admin = browser_of(people.org_admin)
    assert "no tar, gzipped tar or zip" in upload(admin, b"nothing")
    assert "The archive has no tokenizer.json." in upload(admin, tarred({"chat_template.jinja": b"a"}))
    assert "Select a valid choice" in upload(admin, tarred(FILES), org="globex")
    assert "This field is required." in upload(admin, tarred(FILES), org="")  # not the platform's
    assert "This field is required." in compact(admin.post(PAGE, {"name": "x", "org": "acme"}))
    assert browser_of(people.viewer).post(PAGE, {"name": "x"}).status_code == 403
    assert not Tokenizer.objects.exists()
    upload(browser_of(people.platform_admin), tarred(FILES), org="")
    assert Tokenizer.objects.get().org is None


def test_others_do_not_learn_who_uses_a_tokenizer_of_the_platform(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    make_fleet(boxes=4)
    platform = browser_of(people.platform_admin)
    upload(platform, tarred(FILES), org="")
    sha256 = Tokenizer.objects.get().sha256
    make_workload(org="acme", tokenizer={"sha256": sha256})
    for person, is_told in ((people.viewer, True), (people.stranger, False)):
        page = compact(browser_of(person).get(PAGE))
        assert sha256 in page
        assert ("/workloads/talk/" in page) == is_told
    assert compact(platform.get(PAGE)).count('href="/workloads/talk/"') == 1
    # An org that has it too: people of the platform see both, and its workload can do without either.
    upload(browser_of(people.org_admin), tarred(FILES))
    rows = compact(platform.get(PAGE))
    assert [f"/tokenizers/{one.pk}/delete/" in rows for one in Tokenizer.objects.all()] == [True, True]
    assert 'href="/workloads/talk/"' not in rows
    # Without the platform's it can't, and people of the platform see that as well.
    Tokenizer.objects.filter(org=None).delete()
    assert compact(platform.get(PAGE)).count('href="/workloads/talk/"') == 1


def test_the_page_takes_as_many_queries_for_many_as_for_one(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    browser = browser_of(people.platform_admin)

    def a_tokenizer(number: int) -> None:
        Tokenizer.objects.create(sha256=f"{number:064}", name="t", size_bytes=1, author_name="a")

    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert browser.get(PAGE).status_code == 200
        return len(captured)

    a_tokenizer(0)
    few = queries()
    for number in range(1, 9):
        a_tokenizer(number)
    assert queries() == few
