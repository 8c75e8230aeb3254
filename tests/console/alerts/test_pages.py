"""Pages of alerts say the same of one alert."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from console.accounts.models import User
from tests.conftest import People
from tests.console.alerts.things import make_alert

pytestmark = pytest.mark.django_db


def test_each_page_says_when_an_alert_began_and_not_when_its_state_changed(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    began = timezone.now() - timedelta(hours=2)
    alert = make_alert("refill-slow", "org:acme", people.acme, begun_at=began, state="no_data")
    viewer = browser_of(people.viewer)
    for path in ("/", "/alerts/", f"/alerts/{alert.pk}/", "/hand-over/"):
        page = viewer.get(path).content.decode()
        assert f'datetime="{began.isoformat()}"' in page, path
        assert f'datetime="{alert.state_since.isoformat()}"' not in page.partition("Timeline")[0], path


def test_a_resolved_alert_also_says_since_when(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    alert = make_alert("refill-slow", "org:acme", people.acme, state="resolved")
    page = browser_of(people.viewer).get("/alerts/?state=resolved").content.decode()
    assert f'datetime="{alert.state_since.isoformat()}"' in page
