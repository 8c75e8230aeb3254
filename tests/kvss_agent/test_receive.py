"""Payloads are received and summed up, by the Python mover and by the native one."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvss_agent.client.connection import AgentConnection, Lost
from kvss_agent.client.requests import Pending, Requests
from kvss_agent.data_plane import channel, wire
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.channel import Closed, PlainChannel, receive_sums
from kvss_agent.data_plane.wire import FrameReader
from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard import seal
from tests.kvss_agent.authority import Authority
from tests.kvss_agent.compiled import STRICT, built
from tests.live import wait_until

DATA = bytes(range(251)) * 4200
# Where one algorithm ends and another begins, and where a piece or a block of a checksum does.
LENGTHS = [1, 240, 241, 1023, 1024, 1025, 1088, 2049, 65_536, 262_143, 262_144, 262_145, 1_000_000]
SLOT_BYTES = 64 + max(LENGTHS)
COLUMN = seal.Column(key=bytes(range(16)), tag=b"organisation-001", sequence=7)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built(tmp_path_factory.mktemp("native"), STRICT)


@pytest.fixture(scope="module", params=["python", "avx512", "avx2", "portable"])
def mover(request: pytest.FixtureRequest, compiled: Any) -> Iterator[Mover]:
    if request.param == "python":
        yield PYTHON
        return
    levels = compiled.levels()
    if request.param not in levels:
        pytest.skip(f"this machine has no {request.param}")
    compiled._use(request.param)
    yield compiled
    compiled._use(levels[0])


class Pair:
    """A channel, and the socket at its other end."""

    def __init__(self, stall_seconds: float) -> None:
        sock, self.peer = socket.socketpair()
        self.channel = PlainChannel(sock, stall_seconds)

    def receive(self, places: list[memoryview], mover: Mover) -> list[int]:
        return receive_sums(self.channel, FrameReader(), places, mover)


@contextlib.contextmanager
def pair(stall_seconds: float = 60.0) -> Iterator[Pair]:
    made = Pair(stall_seconds)
    try:
        yield made
    finally:
        made.channel.close()
        made.peer.close()


@contextlib.contextmanager
def meanwhile(do: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=do)
    thread.start()
    yield
    thread.join()


def places_of(*lengths: int) -> list[memoryview]:
    return [memoryview(bytearray(length)) for length in lengths]


@pytest.mark.parametrize("piece_bytes", [777, 100_000, len(DATA)])
def test_each_payload_is_in_its_place_with_its_checksum(mover: Mover, piece_bytes: int) -> None:
    places = places_of(*LENGTHS)
    payloads = [DATA[number : number + length] for number, length in enumerate(LENGTHS)]
    stream = b"".join(payloads)

    def send() -> None:
        for at in range(0, len(stream), piece_bytes):
            two.peer.sendall(stream[at : at + piece_bytes])

    with pair() as two, meanwhile(send):
        sums = two.receive(places, mover)
    assert sums == [xxh3_64_intdigest(payload) for payload in payloads]
    assert places == payloads


def test_nothing_is_received_beyond_the_last_place(mover: Mover) -> None:
    with pair() as two:
        two.peer.sendall(DATA[:400])
        assert two.receive(places_of(300), mover) == [xxh3_64_intdigest(DATA[:300])]
        assert two.receive([], mover) == []
        assert two.channel.socket.recv(1000) == DATA[300:400]


def test_a_stream_that_ends_or_stalls_says_so(mover: Mover) -> None:
    with pair() as two:
        two.peer.sendall(DATA[:400])
        two.peer.close()
        with pytest.raises(Closed):
            two.receive(places_of(300, 300), mover)
    with pair(stall_seconds=0.01) as two:
        two.peer.sendall(DATA[:400])
        with pytest.raises(Breach) as stalled:
            two.receive(places_of(300, 300), mover)
        assert stalled.value.cause is Cause.STALLED
        two.channel.close()
        with pytest.raises(Closed):
            two.receive(places_of(300), mover)


def drip(peer: socket.socket, data: bytes, given_up: threading.Event) -> None:
    """Some of these bytes, one by one, and then the end."""
    with contextlib.suppress(OSError):
        for byte in data[:200]:
            if given_up.wait(0.02):
                break
            peer.sendall(bytes([byte]))
        peer.shutdown(socket.SHUT_RDWR)


def test_payloads_that_drip_are_not_waited_for(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes long before the peer would have stalled; and it is not the peer who ends it."""
    monkeypatch.setattr(channel, "seconds_for", lambda *_: 0.3)
    given_up = threading.Event()
    with pair() as two, meanwhile(lambda: drip(two.peer, DATA, given_up)):
        try:
            with pytest.raises(Breach, match="too slowly") as late:
                two.receive(places_of(100_000, 100_000), mover)
        finally:
            given_up.set()
    assert late.value.cause is Cause.STALLED


