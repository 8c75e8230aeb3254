"""What people see of redundancy: pages of a driver, a node and the session rules, and the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.fleet.models import Node
from console.placement.topology import State
from console.sessions import holders
from console.sessions.models import (
    FragmentHolder,
    Job,
    RuleSet,
    Session,
    SessionBox,
    Stream,
    StreamRedundancy,
)
from tests.conftest import People
from tests.console.sessions.fleets import make_box, make_driver, make_node
from tests.console.sessions.redundant import serve
from tests.console.sessions.requests import set_rules

pytestmark = pytest.mark.django_db

API = "/api/v1/drivers/job1/redundancy"
DISK = {"tier2": {"kind": "posix", "path": "/mnt/kv", "cap": "1TiB", "shared": False}}


@pytest.fixture
def stream(db: None) -> Stream:
    """Of `job1`, on `n1`. Agents on n1, n2 and n3 could store its fragments."""
    for number in (1, 2, 3):
        make_node(f"n{number}", f"l{number}", declared=DISK)
    model = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [192]}]}
    driver = make_driver("job1", model)
    session = Session.objects.create(name="chat", boxes_desired=1, boxes_min=1, boxes_increment=1)
    box = make_box("cs1")
    SessionBox.objects.create(session=session, box=box, ready=True)
    return Stream.objects.create(
        job=Job.objects.create(session=session, name="serve", driver=driver, running=True),
        group="full",
        index=0,
        box=box,
        domain=0,
        wio=3,
        slot_bytes=1 << 20,
        slots=10,
        node=Node.objects.get(name="n1"),
        tier=0,
        port_leaf="l1",
        nic_leaf="l1",
    )


def said(browser: Client) -> str:
    """The panel of the driver's page."""
    page = browser.get("/fleet/drivers/job1/").content.decode()
    _, _, rest = page.partition('<h2 id="redundancy">')
    return " ".join(rest.partition("</section>")[0].split())


def test_a_drivers_page_says_who_stores_fragments_and_what_agents_say_of_it(
    stream: Stream, people: People, browser_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.platform_viewer)
    assert "The session rules ask for none." in said(browser)
    set_rules(people, redundancy="2+1")
    page = said(browser)
    assert "2+1 on" in page
    assert all(f"/fleet/nodes/n{number}/" in page for number in (1, 2, 3))
    assert "not reported yet" in page
    assert "at most 2.18 GiB/s over the NIC of n1" in page
    row = StreamRedundancy.objects.create(
        stream=stream,
        state="ready",
        columns=9000,
        incomplete=1204,
        repaired=31,
        unreachable=["unix:/nowhere/n2", "unix:/former"],
        seen_at=timezone.now(),
    )
    page = said(browser)
    assert "1,204 of 9,000 columns lack a fragment" in page
    assert '<rect class="bar-fill" width="86.6"' in page
    assert "31 repaired" in page
    assert "n2, unix:/former" in page
    assert "status--warn" in page, "it is ready, but not well"
    row.incomplete, row.unreachable = 0, []
    row.save()
    page = said(browser)
    assert "9,000 columns" in page
    assert "lack" not in page
    assert "status--ok" in page
    row.columns, row.incomplete = 0, 2
    row.save()
    assert "2 columns lack a fragment" in said(browser), "not all are listed yet"
    assert "of 0 columns" not in said(browser)
    row.incomplete, row.unreachable = 0, ["unix:/nowhere/n2"]
    row.reason = "indexing unreachable: unix:/nowhere/n2 is gone"
    row.save()
    assert "what n2 lacks is unknown" in said(browser)
    assert "indexing unreachable: n2 is gone" in said(browser)
    row.state, row.reason = "refused", "ISA-L is not installed"
    row.save()
    assert "ISA-L is not installed" in said(browser)


def test_a_drivers_page_says_why_a_holder_is_not_replaced(
    stream: Stream, people: People, browser_of: Callable[..., Client]
) -> None:
    set_rules(people, redundancy="2+1")
    Node.objects.filter(name="n2").update(state=State.DRAINING.value)
    page = said(browser_of(people.platform_viewer))
    assert "n2 is draining, and no other agent can take its fragments over." in page
    FragmentHolder.objects.all().delete()
    set_rules(people, redundancy="4+1")
    page = said(browser_of(people.platform_viewer))
    assert "4+1 needs 5 agents with tier 2 on a disk of their own; there are 2." in page


