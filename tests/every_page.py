"""Every page that there is, by the list of addresses itself: so that no check forgets a new one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from django.urls import URLPattern, get_resolver

TOKENIZER_ARCHIVE: Final = "tokenizer-archive"  # what managers fetch, by a signed address
_PARAMETER: Final = re.compile(r"([^/<>]+)/<[^>]+>")


def addresses(things: Mapping[str, object]) -> dict[str, str]:
    """Paths by the names of their routes, the API's apart. `things` says what stands for a parameter, by
    what stands before it: `{"nodes": "ax-1"}`. Some of them only take forms, and answer a GET with 405.

    Raises KeyError for a route with a parameter that nothing stands for."""
    return {
        str(route.name): _filled(str(route.pattern), things)
        for route in get_resolver().url_patterns
        if isinstance(route, URLPattern) and str(route.name) != TOKENIZER_ARCHIVE
    }


def _filled(route: str, things: Mapping[str, object]) -> str:
    return "/" + _PARAMETER.sub(lambda found: f"{found[1]}/{things[found[1]]}", route)
