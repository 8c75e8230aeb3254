"""Peers that are broken, slow or hostile: each costs its own connection, for a counted reason."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import random
import socket
import struct
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvss_agent.client import Evict, Header, Lost, Miss, NotApplied, ShardClient, Wanted
from kvss_agent.client.connection import AgentConnection, Credentials
from kvss_agent.client.stream import StreamClient
from kvss_agent.data_plane import connection, handshake, server, wire
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Cause
from kvss_agent.data_plane.carrier import TierDone
from kvss_agent.data_plane.channel import PlainChannel
from kvss_agent.data_plane.connection import TIER_REQUESTS_MAX
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.data_plane.wire import Role
from kvss_agent.limits.admission import Places
from kvss_agent.mover import PYTHON
from kvss_agent.shard import seal
from kvss_agent.shard.core import Request, Verb
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.leases import FOREVER
from tests.kvss_agent.integrity import check_integrity
from tests.kvss_agent.plane import (
    DRIVER,
    PAYLOAD,
    READER,
    SECRET,
    TAG,
    Plane,
    column,
    kv,
    place,
    running,
)
from tests.live import wait_until


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with running(tmp_path) as plane:
        plane.add("s")
        plane.add("neighbour")
        yield plane


def channel_of_newest(plane: Plane) -> PlainChannel:
    """Of who has connected last."""
    connections = plane.plane._connections
    channel = connections[max(connections)]._channel
    assert isinstance(channel, PlainChannel)
    return channel


def impatient_line(plane: Plane, role: Role) -> AgentConnection:
    """Once it is connected it may stall for a moment only: in its handshake, and all the others, for as
    long as a busy machine may need."""
    made = line(plane, role)
    channel = channel_of_newest(plane)
    channel.stall_seconds = 0.6
    channel.wait_at_most(math.inf)
    return made


@contextlib.contextmanager
def unharmed(plane: Plane) -> Iterator[None]:
    """A neighbour goes on while something happens, and after it nothing is left over."""
    with plane.client("unix", "neighbour") as shard:
        payload = kv()
        number = shard.evict(0, column("n").key, TAG, 64, payload)
        shard.wait_applied(number)
        wrong: list[object] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                into = place()
                [found] = shard.refill([Wanted(0, column("n", number))], [into])
                if not isinstance(found, Header) or into != payload:
                    wrong.append(found)

        thread = threading.Thread(target=read)
        thread.start()
        before = holdings()
        try:
            yield
            wait_until("only the neighbour is connected", lambda: plane.plane.connections == 2)
            wait_until("nothing is left over", lambda: all(map(le, holdings(), before)))
        finally:
            stop.set()
            thread.join()
        assert wrong == []
    every_slot_works(plane)


def holdings() -> tuple[int, int]:
    """Threads and descriptors."""
    return threading.active_count(), sum(1 for _ in Path("/proc/self/fd").iterdir())


def every_slot_works(plane: Plane) -> None:
    """Nothing is leased or claimed for ever."""
    with plane.client("unix") as shard:
        for slot in range(shard.slots):
            payload, into = kv(), place()
            number = shard.evict(slot, column("w").key, TAG, 64, payload)
            shard.wait_applied(number, 30)
            assert isinstance(shard.refill([Wanted(slot, column("w", number))], [into])[0], Header)
            assert into == payload
            assert shard.delete([slot]) is None
    check_integrity(plane.shards["s"])


class Tier(TierRequests):
    """A tier 2 that has nothing; or that hangs until it is told to go on."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.held: list[Callable[[], None]] = []

    def start(
        self, shard: HostedShard, asked: wire.Tier, slots: tuple[int | Miss, ...], then: TierDone
    ) -> None:
        del shard, slots
        self.held.append(lambda: then(tuple(Miss.ABSENT for _ in asked.columns), ()))
        if self.answers:
            self.go_on()

    def list_columns(
        self, shard: HostedShard, asked: wire.Tier, then: Callable[[wire.Listed | wire.Rejected], None]
    ) -> None:
        del shard
        self.held.append(lambda: then(wire.Listed(asked.request, (), more=False)))
        if self.answers:
            self.go_on()

    @property
    def has_front(self) -> bool:
        return False

    def go_on(self) -> None:
        while self.held:
            self.held.pop(0)()


def connected(plane: Plane) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(plane.unix))  # which waits its turn; with a timeout it would give up at once
    sock.settimeout(60)
    return sock


def line(plane: Plane, role: Role, driver: str = DRIVER) -> AgentConnection:
    return AgentConnection(
        Address(path=str(plane.unix)), "s", Credentials(driver, plane.secrets[driver]), role
    )


def raw(line: AgentConnection) -> socket.socket:
    """Beside the client library: to say what it would never say."""
    assert isinstance(line.channel.socket, socket.socket)
    return line.channel.socket


def test_who_stalls_in_the_middle_of_an_evict_leaves_nothing_of_a_purged_tag(plane: Plane) -> None:
    shard, attacker = plane.shards["s"], line(plane, Role.EVICT)
    frame, [payload] = evict(1, 0)
    with contextlib.closing(attacker.channel.socket):
        raw(attacker).sendall(frame.encode() + bytes(payload)[:1000])
        wait_until("it is being written", lambda: shard.core.is_claimed(0))
        purging = threading.Thread(target=lambda: done.append(shard.purge({TAG})))
        done: list[tuple[int, int]] = []
        purging.start()
        raw(attacker).sendall(bytes(payload)[1000:])
        purging.join()
        assert done == [(1, shard.core.slots)]
        assert seal.tag_of(shard.arena.slot(0)) is None


@contextlib.contextmanager
def purged_amid_a_column(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[socket.socket, bytes]]:
    """Who sends a column whose tag has been purged, by a purge that waits for nobody, and what is to be
    sent yet."""
    monkeypatch.setattr("kvss_agent.shard.hosted.WRITE_SECONDS", 0.0)
    shard, attacker = plane.shards["s"], line(plane, Role.EVICT)
    frame, [payload] = evict(1, 0)
    with contextlib.closing(attacker.channel.socket):
        raw(attacker).sendall(frame.encode() + bytes(payload)[:1000])
        wait_until("it is being written", lambda: seal.tag_of(shard.arena.slot(0)) == TAG)
        assert shard.purge({TAG}) == (1, shard.core.slots)
        yield raw(attacker), bytes(payload)[1000:]


