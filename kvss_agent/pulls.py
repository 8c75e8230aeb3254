"""Bringing columns over from another agent: the new home of a shard fetches what the old one still has.

The slots come as they lie there, seals and numbers with them, straight into the same slots here. What
has been evicted here meanwhile is newer, and stays. Evicts and refills go first: see `Background`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.client.connection import AgentConnection, Credentials, Lost
from kvss_agent.data_plane import channel as channels
from kvss_agent.data_plane import wire
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.channel import STALL_SECONDS, DiscardBuffer
from kvss_agent.data_plane.wire import Role
from kvss_agent.limits.background import REST_SECONDS_MAX, Background
from kvss_agent.mover import PYTHON
from kvss_agent.shard import seal
from kvss_agent.shard.core import BATCH_MAX, WAIT_SECONDS_MAX, Fill, Reject, Request, Verb
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.own_member import OwnMember
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss

log = logging.getLogger(__name__)

NEWER: Final = "newer"
SOURCE_SECONDS: Final = 5.0  # for the source to apply what is asked for: evicts here wait meanwhile


@dataclass(frozen=True, slots=True)
class Source:
    """Where the columns are now. They have all been written once `after` evicts are applied there."""

    address: Address
    shard: str
    credentials: Credentials
    after: int


@dataclass(slots=True)
class Pull:
    """One pull, as it goes. Read by anybody, written by its own thread."""

    id: str
    shard: str
    total: int
    state: str = "running"  # then "done", "cancelled" or "failed"
    reason: str = ""
    moved: int = 0
    moved_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by Miss, or NEWER
    started_at: float = field(default_factory=time.time)
    finished_at: float | None = None
    cancelled: bool = False
    driver: str = ""  # in whose name
    rest_seconds: float = 0.0  # how long to wait before the next one, since it would only wait here
    _puller: _Puller | None = None

    def cancel(self) -> None:
        """End it soon, whatever it waits for. What has been moved stays."""
        self.cancelled = True
        if self._puller:
            self._puller.member.close(Cause.GONE, "the pull was cancelled")

    def begin(self, puller: _Puller) -> None:
        self._puller = puller
        if self.cancelled:
            self.cancel()

    @property
    def done(self) -> int:
        return self.moved + self.skipped.total()


class _Puller:
    """Carries out a pull, as a member of the shard that waits for its own effects."""

    def __init__(self, pull: Pull, shard: HostedShard, source: Source, background: Background) -> None:
        self.member = OwnMember(shard, shard.identity.driver, self._hang_up)
        self._pull, self._shard, self._source = pull, shard, source
        self._background = background
        self._ended = threading.Event()
        self._line: AgentConnection | None = None  # to the source

    def _hang_up(self) -> None:
        self._ended.set()
        if self._line:
            channels.hang_up(self._line.channel.socket)

    def run(self, slots: Sequence[int]) -> None:
        """Raises Lost and Breach."""
        source, shard = self._source, self._shard
        with self.member.attached():
            line = self._line = AgentConnection(
                source.address, source.shard, source.credentials, Role.REFILL
            )
            try:
                if self.member.closed:
                    raise self.member.closed
                if line.welcome.slot_bytes != shard.identity.slot_bytes:
                    raise Lost("the slots of the other agent have another size")
                at, request = 0, 0
                while at < len(slots):
                    self._ended.wait(self._background.rest(time.monotonic()))
                    if self.member.closed:
                        raise self.member.closed
                    request += 1
                    fitting = self._background.piece() // shard.identity.slot_bytes
                    batch = slots[at : at + min(BATCH_MAX, max(1, fitting))]
                    self._fetch(line, request, batch)
                    at += len(batch)
            finally:
                line.close()

    def _fetch(self, line: AgentConnection, request: int, slots: Sequence[int]) -> None:
        member, purges = self.member, self._shard.purges
        effect = member.ask(Request(Verb.FILL, member.number, request, 0, slots, WAIT_SECONDS_MAX))
        if isinstance(effect, Reject):
            self._pull.skipped[effect.reason] += len(slots)
            return
        if not isinstance(effect, Fill):
            raise TypeError(f"a fill was answered by {effect}")
        try:
            self._receive(line, request, slots, effect, purges)
        finally:
            self._shard.done(effect.lease, self.member)

    def _receive(
        self, line: AgentConnection, request: int, slots: Sequence[int], effect: Fill, purges: int
    ) -> None:
        """`purges`: so many had begun here before the source was asked."""
        pull, arena = self._pull, self._shard.arena
        wait_ms = int(SOURCE_SECONDS * 1000)
        line.send(wire.Refill(request, self._source.after, wait_ms, tuple(slots)))
        deadline = time.monotonic() + SOURCE_SECONDS + STALL_SECONDS
        answer = line.receive(deadline)
        while isinstance(answer, wire.Goodbye):
            answer = line.receive(deadline)
        if isinstance(answer, wire.Rejected):
            pull.skipped[answer.reason] += len(slots)
            return
        if not isinstance(answer, wire.Refilled) or len(answer.headers) != len(slots):
            raise Lost(f"{line.address} sent {type(answer).__name__}, which is not allowed here")
        if self._shard.purges != purges:  # the source may have sent this before its own
            raise Lost("the shard was purged meanwhile")
        waste = DiscardBuffer()
        places: list[memoryview] = []
        memories: list[tuple[memoryview, Header] | None] = []
        for slot, raw in zip(effect.slots, answer.headers, strict=True):
            header = seal.read(raw)
            if isinstance(header, Miss):
                pull.skipped[header] += 1
                continue
            if header.length > arena.payload_bytes_max:  # as large as those of the source
                raise Lost(f"{line.address} announces a payload that is larger than its slots")
            memory = None if isinstance(slot, Miss) else arena.slot(slot)
            if memory is None:
                pull.skipped[Miss.REFUSED] += 1
            elif seal.is_newer(memory, 0):
                pull.skipped[NEWER] += 1
            else:
                seal.open_slot_for(memory, header.sequence, header.tag)
                places.append(memory[HEADER_BYTES : HEADER_BYTES + header.length])
                memories.append((memory, header))
                continue
            places.append(waste.of(header.length))
            memories.append(None)
        arrived, began = -1, time.monotonic()
        try:
            for piece in line.receive_pieces(places):
                if not piece.last:
                    continue
                arrived = piece.place
                if found := memories[arrived]:
                    self._seal(*found, places[arrived])
        finally:
            for found in memories[arrived + 1 :]:
                if found:
                    seal.clear(found[0], found[1].sequence, scrub=True)
        now, size = time.monotonic(), sum(len(place) for place in places)
        self._background.moved(size, now - began, now)

    def _seal(self, memory: memoryview, header: Header, payload: memoryview) -> None:
        pull = self._pull
        is_whole = PYTHON.checksum(payload) == header.checksum
        column = Column(header.key, header.tag, header.sequence)
        found = seal.close_slot(memory, column, header if is_whole else Miss.TORN)
        if isinstance(found, Miss):
            # Also where it was purged meanwhile: the rest of its payload has come since.
            seal.clear(memory, header.sequence, scrub=True)
            pull.skipped[found] += 1
            return
        pull.moved += 1
        pull.moved_bytes += header.length


def run_pull(
    pull: Pull,
    shard: HostedShard,
    source: Source,
    slots: Sequence[int],
    background: Background,
) -> None:
    """Fetch these slots, in this order. Ends with the pull's state; raises nothing."""
    puller = _Puller(pull, shard, source, background)
    pull.begin(puller)
    try:
        puller.run(slots)
        pull.state = "done"
    except (Lost, Breach) as error:
        pull.state, pull.reason = "failed", str(puller.member.closed or error)
    except Exception as error:
        log.exception("Pull %s of %s failed", pull.id, pull.shard)
        pull.state, pull.reason = "failed", repr(error)
    finally:
        if pull.cancelled and pull.state == "failed":
            pull.state = "cancelled"
        pull.rest_seconds = min(REST_SECONDS_MAX, background.rest(time.monotonic()))
        pull.finished_at = time.time()
