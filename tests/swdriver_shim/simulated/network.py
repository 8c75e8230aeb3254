"""Connections in one thread: they break at any byte, stall, and go deaf."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.channel import Closed, PlainChannel, seconds_for
from kvss_agent.mover import Bytes
from tests.one_thread import Task, Turns

STALL_SECONDS: Final = 10.0


@dataclass(eq=False)
class Pipe:
    """One direction of a connection: bytes on their way, and file descriptors that come along."""

    room: int
    bytes: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)
    is_over: bool = False  # nothing more is sent
    is_deaf: bool = False  # nothing more is heard
    held_until: float = 0.0
    slow_seconds: float = 0.0  # which a piece takes
    readers: list[Task] = field(default_factory=list)
    writers: list[Task] = field(default_factory=list)


class End(PlainChannel):
    """One end of a connection."""

    def __init__(
        self, turns: Turns, incoming: Pipe, outgoing: Pipe, family: socket.AddressFamily
    ) -> None:
        self.turns = turns
        self.family = family
        self.incoming = incoming
        self.outgoing = outgoing
        self.descriptors = []
        self.socket = self  # type: ignore[assignment]
        self._sending = turns.threading.Lock()
        self.stall_seconds = self._wait_seconds = STALL_SECONDS

    def getsockopt(self, *_: int) -> bytes:
        return struct.pack("3i", 1, 1000, 1000)  # whose process is at the other end

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    def wait_at_most(self, seconds: float) -> None:
        self._wait_seconds = min(seconds, STALL_SECONDS)

    def receive_into(self, place: memoryview) -> int:
        pipe, turns = self.incoming, self.turns
        turns.maybe_leave()
        if pipe.slow_seconds:
            turns.wait(None, pipe.slow_seconds)
        if not self.comes_within(self._wait_seconds):
            raise TimeoutError
        if pipe.is_deaf or not pipe.bytes:
            raise Closed
        most = turns.chance.choice((1, 70, 600, 5000, 5000))
        count = min(len(place), len(pipe.bytes), most)
        place[:count] = pipe.bytes[:count]
        del pipe.bytes[:count]
        turns.wake_all(pipe.writers)
        return count

    def receive_with_descriptors(self, place: memoryview) -> int:
        count = self.receive_into(place)
        self.descriptors += self.incoming.descriptors
        self.incoming.descriptors.clear()
        return count

    def comes_within(self, seconds: float) -> bool:
        pipe, turns = self.incoming, self.turns
        until = turns.now + seconds
        while not pipe.is_deaf and (pipe.held_until > turns.now or not (pipe.bytes or pipe.is_over)):
            left = until - turns.now
            if left <= 0:
                return False
            held = pipe.held_until - turns.now
            turns.wait(pipe.readers, min(left, held) if held > 0 else left)
        return True

    @property
    def has_ended(self) -> bool:
        return self.incoming.is_over or self.incoming.is_deaf

    def has_more(self) -> bool:
        return bool(self.incoming.bytes) and self.incoming.held_until <= self.turns.now

    def send(self, parts: Sequence[Bytes], descriptors: Sequence[int] = ()) -> None:
        pipe, turns = self.outgoing, self.turns
        with self._sending:
            until = turns.now + seconds_for(self, parts)
            pipe.descriptors += [os.dup(one) for one in descriptors]
            for part in parts:
                left = memoryview(part)
                while left:
                    turns.maybe_leave()
                    if pipe.is_over or pipe.is_deaf:
                        raise Closed
                    if turns.now > until:
                        raise Breach(Cause.STALLED, "the peer reads too slowly")
                    room = pipe.room - len(pipe.bytes)
                    if room <= 0:
                        if not turns.wait(pipe.writers, self._wait_seconds):
                            raise Breach(Cause.STALLED, "the peer does not read")
                        continue
                    pipe.bytes += left[:room]
                    left = left[room:]
                    turns.wake_all(pipe.readers)

    def send_at_once(self, frame: bytes) -> bool:
        pipe = self.outgoing
        is_whole = pipe.is_over or pipe.is_deaf or pipe.room - len(pipe.bytes) >= len(frame)
        if self._sending.locked() or not is_whole:
            return False
        self.send([frame])
        return True

    def close(self) -> None:
        self.hang_up()
        self.outgoing.is_over = True
        self._tell()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def hang_up(self) -> None:
        self.incoming.is_deaf = True
        self._tell()

    def _tell(self) -> None:
        for pipe in (self.incoming, self.outgoing):
            self.turns.wake_all(pipe.readers)
            self.turns.wake_all(pipe.writers)

    def cut(self, lost: int) -> None:
        """The connection breaks: of what is on its way, so many bytes never come."""
        for pipe in (self.incoming, self.outgoing):
            del pipe.bytes[max(0, len(pipe.bytes) - lost) :]
            pipe.is_over = True
        self._tell()
