"""Views by their names: the module of a view is loaded by the first request for it.

    fleet = ViewModule("console.fleet.pages.fleet")
    path("fleet/", fleet.show_fleet, name="fleet")

All modules of pages together take a sixth of the start of a web process, and one page needs one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, get_resolver


class View:
    """A view that is not loaded yet. Django names it as it would name the function."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__ = module
        self.__name__ = self.__qualname__ = name

    def __call__(self, request: HttpRequest, **parameters: Any) -> HttpResponseBase:
        return self.load()(request, **parameters)

    def load(self) -> Callable[..., HttpResponseBase]:
        """The function. Raises ImportError or AttributeError where there is none of this name."""
        view: Callable[..., HttpResponseBase] = getattr(import_module(self.__module__), self.__name__)
        return view


class ViewModule:
    """A module of views, whose attributes are its views."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> View:
        return View(self._module, name)


def named_views() -> Iterator[View]:
    """The views of all pages."""
    for route in get_resolver().url_patterns:
        if isinstance(route, URLPattern) and isinstance(route.callback, View):
            yield route.callback
