"""A platform engineer's journey: a workload is planned while its spec is typed, made, watched and rolled
back. Nobody acts on it here: what an orchestrator would write is written into its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, Request, expect

from tests.browser.chromium import complaints_of
from tests.browser.looking import NARROW, WIDE, TakePicture, faults, log_in
from tests.live import LiveConsole, live_console

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
FLEET = """
from tests.console.sessions.fleets import make_fleet
make_fleet(boxes=4, memory_bytes=1 << 40)
"""
# As an orchestrator sees it: one replica serves, the other one loads its weights.
RUNNING = """
from django.db import transaction
from django.utils import timezone
from console.workloads import changes
from console.workloads.models import Condition, Workload
from tests.console.workloads.workloads import a_rollout, an_instance, settle
settle()
with transaction.atomic():
    workload = Workload.objects.get()
    Condition.objects.filter(workload=workload).update(
        status="False", reason="InstancesNotReady", message="1 of 2 replicas is ready.")
    for kind, status, reason in (("Compiled", "True", "Compiled"), ("SessionReady", "True", "Granted"),
                                 ("InstancesReady", "False", "Loading")):
        Condition.objects.create(workload=workload, type=kind, status=status, reason=reason)
    now = timezone.now()
    an_instance(workload, 0, state="ready", serving=True, url="http://10.0.0.21:8000",
        cache="attached", seen_at=now, boxes=["cs1"], host="host-1")
    an_instance(workload, 1, state="loading", sentence="Reading weights.", progress_done=3 << 30,
        progress_total=15 << 30, progress_unit="bytes", seen_at=now, boxes=["cs2"], host="host-1")
    a_rollout(workload, switched=1, sentence="Waiting for chat-1.")
    changes.tell(workload, changes.OBSERVED)
"""


@pytest.fixture
def console(tmp_path: Path) -> Iterator[LiveConsole]:
    """One for each journey: they go in any order, and each has all boxes."""
    with live_console(tmp_path) as console:
        console.manage(FLEET)
        yield console


def test_a_workload_is_planned_made_watched_and_rolled_back(
    browser: Browser, console: LiveConsole, take_picture: TakePicture
) -> None:
    context = browser.new_context(base_url=console.address, viewport=WIDE, reduced_motion="reduce")
    page = context.new_page()
    complaints = complaints_of(page)
    log_in(page, console)
    page.goto("/workloads/")
    take_picture(page, "workloads-empty")
    page.get_by_role("link", name="Create workload").click()
    spec = page.get_by_label("Spec")
    expect(page.locator("#plan")).to_contain_text("2 boxes stay free", timeout=30_000)
    spec.fill(spec.input_value().replace("replicas: 2", "replicas: 9\nshape: round"))
    expect(page.locator("#plan")).to_contain_text("shape: There is no such field", timeout=30_000)
    take_picture(page, "workload-wrong")
    spec.fill(spec.input_value().replace("\nshape: round", ""))
    expect(page.locator("#plan")).to_contain_text("Never.", timeout=30_000)
    spec.fill(spec.input_value().replace("replicas: 9", "replicas: 2"))
    expect(page.locator("#plan")).to_contain_text("room for", timeout=30_000)
    look(page, take_picture, "workload-new")
    page.get_by_role("button", name="Create workload").click()
    expect(page.get_by_role("heading", name="chat", exact=True)).to_be_visible()
    expect(page.get_by_text("Waiting for the orchestrator.").first).to_be_visible()

    console.manage(RUNNING)
    expect(page.get_by_text("1 of 2 replicas switched")).to_be_visible()
    expect(page.get_by_text("Reading weights.")).to_be_visible()
    look(page, take_picture, "workload")
    page.get_by_role("link", name="Edit").click()
    text = page.get_by_label("Spec")
    text.fill(text.input_value().replace("32768", "16384"))
    expect(page.locator("#plan")).to_contain_text("Make revision 2 and roll it out", timeout=30_000)
    look(page, take_picture, "workload-edit")
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_role("link", name="2", exact=True)).to_be_visible()
    page.get_by_role("link", name="2", exact=True).click()
    expect(page.locator("del")).to_have_text("32768")
    look(page, take_picture, "workload-revision")
    page.goto("/workloads/chat/revisions/1/")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Roll back to it").click()
    expect(page.get_by_text("Rolling back: revision 3 equals revision 1.")).to_be_visible()
    page.get_by_role("link", name="Scale").click()
    expect(page.get_by_label("Replicas")).to_have_value("2")
    look(page, take_picture, "workload-scale")
    page.goto("/workloads/chat/")
    page.keyboard.type("gw")  # at once: there is little time between the two
    expect(page.get_by_role("heading", name="Workloads")).to_be_visible()
    look(page, take_picture, "workloads")
    page.goto("/workloads/chat/")
    page.get_by_role("link", name="chat-1-r1").first.click()
    expect(page.get_by_text("20 %")).to_be_visible()
    look(page, take_picture, "workload-instance")
    context.close()
    assert complaints == []


def test_what_was_typed_is_made_though_its_plan_has_not_come_and_a_refusal_stays_there(
    browser: Browser, console: LiveConsole
) -> None:
    context = browser.new_context(base_url=console.address, viewport=WIDE, reduced_motion="reduce")
    page = context.new_page()
    log_in(page, console)
    page.goto("/new-workload/")
    spec = page.get_by_label("Spec")
    make = page.get_by_role("button", name="Create workload")
    expect(page.locator("#plan")).to_contain_text("box", timeout=30_000)
    page.route("**", lambda route: route.abort() if wants_plan(route.request) else route.continue_())
    spec.fill("name: one\nmodel: example/one\ntokens_max: 4096\nengine: {kind: emulator}\n")
    make.click()
    expect(page.get_by_role("heading", name="one", exact=True)).to_be_visible()

    page.unroute("**")
    page.goto("/new-workload/")
    expect(page.locator("#plan")).to_contain_text("box", timeout=30_000)
    spec.fill("name: one\nmodel: example/two\ntokens_max: 4096\nengine: {kind: emulator}\n")
    make.click()
    refused = page.get_by_text("There is a workload one already.")
    expect(refused).to_be_visible()
    page.wait_for_load_state("networkidle")
    expect(refused).to_be_visible()
    context.close()


def wants_plan(request: Request) -> bool:
    return "hx-request" in request.headers


def look(page: Page, take_picture: TakePicture, name: str) -> None:
    """Wide and narrow, light and dark: nothing shuts anybody out."""
    for width, size in (("wide", WIDE), ("narrow", NARROW)):
        page.set_viewport_size(size)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            assert faults(page) == [], f"{name}, {width}, {scheme}"
            if (width, scheme) in (("wide", "light"), ("narrow", "dark")):
                take_picture(page, f"{name}-{width}")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(WIDE)
