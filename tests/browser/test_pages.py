"""What people see and do: in light and dark, wide and narrow, with keyboard, without scripts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect

from tests.browser.looking import NARROW, WIDE, faults, log_in
from tests.every_page import addresses
from tests.live import LiveConsole, live_console

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# What stands for the parameters of addresses; things that are not there have no page yet, but a 404.
THINGS = {
    "alerts": 1,
    "audit": 2,
    "boxes": "cs-1",
    "callers": "none",
    "channels": 1,
    "drivers": "job-7",
    "join": "none",
    "jobs": "none",
    "members": "admin",
    "nodes": "ax-1",
    "operations": "01a1ffd4-feba-7d6c-b722-e7226d864a20",
    "orgs": "acme",
    "policy": 1,
    "rules": "refill-slow",
    "scheduled": 1,
    "sessions": "none",
    "silences": 1,
    "stores": 1,
    "tokens": "none",
    "users": "admin",
    "views": 1,
}
# Pages as they are with something in their addresses.
MORE = {
    "latency of an org": "/latency/?topic=org:acme",
    "slowest of an org": "/latency/slowest/?topic=org:acme",
    "dead letters": "/dead-letters/",
    "views of a page": "/views/?of=/latency/",
    "latency, nonsense": "/latency/?range=nonsense",
    "policy of a model": "/orgs/acme/policy/?model=llama&template=strict",
    "policies-bulk": "/policies/bulk/?org=acme",
    "rule of an org": "/alerts/rules/refill-slow/?org=acme",
    "audit, nothing found": "/audit/?q=nothing-like-this",
    "audit, nonsense": "/audit/?org=nonsense",
    "search": "/search/?q=a",
    "404": "/nope",
}


FLEET = """
stamps:
  east:
    leaves: {leaf-1: {spine_links: {up-1: {spine: spine-1, gbits: 400}}}, leaf-2: {}}
    nodes: {ax-1: {nics: {eth0: {leaf: leaf-1}}}, ax-2: {nics: {eth0: {leaf: leaf-2}}}}
    boxes: {cs-1: {domains: [{wio: 8, leaves: [leaf-1]}, {wio: 8, leaves: [leaf-2]}]}}
  west: {}
"""
NODE = {
    "control_url": "http://127.0.0.1:8410",
    "control_token": "t" * 32,
    "data_address": "tcp:127.0.0.1:8411",
    "software_version": "0.1.0",
    "protocol_min": 1,
    "protocol_max": 2,
    "memory_bytes": 1 << 40,
    "cpus": 64,
}
DRIVER = {
    "control_url": "http://127.0.0.1:8420",
    "control_token": "t" * 32,
    "software_version": "0.1.0",
    "model": {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [1024, 2048]}]},
}


def join(api: httpx.Client, kind: str, name: str, told: dict[str, Any]) -> None:
    """As an agent or a driver does."""
    token = api.post("/join-tokens", json={"kind": kind}).json()["token"]
    joined = httpx.post(
        f"{api.base_url}{kind}s/{name}/join", json=told, headers={"Authorization": f"Bearer {token}"}
    )
    joined.raise_for_status()


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    """A console with an org, a member of it, a renaming and a token."""
    with live_console(tmp_path_factory.mktemp("console")) as console:
        headers = {"Authorization": f"Bearer {console.token()}", "Idempotency-Key": "k", "If-Match": "*"}
        with httpx.Client(base_url=f"{console.address}/api/v1", headers=headers) as api:
            made = api.post("/orgs", json={"slug": "acme", "name": "Acme", "reason": "new customer"})
            made.raise_for_status()
            api.put("/orgs/acme/members/admin", json={"role": "org admin"}).raise_for_status()
            api.patch("/orgs/acme", json={"name": "Acme Ltd"}).raise_for_status()
            api.put("/fleet/description", json={"yaml": FLEET}).raise_for_status()
            join(api, "node", "ax-1", NODE)
            join(api, "driver", "job-7", DRIVER)
        yield console


@pytest.fixture(scope="module")
def cookies(browser: Browser, console: LiveConsole) -> Any:
    """Those of somebody who has logged in."""
    context = browser.new_context(base_url=console.address)
    log_in(context.new_page(), console)
    found = context.cookies()
    context.close()
    return found


Open = Callable[..., Page]
SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
PARTS = 3


@pytest.fixture
def open_page(browser: Browser, console: LiveConsole, cookies: Any) -> Iterator[Open]:
    """A page of somebody who is logged in. Whatever the browser complains of fails the test."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def complain(message: ConsoleMessage) -> None:
        # The status of a page that is meant to be an error is no fault.
        if message.type in ("error", "warning") and "status of 404" not in message.text:
            complaints.append(message.text)

    def open_page(path: str = "/", **options: Any) -> Page:
        context = browser.new_context(base_url=console.address, **options)
        contexts.append(context)
        context.add_cookies(cookies)
        page = context.new_page()
        page.on("console", complain)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.xdist_group(f"pages {part}")) for part in range(PARTS)]
)
def test_no_page_has_a_serious_accessibility_fault_or_scrolls_sideways(
    part: int, open_page: Open
) -> None:
    """Of all that there are, wide and narrow, light and dark: what only the colours differ in is looked
    at for its contrast. Each part has its share of pages, so that workers share them."""
    page = open_page("/", reduced_motion="reduce")  # no colours half way between two themes
    found, seen = [], 0
    for name, path in list({**addresses(THINGS), **MORE}.items())[part::PARTS]:
        if not is_page(page, path):
            continue
        seen += 1
        page.goto(path)
        for width, size in (("wide", WIDE), ("narrow", NARROW)):
            page.set_viewport_size(size)
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                rules = ["color-contrast"] if scheme == "dark" else None
                found += [f"{name}, {width}, {scheme}: {fault}" for fault in faults(page, rules)]
    assert found == []
    assert seen > 10


