"""Plotly.js as a static file, out of the installed package: that one file, and none of its data sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from django.contrib.staticfiles.finders import BaseFinder
from django.core.files.storage import FileSystemStorage, Storage

from console.environment import package_folder

PREFIX: Final = "plotly"
NAME: Final = "plotly.min.js"
_LOOKS_FOR: Final = re.compile(r'if\(!document\.getElementById\("([0-9a-f]{64})"\)\)')


class PlotlyFinder(BaseFinder):
    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self._storage = FileSystemStorage(location=folder())
        self._storage.prefix = PREFIX  # type: ignore[attr-defined]  # collectstatic asks for it

    def find(self, path: str, find_all: bool = False, **_more: Any) -> Any:  # noqa: FBT001
        if path != f"{PREFIX}/{NAME}":
            return []
        found = str(folder() / NAME)
        return [found] if find_all else found

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterator[tuple[str, Storage]]:  # noqa: ARG002
        yield NAME, self._storage


@cache
def folder() -> Path:
    return package_folder("plotly") / "package_data"


@cache
def styles_it_would_write() -> list[str]:
    """The ids of style sheets that Plotly writes into a page (those of maps) unless it finds them there.
    Our policy forbids that, so pages have empty elements for it to find."""
    return _LOOKS_FOR.findall((folder() / NAME).read_text())
