"""What whoever is on call does with pages, by a robot that never thinks: for `benchmarks.pages`, on its
large console. From the first click until what was looked for can be seen.

docs/comparison.md holds the same tasks against what they take elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from playwright.sync_api import Page, expect

from benchmarks.harness import Row

PATIENCE_MS: Final = 60_000

Journey = Callable[[Page], None]


def _alert(page: Page) -> None:
    """From the overview to what fires, since when, by which numbers, and the suggested fix."""
    page.get_by_role("link", name="Alerts").first.click()
    page.get_by_role("link", name="Refill latency above objective").first.click()
    expect(page.get_by_role("heading", name="Summary")).to_be_visible()


def _acknowledge(page: Page) -> None:
    """From there: acknowledge it."""
    page.get_by_label("Reason").fill("looking")
    page.get_by_role("button", name="Acknowledge").click()
    expect(page.get_by_text("Acknowledged by").first).to_be_visible()


def _silence(page: Page) -> None:
    """From there: no more notifications of just this, for an hour, with a reason."""
    page.get_by_role("link", name="Silence…").click()
    page.get_by_label("Reason").fill("being mended")
    page.get_by_role("button", name="Create silence").click()
    expect(page.get_by_role("row", name="being mended").first).to_be_visible()


def _change(page: Page) -> None:
    """Who changed what of one of 200 orgs last, with before and after."""
    page.get_by_role("link", name="Audit").first.click()
    page.get_by_label("Search").fill("Org 77")
    page.get_by_role("button", name="Filter").click()
    page.locator("table a[href^='/audit/']").first.click()
    expect(page.get_by_text("as agreed").first).to_be_visible()


def _path(page: Page) -> None:
    """Which streams of a session cross the spine, and which moves would end that."""
    page.get_by_role("link", name="Sessions").first.click()
    page.get_by_role("link", name="s-0", exact=True).click()
    page.get_by_role("link", name="Bring back on rails").click()
    expect(page.get_by_role("heading", name="Bring").first).to_be_visible()


JOURNEYS: Final[dict[str, Journey]] = {
    "alert": _alert,
    "acknowledge": _acknowledge,
    "silence": _silence,
    "change": _change,
    "path": _path,
}


def journey_rows(page: Page) -> Iterator[Row]:
    """In a browser of somebody who is logged in. Each begins where the one before has ended."""
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.goto("/")
    for name, journey in JOURNEYS.items():
        began = time.perf_counter()
        journey(page)
        yield Row(f"journey.{name}", time.perf_counter() - began, "s")
