"""A node's tier 2: as a description says it, and as its agent is told. No database.

    tier2: {kind: posix, path: /mnt/kv, cap: 2TiB}
    tier2: {kind: s3, bucket: kv, endpoint: "https://s3.example.org", cap: 20TiB}
    tier2: {kind: s3, bucket: kv, cap: 20TiB, front: {path: /mnt/kv, cap: 2TiB, writes: back}}

What orgs may have of it, and for how long, are policies; with which keys a bucket is opened, its agent's
environment says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from console.placement.topology import NODE_MEMORY_BYTES_MAX
from kvss_agent.tier2.settings import FrontSettings, Tier2Settings, Writes
from telemetry.units import exact_size, parse_size

_TEXT: Final = re.compile(r"[\x21-\x7e]{1,500}")
_OF_KIND: Final = {"posix": ("path", "durable"), "s3": ("bucket", "prefix", "endpoint", "region")}
THREADS_MAX: Final = 64
_Said = Mapping[str, Any]


def _kind(text: str) -> str:
    if text not in _OF_KIND:
        raise ValueError(f"{text[:80]!r} is no kind of tier 2: {' or '.join(_OF_KIND)}")
    return text


def memory(text: str) -> str:
    """A size as it stands in what is read and compared: the same bytes are the same text."""
    return exact_size(parse_size(text, low=1, high=NODE_MEMORY_BYTES_MAX))


def _text(text: str) -> str:
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{text[:80]!r} should be 1 to 500 printable characters, without spaces")
    return text


def _path(text: str) -> str:
    if not text.isprintable() or not 1 <= len(text) <= 500:
        raise ValueError(f"{text[:80]!r} should be a path of at most 500 printable characters")
    return text


def _yes_or_no(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text[:80]!r} should be true or false")
    return text == "true"


def _threads(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= THREADS_MAX:
        raise ValueError(f"{text[:80]!r} should be a whole number from 1 to {THREADS_MAX}")
    return int(text)


def _writes(text: str) -> str:
    if text not in WRITES:
        raise ValueError(f"{text[:80]!r} should be one of {', '.join(WRITES)}")
    return text


FRONT: Final = "front"
WRITES: Final = tuple(one.value for one in Writes)
FRONT_FIELDS: Final[Mapping[str, Callable[[str], Any]]] = {
    "path": _path,
    "cap": memory,
    "writes": _writes,
}
FRONT_REQUIRED: Final = ("path", "cap")
FIELDS: Final[Mapping[str, Callable[[str], Any]]] = {
    "kind": _kind,
    "cap": memory,
    "path": _path,
    "durable": _yes_or_no,
    "bucket": _text,
    "prefix": _text,
    "endpoint": _text,
    "region": _text,
    "shared": _yes_or_no,
    "threads": _threads,
}
REQUIRED: Final = ("kind", "cap")


def told(said: _Said) -> dict[str, Any]:
    """As it stands in a desired document. Raises ValueError for what makes no sense together."""
    for kind, fields in _OF_KIND.items():
        if kind != said["kind"] and (wrong := sorted(set(fields) & said.keys())):
            raise ValueError(f"`{wrong[0]}` is of kind {kind}, and this is {said['kind']}")
    found = {name: value for name, value in said.items() if name != "cap"}
    found["cap_bytes"] = parse_size(said["cap"])
    if front := said.get(FRONT):
        found[FRONT] = {name: value for name, value in front.items() if name != "cap"}
        found[FRONT]["cap_bytes"] = parse_size(front["cap"])
    settings_of(found)
    return found


def settings_of(document: _Said) -> Tier2Settings:
    """Of what is told. Raises ValueError."""
    front = document.get(FRONT)
    return Tier2Settings(**{**document, FRONT: FrontSettings(**front) if front else None})


def is_local(said: _Said) -> bool:
    """Whether it is on a disk of the node's own, as far as is said: else links lead there."""
    return said.get("kind") == "posix" and not said.get("shared", True)


def may_share_files(one: _Said, other: _Said, *, by_any_endpoint: bool = False) -> bool:
    """Whether what one node stores may be where another one does: their places are the same, or one lies
    within the other. Paths of disks that both nodes have for themselves are two places, whatever they
    are called; a bucket is the same from everywhere. `by_any_endpoint`: so may be buckets
    of one name, since a server may have several names."""
    if one.get("kind") != "s3" and not one.get("shared", True) and not other.get("shared", True):
        return False
    if by_any_endpoint and one.get("kind") == other.get("kind") == "s3":
        one, other = {**one, "endpoint": ""}, {**other, "endpoint": ""}
    (root, parts), (other_root, other_parts) = _where(one), _where(other)
    length = min(len(parts), len(other_parts))
    return root == other_root and parts[:length] == other_parts[:length]


def _where(said: _Said) -> tuple[tuple[str, ...], list[str]]:
    """What has to be the same, and the names on the way from there."""
    if said.get("kind") == "s3":
        return ("s3", said.get("endpoint", "").rstrip("/"), said["bucket"]), _names(
            said.get("prefix", "")
        )
    return ("posix",), _names(os.path.normpath(said.get("path", "")))


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]
