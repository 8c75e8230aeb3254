"""Peers that are broken, slow or hostile: each costs its own connection, for a counted reason."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent import handshake, seal, serving, wire
from kvss_agent.breach import Cause
from kvss_agent.client import Header, Lost, Miss, ShardClient, Wanted
from kvss_agent.client.line import Address, Credentials, Line
from kvss_agent.mover import PYTHON
from kvss_agent.wire import Role
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
    with running(tmp_path, stall_seconds=0.3, lease_seconds=0.5) as plane:
        plane.add("s")
        plane.add("neighbour")
        yield plane


@contextlib.contextmanager
def unharmed(plane: Plane) -> Iterator[None]:
    """A neighbour goes on while something happens, and after it nothing is left over."""
    with plane.client("unix", "neighbour") as shard:
        payload = kv()
        number = shard.evict(0, column("n").key, TAG, 64, payload)
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
        try:
            yield
            wait_until("only the neighbour is connected", lambda: plane.plane.connections == 2)
        finally:
            stop.set()
            thread.join()
        assert wrong == []
    every_slot_works(plane)


def every_slot_works(plane: Plane) -> None:
    """Nothing is leased or claimed for ever."""
    with plane.client("unix") as shard:
        for slot in range(shard.slots):
            payload, into = kv(), place()
            number = shard.evict(slot, column("w").key, TAG, 64, payload)
            shard.wait_applied(number, 5)
            assert isinstance(shard.refill([Wanted(slot, column("w", number))], [into])[0], Header)
            assert into == payload
            assert shard.delete([slot]) is None
    plane.shards["s"].check_integrity()


def connected(plane: Plane) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(str(plane.unix))
    return sock


def line(plane: Plane, role: Role, driver: str = DRIVER) -> Line:
    return Line(Address(path=str(plane.unix)), "s", Credentials(driver, plane.secrets[driver]), role)


def raw(line: Line) -> socket.socket:
    """Beside the client library: to say what it would never say."""
    assert isinstance(line.channel.socket, socket.socket)
    return line.channel.socket


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


def conversation(role: Role, plane: Plane) -> list[bytes]:
    """What a driver in its right mind might send, as frames."""
    if role is Role.EVICT:
        return [
            b"".join([frame.encode(), *payloads])
            for frame, payloads in (evict(1, 0), evict(2, 1, 2), evict(4, 3))
        ]
    frames: list[wire.Frame] = [
        wire.Refill(1, 0, 50, (0, 1, 2)),
        wire.Delete(2, 0, 50, (1,), scrub=True),
        wire.Refill(3, 9, 50, (0,)),
        wire.Tier(4, wire.TierVerb.EXISTS, 0, 0, (wire.TierColumn(0, b"k" * 16, TAG),)),
        wire.Shrunk(3),
    ]
    del plane
    return [frame.encode() for frame in frames]


@pytest.mark.parametrize("role", Role)
def test_mutated_conversations_cost_only_their_own_connection(plane: Plane, role: Role) -> None:
    dice = random.Random(int(role))
    with unharmed(plane):
        for _ in range(40):
            mutated = bytearray(b"".join(conversation(role, plane)))
            for _ in range(dice.randint(1, 6)):
                at = dice.randrange(min(len(mutated), 600))
                mutated[at] = dice.randrange(256)
            with contextlib.suppress(Lost):
                attacker = line(plane, role)
                with contextlib.suppress(OSError):
                    raw(attacker).sendall(mutated[: dice.randrange(len(mutated))])
                attacker.close()
            wait_until("the attacker is gone", lambda: plane.plane.connections == 2)


def test_bytes_that_are_no_handshake_are_counted_and_bounded(plane: Plane) -> None:
    dice = random.Random(7)
    before = plane.plane.breaches.total()
    with unharmed(plane):
        tracemalloc.start()
        for _ in range(50):
            with connected(plane) as sock, contextlib.suppress(OSError):
                sock.sendall(dice.randbytes(dice.randrange(16, 4000)))
                last_words(sock)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 20 << 20
    assert plane.plane.breaches.total() - before == 50


def test_whoever_says_nothing_is_not_waited_for(plane: Plane) -> None:
    with unharmed(plane), connected(plane) as silent, connected(plane) as half:
        half.sendall(b"\x01")
        assert last_words(silent) == last_words(half) == b""
    assert plane.breaches()[Cause.STALLED] == 2


def test_a_driver_that_stops_in_the_middle_of_a_payload_is_cut_off_and_what_was_whole_stays(
    plane: Plane,
) -> None:
    frame, payloads = evict(1, 0, 1, 2)
    with unharmed(plane):
        attacker = line(plane, Role.EVICT)
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
        lazy = line(plane, Role.REFILL)
        with contextlib.suppress(OSError):
            for number in range(200):
                raw(lazy).sendall(wire.Refill(number, 0, 0, (0,) * 64).encode())
        wait_until("it is cut off", lambda: Cause.STALLED in plane.breaches())
        lazy.close()


def test_a_slow_reader_holds_a_slot_for_its_lease_and_no_longer(plane: Plane) -> None:
    with plane.client("unix") as shard:
        shard.wait_applied(shard.evict(0, column("a").key, TAG, 64, kv()))
        slow = line(plane, Role.REFILL, READER)
        raw(slow).sendall(wire.Refill(1, 0, 0, (0,) * 64).encode())  # 4 MiB: more than fits a buffer
        wait_until("it reads", lambda: len(plane.shards["s"].core.leases) > 0)
        began = time.monotonic()
        shard.wait_applied(shard.evict(0, column("b").key, TAG, 64, kv()), 5)
        assert time.monotonic() - began < 3
        slow.close()


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


def test_too_many_connections_are_turned_away_and_nobody_else(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 6)
    with unharmed(plane):
        crowd = [connected(plane) for _ in range(30)]
        wait_until("some are turned away", lambda: plane.breaches().get(Cause.LIMIT, 0) >= 26)
        for sock in crowd:
            sock.close()
    assert plane.breaches()[Cause.LIMIT] == 26


def test_requests_beyond_what_may_wait_are_refused(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvss_agent.core.PARKED_MAX", 4)
    with unharmed(plane):
        greedy = line(plane, Role.REFILL)
        for number in range(6):
            greedy.send(wire.Refill(number, 99, 10_000, (0,)))
        answers = [greedy.receive_a(wire.Turned) for _ in range(2)]
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
        got = wire.FrameReader()
        frame = None
        while frame is None:
            frame = got.fed(first.recv_into(got.want()))
        assert isinstance(frame, wire.Challenge)
        proof = handshake.prove(said, frame, SECRET)
        first.sendall(proof.encode())
        assert first.recv(10)
    with connected(plane) as replayed:
        replayed.sendall(said.encode())
        assert replayed.recv(1000)
        replayed.sendall(proof.encode())
        assert b"not its secret" in last_words(replayed)
    assert plane.breaches()[Cause.AUTHENTICATION] == 1
