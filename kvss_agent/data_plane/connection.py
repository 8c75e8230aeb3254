"""One connection of the data plane, from its first byte to its last.

Its thread reads frames, asks the core, and moves bytes itself. Effects that other connections cause
wait in an outbox for a second thread, which is started when it is first needed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, cast

from kvss_agent.data_plane import channel as channels
from kvss_agent.data_plane import handshake, wire
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.carrier import Carrier
from kvss_agent.data_plane.channel import AnyChannel, Closed, TlsChannel
from kvss_agent.data_plane.latencies import Latencies
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.data_plane.wire import Role, TierAnswer, TierVerb
from kvss_agent.limits.admission import Admission
from kvss_agent.mover import zero
from kvss_agent.security.certificates import Role as PeerRole
from kvss_agent.security.certificates import peer_of_connection
from kvss_agent.shard import seal
from kvss_agent.shard.core import Clear, Fill, Receive, Reject, Request, Serve, Verb
from kvss_agent.shard.hosted import HostedShard, Mine, SlotLimit
from kvss_agent.shard.seal import Miss

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS: Final = 5.0  # from connecting to PROOF
_SPILLS: Final = (TierVerb.SPILL, TierVerb.SPILL_REDUNDANT)  # they read slots
_FILLS: Final = (TierVerb.RECALL, TierVerb.BORROW)  # they write to slots
TIER_REQUESTS_MAX: Final = 256  # requests of one connection for tier 2 that are not answered
OUTBOX_MAX: Final = 4096  # answers that wait to be sent: a few times what a shard lets wait
UNREPORTED_MAX: Final = 8  # fewer than a driver may have on its way


class Plane(Protocol):
    """What a connection needs of its data plane: `server.DataPlane`."""

    shards: Mapping[str, HostedShard]
    secrets: Mapping[str, bytes]
    keys: Mapping[str, str]
    tier_requests: TierRequests | None
    borrowing: Carrier | None
    versions: tuple[int, int]
    lease_seconds: float
    breaches: Counter[str]
    admission: Admission[Connection]

    def latencies_of(self, shard: str) -> Latencies: ...
    def remove(self, connection: Connection) -> None: ...


class Connection:
    """One connection, from its first byte to its last."""

    def __init__(self, plane: Plane, number: int, channel: AnyChannel) -> None:
        self.plane = plane
        self.number = number
        self.driver = ""
        self.left = threading.Event()
        self._channel = channel
        self._reader = wire.FrameReader(wire.HANDSHAKE_BODY_BYTES_MAX)
        self._role: Role | None = None
        self._welcomed = False  # nothing may be said before WELCOME
        self._closing: Breach | None = None
        self._outbox: SimpleQueue[Mine | SlotLimit | wire.Frame | None] = SimpleQueue()
        self._helper: threading.Thread | None = None
        self._start_helper = threading.Lock()
        self._tier_requests: dict[int, wire.Tier] = {}
        self._received = 0  # columns of the run that is being received that are in their slots
        self._counted = 0  # evicts that are applied, as far as this connection knows
        self._unreported = 0  # runs that are applied, and whose driver has not been told
        self._discarded = channels.DiscardBuffer()

    # What others call

    def post(self, what: Mine | SlotLimit | wire.Frame) -> None:
        """To be done by a thread of this connection's own."""
        self._outbox.put(what)
        if self.left.is_set():
            self._release_posted()
        elif self._welcomed and self._role is not Role.EVICT:  # which looks into it by itself
            self._help()

    def close(self, cause: Cause, sentence: str) -> None:
        """End the connection, and tell the peer why if it listens."""
        self._closing = self._closing or Breach(cause, sentence)
        channels.hang_up(self._channel.socket)
        self._outbox.put(None)

    def send_goodbye(self) -> None:
        """Ask the peer to leave when it has finished."""
        with contextlib.suppress(Breach, Closed):
            self._send(wire.Goodbye())

    # Its life

    def run(self) -> None:
        shard: HostedShard | None = None
        try:
            shard = self._shake_hands()
            self._serve(shard)
        except Breach as breach:
            self._send_error(self._closing or breach)
        except Closed:
            if self._closing:
                self._send_error(self._closing)
            elif not self._reader.between_frames:
                self.plane.breaches[Cause.GONE] += 1
        except Exception:
            log.exception("A connection failed")
            self._send_error(Breach(Cause.GONE, "internal error of the agent; see its log"))
        finally:
            self._outbox.put(None)
            self._channel.close()
            if self._helper:
                self._helper.join()
            if shard:
                self._latencies.this_thread_ends()
                shard.detach(self, self._received)
                self._release_posted()
            self.left.set()
            self.plane.remove(self)

    def _release_posted(self) -> None:
        """Release the slots of what was posted and is not carried out any more."""
        with contextlib.suppress(Empty):
            while True:
                what = self._outbox.get_nowait()
                if isinstance(what, Serve | Clear | Fill):
                    self._shard.done(what.lease, None)
        self._outbox.put(None)  # the second thread may have begun this late

    def _shake_hands(self) -> HostedShard:
        channel = self._channel
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        if isinstance(channel, TlsChannel):
            channel.shake_hands(deadline)
        said = channels.receive(channel, self._reader, deadline=deadline)
        if not isinstance(said, wire.Hello):
            raise Breach(Cause.UNEXPECTED, "a connection begins with HELLO")
        version = handshake.agree(said, self.plane.versions)
        secret: bytes | None = None
        if not isinstance(channel, TlsChannel) or self._is_other_agent(channel, said):
            secret = self.plane.secrets.get(said.driver)
            if secret is None:
                raise Breach(Cause.AUTHENTICATION, "unknown driver or wrong secret")
        given = handshake.challenge(said, secret, version=version, features=self._features(said))
        self._send(given)
        proof = channels.receive(channel, self._reader, deadline=deadline)
        if not isinstance(proof, wire.Proof):
            raise Breach(Cause.UNEXPECTED, "after CHALLENGE comes PROOF")
        handshake.check(said, given, proof, secret)
        if not self.plane.admission.prove(self, said.driver):
            raise self._closing or Breach(
                Cause.LIMIT, "this driver has reached its limit of connections"
            )
        self._reader = wire.FrameReader()
        channel.wait_at_most(math.inf)
        return self._enter(said, version)

    def _is_other_agent(self, channel: TlsChannel, said: wire.Hello) -> bool:
        """Whether it has shown the certificate of another agent, which fetches what a driver has here,
        or stores fragments, and has to know its secret. A breach for a certificate that is neither its
        nor that."""
        peer = peer_of_connection(channel.socket)
        if peer is None:  # not of a console's authority: a driver is known by its common name
            if said.driver not in common_names(channel.socket):
                raise Breach(Cause.AUTHENTICATION, "the certificate belongs to another driver")
            return False
        shard = self.plane.shards.get(said.shard)
        may_write = said.role is Role.EVICT and shard and shard.identity.is_for_fragments
        if peer.role is PeerRole.NODE and (said.role is Role.REFILL or may_write):
            return True
        if peer.role is not PeerRole.DRIVER or peer.name != said.driver:
            raise Breach(Cause.AUTHENTICATION, "the certificate belongs to another driver")
        if self.plane.keys.get(said.driver, peer.key) != peer.key:
            raise Breach(Cause.AUTHENTICATION, "the key of this driver has changed")
        return False

    def _enter(self, said: wire.Hello, version: int) -> HostedShard:
        shard = self.plane.shards.get(said.shard)
        if not shard:
            # Whoever is told that it is absent takes it that nothing of it will come to light here.
            unsettled = self.plane.tier_requests.unsettled if self.plane.tier_requests else ""
            cause = Cause.BUSY if unsettled else Cause.ABSENT
            raise Breach(cause, f"there is no shard {said.shard} here{unsettled}")
        identity = shard.identity
        may_read = said.driver in shard.readers and said.role is Role.REFILL
        if said.driver != identity.driver and not may_read:
            raise Breach(Cause.AUTHENTICATION, f"{said.driver} may not use this shard in this role")
        if said.role is Role.SHARED and not self._may_share:
            raise Breach(Cause.UNEXPECTED, "an arena is shared over a Unix socket only")
        self.driver, self._role, self._version = said.driver, said.role, version
        self._may_change = said.driver == identity.driver
        self._latencies = self.plane.latencies_of(identity.name)
        shard.attach(self, said.role)
        self._shard = shard
        self._latencies.count_this_thread()
        try:
            welcome, descriptors = shard.welcome(said.role)
            self._send_with(welcome, descriptors)
            self._welcomed = True
            if not self._outbox.empty() and said.role is not Role.EVICT:
                self._help()
        except BaseException:
            self._latencies.this_thread_ends()
            shard.detach(self)
            raise
        return shard

    @property
    def _may_share(self) -> bool:
        return self._channel.socket.family == socket.AF_UNIX

    def _features(self, said: wire.Hello) -> int:
        features = wire.Feature.SCRUB
        if self._may_share:
            features |= wire.Feature.SHARED
        if self.plane.tier_requests:
            features |= wire.Feature.TIER | wire.Feature.PURGE | wire.Feature.ENCRYPT
            features |= wire.Feature.REDUNDANCY | wire.Feature.FLUSH
            if self.plane.tier_requests.has_front:
                features |= wire.Feature.FRONT
        if self.plane.borrowing:
            features |= wire.Feature.BORROW
        return features & said.features

    def _serve(self, shard: HostedShard) -> None:
        while True:
            frame = channels.receive(self._channel, self._reader, patient=True)
            if self._closing:
                raise self._closing
            if self._outbox.qsize() > OUTBOX_MAX:
                raise Breach(Cause.LIMIT, "too many answers are waiting to be read")
            match self._role, frame:
                case Role.EVICT, wire.Evict():
                    self._take(shard, frame)
                case Role.REFILL, wire.Refill():
                    self._ask(Verb.REFILL, frame, frame.request, frame.slots)
                case Role.REFILL, wire.Delete() if self._may_change:
                    self._ask(Verb.DELETE, frame, frame.request, frame.slots, scrub=frame.scrub)
                case Role.REFILL, wire.Tier() if self._may_change:
                    self._tier(frame)
                case Role.SHARED, wire.Shrunk():
                    shard.shrunk(frame.slots)
                case _:
                    raise Breach(Cause.UNEXPECTED, f"{type(frame).__name__} is not allowed here")

    # Evicts

    def _take(self, shard: HostedShard, run: wire.Evict) -> None:
        began = time.perf_counter()
        headers = run.headers()
        if max(header.length for header in headers) > shard.arena.payload_bytes_max:
            raise Breach(Cause.LIMIT, "a payload is larger than a slot")
        slots = [slot for slot, _ in run.columns]
        mine = shard.act(lambda core, now: core.evict(self.number, run.first, slots, now), self)
        receive = mine[0] if mine else self._wait_for_turn()
        if not isinstance(receive, Receive):
            raise TypeError(f"an evict was answered by {receive}")
        places: list[memoryview] = []
        views: list[memoryview | None] = []
        for sequence, slot, header in zip(self._sequences(run), receive.slots, headers, strict=True):
            view = None if slot is None else shard.arena.slot(slot)
            views.append(view)
            if view is None:
                places.append(self._discarded.of(header.length))
            else:
                seal.open_slot_for(view, sequence, header.tag)
                places.append(view[seal.HEADER_BYTES : seal.HEADER_BYTES + header.length])
        self._received = 0
        try:
            for piece in channels.receive_pieces(self._channel, self._reader, places, whole=True):
                if not piece.last:
                    continue
                view = views[piece.place]
                if view and seal.is_open_for(view, run.first + piece.place, headers[piece.place].tag):
                    # A purge that waits no more may empty the slot just now: its reader gets a miss.
                    view[: seal.HEADER_BYTES] = run.columns[piece.place][1]
                else:
                    _empty_if_purged(view)
                self._received = piece.place + 1
        except BaseException:
            for view in views[self._received :]:
                _empty_if_purged(view)
            raise
        self._received, columns = 0, self._received
        shard.act(lambda core, now: core.received(self.number, now), self)
        size = sum(header.length for header in headers)
        self._latencies.record_evicts(time.perf_counter() - began, columns, size)
        self._report_count(run.first + columns - 1)

    def _report_count(self, count: int) -> None:
        """A driver that has the next run on its way already can wait: telling it costs as much as a
        small column."""
        self._counted = count
        self._unreported += 1
        if self._version < 2 or self._unreported >= UNREPORTED_MAX or not self._channel.has_more():
            self._send_count()

    def _send_count(self) -> None:
        self._unreported = 0
        self._send(wire.Count(self._counted))

    @staticmethod
    def _sequences(run: wire.Evict) -> Iterable[int]:
        return range(run.first, run.first + len(run.columns))

    def _wait_for_turn(self) -> Mine | SlotLimit | wire.Frame:
        """Somebody reads a slot that this run writes to. This is the back-pressure."""
        if self._unreported:
            self._send_count()
        while True:
            what = self._outbox.get()
            if what is None:
                raise self._closing or Closed
            if isinstance(what, Receive):
                return what

    # Refills, deletes, tier 2

    def _ask(
        self,
        verb: Verb,
        asked: wire.Refill | wire.Delete | wire.Tier,
        number: int,
        slots: Sequence[int],
        *,
        scrub: bool = False,
    ) -> None:
        """Give the core a request, and carry out what it wants done now."""
        wait, lease = asked.wait_ms / 1000, self.plane.lease_seconds
        request = Request(verb, self.number, number, asked.after, slots, wait, lease, scrub)
        self._do(self._shard.act(lambda core, now: core.ask(request, now), self))

    def _tier(self, asked: wire.Tier) -> None:
        if not self._carrier_of(asked) or len(self._tier_requests) >= TIER_REQUESTS_MAX:
            self._send(wire.Rejected(asked.request, Miss.REFUSED))
            return
        request = _apart(asked.request)
        if request in self._tier_requests:
            raise Breach(Cause.UNEXPECTED, f"request {asked.request} is running already")
        self._tier_requests[request] = asked
        if asked.verb not in (*_SPILLS, *_FILLS):
            self._start_tier_request(asked, tuple(Miss.ABSENT for _ in asked.columns), None)
            return
        verb = Verb.REFILL if asked.verb in _SPILLS else Verb.FILL
        self._ask(verb, asked, request, [column.slot for column in asked.columns])

    def _do(self, effects: Iterable[Mine]) -> None:
        """Carry out what the core wants done, and what that leads to."""
        todo = deque(effects)
        effect: Mine | None = None
        try:
            while todo:
                effect = todo.popleft()
                self._do_one(effect, todo)
        except BaseException:  # nobody will do the rest: its slots are free again
            for left in (effect, *todo):
                if isinstance(left, Serve | Clear | Fill):
                    self._shard.done(left.lease, None)
            raise

    def _do_one(self, effect: Mine, todo: deque[Mine]) -> None:
        match effect:
            case Reject(_, request, reason):
                asked = self._tier_requests.pop(request, None)
                self._send(wire.Rejected(asked.request if asked else request, reason))
            case Serve() | Fill() if effect.request < 0:
                self._start_tier_request(self._tier_requests[effect.request], effect.slots, effect.lease)
            case Serve():
                self._answer(effect)
                todo += self._shard.done(effect.lease, self)
            case Clear():
                for slot in effect.slots:
                    memory = self._shard.arena.slot(slot)
                    seal.clear(memory, effect.up_to, effect.last, scrub=effect.scrub)
                todo += self._shard.done(effect.lease, self)
                self._send(wire.Deleted(effect.request))
            case _:
                raise TypeError(f"a reader got {effect}")

    def _start_tier_request(
        self, asked: wire.Tier, slots: tuple[int | Miss, ...], lease: int | None
    ) -> None:
        own_thread = threading.get_ident()

        def then(answers: tuple[TierAnswer | Miss, ...], notes: tuple[int, ...] = ()) -> None:
            if lease is not None:
                if asked.verb in _FILLS and self.left.is_set():
                    self._shard.empty(slots, asked.after)  # nobody knows that they have come
                for more in self._shard.done(lease, self):
                    self.post(more)
            answered(wire.Tiered(asked.request, answers, notes))

        def answered(answer: wire.Frame) -> None:
            del self._tier_requests[_apart(asked.request)]  # first: then the next one may come
            if threading.get_ident() == own_thread:
                self._send(answer)
            elif not self._has_sent(answer):  # this thread must not wait for the peer
                self.post(answer)

        if asked.verb is TierVerb.LIST and self.plane.tier_requests:
            self.plane.tier_requests.list_columns(self._shard, asked, answered)
            return
        carrier = self._carrier_of(asked)
        assert carrier  # noqa: S101 - it was there when the request was accepted
        carrier.start(self._shard, asked, slots, then)

    def _carrier_of(self, asked: wire.Tier) -> Carrier | None:
        return self.plane.borrowing if asked.verb is TierVerb.BORROW else self.plane.tier_requests

    def _answer(self, serve: Serve) -> None:
        """Send what lies in the slots, as it lies there: it is the reader who checks seals."""
        began = time.perf_counter()
        headers: list[bytes] = []
        payloads: list[memoryview] = []
        for slot in serve.slots:
            raw, payload = self._look_into(slot)
            headers.append(raw)
            payloads += payload
        self._send(wire.Refilled(serve.request, tuple(headers)), payloads)
        size = sum(map(len, payloads))
        self._latencies.record_refills(time.perf_counter() - began, len(headers), size)

    def _look_into(self, slot: int | Miss) -> tuple[bytes, list[memoryview]]:
        if isinstance(slot, int):
            try:
                view = self._shard.arena.slot(slot)
            except IndexError:  # taken away meanwhile: its lease had run out
                slot = Miss.ABSENT
        if isinstance(slot, Miss):
            return (seal.OPEN_HEADER if slot is Miss.TORN else seal.NO_HEADER), []
        raw = bytes(view[: seal.HEADER_BYTES])
        header = seal.read(raw)
        payload = None if isinstance(header, Miss) else seal.payload_of(view, header)
        if payload is None:
            return (raw if isinstance(header, Miss) else seal.OPEN_HEADER), []
        return raw, [payload]

    # Sending

    def _send(self, frame: wire.Frame, payloads: Iterable[memoryview] = ()) -> None:
        self._channel.send([frame.encode(), *payloads])

    def _has_sent(self, answer: wire.Frame) -> bool:
        """Whether an answer could be sent without waiting for anybody. If the peer is gone, the second
        thread will find out as well."""
        try:
            return self._channel.send_at_once(answer.encode())
        except (Breach, Closed):
            return False

    def _send_with(self, frame: wire.Frame, descriptors: list[int]) -> None:
        try:
            self._channel.send([frame.encode()], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _help(self) -> None:
        with self._start_helper:
            if not self._helper:
                self._helper = spawn(self._work_off, name=f"outbox {self.number}")

    def _work_off(self) -> None:
        """The second thread: does what others have posted."""
        self._latencies.count_this_thread()
        try:
            self._work()
        finally:
            self._latencies.this_thread_ends()

    def _work(self) -> None:
        while (what := self._outbox.get()) is not None:
            try:
                if isinstance(what, SlotLimit):
                    extents, descriptors = self._shard.memory()
                    self._send_with(wire.Resized(what.slots, extents), descriptors)
                elif isinstance(what, wire.Frame):
                    self._send(what)
                else:
                    self._do([what])
            except Closed:
                return
            except Breach as breach:
                self.close(breach.cause, str(breach))
                return
            except Exception:
                log.exception("A connection failed")
                self.close(Cause.GONE, "internal error of the agent; see its log")
                return

    def _send_error(self, breach: Breach) -> None:
        """Count why this connection ends, and say so if the peer still listens."""
        self.plane.breaches[breach.cause] += 1
        log.info(
            "Connection %d of %s ends: %s", self.number, self.driver or "an unauthenticated peer", breach
        )
        if breach.cause is not Cause.STALLED:
            with contextlib.suppress(Breach, Closed):
                self._send(wire.Error(breach.cause, str(breach)))


def _apart(request: int) -> int:
    """By which number the core knows a request for tier 2: never that of a refill or delete."""
    return -1 - request


def _empty_if_purged(slot: memoryview | None) -> None:
    """Overwrite what has come into a slot since its tag was purged: it has no header any more."""
    if slot is not None and seal.tag_of(slot) is None:
        zero(slot)


def common_names(sock: ssl.SSLSocket) -> set[str]:
    """The names that the peer's certificate gives: common name and DNS names."""
    certificate = cast("dict[str, Any]", sock.getpeercert() or {})
    subject = certificate.get("subject", ())
    names = {value for part in subject for key, value in part if key == "commonName"}
    return names | {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}


def spawn(target: Callable[..., None], *args: object, name: str) -> threading.Thread:
    """A thread that does not keep the process alive."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread
