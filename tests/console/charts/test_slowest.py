"""What is behind the slow end of a heat map, and who may see whose it was."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from django.test import Client

from console.accounts.models import User
from console.sessions.changes.sizes import new_session
from console.sessions.models import Job
from telemetry.ingest.folder import bucket_of
from telemetry.ingest.slowest import store_slowest
from tests.conftest import People
from tests.console.charts.numbers import drawn, tell
from tests.console.sessions.fleets import make_driver
from tests.html import compact
from tests.swdriver_shim.transfers import transfer

pytestmark = pytest.mark.django_db


def kept(at: float) -> None:
    """Of two orgs on one node, one of them over the spine."""
    store_slowest(
        "job7",
        [
            transfer(0.0037, at=at, org="acme", request="r-1", bytes=3 << 20, slot_first=4, slot_last=9),
            transfer(0.5, at=at, org="globex", tier="spine", link="leaf-1/spine-1"),
            transfer(0.25, at=at, org="acme", direction="out", node="ax-2"),
        ],
    )


def test_a_member_sees_what_is_of_the_org_and_who_has_the_platform_sees_all_of_it(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    now = time.time()
    kept(now - 5)
    held = new_session("chat", people.acme, 1)
    held.save()
    Job.objects.create(session=held, name="serve", driver=make_driver("job7"))
    member, platform = browser_of(people.viewer), browser_of(people.platform_viewer)
    page = compact(member.get("/latency/slowest/?topic=org:acme"))
    assert page.index("250 ms") < page.index("3.7 ms"), "the slowest first"
    assert "refill of 2 columns, 3 MiB" in page
    assert ">4\u20139</td>" in page
    assert "r-1" in page
    assert "globex" not in page
    assert "/fleet/" not in page, "whose it is not to see"
    both = compact(platform.get("/latency/slowest/?topic=fleet"))
    assert re.search(r"500 ms.*spine.*over leaf-1/spine-1.*250 ms", both, re.DOTALL)
    assert '<a href="/fleet/nodes/ax-1/">ax-1</a> on <a href="/fleet/nodes/?leaf=leaf-1">' in both
    for topic, found in (("node:ax-2", [0.25]), ("driver:job7", [0.5, 0.25, 0.0037]), ("session:x", [])):
        answer = platform.get(f"/api/v1/slowest?topic={topic}")
        expected = (404, None) if topic == "session:x" else (200, found)
        got = [one["seconds"] for one in answer.json()] if answer.status_code == 200 else None
        assert (answer.status_code, got) == expected
    assert member.get("/latency/slowest/?topic=org:globex").status_code == 404
    assert member.get("/api/v1/slowest?topic=fleet").status_code == 404


def test_a_cell_of_a_heat_map_leads_to_what_is_behind_it_and_not_to_slower_ones(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    bucket = tell("org:acme", time.time())
    kept(bucket + 3)
    browser = browser_of(people.viewer)
    page = browser.get("/latency/?topic=org:acme&range=15m").content.decode()
    _, _, refills, evicts, *others = drawn(page)
    assert refills["slowest"] == "/latency/slowest/?topic=org%3Aacme&direction=in"
    assert evicts["slowest"].endswith("&direction=out")
    assert not any(one["slowest"] for one in others)
    [address] = re.findall(r'<a href="(/latency/slowest/[^"]+)" title', page)
    assert "3.7 ms" in browser.get(address.replace("&amp;", "&")).content.decode()
    since, until = (datetime.fromtimestamp(at, UTC).isoformat() for at in (bucket, bucket + 10))
    cell = {"topic": "org:acme", "from": since, "until": until}
    found = browser.get("/latency/slowest/", {**cell, "most": "0.1"}).content.decode()
    assert "3.7 ms" in found
    assert "250 ms" not in found
    below = browser.get("/latency/slowest/", {**cell, "most": "0.001"})
    assert "No transfers stored" in below.content.decode()
    earlier = datetime.fromtimestamp(bucket_of(bucket) - 10, UTC).isoformat()
    empty = browser.get("/latency/slowest/", {**cell, "from": earlier, "until": since})
    assert "No transfers stored" in empty.content.decode()


def test_a_cell_leads_also_to_what_was_over_in_the_second_before_it_was_told(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    kept(tell("org:acme", time.time()) - 0.5)
    browser = browser_of(people.viewer)
    page = browser.get("/latency/?topic=org:acme&range=15m").content.decode()
    [address] = re.findall(r'<a href="(/latency/slowest/[^"]+)" title', page)
    assert "3.7 ms" in browser.get(address.replace("&amp;", "&")).content.decode()


@pytest.mark.parametrize("odd", ["", "A/B c"])
def test_names_that_can_have_no_page_are_shown_without_a_link(
    odd: str, people: People, browser_of: Callable[[User], Client]
) -> None:
    """Names of drivers are what they say, and rows of an earlier version may have others, too."""
    store_slowest(odd, [transfer(at=time.time() - 5, org=odd, node=odd, request="r-1")])
    page = compact(browser_of(people.platform_viewer).get("/latency/slowest/?topic=fleet"))
    assert f'<td data-label="Org">{odd} <code>r-1</code></td>'.replace("> <", "><") in page
    assert re.search(r"/(orgs|fleet/drivers|fleet/nodes)/[^?\"]", page) is None


@pytest.mark.parametrize("query", ["direction=pull", "most=-1", "most=x"])
def test_a_list_that_there_is_not_is_not_found(
    query: str, people: People, browser_of: Callable[[User], Client]
) -> None:
    answer = browser_of(people.viewer).get(f"/latency/slowest/?topic=org:acme&{query}")
    assert answer.status_code == 404


def test_more_than_is_said_at_once_is_refused_over_rest(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    answer = browser_of(people.viewer).get(
        "/api/v1/slowest?topic=org:acme&start=2026-11-21T03:00:00Z&end=2026-11-21T02:00:00Z"
    )
    assert answer.json()["detail"] == "The end must be after the start."