def test_a_column_that_comes_to_an_end_after_its_tag_was_purged_is_none(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = plane.shards["s"]
    with purged_amid_a_column(plane, monkeypatch) as (attacker, rest):
        attacker.sendall(rest)
        wait_until("it is over", lambda: shard.core.applied == 1)
        assert not any(bytes(shard.arena.slot(0)))


def test_of_a_column_that_breaks_off_after_its_tag_was_purged_nothing_stays(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = plane.shards["s"]
    with purged_amid_a_column(plane, monkeypatch) as (attacker, rest):
        attacker.sendall(rest[:1000])
        wait_until("more has come", lambda: any(bytes(shard.arena.slot(0))))
    wait_until("it has left", lambda: shard.state()["writer"] is None)
    assert not any(bytes(shard.arena.slot(0)))


def test_a_column_that_is_purged_while_it_is_sealed_is_a_miss_to_every_reader(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a purge that waits for nobody any more: the header comes over zeros."""
    monkeypatch.setattr("kvss_agent.shard.hosted.WRITE_SECONDS", 0.0)
    shard, is_open_for = plane.shards["s"], seal.is_open_for

    def purged_after(slot: memoryview, sequence: int, tag: bytes) -> bool:
        is_open = is_open_for(slot, sequence, tag)
        assert shard.purge({TAG}) == (1, shard.core.slots)
        return is_open

    with plane.client("unix", "s") as client:
        with monkeypatch.context() as patch:
            patch.setattr(seal, "is_open_for", purged_after)
            number = client.evict(0, *column("one", 1)[:1], TAG, 64, kv())
            client.wait_applied(number)
        expected, into = column("one", number), place()
        assert isinstance(seal.identify(shard.arena.slot(0)[: seal.HEADER_BYTES], expected), Header)
        assert not any(bytes(shard.arena.slot(0)[seal.HEADER_BYTES :]))
        assert seal.verify(shard.arena.slot(0), expected) is Miss.CORRUPT
        assert isinstance(client.refill([Wanted(0, expected)], [into])[0], Miss)


def test_a_purge_waits_for_what_waits_to_be_written(plane: Plane) -> None:
    shard = plane.shards["s"]
    shard.core._claim((0,), 1)
    done: list[tuple[int, int]] = []
    purging = threading.Thread(target=lambda: done.append(shard.purge({TAG})))
    purging.start()
    time.sleep(0.1)
    assert not done
    with shard._lock:
        shard.arena.slot(0)[: seal.HEADER_BYTES] = seal.pack(column("h", 1), 64, 10, 0)
        shard.core._claim((0,), -1)
    purging.join()
    assert done == [(1, shard.core.slots)]


def test_a_welcome_that_lacks_descriptors_keeps_none(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def dup(fd: int) -> int:
        if made:
            raise OSError(errno.EMFILE, "no more")
        made.append(duplicate(fd))
        return made[-1]

    duplicate = os.dup
    monkeypatch.setattr("kvss_agent.shard.hosted.os.dup", dup)
    with pytest.raises(OSError, match="no more"):
        plane.shards["s"].welcome(Role.SHARED)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def last_words(sock: socket.socket) -> bytes:
    """All that the agent still says before it hangs up."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            said += piece
    return said


def evict(first: int, *slots: int, size: int = PAYLOAD) -> tuple[wire.Evict, list[memoryview]]:
    payloads = [kv(size) for _ in slots]
    columns = [
        (slot, seal.pack(column("h", first + n), 64, size, PYTHON.checksum(payloads[n])))
        for n, slot in enumerate(slots)
    ]
    return wire.Evict(first, tuple(columns)), payloads


def talk(sock: socket.socket, said: bytes) -> list[wire.Frame]:
    """Say all of it and hang up on one's own side; the frames that come until the agent hangs up."""
    sending = threading.Thread(target=say, args=(sock, said))  # the agent may stop reading: we read on
    sending.start()
    heard = last_words(sock)
    sending.join()
    reader, frames = wire.FrameReader(), []
    while heard:
        place = reader.want()
        size = min(len(place), len(heard))
        place[:size] = heard[:size]
        heard = heard[size:]
        found = reader.fed(size)
        if isinstance(found, wire.Refilled) and any(found.lengths()):
            reader.expect([memoryview(bytearray(length)) for length in found.lengths() if length])
        if found is not None and not isinstance(found, wire.Filled):
            frames.append(found)
    return frames


def say(sock: socket.socket, said: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)


SLOTS = st.lists(st.sampled_from([0, 1, 7, 8, 2**32 - 1]), min_size=1, max_size=4)
COUNTS = st.sampled_from([0, 1, 2, 5, 2**64 - 1])
WAITS = st.sampled_from([0, 20])
TIER_COLUMNS = st.lists(
    st.builds(wire.TierColumn, st.integers(0, 9), st.just(b"k" * 16), st.just(TAG), COUNTS, COUNTS),
    min_size=1,
    max_size=4,
)
FRAMES = st.one_of(
    st.builds(wire.Refill, st.integers(0, 9), COUNTS, WAITS, SLOTS.map(tuple)),
    st.builds(wire.Delete, st.integers(0, 9), COUNTS, WAITS, SLOTS.map(tuple), st.booleans()),
    st.builds(
        wire.Tier,
        st.integers(0, 9),
        st.sampled_from(wire.TierVerb),
        COUNTS,
        WAITS,
        TIER_COLUMNS.map(tuple),
    ),
    st.builds(wire.Shrunk, COUNTS),
    st.builds(wire.Count, COUNTS),
    st.builds(wire.Proof, st.binary(min_size=32, max_size=32)),
    st.builds(wire.Resized, COUNTS, st.just((1,))),
    st.just(wire.Goodbye()),
)


@st.composite
def conversations(draw: st.DrawFn, role: Role) -> bytes:
    """What a driver in its right mind might send, or nearly."""
    said: list[bytes] = []
    first = 1
    for _ in range(draw(st.integers(1, 5))):
        if role is Role.EVICT and draw(st.integers(0, 9)):
            slots = draw(SLOTS)
            size = draw(st.sampled_from([1, 4096, PAYLOAD, PAYLOAD + 4096]))
            frame, payloads = evict(
                first + draw(st.sampled_from([0, 0, 0, 0, -1, 1])), *slots, size=size
            )
            said.append(b"".join([frame.encode(), *payloads]))
            first += len(slots)
        else:
            said.append(draw(FRAMES).encode())
    return b"".join(said)


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["change", "drop", "insert", "end"]),
        st.integers(0, 700),
        st.binary(min_size=1, max_size=8),
    ),
    max_size=3,
)


