"""What other apps say of live topics: that something changed, and how it is now.

    publish("operations", "operation")          in the transaction of the change, or outside of any

    @snapshot("alerts")                         of topics of this kind: `alerts`, or `session:…`
    def firing(principal, topic): return {"firing": 3}

Pages need neither where they are driven by events: `telemetry.events.note` tells viewers by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from console.accounts.principal import SYSTEM, Principal
from telemetry.hints import hint
from telemetry.topics import kind_of

Snapshot = Callable[[Principal, str], Mapping[str, Any]]
_snapshots: Final[dict[str, list[Snapshot]]] = {}


def publish(topic: str, kind: str) -> None:
    """Hint that something of this kind changed, so that viewers are told now rather than soon. What it
    is they learn from storage: a hint that is lost costs a few seconds."""
    hint([topic], kind)


def snapshot(kind: str) -> Callable[[Snapshot], Snapshot]:
    """Register how topics of a kind are now, as a small JSON-able dict. Several add up to one.

    It is asked once for all viewers of a topic, so it gets the system as its principal: it may tell
    whatever everybody may know who may see the topic, and nothing else.
    """

    def register(function: Snapshot) -> Snapshot:
        _snapshots.setdefault(kind, []).append(function)
        return function

    return register


def state_of(topic: str) -> dict[str, Any]:
    """What the apps say of it, put together."""
    state: dict[str, Any] = {}
    for function in _snapshots.get(kind_of(topic), ()):
        state |= function(SYSTEM, topic)
    return state
