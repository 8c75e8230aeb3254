"""The page of the default and the limits, where two people save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from console.accounts.models import User
from console.policies import documents, services
from console.policies.documents import ClusterPolicies, Limits
from console.policies.pages.forms import ClusterForm, PolicyForm
from tests.conftest import People
from tests.html import compact

pytestmark = pytest.mark.django_db
PAGE = "/policies/default/"


def opened() -> dict[str, Any]:
    """What the form sends where nobody changes it."""
    held = services.cluster()
    default = PolicyForm.initial_of(held.policies.default)
    policy = PolicyForm(initial=default, prefix="default", limits=None)
    limits = ClusterForm(initial=documents.spelled_out(held.policies.limits), prefix="limits")
    values = {field.html_name: field.value() for form in (policy, limits) for field in form}
    sent = {name: value for name, value in values.items() if value not in (None, False)}
    return {**sent, "limits-share_max": "500", "version": held.number, "reason": "x"}


def limits_are(people: People, share: int) -> None:
    told = ClusterPolicies(limits=Limits(share_max=share))
    services.set_cluster(people.principal("platform_admin"), told, reason="a contract")


def test_who_saves_what_was_changed_meanwhile_has_seen_what_that_replaces(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    browser = browser_of(people.platform_admin)
    sent = opened()
    limits_are(people, 700)
    invalid = compact(browser.post(PAGE, {**sent, "limits-share_max": "no number"}))
    assert 'name="version" value="0"' in invalid, "nothing was shown of the first version yet"
    stale = compact(browser.post(PAGE, sent))
    assert "It has changed since you opened the form" in stale
    assert "Now: 700." in stale
    assert 'name="version" value="1"' in stale
    assert services.cluster().policies.limits.share_max == 700
    assert browser.post(PAGE, {**sent, "version": "1"}).status_code == 302
    assert services.cluster().policies.limits.share_max == 500


def test_what_is_changed_while_it_is_saved_is_not_overwritten(
    people: People, browser_of: Callable[[User], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = browser_of(people.platform_admin)
    sent = opened()
    locked = services.locked_cluster

    def change_first() -> services.Cluster:
        monkeypatch.setattr(services, "locked_cluster", locked)
        limits_are(people, 700)
        return locked()

    monkeypatch.setattr(services, "locked_cluster", change_first)
    assert "were changed since you read them" in compact(browser.post(PAGE, sent))
    assert services.cluster().policies.limits.share_max != 500
