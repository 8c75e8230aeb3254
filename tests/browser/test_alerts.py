"""An alert at night: seen on a phone, acknowledged, silenced, and told to a real receiver."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.chromium import chromium, complaints_of
from tests.browser.looking import NARROW, faults, log_in
from tests.console.alerts.receivers import hook
from tests.live import LiveConsole, live_console

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]
SECONDS = 30_000
REFILLS = re.compile("Refill latency above objective")
_ALERTS = """
from tests.console.alerts.things import make_alert
from console.orgs.models import Org
from django.utils import timezone
acme = Org.objects.create(slug="acme", name="Acme")
cause = make_alert("agent-not-reporting", "node:ax-7", pk=1, begun_at=timezone.now())
make_alert("queue-deep", "node:ax-7", pk=2, labels={"shard": "a"}, suppressed_by=cause, state="no_data")
windows = {"windows": ["5 min and 1 h"]}
make_alert("refill-slow", "org:acme", acme, pk=3, evidence=windows, value=0.4, threshold=0.25)
from tests.console.sessions.fleets import make_across
make_across(acme)
stream = {"driver": "job7", "stream": "full.1", "node": "ax1"}
make_alert("spine-placement", "session:chat", acme, pk=4, labels=stream)
"""
_OVER = """
from django.db import transaction
from console.alerts.state.transitions import observe
from console.alerts.state.lifecycle import Delays, Verdict
from console.alerts.models import Alert
from console.alerts.conditions.condition import Finding
from datetime import timedelta
from django.utils import timezone
at_once = Delays(timedelta(0), timedelta(0))
well = Finding("org:acme", Verdict.OK, "it is well")
observe(Alert.objects.get(pk=3), well, at_once, timezone.now())
"""


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    with live_console(tmp_path_factory.mktemp("alerts")) as console:
        console.manage(_ALERTS)
        yield console


def test_an_alert_is_acknowledged_silenced_and_told(console: LiveConsole) -> None:
    with chromium() as browser, hook() as receiver:
        context = browser.new_context(
            base_url=console.address, viewport=NARROW, color_scheme="dark", locale="en-GB"
        )
        page = context.new_page()
        complaints = complaints_of(page)
        log_in(page, console)

        # What fires, and what that explains; and since nobody evaluates, that as well.
        page.goto("/alerts/")
        expect(page.get_by_role("alert")).to_contain_text("Rules are not being evaluated")
        expect(page.get_by_role("heading", name="3 alerts")).to_be_visible()
        assert faults(page) == []
        page.get_by_role("link", name="1 suppressed").click()
        expect(page.get_by_text("caused by").first).to_be_visible()
        page.get_by_role("link", name="Agent not reporting").first.click()
        expect(page.get_by_role("link", name="Shard queue too deep: ax-7, shard a")).to_be_visible()
        expect(page.get_by_role("heading", name="Runbook")).to_be_visible()
        assert faults(page) == []

        # Acknowledged, with a word of what is done, and silenced for the work on it.
        page.get_by_label("Reason").fill("walking to the rack")
        page.get_by_role("button", name="Acknowledge").click()
        expect(page.get_by_text("Acknowledged by admin at")).to_be_visible()
        page.get_by_role("textbox", name="Comment", exact=True).fill("its power is off")
        page.get_by_role("button", name="Add comment").click()
        expect(page.get_by_text("its power is off")).to_be_visible()
        page.get_by_role("link", name="Silence…").click()
        expect(page.get_by_label("Matchers")).to_have_value("rule=agent-not-reporting, node=ax-7")
        page.get_by_label("Reason").fill("new power supply")
        page.get_by_role("button", name="Create silence").click()
        expect(page.get_by_role("row", name=re.compile("new power supply"))).to_contain_text("active")
        assert faults(page) == []
        page.goto("/alerts/")
        expect(page.get_by_role("row", name=re.compile("Agent not reporting"))).to_contain_text(
            "silenced"
        )

        # By keys alone: the help tells them, and what is chosen outlives the page's renewing itself.
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("acknowledge the selected alerts")
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("j")
        expect(page.get_by_role("link", name="Refill latency above objective")).to_be_focused()
        page.keyboard.press("x")
        chosen = page.get_by_role("checkbox", name=re.compile("Refill latency above objective"))
        expect(chosen).to_be_checked()
        with page.expect_response(lambda one: one.request.headers.get("hx-request") == "true"):
            pass
        expect(chosen).to_be_checked()
        chosen.focus()  # as it is for who has clicked it
        page.keyboard.press("a")
        expect(page.locator(".messages")).to_contain_text("1 alert acknowledged.")
        expect(page.get_by_role("row", name=REFILLS)).to_contain_text("admin")
        assert faults(page) == []

        # From the alert to its fix by keys alone; and the alert's own page says what is being done.
        page.wait_for_load_state("load")
        for _ in range(3):
            page.keyboard.press("j")
        expect(page.get_by_role("link", name="Stream placed across the spine")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Move it now")).to_be_visible()
        page.wait_for_load_state("load")  # from then on it listens to keys
        page.once("dialog", lambda dialog: dialog.accept())
        page.keyboard.press("f")
        expect(page.get_by_role("heading", name="Move job7.full.1 of chat to ax2")).to_be_visible()
        page.go_back()
        expect(page.locator("#fixes")).to_contain_text("In progress: Move job7.full.1 of chat to ax2.")
        expect(page.locator("#entries")).to_contain_text("Applied: Move job7.full.1 from ax1 to ax2")
        with context.new_page() as other:
            other.goto("/alerts/4/")
            other.get_by_role("textbox", name="Comment", exact=True).fill("watching it arrive")
            other.get_by_role("button", name="Add comment").click()
            expect(other.locator("#entries")).to_contain_text("watching it arrive")
        expect(page.locator("#entries")).to_contain_text("watching it arrive")
        expect(page.locator("#entries")).to_have_count(1)
        expect(page.locator("#fixes")).to_have_count(1)
        page.goto("/alerts/")

        # What becomes known while the page is open appears on it.
        expect(page.get_by_role("row", name=REFILLS)).to_contain_text("firing")
        console.manage(_OVER)
        expect(page.get_by_role("row", name=REFILLS)).to_have_count(0, timeout=SECONDS)

        # How it has been.
        page.goto("/alerts/history/")
        expect(page.get_by_role("row", name=REFILLS)).to_be_visible()
        assert faults(page) == []

        # What the next on call is told, on the screen and on paper.
        page.keyboard.type("gd")  # at once: there is little time between the two
        page.get_by_role("textbox", name="Note").fill("ax-7: power supply at 9")
        page.get_by_role("button", name="Add note").click()
        notes = page.get_by_role("region", name="Notes", exact=True)
        expect(notes).to_contain_text("power supply at 9")
        page.get_by_role("textbox", name="Note").fill("and its ")
        with context.new_page() as other:
            other.goto("/hand-over/")
            other.get_by_role("textbox", name="Note").fill("said by somebody else")
            other.get_by_role("button", name="Add note").click()
            expect(other.get_by_role("region", name="Notes", exact=True)).to_contain_text("else")
        expect(notes).to_contain_text("said by somebody else")
        expect(page.get_by_role("textbox", name="Note")).to_have_value("and its ")
        expect(page.get_by_role("region", name="Silences")).to_contain_text("ends soon")
        assert faults(page) == []
        page.emulate_media(media="print")
        expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
        expect(page.get_by_role("button", name="Add note")).to_be_hidden()
        expect(notes).to_be_visible()
        paper = page.pdf(format="A4")
        assert paper.startswith(b"%PDF")
        assert 1 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 3
        page.emulate_media(media="screen")

        # A channel, told at once, with its answer in the log.
        page.goto("/alerts/channels/")
        page.get_by_role("link", name="Add channel").click()
        page.get_by_label("Name").fill("pager")
        page.get_by_label("Address").fill("ftp://nowhere")
        page.get_by_role("button", name="Add channel").click()
        expect(page.locator(".field-error")).to_contain_text("Must be a URL that starts with https://")
        page.get_by_label("Address").fill(receiver.address)
        page.get_by_role("button", name="Add channel").click()
        expect(page.get_by_role("heading", name="pager")).to_be_visible()
        page.get_by_role("button", name="Send test").click()
        expect(page.locator(".messages")).to_contain_text("200 OK")
        assert receiver.bodies[0]["what"] == "test"
        assert "s3cret" not in page.content()
        assert faults(page) == []

        # A threshold for all, and it is in the trail.
        page.goto("/alerts/rules/refill-slow/")
        page.get_by_label("Objective seconds").fill("0.5")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("row", name=re.compile("objective_seconds"))).to_contain_text(
            "set for all"
        )
        expect(page.get_by_role("link", name="Alerts: thresholds")).to_be_visible()
        assert faults(page) == []
        context.close()
    assert complaints == []
