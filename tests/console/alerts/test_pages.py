"""Pages of alerts say the same of one alert."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from console.accounts.models import User
from telemetry.events import note
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


def test_recent_changes_are_in_the_order_of_the_times_that_they_show(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    began = timezone.now() - timedelta(minutes=1)
    alert = make_alert("refill-slow", "org:acme", people.acme, begun_at=began)
    with transaction.atomic():
        for minutes in (2, 9, 5):  # as they are noted: some later than they happened
            at = began - timedelta(minutes=minutes)
            note("node.lost", ["org:acme"], f"{minutes} min before.", at=at)
    page = browser_of(people.viewer).get(f"/alerts/{alert.pk}/").content.decode()
    changes = page.partition("Recent changes")[2]
    assert re.findall(r"(\d) min before", changes) == ["2", "5", "9"]


@pytest.mark.parametrize(
    ("rule", "every", "stale"), [("evict-slow", "1 min", 120), ("driver-not-ready", "10 s", 70)]
)
def test_the_page_says_how_often_its_rule_is_evaluated_and_greys_only_what_is_older(
    people: People, browser_of: Callable[[User], Client], rule: str, every: str, stale: int
) -> None:
    alert = make_alert(rule, "org:acme", people.acme)
    page = browser_of(people.viewer).get(f"/alerts/{alert.pk}/").content.decode()
    [evaluated] = re.findall(r"evaluated (.*)", page)
    assert f'data-stale="{stale}"' in evaluated
    assert evaluated.endswith(f", every {every}")


def test_a_comment_has_as_many_lines_as_fit_in_its_box_and_is_not_lost_if_it_is_too_long(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    alert = make_alert("refill-slow", "org:acme", people.acme)
    page, on_call = f"/alerts/{alert.pk}/", browser_of(people.on_call)
    lines = "\r\n".join(["x" * 39] * 50)  # as browsers send what they count as 1,999 characters
    assert on_call.post(page, {"text": lines})["Location"] == page
    assert alert.comments.get().text == "\n".join(["x" * 39] * 50)
    refused = on_call.post(page, {"text": f"{lines}too long"}).content.decode()
    assert "at most 2000 characters" in refused
    assert "too long</textarea>" in refused
    assert browser_of(people.viewer).post(page, {"text": "hm"}).status_code == 403
    assert alert.comments.count() == 1


def test_an_alert_is_not_acknowledged_for_a_reason_that_is_refused(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    alert = make_alert("refill-slow", "org:acme", people.acme)
    told = {"reason": "x" * 501}
    page = browser_of(people.on_call).post(f"/alerts/{alert.pk}/acknowledge/", told, follow=True)
    assert "Reason: Ensure this value has at most 500 characters" in page.content.decode()
    alert.refresh_from_db()
    assert alert.acknowledged_at is None


def test_a_resolved_alert_also_says_since_when(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    alert = make_alert("refill-slow", "org:acme", people.acme, state="resolved")
    page = browser_of(people.viewer).get("/alerts/?state=resolved").content.decode()
    assert f'datetime="{alert.state_since.isoformat()}"' in page


def test_facts_have_names_of_their_own(people: People, browser_of: Callable[[User], Client]) -> None:
    alert = make_alert(
        "desired-not-applied",
        "node:ax-1",
        labels={"node": "ax-1"},
        evidence={"last_valid_answer": "never"},
    )
    page = browser_of(people.platform_viewer).get(f"/alerts/{alert.pk}/").content.decode()
    for name in ("Node", "Last valid answer"):
        assert f"<dt>{name}</dt>" in page
    for name in ("kvss_generation desired", "kvss_generation observed"):
        assert f"<code>{name}</code>" in page


def test_a_metric_that_one_request_returns_has_its_name_alone(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    """A rule reads it twice, for an hour and for six."""
    alert = make_alert("evict-slow", "org:acme", people.acme)
    page = browser_of(people.viewer).get(f"/alerts/{alert.pk}/").content.decode()
    assert "<code>swdriver_evict_seconds</code>" in page


def test_rules_have_the_same_names_in_the_filter_as_in_the_list(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    make_alert("refill-slow", "org:acme", people.acme)
    make_alert("evict-slow", "org:acme", people.acme)
    page = browser_of(people.viewer).get("/alerts/?rule=refill-slow").content.decode()
    assert '<option value="refill-slow" selected>Refill latency above objective</option>' in page
    assert "Evict latency above objective</a>" not in page