def mutated(said: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    for how, at, some in mutations:
        at = min(at, len(said))
        if how == "end":
            said = said[:at]
        else:
            kept = at if how == "insert" else at + len(some)
            said = said[:at] + (b"" if how == "drop" else some) + said[kept:]
    return said


def counted_once(plane: Plane, attack: Callable[[], list[wire.Frame]]) -> list[wire.Frame]:
    """A connection ends with the reason that it is told, or that it broke off; counted once."""
    before = plane.plane.breaches.copy()
    heard = attack()
    wait_until("the attacker is gone", lambda: plane.plane.connections == 2)
    counted = plane.plane.breaches - before
    assert counted.total() <= 1, counted
    told = [frame for frame in heard if isinstance(frame, wire.Error)]
    if told:
        assert counted == Counter({told[0].cause: 1})
    else:
        assert set(counted) <= {Cause.GONE}, counted
    return heard


@pytest.mark.slow
@pytest.mark.parametrize("role", Role)
def test_mutated_conversations_cost_only_their_own_connection(plane: Plane, role: Role) -> None:
    @settings(max_examples=60)
    @given(conversations(role), MUTATIONS)
    def attack(said: bytes, mutations: list[tuple[str, int, bytes]]) -> None:
        attacker = line(plane, role)
        counted_once(plane, lambda: talk(raw(attacker), mutated(said, mutations)))
        attacker.close()

    plane.plane.tier_requests = Tier(answers=True)
    with unharmed(plane), bounded_memory():
        attack()


@pytest.mark.slow
def test_mutated_handshakes_cost_only_their_own_connection(plane: Plane) -> None:
    """Whatever of it is changed, nobody gets in, not even who knows the secret."""

    @settings(max_examples=60)
    @given(st.sampled_from(Role), MUTATIONS)
    def change_hello(role: Role, mutations: list[tuple[str, int, bytes]]) -> None:
        said = handshake.hello(role, DRIVER, "s", versions=(1, 2), software="x").encode()
        with connected(plane) as sock:
            heard = counted_once(plane, lambda: talk(sock, mutated(said, mutations)))
        assert not any(isinstance(frame, wire.Welcome) for frame in heard)

    @settings(max_examples=60)
    @given(st.sampled_from(Role), st.integers(0, wire.PROOF_BYTES - 1), st.integers(1, 255))
    def change_proof(role: Role, at: int, by: int) -> None:
        said = handshake.hello(role, DRIVER, "s", versions=(1, 2), software="x")
        with connected(plane) as sock:
            sock.sendall(said.encode())
            proof = bytearray(handshake.prove(said, challenge(sock), SECRET).encode())
            proof[wire.HEAD_BYTES + at] ^= by
            heard = counted_once(plane, lambda: talk(sock, bytes(proof)))
        assert [frame.cause for frame in heard if isinstance(frame, wire.Error)] == [
            Cause.AUTHENTICATION
        ]

    with unharmed(plane), bounded_memory():
        change_hello()
        change_proof()


def challenge(sock: socket.socket) -> wire.Challenge:
    reader = wire.FrameReader()
    frame = None
    while frame is None:
        frame = reader.fed(sock.recv_into(reader.want()))
    assert isinstance(frame, wire.Challenge)
    return frame


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20


def test_bytes_that_are_no_handshake_are_counted_and_bounded(plane: Plane) -> None:
    dice = random.Random(7)
    before = plane.plane.breaches.total()
    with unharmed(plane), bounded_memory():
        for _ in range(50):
            with connected(plane) as sock, contextlib.suppress(OSError):
                sock.sendall(dice.randbytes(dice.randrange(16, 4000)))
                last_words(sock)
    assert plane.plane.breaches.total() - before == 50


def test_whoever_says_nothing_is_not_waited_for(plane: Plane) -> None:
    with unharmed(plane):
        plane.plane.stall_seconds = 0.6
        with connected(plane) as silent, connected(plane) as half:
            with contextlib.suppress(BrokenPipeError):  # on a busy machine it is over already
                half.sendall(b"\x01")
            assert last_words(silent) == last_words(half) == b""
        plane.plane.stall_seconds = 30
    assert plane.breaches()[Cause.STALLED] == 2


def test_whoever_drips_a_handshake_is_not_waited_for(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = handshake.hello(Role.REFILL, DRIVER, "s", versions=(1, 2), software="").encode()
    with unharmed(plane), monkeypatch.context() as patched:
        patched.setattr(connection, "HANDSHAKE_SECONDS", 0.3)
        with connected(plane) as slow, contextlib.suppress(OSError):
            for byte in hello:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)  # never so slow that it has stalled
    assert plane.breaches() == {Cause.STALLED: 1}


def test_a_driver_that_stops_in_the_middle_of_a_payload_is_cut_off_and_what_was_whole_stays(
    plane: Plane,
) -> None:
    frame, payloads = evict(1, 0, 1, 2)
    with unharmed(plane):
        attacker = impatient_line(plane, Role.EVICT)
        raw(attacker).sendall(frame.encode() + bytes(payloads[0]) + bytes(payloads[1])[:1000])
        wait_until("it is cut off", lambda: Cause.STALLED in plane.breaches())
        attacker.close()
        wait_until("it is gone", lambda: plane.plane.connections == 2)
        assert plane.shards["s"].core.applied == 1
        with plane.client("unix") as shard:
            wanted = [Wanted(slot, column("h", 1)) for slot in range(3)]
            found = shard.refill(wanted, [place() for _ in wanted])
            assert isinstance(found[0], Header)
            assert found[1:] == [Miss.TORN, Miss.TORN]


def test_a_driver_that_breaks_off_in_the_middle_of_a_payload(plane: Plane) -> None:
    frame, payloads = evict(1, 0)
    with unharmed(plane):
        attacker = line(plane, Role.EVICT)
        raw(attacker).sendall(frame.encode() + bytes(payloads[0])[:100])
        attacker.close()
        wait_until("it is counted", lambda: Cause.GONE in plane.breaches())
        assert plane.shards["s"].core.applied == 0


def test_a_peer_that_does_not_read_its_answers_is_cut_off(plane: Plane) -> None:
    with plane.client("unix") as shard:
        shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
    with unharmed(plane):
        lazy = impatient_line(plane, Role.REFILL)
        with contextlib.suppress(OSError):
            for number in range(200):
                raw(lazy).sendall(wire.Refill(number, 0, 0, (0,) * 64).encode())
        wait_until("it is cut off", lambda: Cause.STALLED in plane.breaches())
        lazy.close()


def test_a_slow_reader_holds_a_slot_for_its_lease_and_no_longer(plane: Plane) -> None:
    hosted, ahead = plane.shards["s"], 0.0
    hosted._clock = lambda: time.monotonic() + ahead
    with plane.client("unix") as shard:
        shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
        slow = line(plane, Role.REFILL, READER)
        raw(slow).sendall(wire.Refill(1, 0, 0, (0,) * 64).encode())  # 4 MiB: more than fits a buffer
        wait_until("it reads", lambda: len(hosted.core.leases) > 0)
        number = shard.evict(0, column("b").key, TAG, 64, kv())
        with pytest.raises(NotApplied):
            shard.wait_applied(number, 0.1)
        ahead = plane.plane.lease_seconds
        hosted.tick()
        shard.wait_applied(number, 20)
        slow.close()


def test_who_waits_for_an_evict_waits_no_longer_than_told_while_a_later_one_is_held_up(
    plane: Plane,
) -> None:
    hosted, ahead = plane.shards["s"], 0.0
    hosted._clock = lambda: time.monotonic() + ahead
    with plane.client("unix") as shard, contextlib.closing(line(plane, Role.REFILL, READER)) as slow:
        assert isinstance(shard, StreamClient)
        number = shard.evict(0, column("a").key, TAG, 64, kv())
        shard.wait_applied(number)
        raw(slow).sendall(wire.Refill(1, 0, 0, (0,) * 64).encode())  # 4 MiB: more than fits a buffer
        wait_until("it reads", lambda: len(hosted.core.leases) > 0)
        number = shard.evict(0, column("b").key, TAG, 64, kv())
        later = [Evict(0, column("c").key, TAG, 64, kv())] * 64  # more than fits a buffer, too
        sending = threading.Thread(target=shard.evict_batch, args=(later,))
        sending.start()
        wait_until("they are being sent", shard._evicting.locked)
        with pytest.raises(NotApplied):
            shard.wait_applied(number, 0.01)
        assert sending.is_alive()
        ahead = plane.plane.lease_seconds
        hosted.tick()
        sending.join()
        shard.wait_applied(number, 60)


def test_who_waits_for_an_evict_waits_no_longer_than_told_where_the_agent_says_goodbye(
    plane: Plane,
) -> None:
    hosted, ahead = plane.shards["s"], 0.0
    hosted._clock = lambda: time.monotonic() + ahead
    with plane.client("unix") as shard, contextlib.closing(line(plane, Role.REFILL, READER)) as slow:
        shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
        raw(slow).sendall(wire.Refill(1, 0, 0, (0,) * 64).encode())  # 4 MiB: more than fits a buffer
        wait_until("it reads", lambda: len(hosted.core.leases) > 0)
        number = shard.evict(0, column("b").key, TAG, 64, kv())
        for ours in [one for one in plane.plane._connections.values() if one.driver == DRIVER]:
            ours.send_goodbye()
        with pytest.raises(NotApplied):
            shard.wait_applied(number, 0.1)
        ahead = plane.plane.lease_seconds
        hosted.tick()
        shard.wait_applied(number, 60)


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        (evict(2, 0)[0], Cause.ORDER),
        (evict(1, 0, size=PAYLOAD * 2)[0], Cause.LIMIT),
        (wire.Evict(1, ()), Cause.MALFORMED),
        (wire.Refill(1, 0, 0, (0,)), Cause.UNEXPECTED),
    ],
    ids=["a gap", "too large", "none", "of the other queue"],
)
def test_evicts_that_may_not_be_end_the_connection_with_a_reason(
    plane: Plane, frame: wire.Frame, cause: Cause
) -> None:
    with unharmed(plane):
        driver = line(plane, Role.EVICT)
        driver.send(frame)
        with pytest.raises(Lost) as caught:
            driver.receive()
        assert caught.value.cause is cause
        driver.close()
    assert plane.plane.breaches.total() == 1