def is_page(page: Page, path: str) -> bool:
    """Not what only takes forms, sends on, is to be taken away, or is a part of another page."""
    answer = page.request.get(path, max_redirects=0)
    return answer.status in (200, 404) and b"<!doctype html>" in answer.body()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_log_in_page_is_accessible_with_its_errors_too(
    scheme: Literal["light", "dark"], browser: Browser, console: LiveConsole
) -> None:
    context = browser.new_context(base_url=console.address, color_scheme=scheme, viewport=NARROW)
    page = context.new_page()
    page.goto("/log-in/")
    page.get_by_label("User name").fill("somebody")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("do not belong together")
    assert faults(page) == []
    context.close()


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


def test_an_org_is_made_renamed_and_the_renaming_taken_back(open_page: Open) -> None:
    page = open_page("/orgs/")
    page.get_by_role("link", name="Add org").click()
    page.get_by_label("Slug").fill("Not A Slug")
    page.get_by_label("Name").fill("Initech")
    page.get_by_role("button", name="Add org").click()
    expect(page.locator(".field-error")).to_contain_text("valid value")
    page.get_by_label("Slug").fill("initech")
    page.get_by_role("button", name="Add org").click()
    expect(page.locator(".messages")).to_contain_text("Initech is there")
    page.get_by_role("link", name="Edit").click()
    page.get_by_label("Name", exact=True).fill("Initrode")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="Initrode")).to_be_visible()
    page.get_by_role("link", name="org.update").first.click()
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
    httpx.post(f"{console.address}/api/v1/nodes/ax-7/join", json=NODE, headers=told).raise_for_status()
    page.get_by_role("link", name="Nodes", exact=True).click()
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
    assert httpx.get(f"{console.address}/api/v1/me", headers=headers).json()["username"] == "admin"
    page.goto("/tokens/")
    assert text not in page.content()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("row", name=re.compile("resize bot")).get_by_role("button").click()
    expect(page.get_by_role("row", name=re.compile("resize bot"))).to_contain_text("revoked")
    assert httpx.get(f"{console.address}/api/v1/me", headers=headers).status_code == 401


def test_keys_lead_to_pages_help_and_search_but_not_while_typing(open_page: Open) -> None:
    page = open_page("/")
    page.keyboard.press("g")
    page.keyboard.press("a")
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
    page.get_by_label("Slug").fill("hooli")
    page.get_by_label("Name").fill("Hooli")
    page.get_by_role("button", name="Add org").click()
    expect(page.get_by_role("heading", name="Hooli")).to_be_visible()
    page.goto("/audit/")
    page.get_by_label("Search").fill("Hooli")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_role("row")).to_have_count(2)  # the head and the one
    page.get_by_role("searchbox", name="Find").fill("hool")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="What was found").get_by_role("link", name="Hooli").click()
    expect(page.get_by_role("heading", name="Hooli")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    context.close()