def test_payloads_of_a_byte_are_not_waited_for_one_by_one(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is whole as soon as something of it comes."""
    monkeypatch.setattr(channel, "seconds_for", lambda *_: 0.3)
    given_up = threading.Event()
    with pair() as two, meanwhile(lambda: drip(two.peer, DATA, given_up)):
        try:
            with pytest.raises(Breach, match="too slowly"):
                two.receive(places_of(*[1] * 1000), mover)
        finally:
            given_up.set()


def test_a_record_of_tls_that_drips_is_not_waited_for(tmp_path: Path) -> None:
    """Nothing of it can be read before it is whole."""
    authority = Authority.make(tmp_path)
    certificate, key, authorities = authority.issue("agent-1")
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(certificate, key)
    client.load_verify_locations(authorities)
    client.check_hostname = False
    given_up = threading.Event()
    sock, peer = socket.socketpair()
    wrapped = server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    tls = channel.TlsChannel(wrapped, stall_seconds=0.4)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    sender = client.wrap_bio(incoming, outgoing)

    def send() -> None:
        while True:
            try:
                sender.do_handshake()
                break
            except ssl.SSLWantReadError:
                peer.sendall(outgoing.read())
                incoming.write(peer.recv(65536))
        peer.sendall(outgoing.read())
        sender.write(DATA[:10_000])
        drip(peer, outgoing.read(), given_up)

    with contextlib.closing(peer), contextlib.closing(tls), meanwhile(send):
        try:
            tls.shake_hands(time.monotonic() + 60)
            with pytest.raises(Breach) as late:
                receive_sums(tls, FrameReader(), places_of(10_000))
        finally:
            given_up.set()
    assert late.value.cause is Cause.STALLED


def test_a_socket_of_tls_is_not_closed_in_the_middle_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL would read on by its number, from whatever has that next."""
    certificate, key, _ = Authority.make(tmp_path).issue("agent-1")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    sock, peer = socket.socketpair()
    tls = channel.TlsChannel(server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))
    numbers: list[int] = []

    def read(_: memoryview) -> int:
        closing.start()
        assert not peer.recv(1), "it is shut down before"
        closing.join(0.2)
        numbers.append(tls.socket.fileno())
        return 1

    closing = threading.Thread(target=tls.close)
    monkeypatch.setattr(tls.socket, "recv_into", read)
    with peer:
        assert tls.receive_into(memoryview(bytearray(1))) == 1
        closing.join()
    assert numbers != [-1]
    assert tls.socket.fileno() == -1
    monkeypatch.undo()
    with pytest.raises(Closed):
        tls.receive_into(memoryview(bytearray(1)))


def received_by_agent(of: PlainChannel) -> None:
    channel.receive(of, FrameReader(), patient=True)


def received_by_client(of: PlainChannel) -> None:
    connection = AgentConnection.__new__(AgentConnection)  # after its handshake
    connection.channel, connection.reader = of, FrameReader()
    connection.address = Address.parse("unix:/a")
    connection._until, connection._with_descriptors = math.inf, False
    connection.receive(math.inf)


@pytest.mark.parametrize("receive", [received_by_agent, received_by_client])
def test_a_frame_that_drips_is_not_waited_for(receive: Callable[[PlainChannel], None]) -> None:
    frame = wire.Refilled(1, (bytes(64),) * 64).encode()
    given_up = threading.Event()
    with pair(stall_seconds=0.4) as two, meanwhile(lambda: drip(two.peer, frame, given_up)):
        try:
            with pytest.raises((Breach, Lost), match="too slowly"):
                receive(two.channel)
        finally:
            given_up.set()


def test_how_long_payloads_may_take_is_a_matter_of_their_size() -> None:
    with pair(stall_seconds=10.0) as two:
        assert channel.seconds_for(two.channel, []) == 10.0
        assert channel.seconds_for(two.channel, places_of(1 << 20, 3 << 20)) == 14.0


def send_by_another(number: int, data: bytes, opened: contextlib.ExitStack) -> None:
    """Open sockets until one has this number, and send these bytes to both of that pair."""
    other = None
    while other is None or number not in (other[0].fileno(), other[1].fileno()):
        other = socket.socketpair()
        opened.enter_context(other[0])
        opened.enter_context(other[1])
    for end in other:
        end.sendall(data)


def test_another_socket_with_the_number_of_one_that_was_closed_is_not_read(compiled: Any) -> None:
    """Whoever closes a socket shuts it down before; here it is not, so that the stream goes on."""
    (place,) = places_of(3000)
    with pair() as two, contextlib.ExitStack() as opened:
        number = two.channel.socket.fileno()

        def send() -> None:
            two.peer.sendall(DATA[:1000])
            wait_until("the beginning has come", lambda: place[:1000] == DATA[:1000])
            two.channel.socket.close()
            send_by_another(number, bytes(3000), opened)
            two.peer.sendall(DATA[1000:2000])
            wait_until("the middle has come", lambda: place[1000:2000] == DATA[1000:2000])
            two.peer.sendall(DATA[2000:3000])

        with meanwhile(send):
            assert two.receive([place], compiled) == [xxh3_64_intdigest(DATA[:3000])]
    assert place == DATA[:3000]


def test_a_socket_that_is_closed_just_before_is_not_another_one_with_its_number(compiled: Any) -> None:
    """Whoever runs between two lines of Python may close it, and open another."""
    places = places_of(300)
    with pair() as two, contextlib.ExitStack() as opened:

        def late(sock: Any, places: Any, seconds: float) -> Any:
            number = sock.fileno()
            two.channel.close()
            send_by_another(number, bytes(300), opened)
            return compiled.receive_payloads(sock, places, seconds)

        with pytest.raises(Closed):
            two.channel.receive_by(lambda sock, seconds: late(sock, places, seconds), places)


def test_whoever_closes_a_channel_ends_what_is_received_there(mover: Mover) -> None:
    (place,) = places_of(300)
    with pair() as two:

        def close() -> None:
            two.peer.sendall(DATA[:200])
            wait_until("the beginning has come", lambda: place[:200] == DATA[:200])
            two.channel.close()

        with meanwhile(close), pytest.raises(Closed):
            two.receive([place], mover)


def test_no_child_process_gets_the_socket(compiled: Any) -> None:
    (place,) = places_of(300)
    both: list[int] = []
    inheritable: list[int] = []
    with pair() as two:
        sock = two.channel.socket
        inode = os.fstat(sock.fileno()).st_ino

        def descriptors() -> list[int]:
            found = []
            for one in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):  # others come and go
                    if one.stat().st_ino == inode:
                        found.append(int(one.name))
            return found

        def send() -> None:
            two.peer.sendall(DATA[:200])
            wait_until("the beginning has come", lambda: place[:200] == DATA[:200])
            both.extend(descriptors())
            inheritable.extend(one for one in both if os.get_inheritable(one))
            two.peer.sendall(DATA[200:300])

        with meanwhile(send):
            two.receive([place], compiled)
        assert descriptors() == [sock.fileno()]  # the other one is closed again
    assert len(both) == 2
    assert inheritable == []


def test_a_signal_interrupts_who_receives(mover: Mover) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    over = threading.Event()

    def keep_interrupting() -> None:
        (place,) = places
        wait_until("the beginning has come", lambda: place[:10] == DATA[:10])
        while not over.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    places = places_of(300)
    try:
        with pair() as two:
            two.peer.sendall(DATA[:10])
            thread = threading.Thread(target=keep_interrupting)
            thread.start()
            try:
                with pytest.raises(Interrupted):
                    two.receive(places, mover)
            finally:
                over.set()
                thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_can_be_no_place_is_refused(compiled: Any) -> None:
    with pair() as two:
        sock = two.channel.socket
        with pytest.raises(BufferError):
            compiled.receive_payloads(sock, [memoryview(bytearray(9)), memoryview(bytes(9))], 60.0)
        with pytest.raises(TypeError):
            compiled.receive_payloads(sock, None, 60.0)
        with pytest.raises(AttributeError):
            compiled.receive_payloads(None, [], 60.0)
        place = bytearray(9)
        two.peer.sendall(DATA[:9])
        assert compiled.receive_payloads(sock, [place], 60.0) == [xxh3_64_intdigest(DATA[:9])]
        place.clear()  # nothing is held any more


def received(
    two: Pair, headers: Sequence[bytes], slots: Sequence[memoryview], mover: Mover
) -> list[seal.Header | seal.Miss]:
    """What a borrower makes of columns that have these headers, in slots that were opened for COLUMN."""
    connection = AgentConnection.__new__(AgentConnection)  # after its handshake
    connection.channel, connection.reader = two.channel, FrameReader()
    connection.address = Address.parse("unix:/a")
    connection.welcome = wire.Welcome(bytes(16), 0, 8, SLOT_BYTES)
    requests = Requests.__new__(Requests)
    requests.connection, requests._mover, requests._waste = connection, mover, channel.DiscardBuffer()
    pending = Pending(wire.Refilled, [COLUMN] * len(slots), slots, are_slots=True)
    requests._receive_columns(wire.Refilled(1, tuple(headers)), pending)
    return pending.found


