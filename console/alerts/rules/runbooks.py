"""Runbooks: pages of docs/runbooks, as HTML."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from django.utils.safestring import SafeString

from console.environment import bundled

FOLDER: Final = bundled("docs/runbooks")
_LINK: Final = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)]+)\)")


@lru_cache(maxsize=128)
def rendered(page: str) -> SafeString:
    """The page without its title. It is ours, and HTML in it is text all the same."""
    from markdown_it import MarkdownIt  # for pages of rules only

    text = (FOLDER / page).read_text().split("\n", 1)[1]
    text = _LINK.sub(_named, text)
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("link")
    return SafeString(markdown.render(text))


def _named(link: re.Match[str]) -> str:
    """The console does not serve the documentation: a link to it becomes the name of its page."""
    target = link["target"].partition("#")[0]
    if "://" in target:
        return f"{link['text']} ({target})"
    page = (FOLDER / target).resolve().relative_to(FOLDER.parents[1]) if target else ""
    return f"{link['text']} (`{page}`)" if page else link["text"]
