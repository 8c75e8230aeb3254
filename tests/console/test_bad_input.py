"""Nothing answers 500 to bad input: every page, with what nobody should send."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from console.accounts.models import User
from tests.conftest import People

BAD = ["%00", "%FF%FE", "%ED%A0%80", "x" * 10_000, "%0d%0aX-Injected:%201", "../../etc/passwd", "9" * 40]
PATHS = [
    "/{}",
    "/?x={}",
    "/log-in/?next={}",
    "/users/{}/",
    "/orgs/{}/",
    "/orgs/{}/edit/",
    "/audit/{}/",
    "/audit/?q={0}&actor={0}&action={0}&org={0}&request_id={0}&since={0}&until={0}&page={0}",
    "/audit/export.csv?q={0}&org={0}&since={0}",
    "/operations/?target={0}&kind={0}&done={0}&page={0}",
    "/operations/{}/",
    "/api/v1/operations?target={0}&kind={0}&done={0}&cursor={0}",
    "/api/v1/operations/{}",
    "/tokens/?x={}",
    "/static/{}",
    "/api/v1/orgs/{}",
    "/api/v1/audit?q={0}&org={0}&cursor={0}&since={0}&limit={0}",
    "/api/v1/audit/{}",
]
FORMS = {
    "/log-in/": "username={0}&password={0}&next={0}",
    "/account/password/": "current={0}&new={0}&again={0}",
    "/tokens/": "name={0}&scope={0}&org={0}&days={0}",
    "/tokens/0123456789ab/revoke/": "x={0}",
    "/new-user/": "username={0}&full_name={0}&email={0}&platform_role={0}&reason={0}",
    "/users/vic/": "full_name={0}&email={0}&platform_role={0}&is_active={0}&reason={0}",
    "/new-org/": "slug={0}&name={0}&reason={0}",
    "/orgs/acme/edit/": "name={0}&reason={0}",
    "/orgs/acme/delete/": "typed={0}&reason={0}",
    "/orgs/acme/members/": "username={0}&role={0}&reason={0}",
}


@pytest.mark.parametrize("bad", BAD, ids=lambda value: value[:12])
def test_no_address_answers_500(bad: str, people: People, browser_of: Callable[[User], Client]) -> None:
    browser = browser_of(people.platform_admin)
    statuses = {path: browser.get(path.format(bad)).status_code for path in PATHS}
    assert all(status < 500 for status in statuses.values()), statuses


@pytest.mark.parametrize("bad", BAD, ids=lambda value: value[:12])
def test_no_form_answers_500(bad: str, people: People, browser_of: Callable[[User], Client]) -> None:
    browser = browser_of(people.platform_admin)
    statuses = {
        path: browser.post(
            path, body.format(bad), content_type="application/x-www-form-urlencoded"
        ).status_code
        for path, body in FORMS.items()
    }
    assert all(status < 500 for status in statuses.values()), statuses
