"""The pages of the fleet: what they say, and that they ask as often for many as for few."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.audit.models import AuditEntry
from console.control.models import Target
from console.fleet.descriptions import changes
from console.fleet.descriptions.document import dump
from console.fleet.membership import joins
from console.fleet.models import Box, Driver, JoinToken, Node
from console.fleet.pages import descriptions
from console.operations.models import Operation
from console.placement.topology import Tier
from console.sessions.models import Job, JobBox, Session, SessionBox, Stream
from kvss_agent.process.membership import credential
from telemetry.ingest.folder import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.conftest import People
from tests.console.fleet.descriptions import many
from tests.console.fleet.worlds import CONTROL_TOKEN, DRIVER_FACTS, FACTS, World, new_token, refreshed
from tests.html import compact

Browser = Callable[..., Client]


def test_an_empty_fleet_says_what_to_do_next(people: People, browser_of: Browser) -> None:
    admin = browser_of(people.platform_admin)
    assert "No fleet yet" in compact(admin.get("/fleet/"))
    assert "No fleet yet" in compact(admin.get("/fleet/description/"))
    assert "Describe the fleet" in compact(admin.get("/fleet/nodes/"))
    assert "A platform admin describes the fleet" in compact(
        browser_of(people.platform_viewer).get("/fleet/")
    )


def test_a_viewer_sees_but_is_offered_no_change(
    world: World, people: People, browser_of: Browser
) -> None:
    viewer = browser_of(people.platform_viewer)
    page = compact(viewer.get("/fleet/nodes/ax-1/"))
    assert "Change state" not in page
    assert "Save labels" not in page
    assert "Preview" not in compact(viewer.get("/fleet/description/"))
    assert viewer.get("/fleet/join/").status_code == 403
    on_call = compact(browser_of(people.platform_on_call).get("/fleet/nodes/ax-1/"))
    assert "Change state" in on_call
    assert "Save labels" not in on_call


def test_the_secret_that_agents_tell_is_on_no_page(
    world: World, people: People, browser_of: Browser, api_of: Browser
) -> None:
    admin, api = browser_of(people.platform_admin), api_of(people.platform_admin)
    for answer in (
        admin.get("/fleet/nodes/ax-1/"),
        admin.get("/fleet/description/"),
        api.get("/api/v1/nodes/ax-1"),
        api.get("/api/v1/audit"),
        api.get("/api/v1/events?topic=fleet"),
    ):
        assert answer.status_code == 200
        assert world.here.control_token not in answer.content.decode()


def test_a_node_is_cordoned_and_labelled_on_its_page(
    world: World, people: People, browser_of: Browser
) -> None:
    admin = browser_of(people.platform_admin)
    admin.post("/fleet/nodes/ax-1/state/", {"state": "cordoned", "reason": "loud fan"})
    assert "loud fan" in compact(admin.get("/fleet/nodes/ax-1/"))
    version = refreshed(world.here).version
    form = {"labels": "rack=7\r\nzone=a\r\n", "version": version}
    assert admin.post("/fleet/nodes/ax-1/labels/", form).status_code == 302
    assert refreshed(world.here).labels == {"rack": "7", "zone": "a"}
    again = compact(admin.post("/fleet/nodes/ax-1/labels/", form))
    assert "It has changed since you opened the form" in again
    assert "Now:" not in again, "it was this form that has changed it"
    stale = {"labels": "rack=8\r\nzone=a\r\n", "version": version}
    again = compact(admin.post("/fleet/nodes/ax-1/labels/", stale))
    assert "Now: without “rack=8”, with “rack=7”." in again
    assert f'name="version" value="{refreshed(world.here).version}"' in again
    for bad in ("a=1\na=2", "Bad!=1", "=1"):
        form = {"labels": bad, "version": refreshed(world.here).version}
        assert "field--bad" in compact(admin.post("/fleet/nodes/ax-1/labels/", form))
    assert refreshed(world.here).labels == {"rack": "7", "zone": "a"}


def test_a_node_is_upgraded_to_a_version_from_its_page(
    world: World, people: People, browser_of: Browser
) -> None:
    client = browser_of(people.platform_on_call)
    refused = client.post("/fleet/nodes/ax-1/upgrade/", {"version": "no version"}, follow=True)
    assert "Upgrade to: A version has no blanks" in refused.content.decode()
    refused = client.post("/fleet/nodes/ax-1/upgrade/", {"version": "0.1.0"}, follow=True)
    assert "ax-1 runs 0.1.0 already" in refused.content.decode()
    assert not Operation.objects.exists()
    said = {"version": "0.2.0", "ignore_redundancy": "on", "reason": "loud fan"}
    client.post("/fleet/nodes/ax-1/upgrade/", said)
    plan = {"node": "ax-1", "version": "0.2.0", "ignore_redundancy": True}
    assert Operation.objects.get().plan == plan
    assert AuditEntry.objects.get(action="node.upgrade").reason == "loud fan"


def test_a_page_and_the_api_say_what_moves_bytes_in_a_process(
    world: World, people: People, browser_of: Browser, api_of: Browser
) -> None:
    page, api = browser_of(people.platform_viewer), api_of(people.platform_viewer)
    words = {"": "unknown", "python": "Python", "compiled": "compiled"}
    driver = joins.join_driver(new_token("driver"), "job7", "x" * 32, DRIVER_FACTS)
    for mover, sentence in words.items():
        joins.beats("ax-1", credential(CONTROL_TOKEN, "node:ax-1"), replace(FACTS, mover=mover))
        Driver.objects.filter(pk=driver.pk).update(mover=mover)
        for kind, name in (("nodes", "ax-1"), ("drivers", "job7")):
            assert api.get(f"/api/v1/{kind}/{name}").json()["mover"] == (mover or None)
            shown = compact(page.get(f"/fleet/{kind}/{name}/"))
            assert f"<dt>Mover</dt><dd>{sentence}" in shown


def test_a_node_that_is_lost_says_what_it_will_be(
    world: World, people: People, browser_of: Browser
) -> None:
    Node.objects.filter(name="ax-1").update(state="lost", held_state="cordoned", held_reason="loud fan")
    page = compact(browser_of(people.platform_viewer).get("/fleet/nodes/ax-1/"))
    assert "<dt>State after rejoining</dt><dd>cordoned: loud fan</dd>" in page


def test_versions_that_do_not_go_with_the_console_are_shown(
    world: World, people: People, browser_of: Browser
) -> None:
    Node.objects.filter(name="ax-1").update(software_version="0.9.0")
    viewer = browser_of(people.platform_viewer)
    assert "go together" in viewer.get("/fleet/nodes/ax-1/").content.decode()
    assert 'status--warn">0.9.0' in compact(viewer.get("/fleet/nodes/"))


def test_a_join_token_is_shown_once_with_its_command(
    world: World, people: People, browser_of: Browser
) -> None:
    admin = browser_of(people.platform_admin)
    page = compact(
        admin.post("/fleet/join/", {"kind": "node", "uses": 3, "hours": 24, "note": "rack 7"})
    )
    token = JoinToken.objects.latest("id")
    assert page.count(f"{token.prefix}_") == 2  # by itself, and in the command
    assert "--nics eth0=leaf-1" in page
    assert "TIDEGATE_OWN_TELEMETRY_URL" in page, "who sends no telemetry is taken for silent"
    assert f"{token.prefix}_" not in compact(admin.get("/fleet/join/"))
    assert (token.uses_left, token.note) == (3, "rack 7")
    assert token.expires_at - timezone.now() > timedelta(hours=23)
    admin.post(f"/fleet/join/{token.public_id}/revoke/")
    assert JoinToken.objects.get(pk=token.pk).state == "revoked"


def test_a_join_token_for_one_name_is_shown_with_it(
    world: World, people: People, browser_of: Browser
) -> None:
    admin = browser_of(people.platform_admin)
    asked = {"kind": "driver", "uses": 1, "hours": 1}
    assert "Lower-case letters" in compact(admin.post("/fleet/join/", {**asked, "name": "Job 3"}))
    page = compact(admin.post("/fleet/join/", {**asked, "name": "job-3"}))
    assert "It lets driver job-3 join" in page
    assert "--name job-3" in page
    assert JoinToken.objects.get(name="job-3").kind == "driver"


@pytest.mark.parametrize("kind", ["node", "driver"])
def test_the_command_to_join_needs_no_address_for_telemetry(
    kind: str, world: World, people: People, browser_of: Browser
) -> None:
    """It is in the answer to a heartbeat."""
    admin = browser_of(people.platform_admin)
    with override_settings(OWN_TELEMETRY_URL="rediss://own@redis.example.org:6379/0"):
        page = compact(admin.post("/fleet/join/", {"kind": kind, "uses": 1, "hours": 24}))
    assert "_TELEMETRY=" not in page
    assert "TIDEGATE_OWN_TELEMETRY_URL" not in page


def test_a_large_fleet_is_described_by_a_file(
    world: World, people: People, browser_of: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, viewer = browser_of(people.platform_admin), browser_of(people.platform_viewer)
    of_a_node = changes.export(SYSTEM).splitlines()[-1].strip()
    assert of_a_node in admin.get("/fleet/description/").content.decode()
    monkeypatch.setattr(descriptions, "THINGS_MAX", 0)
    page = compact(admin.get("/fleet/description/"))
    assert of_a_node not in page
    assert "download the description, edit it, and upload the file" in page
    assert "upload the file" not in compact(viewer.get("/fleet/description/"))


def seen_in(page: Any) -> str:
    """Which fleet a preview was of, as its form sends it back."""
    found = re.search(r'name="seen" value="([^"]+)"', page.content.decode())
    assert found
    return found[1]


def test_a_description_is_looked_at_and_then_applied(
    world: World, people: People, browser_of: Browser
) -> None:
    admin = browser_of(people.platform_admin)
    text = changes.export(SYSTEM).replace("ax-2", "ax-3")
    page = admin.post("/fleet/description/", {"yaml": text, "preview": ""})
    assert "removed node" in compact(page)
    assert Node.objects.filter(name="ax-2").exists()
    seen = seen_in(page)
    Node.objects.filter(name="ax-1").update(labels={"rack": "7"})
    form = {"yaml": text, "seen": seen, "apply": "", "reason": "moved"}
    assert "changed since you looked" in compact(admin.post("/fleet/description/", form))
    page = admin.post("/fleet/description/", {"yaml": text, "preview": ""})
    form["seen"] = seen_in(page)
    assert admin.post("/fleet/description/", form).status_code == 302
    assert not Node.objects.filter(name="ax-2").exists()
    wrong = compact(admin.post("/fleet/description/", {"yaml": "stamps:\n  East: {}", "preview": ""}))
    assert "line 2, stamps: " in wrong
    removing = compact(admin.post("/fleet/description/", {"yaml": "stamps: {}", "preview": ""}))
    assert "1 of the nodes to be removed is alive: ax-1" in removing
    assert admin.get("/fleet/description/fleet.yaml").content.decode() == changes.export(SYSTEM)


def test_a_file_is_taken_instead_of_the_text(world: World, people: People, browser_of: Browser) -> None:
    from django.core.files.uploadedfile import SimpleUploadedFile

    admin = browser_of(people.platform_admin)
    file = SimpleUploadedFile("fleet.yaml", b"stamps:\n  north: {}\n")
    page = compact(admin.post("/fleet/description/", {"yaml": "", "file": file, "preview": ""}))
    assert "added stamp" in page
    file = SimpleUploadedFile("fleet.yaml", b"\xff\xfe\x00")
    assert "not text in UTF-8" in compact(admin.post("/fleet/description/", {"yaml": "", "file": file}))


@pytest.mark.slow
def test_pages_ask_as_often_for_a_thousand_nodes_as_for_two(
    world: World, people: People, browser_of: Browser, django_assert_max_num_queries: Any
) -> None:
    viewer, asked = browser_of(people.platform_viewer), {}
    for path in ("/fleet/", "/fleet/nodes/", "/fleet/boxes/", "/fleet/drivers/"):
        with CaptureQueriesContext(connection) as queries:
            assert viewer.get(path).status_code == 200
        asked[path] = len(queries)
    changes.apply(SYSTEM, dump(many(1000)))
    for path, before in asked.items():
        with django_assert_max_num_queries(before):
            page = viewer.get(path)
        assert page.status_code == 200
        assert len(page.content) < 200_000


@pytest.fixture
def shards(world: World) -> list[Stream]:
    """Two streams: one on a rail of ax-1, one that crosses the spine from a leaf of another stamp."""
    session = Session.objects.create(name="prod", boxes_desired=1, boxes_min=1, boxes_increment=1)
    job = Job.objects.create(
        session=session, name="chat", driver=Driver.objects.create(name="job-7"), running=True
    )
    common = {
        "job": job,
        "group": "full",
        "box": world.box,
        "wio": 8,
        "slot_bytes": 1 << 20,
        "slots": 1024,
        "node": world.here,
        "nic_leaf": "leaf-1",
    }
    return [
        Stream.objects.create(index=0, domain=1, tier=Tier.RAIL, port_leaf="leaf-1", **common),
        Stream.objects.create(index=1, domain=0, tier=Tier.SPINE, port_leaf="leaf-2", **common),
    ]


def test_what_runs_on_a_node_is_shown_with_its_path(
    world: World, shards: list[Stream], people: People, browser_of: Browser
) -> None:
    page = compact(browser_of(people.platform_viewer).get("/fleet/nodes/ax-1/"))
    assert "job-7.full.0" in page
    assert 'status--ok">rail' in page
    assert 'status--bad">spine</span> <span class="quiet">leaf-2 → leaf-1' in page
    assert "<dt>Granted</dt><dd>2 GiB</dd>" in page


@pytest.mark.parametrize("code", ["", "2+1"])
def test_charts_of_redundancy_are_on_pages_of_nodes_with_redundant_streams(
    world: World, shards: list[Stream], people: People, browser_of: Browser, code: str
) -> None:
    Stream.objects.update(code=code)
    page = compact(browser_of(people.platform_viewer).get("/fleet/nodes/ax-1/"))
    assert "Memory granted" in page
    for chart in ("Columns that lack a fragment", "Columns asked for twice", ">Repair<"):
        assert (chart in page) == bool(code), chart


def test_a_node_says_what_it_keeps_beside_memory(
    world: World, people: People, browser_of: Browser
) -> None:
    viewer = browser_of(people.platform_viewer)
    assert "<dt>Tier 2</dt><dd>none" in compact(viewer.get("/fleet/nodes/ax-1/"))
    for kept, shown in (
        ({"kind": "posix", "path": "/mnt/kv", "cap": "2T", "shared": False}, "posix, at most 2T</span>"),
        (
            {"kind": "s3", "bucket": "kv", "cap": "9T"},
            "s3, at most 9T, shared with others, written with at most ",
        ),
    ):
        Node.objects.filter(name="ax-1").update(declared={"tier2": kept})
        page = compact(viewer.get("/fleet/nodes/ax-1/"))
        assert f"<code>{kept.get('path', 'kv')}</code>" in page
        assert shown in page


def tell_of_front(node: str, **values: float) -> None:
    """What its agent told over the ten seconds before these, by the end of the metric's name."""
    at = time.time() - 10
    RollUp().tend_days(at)
    series = {
        Series(
            Kind.GAUGE,
            f"kvss_tier2_front_{name}",
            (("which", "waiting"),) if name == "bytes" else (),
        ): value
        for name, value in values.items()
    }
    shape = Shape(list(series))
    cells = shape.cells({one: (value * 10, 10, value) for one, value in series.items()})
    copy_in(FRESH, Names().stored([Row(f"node:{node}", bucket_of(at), shape, cells)], day_of(at)))