def test_the_rules_page_says_whether_there_are_enough_agents(
    stream: Stream, people: People, browser_of: Callable[..., Client]
) -> None:
    def active() -> str:
        page = browser_of(people.platform_admin).get("/session-rules/").content.decode()
        return " ".join(page.partition("<dt>Redundancy</dt>")[2].partition("</dd>")[0].split())

    assert "3 agents can store fragments now" in active()
    set_rules(people, redundancy="4+1")
    assert "4+1 needs 5 agents with tier 2 on a disk of their own; there are 3." in active()
    page = browser_of(people.org_admin).get("/orgs/acme/session-rules/").content.decode()
    assert "4+1: survives" in page
    assert "there are 3" not in page, "how many agents there are is not an org's to know"


def test_a_nodes_page_counts_the_shards_of_fragments(
    stream: Stream, people: People, browser_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.platform_viewer)
    assert "<dt>Fragments</dt>" not in browser.get("/fleet/nodes/n2/").content.decode()
    set_rules(people, redundancy="1+1")
    page = browser.get("/fleet/nodes/n2/").content.decode()
    facts = " ".join(page.partition("<dt>Fragments</dt>")[2].partition("</dd>")[0].split())
    assert "1 shard of 32.3 MiB" in facts
    assert "/fleet/drivers/job1/" in facts


def test_the_api_says_what_a_drivers_page_says(
    stream: Stream, people: People, browser_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.platform_viewer)

    def shard() -> dict[str, Any]:
        found = browser.get(API)
        assert found.status_code == 200
        [one] = found.json()["shards"]
        assert (one["stream"], one["group"], one["index"]) == ("job1.full.0", "full", 0)
        return dict(one)

    before = shard()
    assert (before["redundancy"], before["holders"], before["reported"]) == ("none", [], None)
    assert before["why"] == "The session rules ask for none."
    set_rules(people, redundancy="2+1")
    assigned = shard()
    assert (assigned["redundancy"], assigned["why"], assigned["reported"]) == ("2+1", "", None)
    assert [(one["place"], one["node"]) for one in assigned["holders"]] == [
        (0, "n1"),
        (1, "n2"),
        (2, "n3"),
    ]
    assert {one["reachable"] for one in assigned["holders"]} == {None}
    row = StreamRedundancy.objects.create(
        stream=stream,
        state="ready",
        columns=9000,
        incomplete=1204,
        incomplete_at=[0, 1204],
        most_lacking=1,
        repaired=31,
        unreachable=["unix:/nowhere/n2", "unix:/former"],
        seen_at=timezone.now(),
    )
    seen_at = row.seen_at.isoformat().replace("+00:00", "Z")
    assert shard()["reported"] == {
        "state": "ready",
        "reason": "",
        "columns": 9000,
        "incomplete": 1204,
        "incomplete_at": {"n2": 1204},
        "most_lacking": 1,
        "unreachable": ["n2", "unix:/former"],
        "holders_since": None,
        "repaired": 31,
        "seen_at": seen_at,
    }
    found = browser.get(API).json()
    assert (found["redundancy"], found["asked"], found["incomplete"]) == ("2+1", "2+1", 1204)
    assert shard()["link"] == "the NIC of n1"
    assert shard()["bytes_per_second"] > 0
    assert [one["reachable"] for one in shard()["holders"]] == [True, False, True]
    row.state, row.reason, row.unreachable = "refused", "ISA-L is not installed", []
    row.save()
    assert shard()["reported"]["reason"] == "ISA-L is not installed"
    assert {one["reachable"] for one in shard()["holders"]} == {None}, "it asks nobody"
    Job.objects.update(running=False)
    nothing: dict[str, Any] = {"redundancy": None, "asked": None, "incomplete": 0, "shards": []}
    assert browser.get(API).json() == {"driver": "job1", **nothing}