@pytest.mark.slow
def test_too_many_connections_are_turned_away_and_nobody_else(plane: Plane) -> None:
    plane.plane.admission.places = Places(strangers_max=4, strangers_per_origin=4)
    with unharmed(plane):
        for wave in range(1, 41):
            crowd = [connected(plane) for _ in range(50)]
            wait_until("most are turned away", partial(turned_away, plane, 44 * wave))
            wait_until("their threads end", lambda: plane.plane.connections <= 6)
            for sock in crowd:
                sock.close()


def turned_away(plane: Plane, least: int) -> bool:
    return plane.plane.breaches[Cause.LIMIT] >= least


def tcp(plane: Plane) -> socket.socket:
    return socket.create_connection(("127.0.0.1", plane.tcp), 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_driver_always_gets_in_while_strangers_hold_all_of_their_places(
    plane: Plane, kind: str
) -> None:
    """As many of them as there used to be places for everybody, over both transports."""
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(connected(plane))
            stack.enter_context(tcp(plane))
        for number in range(1, 21):
            with plane.client(kind) as shard:
                shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
            assert plane.shards["s"].core.applied == number
        places = plane.plane.admission.places
        assert plane.plane.admission.strangers <= places.strangers_max
        wait_until(
            "all the others had to make way",
            lambda: plane.plane.admission.displaced >= 1200 - places.strangers_max,
        )


@pytest.mark.slow
def test_drivers_that_are_connected_stay_while_strangers_come(plane: Plane) -> None:
    with contextlib.ExitStack() as stack, plane.client("tcp") as shard:
        for _ in range(300):
            stack.enter_context(connected(plane))
            stack.enter_context(tcp(plane))
        shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
    assert plane.plane.admission.refused == 0


def test_one_driver_does_not_take_the_places_of_others(plane: Plane) -> None:
    plane.plane.admission.places = Places(proven_max=8, reserved_per_owner=4)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.callback(line(plane, Role.REFILL, READER).close)
        with pytest.raises(Lost, match="limit of connections"):
            line(plane, Role.REFILL, READER)
        assert plane.plane.admission.proven == 4
        with plane.client("unix") as shard:
            shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))


