"""An evil viewer: may read one org, and reads everything that has an address."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import httpx

_PLACE: Final = re.compile(r"\{([a-z_]+)\}")


def routes(api: httpx.Client) -> list[str]:
    """The paths of all that can be read, as the API describes itself."""
    described = api.get("/openapi.json").json()
    return [
        path.removeprefix("/api/v1")
        for path, verbs in described["paths"].items()
        if "get" in verbs and not path.endswith("/openapi.json")
    ]


def filled(path: str, names: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """The path with every combination of the names that its places may have."""
    place = _PLACE.search(path)
    if place is None:
        yield path
        return
    for name in names.get(place[1], ("1",)):
        yield from filled(path.replace(place[0], name, 1), names)


def read_everything(api: httpx.Client, names: Mapping[str, Iterable[str]]) -> dict[str, httpx.Response]:
    """What each route answers."""
    return {path: api.get(path) for route in routes(api) for path in filled(route, names)}


def tells_of(answers: Mapping[str, httpx.Response], secrets: Iterable[str]) -> dict[str, list[str]]:
    """By path: which of these its answer has in it."""
    found: dict[str, Any] = {}
    for path, answer in answers.items():
        if told := [secret for secret in secrets if secret in answer.text and secret not in path]:
            found[path] = told
    return found
