"""The front for LMCache, over real sockets: what clients get, and what those get who send nonsense."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvss_agent.process import daemon
from swdriver_shim.adapters.lmcache_frames import (
    ANSWER_BYTES,
    LENGTH_MAX,
    REQUEST_BYTES,
    SHAPE_BYTES,
    Code,
    Command,
    Malformed,
    answer,
    parse,
)
from swdriver_shim.adapters.lmcache_server import (
    SCRAP_BYTES,
    SILENT_PER_ORIGIN,
    Connection,
    LmcacheServer,
)
from swdriver_shim.adapters.remote import Objects
from swdriver_shim.driver import Driver
from swdriver_shim.objects import LocalObjects
from tests.kvss_agent.plane import running
from tests.live import wait_until
from tests.swdriver_shim.fleets import Fleet
from tests.swdriver_shim.keeping import BYTES_MAX, LAYOUT, keeping, value
from tests.swdriver_shim.prompts import keys

VALUE_MAX = BYTES_MAX - SHAPE_BYTES
KEY = "model@1@0@1f2e@bfloat16"


def request(command: int, key: str = KEY, length: int = 0, *shape: int) -> bytes:
    """As a client packs it: command, length, format, dtype, location, four dimensions, key."""
    format_, dtype, *dimensions = shape or (1, 2, 0, 0, 0, 0)
    numbers = (command, length, format_, dtype, 0, *dimensions)
    return struct.pack("9i150s", *numbers, key.encode().ljust(150))


class Client:
    every: ClassVar[list[Client]] = []  # to be closed after each test

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.every.append(self)

    def put(self, key: str, data: bytes | memoryview, *shape: int) -> None:
        self.socket.sendall(request(Command.PUT, key, len(data), *shape))
        self.socket.sendall(data)

    def get(self, key: str) -> tuple[tuple[int, ...], bytes] | None:
        """Format, dtype and dimensions; and the value."""
        self.socket.sendall(request(Command.GET, key))
        code, length, *shape, location = struct.unpack("9i", self.receive(ANSWER_BYTES))
        assert location == 0
        return (tuple(shape), self.receive(length)) if code == Code.SUCCESS else None

    def ask(self, command: int, key: str = KEY) -> int:
        self.socket.sendall(request(command, key))
        return int(struct.unpack("9i", self.receive(ANSWER_BYTES))[0])

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = self.socket.recv(size - len(data))
            if not got:
                raise EOFError
            data += got
        return data

    def is_cut_off(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return self.socket.recv(1) == b""
        return True


@pytest.fixture(autouse=True)
def _clients() -> Iterator[None]:
    yield
    while Client.every:
        Client.every.pop().socket.close()


class World:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.fronts: list[LmcacheServer] = []

    def front(self, org: str = "acme", objects: Objects | None = None, **how: float) -> int:
        """A listener for this org: its port."""
        listener = daemon.listen(("127.0.0.1", 0))
        given = objects or LocalObjects(self.driver, keys(org))
        front = LmcacheServer(listener, lambda: given, **how)  # type: ignore[arg-type]
        self.fronts.append(front)
        return int(listener.getsockname()[1])

    def counts(self, what: str) -> int:
        return sum(front.counts[what] for front in self.fronts)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path) as plane:
        fleet = Fleet(plane, LAYOUT)
        fleet.make(20)
        with keeping(fleet) as driver:
            made = World(driver)
            yield made
            for front in made.fronts:
                front.stop()


def test_what_is_put_is_got_with_its_shape_and_dtype(world: World) -> None:
    client = Client(world.front())
    for number, size in enumerate([1, 4096, VALUE_MAX]):
        key, data, shape = f"{KEY}@{number}", value(b"%d" % number, size), (2, 3, size, 7, 0, number)
        assert client.ask(Command.EXIST, key) == Code.FAIL
        assert client.get(key) is None
        client.put(key, data, *shape)
        assert client.ask(Command.EXIST, key) == Code.SUCCESS
        assert client.get(key) == (shape, bytes(data))
    assert client.ask(Command.HEALTH) == Code.SUCCESS
    assert client.ask(Command.LIST) == Code.FAIL
    assert world.counts("puts") == world.counts("gets") == 3
    assert world.counts("gets_missed") == world.counts("looks_missed") == 3


def test_an_org_is_whose_listener_it_is_and_tags_keep_apart_what_is_within(world: World) -> None:
    acme, globex = Client(world.front("acme")), Client(world.front("globex"))
    acme.put(KEY, b"of acme")
    acme.put(f"{KEY}@user%1", b"of its user 1")
    assert globex.get(KEY) is None
    assert acme.get(f"{KEY}@user%2") is None
    found = [acme.get(KEY), acme.get(f"{KEY}@user%1")]
    assert [one and one[1] for one in found] == [b"of acme", b"of its user 1"]


def test_what_is_too_large_is_left_out_and_the_connection_goes_on(world: World) -> None:
    client = Client(world.front())
    client.put(KEY, bytes(VALUE_MAX + 1))
    assert client.get(KEY) is None
    client.put(KEY, b"")
    assert client.get(KEY) is None
    client.put(KEY, b"now it fits")
    assert client.get(KEY) == ((1, 2, 0, 0, 0, 0), b"now it fits")
    assert world.counts("puts_missed") == 2


def test_before_anything_is_kept_for_an_org_all_is_a_miss() -> None:
    front = LmcacheServer(listener := daemon.listen(("127.0.0.1", 0)), lambda: None)
    client = Client(listener.getsockname()[1])
    client.put(KEY, b"nobody wants it")
    assert client.get(KEY) is None
    assert client.ask(Command.EXIST) == Code.FAIL
    assert client.ask(Command.HEALTH) == Code.SUCCESS
    front.stop()
    assert client.is_cut_off()


@pytest.mark.parametrize(
    "raw",
    [
        request(0),
        request(6),
        request(-1),
        request(Command.PUT, KEY, -1),
        request(Command.PUT, KEY, LENGTH_MAX + 1),
        request(Command.GET, " "),
        request(Command.GET, "é"),
        b"GET / HTTP/1.1\r\n".ljust(REQUEST_BYTES, b"\n"),
    ],
)
def test_nonsense_costs_its_connection_and_nothing_else(world: World, raw: bytes) -> None:
    port = world.front()
    good, bad = Client(port), Client(port)
    good.put(KEY, b"here")
    bad.socket.sendall(raw)
    assert bad.is_cut_off()
    assert good.get(KEY) == ((1, 2, 0, 0, 0, 0), b"here")
    assert world.counts("connections_malformed") == 1


def test_who_stops_in_the_middle_is_cut_off_and_who_is_silent_between_is_not(world: World) -> None:
    port = world.front()
    front, silent = world.fronts[0], Client(port)
    silent.put(KEY, b"here")
    silent.put("big", value(b"big", VALUE_MAX))
    assert silent.get("big"), "it is connected, and what the others ask for is there"
    # Of those that come from here on. Few answers fill the buffers of who does not listen.
    front._frame_seconds = 1.0
    front._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    head, body, deaf = (Client(port) for _ in range(3))
    head.socket.sendall(request(Command.GET)[:100])
    body.socket.sendall(request(Command.PUT, KEY + "x", 1000) + b"x" * 999)
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.socket.settimeout(None)
    flood = threading.Thread(target=_ask_without_listening, args=(deaf,))
    flood.start()
    wait_until("all three are cut off", lambda: world.counts("connections_stalled") == 3)
    flood.join()
    assert head.is_cut_off()
    assert body.is_cut_off()
    assert silent.get(KEY + "x") is None, "half a value is none"
    assert silent.get(KEY) is not None


def test_who_sends_a_little_now_and_then_is_cut_off_as_well(world: World) -> None:
    client = Client(world.front(frame_seconds=0.3))
    sent = 0
    with contextlib.suppress(OSError):
        client.socket.sendall(request(Command.PUT, KEY, 1000))
        for _ in range(900):
            client.socket.sendall(b"x")
            sent += 1
            time.sleep(0.01)
    assert sent < 900
    assert client.is_cut_off()
    assert world.counts("connections_stalled") == 1


def test_a_frame_has_one_deadline_also_for_a_value_that_is_dropped(world: World) -> None:
    """It comes in pieces, each of which is within the limit."""
    client = Client(world.front(frame_seconds=0.3))
    sent = 0
    with contextlib.suppress(OSError):
        client.socket.sendall(request(Command.PUT, KEY, 100 * SCRAP_BYTES))
        for _ in range(100):
            client.socket.sendall(bytes(SCRAP_BYTES))
            sent += 1
            time.sleep(0.1)
    assert sent < 100
    assert client.is_cut_off()
    assert world.counts("connections_stalled") == 1


def test_a_connection_that_is_silent_for_long_holds_no_memory_for_values() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        connection, got = Connection(mine, 30.0, rest_seconds=0.05), list[object]()
        connection.room(1 << 20)
        asking = threading.Thread(target=lambda: got.append(connection.request()))
        asking.start()
        wait_until("its memory is freed", lambda: not connection._room)
        theirs.sendall(request(Command.GET))
        asking.join()
        assert got == [request(Command.GET)]


def _ask_without_listening(client: Client) -> None:
    with contextlib.suppress(OSError):
        for _ in range(100_000):
            client.socket.sendall(request(Command.GET, "big"))


def test_there_are_so_many_connections_and_no_more(world: World) -> None:
    port = world.front(connections_max=2)
    first, second = Client(port), Client(port)
    assert first.ask(Command.HEALTH) == second.ask(Command.HEALTH) == Code.SUCCESS
    third = Client(port)
    third.socket.sendall(request(Command.HEALTH, KEY))
    assert third.is_cut_off()
    wait_until("it is counted", lambda: world.counts("connections_refused") == 1)
    first.socket.close()
    wait_until("its place is free", lambda: world.counts("connections_closed") == 1)
    assert Client(port).ask(Command.HEALTH) == Code.SUCCESS


@pytest.mark.slow
def test_connections_that_say_nothing_keep_no_engine_out(world: World) -> None:
    port = world.front()
    engine = Client(port)
    assert engine.ask(Command.HEALTH) == Code.SUCCESS
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.callback(Client(port).socket.close)
        for _ in range(10):
            late = Client(port)
            assert late.ask(Command.HEALTH) == Code.SUCCESS
            late.socket.close()
        assert engine.ask(Command.HEALTH) == Code.SUCCESS
        wait_until("few are kept", lambda: len(world.fronts[0]._open) <= SILENT_PER_ORIGIN + 2)


def test_a_client_whose_machine_is_gone_does_not_hold_its_place_for_ever(world: World) -> None:
    client = Client(world.front())
    assert client.ask(Command.HEALTH) == Code.SUCCESS
    [held] = world.fronts[0]._open
    assert held.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle, every, times = (
        held.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + every * times <= 120


def test_a_machine_without_threads_refuses_and_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, start, refused = world.front(), threading.Thread.start, list[str]()

    def starting(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", starting)
        assert Client(port).is_cut_off()
    assert Client(port).ask(Command.HEALTH) == Code.SUCCESS
    assert world.counts("connections_refused") == 1


def test_many_clients_at_once_get_their_own_bytes_or_none(world: World) -> None:
    port, wrong = world.front(), list[BaseException]()

    def run(seed: int) -> None:
        client = Client(port)
        try:
            for turn in range(40):
                key = f"{KEY}@{(seed + turn) % 30}"
                found = client.get(key)
                assert found is None or found[1] == value(key.encode(), len(found[1]))
                client.put(key, value(key.encode(), 1 + turn * 100))
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert world.counts("gets") > 0


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=400),
            st.builds(
                request,
                st.integers(-1, 7),
                st.sampled_from([KEY, "k" * 150, "x"]),
                st.integers(-(2**31), 2**31 - 1) | st.integers(0, 300),
            ),
        ),
        max_size=6,
    )
)
def test_whatever_is_sent_others_are_served(world: World, pieces: list[bytes]) -> None:
    if not world.fronts:
        world.front()
    port = world.fronts[0]._listener.getsockname()[1]
    hostile = Client(port)
    with contextlib.suppress(OSError):
        for piece in pieces:
            hostile.socket.sendall(piece)
        hostile.socket.shutdown(socket.SHUT_WR)
        while hostile.socket.recv(1 << 16):
            pass
    hostile.socket.close()
    good = Client(port)
    good.put("good", b"bytes")
    assert good.get("good") == ((1, 2, 0, 0, 0, 0), b"bytes")
    good.socket.close()


@given(st.binary(min_size=REQUEST_BYTES, max_size=REQUEST_BYTES))
def test_a_request_is_read_or_refused(raw: bytes) -> None:
    try:
        read = parse(raw)
    except Malformed:
        return
    assert 0 <= read.length <= LENGTH_MAX
    assert read.key


def test_an_answer_has_its_location_last() -> None:
    made = answer(Code.SUCCESS, 7, (1, 2, 3, 4, 5, 6))
    assert struct.unpack("9i", made) == (200, 7, 1, 2, 3, 4, 5, 6, 0)
    assert len(made) == ANSWER_BYTES == 36
    assert REQUEST_BYTES == 186
