"""Every page in light and dark, wide and narrow: for a screen reader, and without scrolling sideways."""

from __future__ import annotations

from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.looking import NARROW, WIDE, Open, faults
from tests.every_page import addresses
from tests.live import LiveConsole

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# What stands for the parameters of addresses; things that are not there have no page yet, but a 404.
THINGS = {
    "alerts": 1,
    "audit": 2,
    "boxes": "cs-1",
    "brains": "east",
    "buckets": 1,
    "callers": "none",
    "channels": 1,
    "drivers": "job-7",
    "join": "none",
    "instances": "talk-0-r1-0000",
    "jobs": "none",
    "members": "admin",
    "models": "chat",
    "nodes": "ax-1",
    "operations": "01a1ffd4-feba-7d6c-b722-e7226d864a20",
    "orgs": "acme",
    "policy": 1,
    "replicas": "chat-1",
    "revisions": 1,
    "rules": "refill-slow",
    "scheduled": 1,
    "sessions": "none",
    "silences": 1,
    "stores": 1,
    "tokenizers": 1,
    "tokens": "none",
    "users": "admin",
    "views": 1,
    "workloads": "talk",
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
SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
PARTS = 6  # of which each has an end within its time on a machine that is eight times slower


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
                told = faults(page, is_contrast_alone=scheme == "dark")
                found += [f"{name}, {width}, {scheme}: {fault}" for fault in told]
    assert found == []
    assert seen > 10


# A critical fault, a serious one and a moderate one, an id that is there twice, and width.
FAULTY = """<html lang="en"><title>Faulty</title>
<main><h1>Faulty</h1><img src="x" id="a"><h4 id="a">Deep</h4>
<p style="color: #999; background: #aaa; width: 5000px">Hard to read</p></main></html>"""


def test_faults_are_found_from_serious_ones_on(browser: Browser) -> None:
    """Else no page could fail above."""
    page = browser.new_page()
    page.set_content(FAULTY)
    found = [fault.partition(":")[0] for fault in faults(page)]
    assert found == ["color-contrast", "image-alt", "the id a is there twice", "it scrolls sideways"]
    [contrast, *others] = faults(page, is_contrast_alone=True)
    assert contrast.startswith("color-contrast: <p")
    assert len(others) == 2
    page.close()


def test_contrast_is_measured_of_each_look_and_not_of_each_text(browser: Browser) -> None:
    def looked_at(body: str) -> Page:
        page = browser.new_page()
        page.set_content(f'<html lang="en"><title>Looks</title><main><h1>Looks</h1>{body}</main></html>')
        return page

    text = '<p style="color: #222">Easy to read</p>'
    page = looked_at(text)
    assert faults(page) == []
    page.evaluate("axe.run = null")
    assert faults(page, is_contrast_alone=True) == []
    for around in ("background: #111", "opacity: 0.3"):
        [fault] = faults(looked_at(f'<div style="{around}">{text}</div>'))
        assert fault.startswith("color-contrast: <p"), around


# Where people read names that other people gave, of all lengths that there may be.
LONG_NAMES = [
    "/",
    "/orgs/",
    "/orgs/acme/",
    "/orgs/acme/edit/",
    "/orgs/acme/policy/",
    "/routing/?org=acme",
]
LONG_NAMES += [
    "/orgs/acme/session-rules/",
    "/hand-over/?org=acme",
    "/latency/?topic=org:acme",
    "/account/",
]
RENAME = "from console.orgs.models import Org; Org.objects.filter(slug='acme').update(name='{}')"


def test_names_without_a_blank_do_not_make_pages_scroll_sideways(
    open_page: Open, console: LiveConsole
) -> None:
    page = open_page("/", viewport=NARROW)
    console.manage(RENAME.format("W" * 120))
    try:
        wide = []
        for path in LONG_NAMES:
            page.goto(path)
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide.append(path)
        assert wide == []
    finally:
        console.manage(RENAME.format("Acme Ltd"))


def is_page(page: Page, path: str) -> bool:
    """Not what only takes forms, sends on, is to be taken away, or is a part of another page."""
    answer = page.request.get(path, max_redirects=0)
    return answer.status in (200, 404) and b"<!doctype html>" in answer.body()


# The part of the page that is fetched anew, and how often it was.
LIVE = "[hx-trigger^=live]"
COUNT_SWAPS = "window.swaps = 0; document.addEventListener('htmx:afterSwap', () => (swaps += 1), true)"
FETCH_ANEW = f"htmx.trigger(document.querySelector('{LIVE}'), 'live')"
LITTLE_ROOM = """
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(".scroll { max-height: 60px; overflow-y: auto; }");
    document.adoptedStyleSheets.push(sheet);
"""
# At once: what is looked up before may have been replaced by then.
FOCUS_AND_SCROLL = f"""
    document.querySelector('{LIVE} .scroll a').focus();
    document.activeElement.closest('.scroll').scrollTop = 20;
    document.activeElement.getAttribute('href');
"""
SEEN = """
    [document.activeElement, document.activeElement.closest('.scroll')]
        .map((one) => one?.getAttribute('href') ?? one?.scrollTop)
"""


def fetch_anew(page: Page) -> None:
    before = page.evaluate("swaps")
    page.evaluate(FETCH_ANEW)
    page.wait_for_function("(before) => swaps > before", arg=before)


def test_focus_and_scrolling_stay_when_a_part_is_fetched_anew(open_page: Open) -> None:
    page = open_page("/workloads/talk/")
    page.evaluate(COUNT_SWAPS)
    page.evaluate(LITTLE_ROOM)
    was = page.evaluate(FOCUS_AND_SCROLL)
    for _ in range(2):
        fetch_anew(page)
        assert page.evaluate(SEEN) == [was, 20]


def test_a_click_that_has_begun_is_one_though_its_part_is_fetched_anew(open_page: Open) -> None:
    page = open_page("/workloads/talk/")
    link = page.locator(f"{LIVE} .scroll a").first
    there = link.get_attribute("href")
    link.hover()
    page.mouse.down()
    page.evaluate(COUNT_SWAPS)
    with page.expect_response(lambda answer: "hx-request" in answer.request.headers) as fetched:
        page.evaluate(FETCH_ANEW)
    fetched.value.finished()
    assert page.evaluate("swaps") == 0
    page.mouse.up()
    page.wait_for_url(f"**{there}")


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
    expect(page.get_by_role("alert")).to_contain_text("Wrong user name or password")
    assert faults(page) == []
    context.close()
