"""Clients of the live WebSocket, which follow the whole protocol of docs/live.md."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any, Final

import websockets.sync.client as websockets
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from tests.chaos.scene import Place
from tests.chaos.threads import Threads

SILENT_SECONDS_MAX: Final = 12.0  # without a frame, as the protocol has it
RECONNECT_SECONDS: Final = 0.5
RECONNECT_SECONDS_MAX: Final = 4.0
LOOK_SECONDS: Final = 0.5


@dataclass
class Topic:
    """What a client knows of one topic.

    `gaps`: between which events the server said that it has no more. `missed`: how often the client
    noticed by itself that a frame was missing.
    """

    name: str
    seq: int | None = None
    event: int | None = None
    first_event: int | None = None
    is_waiting: bool = True  # for a snapshot
    events: dict[int, int] = field(default_factory=dict)  # how often each was processed
    gaps: list[tuple[int, int]] = field(default_factory=list)
    missed: int = 0
    frames: int = 0
    broken: list[str] = field(default_factory=list)

    def take(self, frame: dict[str, Any]) -> bool:
        """Whether to subscribe again: a frame is missing."""
        self.frames += 1
        kind, seq, data = frame["kind"], frame["seq"], frame["data"]
        match kind:
            case "gap":
                self.gaps.append((data["after"], data["before"]))
            case "snapshot":
                if self.seq is not None and seq < self.seq:
                    self.broken.append(f"{self.name}: seq fell from {self.seq} to {seq}.")
                self.is_waiting, self.seq = False, seq
                self._process(data)
            case "delta" | "heartbeat" if self.is_waiting or self.seq is None:
                return False
            case "delta" | "heartbeat":
                if seq != self.seq + (kind == "delta"):
                    self.missed += 1
                    self.is_waiting = True
                    return True
                self.seq = seq
                if kind == "delta":
                    self._process(data)
            case _:
                self.broken.append(f"{self.name}: {kind} {data}")
        return False

    def _process(self, data: dict[str, Any]) -> None:
        for one in data.get("events", ()):
            if self.event is not None and one["id"] > self.event:
                self.events[one["id"]] = self.events.get(one["id"], 0) + 1
        if self.first_event is None:
            self.first_event = data["event"]
        self.event = max(self.event or 0, data["event"])

    def unnoticed(self, all_events: list[int]) -> list[int]:
        """Of what happened since the first snapshot: what it neither got nor was told to be missing."""
        since = self.first_event or 0
        return [
            one
            for one in all_events
            if one > since
            and one not in self.events
            and not any(after < one < before for after, before in self.gaps)
        ]


@dataclass(frozen=True)
class Break:
    """A connection that ended, or that could not be made. `began`: when it was last seen to work, or was
    tried."""

    place: str
    began: float
    at: float
    why: str


class Viewer(Threads):
    """Watches topics at one web until the block ends."""

    def __init__(self, web: Place, token: str, topics: tuple[str, ...]) -> None:
        super().__init__(self._watch_until_told)
        self.web = web
        self.topics = {name: Topic(name) for name in topics}
        self.breaks: list[Break] = []
        self.connections = 0
        self._token = token
        self._worked_at = 0.0

    def has(self, event: int) -> bool:
        """Whether it is told of all up to this number."""
        return all((one.event or 0) >= event for one in self.topics.values())

    def _watch_until_told(self) -> None:
        pause = RECONNECT_SECONDS
        while not self.ends.is_set():
            began = self._worked_at = time.monotonic()
            try:
                self._connected()
            except (OSError, ConnectionClosed, InvalidHandshake, TimeoutError) as error:
                ended = time.monotonic()
                self.breaks.append(Break(self.web.victim, self._worked_at, ended, repr(error)))
            lasted = time.monotonic() - began
            pause = RECONNECT_SECONDS if lasted > pause else min(2 * pause, RECONNECT_SECONDS_MAX)
            self.ends.wait(pause * random.uniform(0.8, 1.2))

    def _connected(self) -> None:
        address = self.web.url.replace("http", "ws", 1) + "/ws/v1/live"
        headers = {"Authorization": f"Bearer {self._token}"}
        with websockets.connect(
            address, additional_headers=headers, compression=None, open_timeout=60
        ) as wire:
            self.connections += 1
            self._worked_at = time.monotonic()
            for topic in self.topics.values():
                self._subscribe(wire, topic)
            while not self.ends.is_set():
                try:
                    text = wire.recv(LOOK_SECONDS)
                except TimeoutError:
                    if time.monotonic() - self._worked_at > SILENT_SECONDS_MAX:
                        raise
                    continue
                self._worked_at = time.monotonic()
                frame = json.loads(text)
                topic = self.topics[frame["topic"]]
                if topic.take(frame):
                    self._subscribe(wire, topic)

    @staticmethod
    def _subscribe(wire: websockets.ClientConnection, topic: Topic) -> None:
        topic.is_waiting = True
        since = {} if topic.event is None else {"since": topic.event}
        wire.send(json.dumps({"type": "subscribe", "topic": topic.name, **since}))
