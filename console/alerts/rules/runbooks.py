"""Runbooks: pages of docs/runbooks, as HTML."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from django.utils.safestring import SafeString
from markdown_it import MarkdownIt

from console.environment import PROJECT

FOLDER: Final = PROJECT / "docs" / "runbooks"


@lru_cache(maxsize=128)
def rendered(page: str) -> SafeString:
    """The page without its title. It is ours, and HTML in it is text all the same."""
    text = (FOLDER / page).read_text().split("\n", 1)[1]
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("link")
    return SafeString(markdown.render(text))
