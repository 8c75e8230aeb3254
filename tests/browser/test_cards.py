"""Tables as cards on a narrow screen, by the style sheet alone."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser

from console.environment import PROJECT
from tests.browser.looking import NARROW

pytestmark = pytest.mark.browser

STYLES = PROJECT / "console/static/tidegate/components.css"
CELLS = ("State", "Displacement", "Hit rates on a sample")
HEIGHTS = """() => Object.fromEntries([...document.querySelectorAll("td")].map((cell) =>
  [cell.dataset.label, Math.round(parseFloat(getComputedStyle(cell, "::before").height))]))"""


def test_a_label_breaks_between_words_and_never_inside_one(browser: Browser) -> None:
    page = browser.new_page(viewport=NARROW)
    cells = "".join(f'<td data-label="{label}">lru</td>' for label in CELLS)
    page.set_content(f'<table class="cards"><tr>{cells}</tr></table>')
    page.add_style_tag(content=f"body {{ font: 16px/1 monospace }} {STYLES.read_text()}")
    one, long, words = page.evaluate(HEIGHTS).values()
    assert long == one
    assert words > one