def test_a_node_says_what_waits_in_front_of_its_tier_2_and_since_when(
    world: World, people: People, browser_of: Browser
) -> None:
    viewer = browser_of(people.platform_viewer)
    kept = {"kind": "posix", "path": "/mnt/kv", "cap": "2T"}
    front = {"path": "/nvme/kv", "cap": "1T", "writes": "back"}
    Node.objects.filter(name="ax-1").update(declared={"tier2": kept})
    tell_of_front("ax-1", waiting_columns=1204, waiting_seconds=3000, bytes=3 << 30)
    assert "only in front" not in compact(viewer.get("/fleet/nodes/ax-1/"))
    Node.objects.all().update(declared={"tier2": {**kept, "front": front}})
    page = compact(viewer.get("/fleet/nodes/ax-1/"))
    assert "1,204 columns (3 GiB) only in front" in page
    assert re.search(r"the oldest since <time[^>]*>50 min ago", page)
    assert re.search(r"only in front<span class=\"quiet\">, as of <time[^>]*>\d+ s ago", page)
    assert "Columns only in front of tier 2" in page
    tell_of_front("ax-2", waiting_columns=1, bytes=4096)
    assert "1 column (4 KiB) only in front" in (page := compact(viewer.get("/fleet/nodes/ax-2/")))
    assert "until they make room" in page


