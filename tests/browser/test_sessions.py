"""A platform engineer's journey: a session is planned while its form is filled in, made and grown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Dialog, ViewportSize, expect

from tests.browser.chromium import complaints_of
from tests.browser.looking import NARROW, WIDE, faults, log_in
from tests.live import LiveConsole, live_console

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FLEET = """
from console.orgs.models import Org
from tests.console.sessions.fleets import make_driver, make_fleet
Org.objects.create(slug="acme", name="Acme")
make_fleet(boxes=8, memory_bytes=1 << 40)
make_driver("job7")
"""
SWEEP = """
from django.utils import timezone
from console.operations import services
for operation_id in services.take_due(timezone.now()):
    while services.advance(operation_id): pass
"""


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    with live_console(tmp_path_factory.mktemp("console")) as console:
        console.manage(FLEET)
        yield console


def test_a_session_is_planned_made_and_grown_in_the_browser(
    browser: Browser, console: LiveConsole
) -> None:
    context = browser.new_context(base_url=console.address, viewport=WIDE)
    page = context.new_page()
    complaints = complaints_of(page)
    log_in(page, console)
    page.goto("/sessions/")
    page.get_by_role("link", name="Create session").click()
    page.get_by_label("Name", exact=True).fill("chat")
    page.get_by_label("Org").select_option("acme")
    page.get_by_label("Boxes", exact=True).fill("9")
    expect(page.locator("#plan")).to_contain_text("Never.", timeout=30_000)
    page.get_by_label("Boxes", exact=True).fill("2")
    expect(page.locator("#plan")).to_contain_text("8 on a rail", timeout=30_000)
    page.get_by_role("button", name="Create session").click()
    expect(page.get_by_role("heading", name="Create session chat with 2 boxes")).to_be_visible()
    console.manage(SWEEP)
    expect(page.get_by_text("succeeded").first).to_be_visible(timeout=30_000)

    page.goto("/sessions/chat/")
    expect(page.locator(".sizes")).to_contain_text("actual")
    page.get_by_role("link", name="Resize").click()
    expect(page.locator("#plan")).to_contain_text("Boxes", timeout=30_000)
    page.get_by_label("Boxes", exact=True).fill("4")
    expect(page.locator("#plan")).to_contain_text("Added boxes", timeout=30_000)
    page.get_by_role("button", name="Resize").click()
    console.manage(SWEEP)
    page.goto("/sessions/chat/")
    expect(page.locator(".chip")).to_have_count(4)
    assert complaints == []
    context.close()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_its_pages_are_accessible_and_work_without_scripts(
    size: ViewportSize, browser: Browser, console: LiveConsole
) -> None:
    name = f"plain-{size['width']}"
    context = browser.new_context(base_url=console.address, viewport=size, java_script_enabled=False)
    page = context.new_page()
    log_in(page, console)
    page.goto("/new-session/")
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Boxes", exact=True).fill("1")
    page.get_by_label("Wait for capacity").fill("60")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("#plan")).not_to_contain_text("Fill in the form")
    page.get_by_role("button", name="Create session").click()
    expect(page.get_by_role("heading", name=f"Create session {name} with 1 box")).to_be_visible()
    operation = page.url
    cookies = context.cookies()
    context.close()
    context = browser.new_context(base_url=console.address, viewport=size, color_scheme="dark")
    context.add_cookies(cookies)  # type: ignore[arg-type]
    page = context.new_page()
    paths = ["/sessions/", f"/sessions/{name}/", f"/sessions/{name}/resize/", "/new-session/"]
    paths += [f"/sessions/{name}/new-job/", f"/sessions/{name}/restore-rails/", "/session-rules/"]
    found = {}
    for path in [*paths, "/operations/", operation]:
        page.goto(path)
        if problems := faults(page):
            found[path] = problems
    assert found == {}
    context.close()


def test_an_operation_is_cancelled_once_that_is_confirmed(
    browser: Browser, console: LiveConsole
) -> None:
    """A browser that shows no dialogs dismisses them: nothing is cancelled then."""
    context = browser.new_context(base_url=console.address, viewport=WIDE)
    page = context.new_page()
    log_in(page, console)
    page.goto("/new-session/")
    page.get_by_label("Name", exact=True).fill("regretted")
    page.get_by_label("Boxes", exact=True).fill("1")
    page.get_by_role("button", name="Create session").click()
    expect(page.get_by_role("heading", name="Create session regretted with 1 box")).to_be_visible()
    asked: list[str] = []

    def answer(dialog: Dialog) -> None:
        asked.append(dialog.message)
        if len(asked) == 1:
            dialog.dismiss()
        else:
            dialog.accept()

    page.on("dialog", answer)
    cancel = page.get_by_role("button", name="Cancel", exact=True)
    cancel.click()
    expect(cancel).to_be_visible()
    expect(page.get_by_text("Cancellation requested").first).to_be_hidden()
    cancel.click()
    expect(page.get_by_text("Cancellation requested").first).to_be_visible()
    assert asked == ["Cancel this operation and roll it back?"] * 2
    console.manage(SWEEP)
    expect(page.get_by_text("cancelled").first).to_be_visible(timeout=30_000)
    context.close()
