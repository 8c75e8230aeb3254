"""Desired documents, put together from what each app knows of a target.

    @part("driver")
    def homes(name: str) -> Mapping[str, Any]: ...      # of one target

    @common_part("driver")
    def agents_removed() -> Mapping[str, Any]: ...      # the same for all of the kind, made once

    @round_part("driver")
    def orgs() -> Part: ...                             # called once a round: the part of each target

    @addition("node", "tier2")
    def of_orgs() -> Mapping[str, Any]: ...             # likewise, to what parts say there, if any

    @round_addition("node", "tier2")
    def of_links() -> Part: ...                         # likewise, of each target

A part that can't be made yet raises NotYet with a sentence; the target keeps what it has, and the
sentence is shown as why it lags. One that serves nobody raises Idle, and does not lag.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from django.core.exceptions import ObjectDoesNotExist

from console.control.models import Kind
from inference_brain import desired as of_brains
from kvss_agent import desired as of_agents
from kvss_agent.documents import Invalid
from swdriver_shim import desired as of_drivers

Partial = Mapping[str, Any]
Part = Callable[[str], Partial]
CommonPart = Callable[[], Partial]
RoundPart = Callable[[], Part]
P = TypeVar("P", Part, CommonPart, RoundPart)
Place = tuple[str, str]  # a kind, and a key of its documents

_parts: Final[dict[str, list[Part]]] = {kind: [] for kind in Kind.values}
_common: Final[dict[str, list[CommonPart]]] = {kind: [] for kind in Kind.values}
_of_rounds: Final[dict[str, list[RoundPart]]] = {kind: [] for kind in Kind.values}
_additions: Final[dict[Place, list[CommonPart]]] = {}
_round_additions: Final[dict[Place, list[RoundPart]]] = {}
_PARSE: Final[Mapping[str, Callable[[bytes], object]]] = {
    Kind.NODE: of_agents.parse,
    Kind.DRIVER: of_drivers.parse,
    Kind.BRAIN: of_brains.parse,
}


class NotYet(Exception):
    """Why there can be no document for this target now, in a sentence."""


class Idle(NotYet):
    """The target serves nobody, so nobody waits for it: it gets a document before it does."""


def part(kind: str) -> Callable[[Part], Part]:
    return _registered(_parts[kind])


def common_part(kind: str) -> Callable[[CommonPart], CommonPart]:
    return _registered(_common[kind])


def round_part(kind: str) -> Callable[[RoundPart], RoundPart]:
    """For what targets share in part: what was made for one is there for the others of its round."""
    return _registered(_of_rounds[kind])


def addition(kind: str, key: str) -> Callable[[CommonPart], CommonPart]:
    return _registered(_additions.setdefault((kind, key), []))


def round_addition(kind: str, key: str) -> Callable[[RoundPart], RoundPart]:
    return _registered(_round_additions.setdefault((kind, key), []))


def _registered(into: list[P]) -> Callable[[P], P]:
    def register(function: P) -> P:
        into.append(function)
        return function

    return register


@dataclass(frozen=True, slots=True)
class Document:
    """All of it but its generation. The same intent is the same bytes."""

    content: bytes
    digest: bytes

    def of_generation(self, generation: int) -> bytes:
        return b'{"generation":%d,' % generation + self.content[1:]


class Compiler:
    """Of one kind, for one round: what is common to all is made once, when it is first wanted."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._shared: dict[str, msgspec.Raw] | None = None
        self._more: dict[str, Partial] = {}
        self._more_of_each: list[tuple[str, Part]] = []
        self._of_round: list[Part] = []

    def compile(self, name: str, base: Partial) -> Document:
        """Raises NotYet, also for what the target would refuse."""
        if self._shared is None:
            self._shared = self._made_once()
        if not (_parts[self._kind] or _common[self._kind]):
            raise NotYet("Nobody says yet what it should be.")
        told: dict[str, Any] = {**base, **self._shared}
        try:
            for one in (*self._of_round, *_parts[self._kind]):
                told |= one(name)
        except ObjectDoesNotExist as gone:  # since the round began
            raise NotYet(f"{name} has left the fleet, or what it needs has: {gone}") from gone
        for key, more in (*self._more.items(), *((key, of(name)) for key, of in self._more_of_each)):
            if key in told:
                told[key] = _added(told[key], more)
        content = msgspec.json.encode(told, order="deterministic")
        document = Document(content, hashlib.sha256(content).digest())
        try:
            _PARSE[self._kind](document.of_generation(1))
        except Invalid as error:
            raise NotYet(f"It can't be told what to be yet: {error}") from error
        return document

    def _made_once(self) -> dict[str, msgspec.Raw]:
        self._more = {
            key: {name: value for one in additions for name, value in one().items()}
            for (kind, key), additions in _additions.items()
            if kind == self._kind
        }
        self._more_of_each = [
            (key, made())
            for (kind, key), additions in _round_additions.items()
            if kind == self._kind
            for made in additions
        ]
        self._of_round = [made() for made in _of_rounds[self._kind]]
        return {
            key: msgspec.Raw(msgspec.json.encode(value))
            for common in _common[self._kind]
            for key, value in common().items()
        }


def _added(said: Any, more: Partial) -> Any:
    """To what a part says; to each, where that is several."""
    return [{**one, **more} for one in said] if isinstance(said, list) else {**said, **more}