def test_a_box_says_whose_it_is_and_where_its_streams_go(
    world: World, shards: list[Stream], people: People, browser_of: Browser
) -> None:
    viewer = browser_of(people.platform_viewer)
    page = compact(viewer.get("/fleet/boxes/cs-1/"))
    assert "none (free)" in page
    assert 'status--bad">spine' in page
    job = shards[0].job
    held = SessionBox.objects.create(session=job.session, box=world.box, leaving=True)
    JobBox.objects.create(job=job, session_box=held)
    page = compact(viewer.get("/fleet/boxes/cs-1/"))
    assert 'href="/sessions/prod/">prod</a> <span class="quiet">leaving' in page
    assert 'chat <span class="quiet">on <a href="/fleet/drivers/job-7/">' in page
    assert viewer.get("/fleet/boxes/cs-2/").status_code == 404


@pytest.mark.parametrize(
    ("state", "offered"), [("ready", "ready"), ("cordoned", "cordoned"), ("draining", "cordoned")]
)
def test_a_form_offers_the_state_of_now_without_its_reason(
    world: World, people: People, browser_of: Browser, state: str, offered: str
) -> None:
    """A reason is one for a change. A box that drains is not offered as ready."""
    Box.objects.filter(name="cs-1").update(state=state, state_reason="its disk fails")
    page = compact(browser_of(people.platform_on_call).get("/fleet/boxes/cs-1/"))
    assert re.findall(r'<option value="(\w+)" selected', page) == [offered]
    assert '<span class="quiet">its disk fails</span>' in page
    assert 'value="its disk fails"' not in page


