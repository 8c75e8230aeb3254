"""One topic as its viewers see it: reads of storage in, frames out. Pure.

A frame has what has changed since the one before: its `seq` is one more, and `event` is the number of
the last event that it includes. So a viewer notices that it missed a frame, and can ask for the events
after one that it has. Whatever it missed, the next snapshot is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from console.live.messages import Frame, encoded, frame, moment

EVENTS_KEPT: Final = 200  # of a topic, for those who come back
OPENINGS_KEPT: Final = 64  # encoded ones, until the next round: after a restart all come back at once
STATE_BYTES_MAX: Final = 65_536
HEARTBEAT_SECONDS: Final = 5.0
CONCERNING_ACCESS: Final = frozenset({"org.member", "org.delete"})

Event = Mapping[str, Any]  # as in the API: id, at, kind, sentence, data
State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Update:
    """What one round read of a topic."""

    event: int  # up to which number the log was read
    events: Sequence[Event] = ()  # those of the topic, oldest first
    hints: Collection[str] = ()  # kinds of changes that were hinted at
    numbers: Mapping[str, Any] | None = None  # None: they were not read
    state: State | None = None  # likewise


@dataclass(slots=True)
class Feed:
    """The state of a topic: `begin` makes it from storage, `advance` applies each further read."""

    topic: str
    seq: int
    event: int
    is_whole: bool  # the events kept are all that there ever were
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    numbers: Mapping[str, Any] = field(default_factory=dict)
    state: State = field(default_factory=dict)
    read_at: float = 0.0
    _state_text: bytes = b"{}"
    _openings: dict[int | None, tuple[Frame, ...]] = field(default_factory=dict)

    @classmethod
    def begin(cls, topic: str, event: int, events: Iterable[Event], update: Update, now: float) -> Feed:
        """`events`: the last ones of the topic up to number `event`, EVENTS_KEPT of them at most.

        Sequences go on from the time, in milliseconds: frames are fewer, so a process that is started
        again begins above all that it has sent before.
        """
        listed = list(events)
        feed = cls(topic, int(now * 1000), event, len(listed) < EVENTS_KEPT)
        feed.events.extend(listed)
        feed.advance(update, now)
        return feed

    def advance(self, update: Update, now: float) -> Frame | None:
        """Apply what was read. Returns the frame for viewers that have all frames before; None if
        nothing has changed."""
        data: dict[str, Any] = {}
        changed = set(update.hints)
        self.read_at = now
        self._openings.clear()
        events = [one for one in update.events if one["id"] > self.event]
        if events:
            data["events"] = events
            changed |= {one["kind"] for one in events}
            self.is_whole = self.is_whole and len(self.events) + len(events) <= EVENTS_KEPT
            self.events.extend(events)
        self.event = max(self.event, update.event)
        if update.state is not None and self._is_new_state(update.state):
            changed.add("state")
            data["state"] = self.state
        if update.numbers is not None and (update.numbers or self.numbers):
            self.numbers = data["numbers"] = update.numbers
        if changed:
            data["changed"] = sorted(changed)
        if not data:
            return None
        self.seq += 1
        concerns_access = not changed.isdisjoint(CONCERNING_ACCESS)
        data = {"event": self.event, **data}
        return frame(self.topic, "delta", self.seq, now, data, concerns_access=concerns_access)

    def _is_new_state(self, state: State) -> bool:
        """Whether the state differs. One that is too large is not sent: pages fetch it when they are
        told that it has changed."""
        text = encoded(state)
        if text == self._state_text:
            return False
        self._state_text = text
        self.state = state if len(text) <= STATE_BYTES_MAX else {}
        return True

    def opening(self, since: int | None, now: float) -> tuple[Frame, ...]:
        """The frames for a viewer that subscribes: a snapshot with the events after `since`; before it a
        gap, if some of those are no longer kept."""
        known = self._openings.get(since)
        if known is None:
            if len(self._openings) >= OPENINGS_KEPT:
                self._openings.clear()
            known = self._openings[since] = self._open(since, now)
        return known

    def _open(self, since: int | None, now: float) -> tuple[Frame, ...]:
        events = [one for one in self.events if since is not None and one["id"] > since]
        data = {
            "event": self.event,
            "events": events,
            "numbers": self.numbers,
            "state": self.state,
            "read_at": moment(self.read_at),
        }
        snapshot = frame(self.topic, "snapshot", self.seq, now, data)
        if since is None or self.is_whole or (self.events and self.events[0]["id"] <= since):
            return (snapshot,)
        missed = {"after": since, "before": self.events[0]["id"]}
        return frame(self.topic, "gap", self.seq, now, missed), snapshot

    def heartbeat(self, now: float) -> Frame:
        """The sequence number that every viewer should have, and when storage was last read."""
        data = {"event": self.event, "read_at": moment(self.read_at)}
        return frame(self.topic, "heartbeat", self.seq, now, data)
