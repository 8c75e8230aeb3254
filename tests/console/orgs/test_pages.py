"""Pages of orgs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import pytest
from django.test import Client
from django.utils import timezone

from console.fleet.models import Driver
from console.orgs.models import Org
from console.sessions.models import DriverOrg
from telemetry import queries
from telemetry.ingest.folder import Row
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.conftest import People
from tests.html import compact

EDIT: Final = "/orgs/acme/edit/"
REQUESTED: Final = Series(Kind.COUNTER, "swdriver_requested_tokens_total", (("org", "acme"),))


def test_usage_is_of_all_drivers_that_serve_an_org_or_its_page_says_why_not(
    people: People, browser_of: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, names = timezone.now(), [f"job-{one}" for one in range(queries.GROUPS_MAX + 1)]
    drivers = [
        Driver(
            name=one,
            control_url="http://127.0.0.1:1",
            control_token="c" * 40,
            joined_at=now,
            heartbeat_sha256=one.encode().ljust(32),
            model={"name": "llama", "groups": []},
        )
        for one in names
    ]
    DriverOrg.objects.bulk_create(DriverOrg(driver=one) for one in Driver.objects.bulk_create(drivers))
    RollUp().tend_days(now.timestamp())
    shape, bucket = Shape([REQUESTED]), int(now.timestamp()) // 10 * 10 - 10
    cells = shape.cells({REQUESTED: 5})
    rows = [Row(f"driver:{one}", bucket, shape, cells) for one in [*names, "another"]]
    copy_in(FRESH, Names().stored(rows, day_of(bucket)))
    browser = browser_of(people.platform_viewer)
    assert "1,005" in compact(browser.get("/orgs/acme/"))
    monkeypatch.setattr(queries, "TOPICS_MAX", 200)
    page = compact(browser.get("/orgs/acme/"))
    assert "These figures are not known: These are more than 200 topics." in page
    assert "No traffic." not in page


def test_the_models_of_an_org_add_up_to_all_that_was_requested(
    people: People, browser_of: Callable[..., Client]
) -> None:
    now = timezone.now()
    for number in range(7):
        driver = Driver.objects.create(
            name=f"job-{number}",
            control_url="http://127.0.0.1:1",
            control_token="c" * 40,
            joined_at=now,
            heartbeat_sha256=f"job-{number}".encode().ljust(32),
            model={"name": f"llama-{number}", "groups": []},
        )
        DriverOrg.objects.create(driver=driver)
    RollUp().tend_days(now.timestamp())
    shape, bucket = Shape([REQUESTED]), int(now.timestamp()) // 10 * 10 - 10
    counts = {**{f"driver:job-{number}": 100 + number for number in range(7)}, "driver:former": 50}
    rows = [Row(one, bucket, shape, shape.cells({REQUESTED: count})) for one, count in counts.items()]
    rows.append(Row("org:acme", bucket, shape, shape.cells({REQUESTED: sum(counts.values())})))
    copy_in(FRESH, Names().stored(rows, day_of(bucket)))
    page = compact(browser_of(people.platform_viewer).get("/orgs/acme/"))
    found = re.findall(r'data-label="Model">([^<]*)</th> ?<td[^>]*>([\d,]+)</td>', page)
    most = [(f"llama-{number}", str(100 + number)) for number in (6, 5, 4, 3, 2)]
    assert found == [*most, ("other models", "201"), ("deleted models", "50")]


def test_the_page_of_an_org_overwrites_nothing_unseen(
    people: People, browser_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.org_admin)
    form = {"name": "Acme Inc", "version": people.acme.version}
    assert f'name="version" value="{people.acme.version}"' in browser.get(EDIT).content.decode()
    assert browser.post(EDIT, {**form, "name": "Acme Ltd"}).status_code == 302
    refused = browser.post(EDIT, form).content.decode()
    assert "It has changed since you opened the form" in refused
    acme = Org.objects.get(slug="acme")
    assert acme.name == "Acme Ltd"
    assert "<p>Now: Acme Ltd.</p>" in refused
    assert f'name="version" value="{acme.version}"' in refused, "who has looked again may save"
    assert browser.post(EDIT, {**form, "version": acme.version}).status_code == 302
    assert Org.objects.get(slug="acme").name == "Acme Inc"


def test_every_org_is_on_a_page_of_the_list(people: People, browser_of: Callable[..., Client]) -> None:
    Org.objects.bulk_create(Org(slug=f"org-{number:03}", name=f"Org {number}") for number in range(60))
    browser = browser_of(people.platform_viewer)
    pages = [compact(browser.get(f"/orgs/?page={number}")) for number in (1, 2)]
    assert f"of {Org.objects.count()}" in pages[0]
    assert all(
        sum(f"/orgs/{slug}/" in page for page in pages) == 1
        for slug in Org.objects.values_list("slug", flat=True)
    )


def test_a_short_name_belongs_to_one_org(people: People, browser_of: Callable[..., Client]) -> None:
    refused = browser_of(people.platform_admin).post("/new-org/", {"slug": "acme", "name": "Acme Two"})
    assert "An org has this short name already." in refused.content.decode()
