"""What people do: with keyboard and mouse, with scripts and without."""

from __future__ import annotations

import re
from functools import partial

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import NODE
from tests.browser.looking import Open, log_in
from tests.live import ANSWER_SECONDS_MAX, LiveConsole

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_the_documentation_of_the_api_comes_from_here_alone(
    open_page: Open, console: LiveConsole
) -> None:
    page = open_page("about:blank")
    elsewhere: list[str] = []
    page.on(
        "request",
        lambda request: (
            elsewhere.append(request.url)
            if not request.url.startswith((console.address, "data:", "blob:"))
            else None
        ),
    )
    page.goto("/api/v1/docs")
    expect(page.get_by_text("/api/v1/orgs").first).to_be_visible()
    assert elsewhere == []


def test_the_documentation_of_the_api_is_dark_where_pages_are(
    open_page: Open, console: LiveConsole
) -> None:
    page = open_page("/api/v1/docs", color_scheme="dark")
    dark = ("background-color", "rgb(28, 32, 34)")
    expect(page.locator(".swagger-ui").first).to_have_css(*dark)
    page.emulate_media(color_scheme="light")
    expect(page.locator(".swagger-ui").first).not_to_have_css(*dark)
    page.context.add_cookies([{"name": "tidegate_theme", "value": "dark", "url": console.address}])
    page.reload()
    expect(page.locator(".swagger-ui").first).to_have_css(*dark)


def test_an_org_is_made_renamed_and_the_renaming_taken_back(open_page: Open) -> None:
    page = open_page("/orgs/")
    page.get_by_role("link", name="Add org").click()
    page.get_by_label("Short name").fill("Not A Slug")
    page.get_by_label("Name", exact=True).fill("Initech")
    page.get_by_role("button", name="Add org").click()
    expect(page.locator(".field-error")).to_contain_text("Lower-case letters, digits and dashes, with")
    expect(page.get_by_label("Short name")).to_be_focused()
    page.get_by_label("Short name").fill("initech")
    page.get_by_role("button", name="Add org").click()
    expect(page.locator(".messages")).to_contain_text("Initech added")
    page.get_by_role("link", name="Edit").click()
    page.get_by_label("Name", exact=True).fill("Initrode")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="Initrode")).to_be_visible()
    page.get_by_role("link", name="Org: update").first.click()
    expect(page.get_by_role("row", name=re.compile("name"))).to_contain_text("Initrode")
    page.get_by_role("button", name="Undo this change").click()
    expect(page.locator(".messages")).to_contain_text("Change undone")
    page.goto("/orgs/initech/")
    expect(page.get_by_role("heading", name="Initech", exact=True)).to_be_visible()


def test_a_node_is_described_joins_and_is_cordoned(open_page: Open, console: LiveConsole) -> None:
    page = open_page("/fleet/")
    page.get_by_role("link", name="Description").click()
    text = page.get_by_label("Description", exact=True)
    text.fill(text.input_value().replace("ax-2:", "ax-7:"))
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("row", name=re.compile("removed node"))).to_contain_text("ax-2")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".messages")).to_contain_text("1 added, 1 removed")
    page.get_by_role("link", name="Join", exact=True).click()
    page.get_by_role("button", name="Create join token").click()
    expect(page.locator("#command")).to_contain_text("python -m kvss_agent")
    told = {"Authorization": f"Bearer {page.locator('#made').inner_text()}"}
    join = f"{console.address}/api/v1/nodes/ax-7/join"
    httpx.post(join, json=NODE, headers=told, timeout=ANSWER_SECONDS_MAX).raise_for_status()
    page.get_by_role("navigation", name="Fleet").get_by_role("link", name="Nodes").click()
    expect(page.get_by_role("row", name=re.compile("ax-7"))).to_contain_text("ready")
    page.get_by_role("link", name="ax-7").click()
    page.get_by_label("State", exact=True).select_option("cordoned")
    page.get_by_label("Reason").first.fill("loud fan")
    page.get_by_role("button", name="Save state").click()
    expect(page.locator(".messages")).to_contain_text("ax-7 is cordoned")
    page.goto("/fleet/")
    expect(page.get_by_role("link", name=re.compile("ax-7: cordoned"))).to_be_visible()


