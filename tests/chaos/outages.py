"""An alert that fires and resolves again and again: an agent that is killed, and comes back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from tests.chaos.scene import LONELY, Chaos
from tests.chaos.threads import Threads, came_true
from tests.console.alerts.receivers import Hook, hook

RULE: Final = "agent-not-reporting"
TOPIC: Final = f"node:{LONELY}"
SILENT_SECONDS: Final = 12
# Whoever sends it may be killed again and again, and each time it waits for a minute.
STEP_SECONDS_MAX: Final = 600.0


class Outages(Threads):
    """Goes on until the block ends; one that has begun is waited for to its end."""

    def __init__(self, scene: Chaos, received: Hook) -> None:
        super().__init__(self._again_and_again)
        self.count = 0
        self.missing: list[str] = []  # what was waited for in vain
        self.waited_seconds = 0.0  # the longest from a kill or a start to its notification
        self.received = received
        self._scene = scene

    def notified(self) -> Counter[tuple[str, str]]:
        """How often each was sent, by dedup_key and what of it."""
        return Counter(
            (alert["dedup_key"], alert["what"])
            for body in self.received.bodies
            for alert in body["alerts"]
        )

    def keys(self) -> dict[tuple[str, str], set[str]]:
        """The keys under which each was sent."""
        found: dict[tuple[str, str], set[str]] = {}
        for headers, body in self.received.got.copy():
            for alert in body["alerts"]:
                its = found.setdefault((alert["dedup_key"], alert["what"]), set())
                its.add(headers["Idempotency-Key"])
        return found

    def _again_and_again(self) -> None:
        while not self.ends.is_set():
            self._one()

    def _one(self) -> None:
        agent = self._scene.processes[LONELY]
        self.count += 1
        agent.running.kill()
        agent.running.wait()
        self._wait_until_notified("firing")
        agent.start()
        self._wait_until_notified("resolved")

    def _wait_until_notified(self, what: str) -> None:
        """Of as many as there were outages."""
        said = f"outage {self.count} is notified as {what}"
        began = time.monotonic()
        if not came_true(partial(self._is_notified, what), STEP_SECONDS_MAX):
            self.missing.append(said)
        self.waited_seconds = max(self.waited_seconds, time.monotonic() - began)

    def _is_notified(self, what: str) -> bool:
        return len(self._keys_of(what)) >= self.count

    def _keys_of(self, what: str) -> set[str]:
        return {
            alert["dedup_key"]
            for body in self.received.bodies
            for alert in body["alerts"]
            if (alert["rule"], alert["what"], alert["labels"]["topic"]) == (RULE, what, TOPIC)
        }


@contextmanager
def outages(scene: Chaos) -> Iterator[Outages]:
    with hook() as received:
        told: dict[str, Any] = {"name": "hook", "kind": "webhook", "address": received.address}
        told["min_severity"] = "notice"
        scene.ask("POST", "/alert-channels", told, **{"Idempotency-Key": "hook"})
        values = {"silent_seconds": SILENT_SECONDS, "keep_firing_seconds": 0}
        scene.ask("PUT", f"/alert-rules/{RULE}/thresholds", {"values": values}, **{"If-Match": "*"})
        with Outages(scene, received) as made:
            yield made
