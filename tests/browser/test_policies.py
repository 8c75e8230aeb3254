"""An org's policy from end to end: edited in a browser, in force on a real driver, taken back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.chromium import complaints_of
from tests.browser.looking import NARROW, faults, log_in
from tests.console.control.live import Scene, scene
from tests.live import wait_until
from tests.swdriver_shim.daemons import C, kv

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]
SECONDS = 30_000
TOKENS = list(range(2 * C))


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("policies"), "one", "two") as there:
        yield there


def test_a_policy_is_edited_previewed_saved_applied_proved_and_taken_back(
    acme: Scene, browser: Browser
) -> None:
    driver = acme.drivers["one"]
    caller = acme.api.post("/orgs/acme/callers", json={"name": "engine"}).json()["token"]
    wait_until("the driver knows the caller", lambda: driver.ask(caller, "query", tokens=[1]).is_success)
    driver.store(caller, TOKENS, kv(len(TOKENS)))
    assert driver.load(caller, TOKENS)[0] == len(TOKENS)

    context = browser.new_context(base_url=acme.console.address, viewport=NARROW)
    page = context.new_page()
    complaints = complaints_of(page)
    log_in(page, acme.console)
    page.goto("/orgs/acme/policy/")
    expect(page.get_by_text("for 1 h after their last use").first).to_be_visible()

    # What is wrong is told while one types; then what it would do, from the org's own traffic.
    page.get_by_label("Expire after last use").fill("soon")
    expect(page.locator("#preview")).to_contain_text("is not a duration", timeout=SECONDS)
    page.get_by_label("Expire after last use").fill("1 s")
    expect(page.locator("#preview")).to_contain_text("for 1 s after their last use", timeout=SECONDS)
    expect(page.locator("#preview")).to_contain_text("New hit rate")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("This field is required.")).to_be_visible()
    page.get_by_label("Reason").fill("GDPR request 4711")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".messages")).to_contain_text("Version 1 saved")
    expect(page.locator("#reach")).to_contain_text("on 2 of 2 drivers", timeout=SECONDS)

    # In force: what had expired is not served, and says why.
    wait_until("the columns are over", lambda: driver.load(caller, TOKENS)[0] == 0)
    states = {one["state"] for one in driver.ask(caller, "explain", tokens=TOKENS).json()["full"]}
    assert states == {"expired"}

    # In the trail, with who and why; and taken back from there.
    page.goto("/audit/?action=policy")
    row = page.get_by_role("row", name=re.compile("GDPR request 4711"))
    row.get_by_role("link").first.click()
    page.get_by_role("button", name="Undo this change").click()
    expect(page.locator(".messages")).to_contain_text("Change undone")
    page.goto("/orgs/acme/policy/history/")
    expect(page.get_by_role("heading", name="Version 2")).to_be_visible()
    page.goto("/orgs/acme/policy/")
    expect(page.locator("#reach")).to_contain_text("on 2 of 2 drivers", timeout=SECONDS)
    driver.store(caller, TOKENS, kv(len(TOKENS)))

    # What became of a request is found by the engine's name of it.
    asked = [*TOKENS, *[7] * C]
    assert driver.ask(caller, "load", tokens=asked, request="r-7").is_success
    page.goto("/orgs/acme/explain/")
    page.get_by_label("Request, tokens or keys").fill("r-7")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_text("128 of 192 tokens hit")).to_be_visible()
    expect(page.get_by_text("missed: never stored").first).to_be_visible()
    assert faults(page) == []
    context.close()
    assert complaints == []


def test_without_scripts_a_policy_is_looked_at_and_saved(acme: Scene, browser: Browser) -> None:
    key = {"Idempotency-Key": "globex"}
    acme.api.post("/orgs", json={"slug": "globex", "name": "Globex"}, headers=key).raise_for_status()
    context = browser.new_context(base_url=acme.console.address, java_script_enabled=False)
    page = context.new_page()
    log_in(page, acme.console)
    page.goto("/orgs/globex/policy/")
    page.get_by_role("link", name="Strict").click()
    expect(page.get_by_label("Expire after last use")).to_have_value("10 min")
    page.get_by_label("Memory limit").fill("1 GiB")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("#preview")).to_contain_text("at most 1 GiB of memory")
    page.get_by_label("Reason").fill("a new contract")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".messages")).to_contain_text("saved. It is sent to the drivers now")
    expect(page.locator(".lead").first).to_contain_text("at most 1 GiB of memory")
    context.close()