def test_a_new_token_is_shown_once_and_works(open_page: Open, console: LiveConsole) -> None:
    page = open_page("/tokens/")
    page.get_by_label("Name").fill("resize bot")
    page.get_by_role("button", name="Create token").click()
    text = page.locator("#made").inner_text()
    headers = {"Authorization": f"Bearer {text}"}
    me = partial(httpx.get, f"{console.address}/api/v1/me", headers=headers, timeout=ANSWER_SECONDS_MAX)
    assert me().json()["username"] == "admin"
    page.goto("/tokens/")
    assert text not in page.content()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("row", name=re.compile("resize bot")).get_by_role("button").click()
    expect(page.get_by_role("row", name=re.compile("resize bot"))).to_contain_text("revoked")
    assert me().status_code == 401


def test_keys_lead_to_pages_help_and_search_but_not_while_typing(open_page: Open) -> None:
    page = open_page("/")
    page.keyboard.type("ga")  # at once: there is little time between the two
    expect(page.get_by_role("heading", name="Audit")).to_be_visible()
    page.wait_for_load_state("load")  # from then on it listens to keys
    page.keyboard.press("/")
    find = page.get_by_role("searchbox", name="Find")
    expect(find).to_be_focused()
    page.keyboard.type("g?o")
    expect(find).to_have_value("g?o")
    page.keyboard.press("Escape")
    expect(find).to_have_value("")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("/")
    find.fill("acm")  # at once: so what is found comes once
    expect(page.locator("#found").get_by_role("link", name="Acme Ltd")).to_be_visible()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Acme Ltd")).to_be_visible()


def test_the_theme_is_remembered(open_page: Open) -> None:
    page = open_page("/", color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_label("Theme").select_option("dark")
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    expect(page.get_by_label("Theme")).to_have_value("dark")


def test_ages_go_on_counting(open_page: Open) -> None:
    page = open_page("/audit/2/")
    page.clock.install()
    page.reload()
    age = page.locator("time[data-age]").first
    before = age.inner_text()
    page.clock.fast_forward("02:00")
    expect(age).not_to_have_text(before)


def test_the_overview_renews_itself_and_doubles_nothing(open_page: Open) -> None:
    page = open_page("/")
    with page.expect_response(lambda response: response.request.headers.get("hx-request") == "true"):
        pass
    expect(page.get_by_role("heading", name="Console processes")).to_have_count(1)
    expect(page.get_by_role("heading", name="Overview")).to_have_count(1)


def test_a_page_left_open_after_log_out_asks_to_log_in_again(
    browser: Browser, console: LiveConsole
) -> None:
    context = browser.new_context(base_url=console.address)
    page = context.new_page()
    log_in(page, console)
    context.clear_cookies()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    context.close()


def test_everything_works_without_scripts(browser: Browser, console: LiveConsole) -> None:
    context = browser.new_context(base_url=console.address, java_script_enabled=False)
    page = context.new_page()
    log_in(page, console)
    page.get_by_role("link", name="Orgs", exact=False).first.click()
    page.get_by_role("link", name="Add org").click()
    page.get_by_label("Short name").fill("hooli")
    page.get_by_label("Name", exact=True).fill("Hooli")
    page.get_by_role("button", name="Add org").click()
    expect(page.get_by_role("heading", name="Hooli")).to_be_visible()
    page.goto("/audit/")
    page.get_by_role("textbox", name="Search").fill("Hooli")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_role("row")).to_have_count(2)  # the head and the one
    page.get_by_role("searchbox", name="Find").fill("hool")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="Results").get_by_role("link", name="Hooli").click()
    expect(page.get_by_role("heading", name="Hooli")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    context.close()