def open_slots(count: int) -> list[memoryview]:
    slots = places_of(*[SLOT_BYTES] * count)
    for slot in slots:
        seal.open_slot_for(slot, COLUMN.sequence, COLUMN.tag)
    return slots


def sealed(length: int, **other: Any) -> bytes:
    """As a lender has it: by another evict."""
    column = COLUMN._replace(sequence=3)._replace(**other)
    return seal.pack(column, 64, length, xxh3_64_intdigest(DATA[:length]))


def test_columns_are_sealed_in_their_slots(mover: Mover) -> None:
    slots, headers = open_slots(len(LENGTHS)), [sealed(length) for length in LENGTHS]

    def send() -> None:
        for length in LENGTHS:
            two.peer.sendall(DATA[:length])
        two.peer.sendall(b"next")

    with pair() as two, meanwhile(send):
        found = received(two, headers, slots, mover)
        assert two.channel.socket.recv(100) == b"next"
    for slot, header, length in zip(slots, found, LENGTHS, strict=True):
        assert type(header) is seal.Header
        assert header == seal.verify(slot, COLUMN)
        assert slot[64 : 64 + length] == DATA[:length]


@pytest.mark.parametrize("length", [100, 300])
def test_what_is_not_the_column_or_has_no_slot_any_more_is_not_sealed(mover: Mover, length: int) -> None:
    slots = open_slots(12)
    slots[0][:64] = bytes(64)  # purged
    seal.open_slot_for(slots[1], COLUMN.sequence + 1, COLUMN.tag)  # by a later evict
    seal.open_slot_for(slots[2], COLUMN.sequence, bytes(16))  # for another tag
    slots[3], slots[4] = memoryview(bytearray()), slots[4][: 64 + length - 1]
    headers = [sealed(length)] * 5
    headers += [seal.pack(COLUMN, 64, length, 1)]  # not what its checksum says
    headers += [sealed(length, tag=bytes(16)), sealed(length, key=bytes(16))]
    headers += [seal.NO_HEADER, seal.OPEN_HEADER, sealed(length)[:-1] + b"?"]  # without payloads
    headers += [sealed(length)]
    before = [bytes(slot[:64]) for slot in slots[:-1]]
    with pair() as two:
        two.peer.sendall(DATA[:length] * 9)
        found = received(two, headers, slots, mover)
        assert not two.channel.has_more()
    assert found[:5] == [seal.Miss.ABSENT] * 3 + [seal.Miss.CORRUPT] * 2
    assert found[5:8] == [seal.Miss.TORN, seal.Miss.FOREIGN, seal.Miss.STALE]
    assert found[8:-1] == [seal.Miss.ABSENT, seal.Miss.TORN, seal.Miss.CORRUPT]
    assert all(type(one) is seal.Miss for one in found[:-1])
    assert [bytes(slot[:64]) for slot in slots[:-1]] == before
    assert found[-1] == seal.verify(slots[-1], COLUMN)


def test_a_payload_that_is_larger_than_a_slot_ends_the_connection(mover: Mover) -> None:
    with pair() as two, pytest.raises(Lost, match="larger than its slots"):
        received(two, [seal.pack(COLUMN, 64, SLOT_BYTES - 63, 1)], open_slots(1), mover)


def test_a_column_is_sealed_while_the_next_one_is_on_its_way(compiled: Any) -> None:
    slots = open_slots(2)

    def send() -> None:
        two.peer.sendall(DATA[:300] + DATA[:100])
        wait_until("it is sealed", lambda: isinstance(seal.verify(slots[0], COLUMN), seal.Header))
        two.peer.sendall(DATA[100:300])

    with pair() as two, meanwhile(send):
        found = received(two, [sealed(300)] * 2, slots, compiled)
    assert all(isinstance(one, seal.Header) for one in found)


def test_columns_that_break_off_are_lost(mover: Mover) -> None:
    with pair() as two:
        two.peer.sendall(DATA[:400])
        two.peer.close()
        with pytest.raises(Lost):
            received(two, [sealed(300)] * 2, open_slots(2), mover)


def test_what_can_be_no_slot_is_refused(compiled: Any) -> None:
    (slot,) = open_slots(1)
    before, header = bytes(slot), sealed(300)
    with pair() as two:
        for headers, wrong, kind in (
            ((header,), (slot,), TypeError),
            ((header,), (slot, None), TypeError),
            ((header,), (None, COLUMN), TypeError),
            ((header[:-1],), (slot, COLUMN), TypeError),
            ((header,), (memoryview(bytes(4096)), COLUMN), BufferError),
            ((), (slot, COLUMN), ValueError),
            ([header], (slot, COLUMN), TypeError),
        ):
            with pytest.raises(kind):
                compiled.receive_columns(two.channel.socket, headers, [wrong], 4032, 60.0)
    assert slot == before
