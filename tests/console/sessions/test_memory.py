"""Whose columns fill a session's memory, and who may know of whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pytest
from django.test import Client

from console.accounts.models import User
from console.sessions import memory
from console.sessions.models import Job, Session
from telemetry import queries
from telemetry.ingest.folder import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.conftest import People
from tests.console.sessions.fleets import make_driver

pytestmark = pytest.mark.django_db


def tell(driver: str, **sizes: float) -> None:
    """What a driver told of orgs' memory over the ten seconds before these."""
    store(
        driver,
        {Series(Kind.GAUGE, "swdriver_org_bytes", (("org", org),)): size for org, size in sizes.items()},
    )


def store(driver: str, series: Mapping[Series, float]) -> None:
    at = time.time() - 10
    RollUp().tend_days(at)
    shape = Shape(list(series))
    cells = shape.cells({one: (size * 10, 10, size) for one, size in series.items()})
    rows = [Row(f"driver:{driver}", bucket_of(at), shape, cells)]
    copy_in(FRESH, Names().stored(rows, day_of(at)))


@pytest.fixture
def session(people: People) -> Session:
    made = Session.objects.create(
        name="chat", org=people.acme, boxes_desired=1, boxes_min=1, boxes_increment=1
    )
    for name in ("one", "two"):
        Job.objects.create(session=made, name=name, driver=make_driver(f"job-{name}"))
    return made


@pytest.mark.usefixtures("session")
def test_memory_is_summed_up_over_drivers_and_strangers_are_others(
    people: People, api_of: Callable[..., Client], browser_of: Callable[[User], Client]
) -> None:
    def seen(user: User) -> dict[str | None, int]:
        told = api_of(user).get("/api/v1/sessions/chat/memory").json()
        return {one["org"]: one["bytes"] for one in told["by_org"]}

    assert seen(people.viewer) == {}
    assert "No data yet" in browser_of(people.viewer).get("/sessions/chat/").content.decode()
    tell("job-one", acme=3 << 20, globex=1 << 20)
    tell("job-two", acme=1 << 20)
    tell("job-of-another-session", acme=1 << 30)
    assert seen(people.platform_viewer) == {"acme": 4 << 20, "globex": 1 << 20}
    assert seen(people.viewer) == {"acme": 4 << 20, None: 1 << 20}
    page = browser_of(people.viewer).get("/sessions/chat/").content.decode()
    assert "4 MiB" in page
    assert "others" in page
    assert "Globex" not in page


@pytest.mark.usefixtures("session")
def test_a_driver_of_very_many_orgs_leaves_the_others_to_be_seen(
    people: People, api_of: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell("job-one", **{f"org-{one}": 1 for one in range(queries.GROUPS_MAX)}, acme=1 << 20)
    tell("job-two", acme=1 << 20)
    api = api_of(people.viewer)

    def taken() -> dict[str | None, int]:
        told = api.get("/api/v1/sessions/chat/memory").json()
        return {one["org"]: one["bytes"] for one in told["by_org"]}

    assert taken() == {"acme": 2 << 20, None: queries.GROUPS_MAX}
    monkeypatch.setattr(memory, "ORGS_MAX", queries.GROUPS_MAX)
    assert taken() == {"acme": 1 << 20}, "of the other nothing is known"


def test_of_a_driver_that_does_not_report_it_is_said_that_nothing_is_known(
    people: People, session: Session, api_of: Callable[..., Client], browser_of: Callable[[User], Client]
) -> None:
    Job.objects.create(session=session, name="new", driver=make_driver("job-new"))
    api, page = api_of(people.viewer), browser_of(people.viewer)
    silent = "one has not reported for two minutes"
    assert api.get("/api/v1/sessions/chat/memory").json()["complete"] is False
    tell("job-one", acme=3 << 20)
    store(
        "job-new", {Series(Kind.GAUGE, "swdriver_overstay_seconds_max", ()): 0}
    )  # it has nothing of anybody yet
    assert api.get("/api/v1/sessions/chat/memory").json()["complete"] is False
    assert silent in " ".join(page.get("/sessions/chat/").content.decode().split())
    tell("job-two", acme=1 << 20)
    told = api.get("/api/v1/sessions/chat/memory").json()
    assert (told["complete"], told["by_org"]) == (True, [{"org": "acme", "bytes": 4 << 20}])
    assert silent not in " ".join(page.get("/sessions/chat/").content.decode().split())