def test_a_stranger_gets_no_memory_for_long_frames(plane: Plane) -> None:
    """Only what HELLO and PROOF may take."""
    frame, payloads = evict(1, *range(8), *range(8))
    with connected(plane) as sock:
        sock.sendall(frame.encode() + bytes(payloads[0]))
        assert b"a body of" in last_words(sock)
    assert plane.breaches() == {Cause.MALFORMED: 1}


def test_connections_that_break_off_at_once_do_not_end_the_listener(plane: Plane) -> None:
    with unharmed(plane):
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", plane.tcp)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with plane.client("tcp") as shard:
        shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))


def test_readers_do_not_lock_the_driver_out(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvss_agent.shard.hosted.OTHERS_MAX", 3)
    with unharmed(plane):
        readers = [line(plane, Role.REFILL, READER) for _ in range(3)]
        with pytest.raises(Lost, match="connections already"):
            line(plane, Role.REFILL, READER)
        with plane.client("unix") as shard:
            shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
        for reader in readers:
            reader.close()


def test_a_driver_that_waits_for_a_reader_is_told_what_is_applied_already(plane: Plane) -> None:
    hosted = plane.shards["s"]
    with unharmed(plane):
        lease = hosted.core.leases.take([1], FOREVER)
        driver = line(plane, Role.EVICT)
        runs = (evict(1, 0), evict(2, 1))
        raw(driver).sendall(b"".join(frame.encode() + payloads[0] for frame, payloads in runs))
        assert driver.receive_a(wire.Count).applied == 1
        hosted.done(lease, None)
        assert driver.receive_a(wire.Count).applied == 2
        driver.close()


def test_a_reader_that_stalls_takes_its_own_delete_of_the_same_slot_with_it(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plane.client("unix") as shard:
        shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
    with unharmed(plane):
        lazy = impatient_line(plane, Role.REFILL)
        channel, hosted = channel_of_newest(plane), plane.shards["s"]
        [reader] = [one for one in hosted._members.values() if one.driver == DRIVER]
        waiting: list[int] = []

        def delete_first(*arguments: Any) -> None:
            """While its thread sends, the delete comes on the way that pulls and others take."""
            monkeypatch.undo()
            request = Request(Verb.DELETE, reader.number, 2, 0, [0], 30)
            hosted.act(lambda core, now: core.ask(request, now), None)
            waiting.append(hosted.core.waiting)
            channel.send(*arguments)

        monkeypatch.setattr(channel, "send", delete_first)
        raw(lazy).sendall(wire.Refill(1, 0, 0, (0,) * 64).encode())
        wait_until("it is cut off", lambda: Cause.STALLED in plane.breaches())
        lazy.close()
    assert waiting == [1]


def test_a_listener_outlives_a_lack_of_threads(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with unharmed(plane):
        with monkeypatch.context() as patched:
            patched.setattr(server, "spawn", no_thread)
            with connected(plane) as unlucky:
                assert last_words(unlucky) == b""
        assert plane.breaches()[Cause.LIMIT] == 1


def test_columns_that_are_thrown_away_take_the_room_of_one(plane: Plane) -> None:
    frame, payloads = evict(1, *[100] * 64)
    with unharmed(plane):
        driver = line(plane, Role.EVICT)
        tracemalloc.start()
        driver.send(frame, payloads)
        assert driver.receive_a(wire.Count).applied == 64
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        driver.close()
    assert peak < 16 * PAYLOAD


def test_an_agent_that_announces_more_than_a_slot_costs_its_own_connection(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 columns it could announce 64 GiB, which a driver would have taken at once."""
    with plane.client("unix") as shard:
        number = shard.evict(0, column("a").key, TAG, 64, kv())
        shard.wait_applied(number)
        wanted = column("a", number)
        lie = seal.pack((wanted.key, TAG, number), 64, seal.PAYLOAD_BYTES_MAX, 0)
        lying = wire.Refilled(1, (lie,)).encode()
        monkeypatch.setattr(wire.Refilled, "encode", lambda _: lying)
        with pytest.raises(Lost, match="larger than its slots"):
            shard.refill([Wanted(0, wanted)], [place()])


@pytest.mark.parametrize(
    ("honest", "lie", "ask"),
    [
        (wire.Refilled, wire.Deleted(1), lambda its: its.refill([Wanted(0, column("a"))], [place()])),
        (wire.Deleted, wire.Tiered(1, ()), lambda its: its.delete([0], scrub=True)),
        (wire.Rejected, wire.Deleted(1), lambda its: its.exists([column("a")])),
        (wire.Rejected, wire.Tiered(1, ()), lambda its: its.purge(TAG)),
    ],
)
def test_an_answer_to_something_else_is_none(
    plane: Plane,
    monkeypatch: pytest.MonkeyPatch,
    honest: type[wire.Frame],
    lie: wire.Frame,
    ask: Callable[[ShardClient], object],
) -> None:
    """A refill had no result for its columns, and a delete was taken to be done."""
    lying = lie.encode()
    with plane.client("unix") as shard:
        shard.requests.connection.features = wire.FEATURES
        monkeypatch.setattr(honest, "encode", lambda _: lying)
        with pytest.raises(Lost):
            ask(shard)


def test_tier_2_that_hangs_holds_a_bounded_number_of_requests(plane: Plane) -> None:
    plane.plane.tier_requests = hanging = Tier(answers=False)
    with unharmed(plane):
        greedy = line(plane, Role.REFILL)
        for number in range(TIER_REQUESTS_MAX + 3):
            greedy.send(exists(number))
        refused = [greedy.receive_a(wire.Rejected) for _ in range(3)]
        assert [turned.request for turned in refused] == [TIER_REQUESTS_MAX + n for n in range(3)]
        hanging.go_on()
        # In any order: what comes while another thread is still sending is sent by a third.
        answers = {greedy.receive_a(wire.Tiered).request for _ in range(TIER_REQUESTS_MAX)}
        assert answers == set(range(TIER_REQUESTS_MAX))
        greedy.send(exists(0))
        wait_until("it is asked", lambda: bool(hanging.held))
        hanging.go_on()
        assert greedy.receive_a(wire.Tiered).request == 0
        greedy.close()


def test_whoever_has_an_answer_of_tier_2_may_ask_for_the_next_at_once(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TIER_REQUESTS_MAX", 1)
    plane.plane.tier_requests = hanging = Tier(answers=False)
    pauses, has_asked = threading.Event(), threading.Event()
    with unharmed(plane):
        driver = line(plane, Role.REFILL)
        send = connection.Connection._has_sent

        def send_and_pause(served: connection.Connection, answer: wire.Frame) -> bool:
            has_sent = send(served, answer)
            pauses.set()
            assert has_asked.wait(60)
            return has_sent

        driver.send(exists(0))
        wait_until("it is asked", lambda: bool(hanging.held))
        monkeypatch.setattr(connection.Connection, "_has_sent", send_and_pause)
        answering = threading.Thread(target=hanging.go_on)
        answering.start()
        assert driver.receive_a(wire.Tiered).request == 0
        assert pauses.wait(60)
        driver.send(exists(1))
        try:
            wait_until("it is asked again", lambda: bool(hanging.held))
        finally:
            has_asked.set()
            answering.join()
        hanging.go_on()
        assert driver.receive_a(wire.Tiered).request == 1
        driver.close()


def exists(number: int) -> wire.Tier:
    return wire.Tier(number, wire.TierVerb.EXISTS, 0, 0, (wire.TierColumn(0, b"k" * 16, TAG),))


def test_answers_that_nobody_reads_do_not_pile_up(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OUTBOX_MAX", 50)
    plane.plane.tier_requests = Tier(answers=True)
    with unharmed(plane):
        lazy = impatient_line(plane, Role.REFILL)
        lazy.send(exists(0))
        assert lazy.receive_a(wire.Tiered).request == 0
        with contextlib.suppress(Lost):
            for number in itertools.count(1):
                lazy.send(exists(number))
        wait_until("it is cut off", lambda: plane.plane.connections == 2)
        lazy.close()
    assert plane.breaches() in ({Cause.LIMIT: 1}, {Cause.STALLED: 1})


def test_what_tier_2_gives_back_late_is_free_again_when_its_driver_has_gone(plane: Plane) -> None:
    plane.plane.tier_requests = hanging = Tier(answers=False)
    with unharmed(plane):
        driver = line(plane, Role.REFILL)
        recalled = tuple(wire.TierColumn(slot, b"k" * 16, TAG) for slot in range(8))
        driver.send(wire.Tier(1, wire.TierVerb.RECALL, 0, 1000, recalled))
        wait_until("it is asked", lambda: bool(hanging.held))
        driver.send(wire.Delete(2, 0, 30_000, (0,)))
        driver.close()
        wait_until("it is gone", lambda: plane.plane.connections == 2)
        hanging.go_on()
    check_integrity(plane.shards["s"])


def test_requests_of_tier_2_and_others_may_have_the_same_number(plane: Plane) -> None:
    plane.plane.tier_requests = Tier(answers=True)
    with unharmed(plane):
        driver = line(plane, Role.REFILL)
        column_ = (wire.TierColumn(0, b"k" * 16, TAG),)
        driver.send(wire.Refill(1, 1, 10_000, (1, 2)))  # which are empty
        driver.send(wire.Tier(1, wire.TierVerb.RECALL, 1, 10_000, column_))
        with plane.client("unix") as shard:
            shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
        heard = {type(driver.receive()) for _ in range(2)}
        assert heard == {wire.Refilled, wire.Tiered}
        driver.close()


def test_requests_beyond_what_may_wait_are_refused(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvss_agent.shard.core.PARKED_MAX", 4)
    with unharmed(plane):
        greedy = line(plane, Role.REFILL)
        for number in range(6):
            greedy.send(wire.Refill(number, 99, 10_000, (0,)))
        answers = [greedy.receive_a(wire.Rejected) for _ in range(2)]
        assert [answer.reason for answer in answers] == [Miss.REFUSED, Miss.REFUSED]
        greedy.close()


def test_drivers_that_race_for_a_shard_have_it_one_after_the_other(plane: Plane) -> None:
    """However many of one driver's processes connect at once, the count has no gap and no fork."""

    def drive() -> None:
        for _ in range(15):
            with contextlib.suppress(Lost), plane.client("unix") as shard:
                for _ in range(3):
                    shard.evict(0, column("a").key, TAG, 64, kv())
                shard.wait_applied(shard.applied)

    with unharmed(plane):
        threads = [threading.Thread(target=drive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    core = plane.shards["s"].core
    assert core.accepted == core.applied


def test_a_shared_count_that_goes_back_costs_the_driver_its_place(plane: Plane) -> None:
    with plane.client("shm") as shard:
        for _ in range(3):
            shard.evict(0, column("a").key, TAG, 64, kv())
        with plane.client("unix", driver=READER, write=False) as reader:
            reader.refill([Wanted(0, column("a", 3))], [place()])
            plane.shards["s"].count.publish(1)
            reader.refill([Wanted(0, column("a", 3))], [place()])
            assert plane.shards["s"].core.applied == 3
        wait_until("the driver is lost", lambda: is_lost(shard))
    assert plane.breaches()[Cause.ORDER] == 1


def is_lost(shard: ShardClient) -> bool:
    try:
        shard.evict(0, column("b").key, TAG, 64, kv())
    except Lost:
        return True
    return False


def test_a_proof_fits_one_conversation_only(plane: Plane) -> None:
    """What was overheard is of no use: the other side's nonce is another."""
    said = handshake.hello(Role.REFILL, DRIVER, "s", versions=(1, 2), software="")
    with connected(plane) as first:
        first.sendall(said.encode())
        proof = handshake.prove(said, challenge(first), SECRET)
        first.sendall(proof.encode())
        assert first.recv(10)
    with connected(plane) as replayed:
        replayed.sendall(said.encode())
        assert replayed.recv(1000)
        replayed.sendall(proof.encode())
        assert b"wrong secret" in last_words(replayed)
    assert plane.breaches()[Cause.AUTHENTICATION] == 1
