"""What could not be stored is shown to platform admins, with the process and the reason, and as text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.test import Client

from console.metrics import prometheus
from telemetry.ingest.dead_letters import Cause, DeadLetters, store
from tests.conftest import People

pytestmark = pytest.mark.django_db


@pytest.fixture
def refused(db: None) -> None:
    aside = DeadLetters()
    aside.add(
        Cause.FOREIGN, "node:ax-7", "it says that it is driver:<b>job7</b>", b"\x93\x01\x02\xa3<b>"
    )
    aside.add(Cause.MALFORMED, "unknown", "there is no field `record`", b"\xc1\x00")
    aside.count(Cause.SERIES, "driver:job7", 4096)
    with transaction.atomic():
        store(aside, time.time())


@pytest.mark.usefixtures("refused")
def test_the_page_says_whose_how_many_and_why(people: People, browser_of: Callable[..., Client]) -> None:
    page = browser_of(people.platform_admin).get("/dead-letters/").content.decode()
    for text in ("node:ax-7", "foreign", "4,096", "hex c1 00", "there is no field", "driver:job7"):
        assert text in page
    assert "<b>" not in page
    its = browser_of(people.platform_admin).get("/dead-letters/?source=node:ax-7").content.decode()
    assert "hex c1 00" not in its
    assert "[1,2," in its
    assert '<a href="/alerts/rules/telemetry-rejected/">The runbook</a>' in its


def test_of_nothing_there_is_no_excerpt(
    db: None, people: People, browser_of: Callable[..., Client]
) -> None:
    aside = DeadLetters()
    aside.add(Cause.MALFORMED, "node:ax-7", "there is no field `record`", b"")
    with transaction.atomic():
        store(aside, time.time())
    page = browser_of(people.platform_admin).get("/dead-letters/").content.decode()
    assert '<span class="quiet">none</span>' in page
    assert "hex" not in page


def test_it_is_found_from_the_overview_by_who_may_see_it(
    people: People, browser_of: Callable[..., Client]
) -> None:
    assert b"/dead-letters/" in browser_of(people.platform_admin).get("/").content
    assert b"/dead-letters/" not in browser_of(people.platform_viewer).get("/").content


@pytest.mark.usefixtures("refused")
def test_the_api_says_the_same(people: People, api_of: Callable[..., Client]) -> None:
    client = api_of(people.platform_admin)
    letters: Any = client.get("/api/v1/dead-letters?cause=foreign").json()
    [letter] = letters["items"]
    assert (letter["source"], letter["size"], letter["excerpt"]) == ("node:ax-7", 7, '[1,2,"<b>"]')
    counts: Any = client.get("/api/v1/dead-letters/counts").json()
    assert {(one["cause"], one["source"], one["count"]) for one in counts["items"]} == {
        ("foreign", "node:ax-7", 1),
        ("malformed", "unknown", 1),
        ("over_quota_series", "driver:job7", 4096),
    }
    assert all(one["meaning"] for one in counts["items"])


@pytest.mark.usefixtures("refused")
def test_prometheus_is_told() -> None:
    assert 'tidegate_dead_letters{cause="over_quota_series"} 4096' in prometheus.page()


def test_without_any_the_page_says_so(people: People, browser_of: Callable[..., Client]) -> None:
    page = browser_of(people.platform_admin).get("/dead-letters/").content.decode()
    assert "No dead letters." in page
