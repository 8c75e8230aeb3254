"""Runbooks as pages show them."""

from __future__ import annotations

import re

import pytest

from console.alerts.rules import runbooks
from console.environment import PROJECT


@pytest.mark.parametrize("page", sorted(one.name for one in runbooks.FOLDER.glob("*.md")))
def test_a_page_names_what_it_links_to_since_the_console_does_not_serve_it(page: str) -> None:
    shown = runbooks.rendered(page)
    assert "](" not in shown
    assert "../" not in shown
    for named in re.findall(r"<code>(docs/[^<]+)</code>", shown):
        assert (PROJECT / named).exists(), named