def test_a_driver_says_which_job_it_has_or_how_it_gets_one(
    world: World, shards: list[Stream], people: People, browser_of: Browser
) -> None:
    viewer = browser_of(people.platform_viewer)
    Driver.objects.create(name="job-8")
    assert 'chat <span class="quiet">in session</span> <a href="/sessions/prod/">prod' in compact(
        viewer.get("/fleet/drivers/job-7/")
    )
    assert "none: it stores nothing. Start a job for it" in compact(viewer.get("/fleet/drivers/job-8/"))
    listed = compact(viewer.get("/fleet/drivers/"))
    assert '<a href="/sessions/prod/">prod' in listed
    assert '<span class="quiet">no job' in listed


def test_lost_drivers_are_counted_beside_those_that_are_alive(
    world: World, people: People, browser_of: Browser
) -> None:
    for name in ("job-7", "job-8"):
        joins.join_driver(new_token("driver"), name, CONTROL_TOKEN, DRIVER_FACTS)
    Driver.objects.filter(name="job-8").update(lost_at=timezone.now())
    page = compact(browser_of(people.platform_viewer).get("/fleet/"))
    assert '<span class="figure">1</span> <span class="quiet">driver alive' in page
    assert '<span class="figure">1</span> <span class="status status--bad">lost</span>' in page


def test_links_that_streams_cross_are_told_apart_in_picture_and_table(
    world: World, shards: list[Stream], people: People, browser_of: Browser
) -> None:
    page = compact(browser_of(people.platform_viewer).get("/fleet/"))
    assert "line--crossed" in page
    assert "1 streams cross by this leaf" not in page
    assert "1 stream crosses the spine here" in page
    assert "ready · 1 TiB, 2 shards" in page
    assert '1 <span class="status status--bad">spine</span>' in page


def test_how_far_a_node_follows_is_shown(world: World, people: People, browser_of: Browser) -> None:
    viewer = browser_of(people.platform_viewer)
    assert "<dt>Desired state</dt><dd>none yet" in compact(viewer.get("/fleet/nodes/ax-1/"))
    target = Target.objects.create(kind="node", name="ax-1", generation=3, observed_generation=2)
    target.problem = "It has no memory left."
    target.save()
    page = compact(viewer.get("/fleet/nodes/ax-1/"))
    assert "generation 2 of 3" in page
    assert "It has no memory left." in page
    Target.objects.update(observed_generation=3, problem="")
    assert 'status--ok">applied' in compact(viewer.get("/fleet/nodes/ax-1/"))
