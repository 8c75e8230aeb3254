"""Nobody overwrites what they have not seen: a version is an ETag, a change names it in If-Match."""

from __future__ import annotations

import re
from typing import Protocol, TypeVar

from django.http import HttpResponse

from console.api.problems import ApiError

ETAG = re.compile(r'(?:W/)?("[\x21\x23-\x7e]*")')


def etag(version: int) -> str:
    return f'"{version}"'


class Versioned(Protocol):
    version: int


V = TypeVar("V", bound=Versioned)


def tagged(response: HttpResponse, found: V) -> V:
    """What was found, with its version as the ETag of the response."""
    response["ETag"] = etag(found.version)
    return found


def matched(found: V, if_match: str) -> V:
    """What was found to be changed. Raises 412 unless `if_match` names its version."""
    check_match(if_match, found.version)
    return found


def check_match(if_match: str, version: int) -> None:
    """Raise 412, with the current ETag, unless `if_match` names this version."""
    current = etag(version)
    if if_match.strip() == "*" or current in ETAG.findall(if_match):
        return
    raise ApiError(
        "StaleVersion",
        f"Its version is {current} now, and you named {if_match}. Read it again, then decide.",
        headers={"ETag": current},
    )
