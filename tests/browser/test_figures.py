"""figures.js writes numbers as telemetry/units.py does."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Browser

from console.environment import PROJECT

pytestmark = pytest.mark.browser

FIGURES = PROJECT / "console/static/tidegate/figures.js"
VECTOR = PROJECT / "tests/telemetry/units.json"
WRITE = """async ([source, cases]) => {
  const module = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const { age, show } = await import(module);
  return cases.map(({ unit, value }) => unit === "age" ? age(value) : show(value, unit));
}"""


def test_javascript_writes_what_the_vector_says(browser: Browser) -> None:
    cases, page = json.loads(VECTOR.read_text()), browser.new_page()
    assert page.evaluate(WRITE, [FIGURES.read_text(), cases]) == [case["text"] for case in cases]
