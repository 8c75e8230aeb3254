"""What every journey through pages does: log in, and look for what shuts people out."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any, Final, Protocol, TypeAlias

from playwright.sync_api import Page, ViewportSize, expect

Open: TypeAlias = Callable[..., Page]  # a page of somebody who has logged in, at a path
TakePicture: TypeAlias = Callable[[Page, str], None]  # under a name, see the fixture `take_picture`
WIDE = ViewportSize(width=1440, height=900)
NARROW = ViewportSize(width=390, height=844)
# All at once: each call of the browser costs milliseconds. Preloading would fetch all style sheets
# again. A label names the first thing of its id only, which axe does not say.
#
# To measure contrast costs more than all other rules together, and pages are made of the same parts:
# what looks like a text whose contrast was enough is left out. A look is all that contrast depends on.
# Texts that axe itself leaves out have not been measured.
LOOK = """async ([isContrastAlone, enough]) => {
    const grounds = new Map([[null, ""]]);
    const groundOf = (one) => {
        if (!grounds.has(one)) {
            const style = getComputedStyle(one);
            const own = [style.backgroundColor, style.backgroundImage, style.opacity, style.filter];
            if (style.position !== "static") own.push(style.position, one.className);
            const mine = own.join() === "rgba(0, 0, 0, 0),none,1,none" ? "" : own.join() + ";";
            grounds.set(one, mine + groundOf(one.parentElement));
        }
        return grounds.get(one);
    };
    const lookOf = (one) => {
        const style = getComputedStyle(one);
        const own = [style.color, style.fontSize, style.fontWeight, style.textShadow];
        return own.join() + ";" + groundOf(one);
    };
    const texts = new Set(document.querySelectorAll("input, select, textarea"));
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        if (walker.currentNode.data.trim()) texts.add(walker.currentNode.parentElement);
    }
    const known = new Set(enough);
    const include = [...texts].filter((one) => one.checkVisibility() && !known.has(lookOf(one)));

    const common = { preload: false, selectors: false };
    const contrast = include.length
        ? await axe.run({ include }, { ...common, runOnly: ["color-contrast"], elementRef: true })
        : { violations: [], passes: [], incomplete: [] };
    const others = isContrastAlone ? { violations: [] } : await axe.run({
        ...common,
        resultTypes: ["violations"],
        rules: { "color-contrast": { enabled: false } },
    });
    const looks = (found) => found.flatMap((one) => one.nodes.map((node) => lookOf(node.element)));
    const tooLittle = looks(contrast.violations);
    const measured = looks([...contrast.passes, ...contrast.incomplete]);
    const ids = [...document.querySelectorAll("[id]")].map((one) => one.id).sort();
    return {
        violations: [...contrast.violations, ...others.violations].flatMap(
            (one) => one.nodes.map((node) => [one.id, node.html.slice(0, 200)])
        ),
        enough: [...new Set(measured)].filter((look) => !tooLittle.includes(look)),
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
ENOUGH: Final[set[str]] = set()  # looks, in any page that this process has seen
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


def faults(page: Page, *, is_contrast_alone: bool = False) -> list[str]:
    """What a screen reader stumbles over, as far as it is serious; texts that are hard to read; and
    scrolling sideways."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    seen: dict[str, Any] = page.evaluate(LOOK, [is_contrast_alone, sorted(ENOUGH)])
    ENOUGH.update(seen["enough"])
    found = [f"{rule}: {html}" for rule, html in seen["violations"]]
    found += [f"the id {name} is there twice" for name in seen["twice"]]
    if seen["is_sideways"]:
        found.append("it scrolls sideways")
    return found
