"""What every journey through pages does: log in, and look for what shuts people out."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any, Protocol, TypeAlias

from playwright.sync_api import Page, ViewportSize, expect

Open: TypeAlias = Callable[..., Page]  # a page of somebody who has logged in, at a path
TakePicture: TypeAlias = Callable[[Page, str], None]  # under a name, see the fixture `take_picture`
WIDE = ViewportSize(width=1440, height=900)
NARROW = ViewportSize(width=390, height=844)
# All at once: each call of the browser costs milliseconds. Preloading would fetch all style sheets
# again. A label names the first thing of its id only, which axe does not say.
LOOK = """async (rules) => {
    const { violations } = await axe.run({
        resultTypes: ["violations"], preload: false, selectors: false,
        ...(rules ? { runOnly: rules } : {})
    });
    const ids = [...document.querySelectorAll("[id]")].map((one) => one.id).sort();
    return {
        violations: violations.flatMap(
            (one) => one.nodes.map((node) => [one.id, node.html.slice(0, 200)])
        ),
        twice: [...new Set(ids.filter((id, place) => id === ids[place - 1]))],
        is_sideways: document.documentElement.scrollWidth > innerWidth,
    };
}"""
# A rule's impact is that of all it finds: rules whose findings would not count need not look.
ONLY_SERIOUS = """
axe.configure({ rules: axe._audit.rules
    .filter((one) => ["minor", "moderate"].includes(one.impact))
    .map((one) => ({ id: one.id, enabled: false })) });
"""
AXE = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text() + ONLY_SERIOUS


class Account(Protocol):
    """Who logs in: a live console has one, and a whole stack."""

    @property
    def username(self) -> str: ...
    @property
    def password(self) -> str: ...


def log_in(page: Page, account: Account) -> None:
    page.goto("/log-in/")
    page.get_by_label("User name").fill(account.username)
    page.get_by_label("Password").fill(account.password)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def faults(page: Page, rules: list[str] | None = None) -> list[str]:
    """What a screen reader stumbles over, as far as it is serious, and scrolling sideways. With `rules`
    only these of axe's.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    seen: dict[str, Any] = page.evaluate(LOOK, rules)
    found = [f"{rule}: {html}" for rule, html in seen["violations"]]
    found += [f"the id {name} is there twice" for name in seen["twice"]]
    if seen["is_sideways"]:
        found.append("it scrolls sideways")
    return found