def test_the_api_takes_as_many_queries_for_many_streams_as_for_few(
    stream: Stream, people: People, browser_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.platform_viewer)

    def queries() -> int:
        with CaptureQueriesContext(connection) as asked:
            shards = browser.get(API).json()["shards"]
        assert [len(one["holders"]) for one in shards] == [2] * Stream.objects.count()
        return len(asked)

    set_rules(people, redundancy="1+1")
    few = queries()
    for index in range(1, 6):
        stream.pk, stream.index, stream.domain = None, index, index
        stream._state.adding = True
        stream.save()
    holders.keep(timezone.now())
    assert queries() == few


def test_an_org_admins_rule_changes_only_what_its_own_sessions_have(
    stream: Stream,
    people: People,
    browser_of: Callable[..., Client],
    api_of: Callable[..., Client],
) -> None:
    set_rules(people, redundancy="2+1")
    serve("mine", "n2", org=people.acme, model=stream.job.driver.model)
    holders.keep(timezone.now())
    fleet = browser_of(people.platform_viewer)

    def of_another() -> list[dict[str, Any]]:
        """But for its part of links, which all share."""
        shards: list[dict[str, Any]] = fleet.get(API).json()["shards"]
        return [{**one, "bytes_per_second": 0} for one in shards]

    before = of_another()
    assert before[0]["redundancy"] == "2+1"
    client = api_of(people.org_admin)
    address = "/api/v1/orgs/acme/session-rules"

    def put_rules(redundancy: str, **values: Any) -> None:
        rules = {**client.get(address).json(), "redundancy": redundancy, **values}
        del rules["version"]
        headers = {"If-Match": "*", "Idempotency-Key": redundancy}
        said = client.put(address, rules, content_type="application/json", headers=headers)
        assert said.status_code == 200, said.content

    def now() -> str:
        assert of_another() == before
        found: str = client.get("/api/v1/sessions/mine").json()["redundancy"]
        return found

    put_rules("8+2", replace_lost=False)
    assert now() == "2+1"
    [mine] = fleet.get("/api/v1/drivers/mine/redundancy").json()["shards"]
    assert (mine["asked"], mine["redundancy"]) == ("8+2", "2+1")
    assert mine["why"] == (
        "8+2 needs 10 agents with tier 2 on a disk of their own; there are 3. "
        "Columns have 2+1, as the cluster asks."
    )
    told = (
        "8+2 needs 10 agents with tier 2 on a disk of their own, and there are fewer. "
        "Columns have 2+1, as the cluster asks."
    )
    browser = browser_of(people.org_admin)
    for address_of_page in ("/sessions/mine/", "/orgs/acme/session-rules/"):
        page = " ".join(browser.get(address_of_page).content.decode().split())
        assert told in page
        assert "there are 3" not in page
    assert "there are 3" in fleet.get("/sessions/mine/").content.decode()
    put_rules("1+1")
    assert now() == "1+1"
    assert told not in browser.get("/sessions/mine/").content.decode()


def test_what_rules_would_lose_is_said_before_they_are_saved(
    stream: Stream, people: People, browser_of: Callable[..., Client]
) -> None:
    set_rules(people, redundancy="2+1")
    browser = browser_of(people.platform_admin)
    form = {"path": "any", "wait_for_rail_seconds": 0, "boxes_min": 1, "boxes_increment": 1}
    form |= {"grant_percent": 100, "moves_percent": 25, "borrow": "no", "redundancy": "4+1"}
    form |= {"replace_lost_after_seconds": 20, "reason": "more disks"}
    form |= {"version": RuleSet.objects.get(org=None).version}
    said = browser.post("/session-rules/", form)
    lost = (
        "1 shard of session chat would have no redundancy in place of 2+1. What is stored redundantly "
        "there becomes a miss."
    )
    assert (said.status_code, RuleSet.objects.get(org=None).redundancy) == (200, "2+1")
    assert lost in said.content.decode()
    assert "Save all the same" in said.content.decode()
    assert browser.post("/session-rules/", {**form, "seen": "another"}).status_code == 200
    assert browser.post("/session-rules/", {**form, "seen": lost}).status_code == 302
    assert RuleSet.objects.get(org=None).redundancy == "4+1"
    assert not FragmentHolder.objects.exists()
