"""Pages of orgs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from django.test import Client

from console.orgs.models import Org
from tests.conftest import People

EDIT: Final = "/orgs/acme/edit/"


def test_the_page_of_an_org_overwrites_nothing_unseen(
    people: People, browser_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.org_admin)
    form = {"name": "Acme Inc", "version": people.acme.version}
    assert f'name="version" value="{people.acme.version}"' in browser.get(EDIT).content.decode()
    assert browser.post(EDIT, {**form, "name": "Acme Ltd"}).status_code == 302
    assert "It has changed since you opened the form" in browser.post(EDIT, form).content.decode()
    assert Org.objects.get(slug="acme").name == "Acme Ltd"
