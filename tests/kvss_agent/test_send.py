"""What is sent to a peer that reads slowly: over Unix sockets, TCP and TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent.data_plane import channel
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.channel import AnyChannel, PlainChannel, TlsChannel
from tests.kvss_agent.authority import Authority

SIZE = 4 << 20
BUFFER_BYTES = 64 << 10  # of the kernel, and of a call
STALL_SECONDS = 1.0  # also how long one call waits over TCP, in all


def connected(family: str) -> tuple[socket.socket, socket.socket]:
    if family == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    for one in (ours, peer):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return ours, peer


def over_tls(
    ours: socket.socket, peer: socket.socket, directory: Path
) -> tuple[TlsChannel, ssl.SSLSocket]:
    certificate, key, _ = Authority.make(directory).issue("agent-1")
    serves = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serves.load_cert_chain(certificate, key)
    asks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asks.check_hostname, asks.verify_mode = False, ssl.CERT_NONE
    wrapped: list[ssl.SSLSocket] = []
    wrapping = threading.Thread(target=lambda: wrapped.append(asks.wrap_socket(peer)))
    wrapping.start()
    made = serves.wrap_socket(ours, server_side=True)
    wrapping.join()
    return TlsChannel(made, STALL_SECONDS), wrapped[0]


@pytest.fixture(params=["unix", "tcp", "tls"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[AnyChannel, socket.socket]]:
    """A channel, and the socket at its other end."""
    ours, peer = connected(request.param)
    made: AnyChannel
    if request.param == "tls":
        made, peer = over_tls(ours, peer, tmp_path)
    else:
        made = PlainChannel(ours, STALL_SECONDS)
    yield made, peer
    made.close()
    peer.close()


@contextlib.contextmanager
def read_slowly(peer: socket.socket) -> Iterator[None]:
    """Some of what comes, a little each time, and then the end."""
    given_up = threading.Event()

    def read() -> None:
        for _ in range(200):
            if given_up.wait(0.02):
                return
            peer.recv(BUFFER_BYTES // 4)
        peer.close()

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield
    finally:
        given_up.set()
        reading.join()


@pytest.mark.parametrize("parts", [1, 64])
def test_a_peer_that_reads_slowly_is_not_waited_for(
    pair: tuple[AnyChannel, socket.socket], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads long before it would have stalled; and it is not the peer who ends it."""
    made, peer = pair
    monkeypatch.setattr(channel, "seconds_for", lambda *_: 0.3)
    monkeypatch.setattr(channel, "UNIX_CALL_BYTES", BUFFER_BYTES)
    with read_slowly(peer), pytest.raises(Breach, match="too slowly") as late:
        made.send([memoryview(bytes(SIZE // parts))] * parts)
    assert late.value.cause is Cause.STALLED


def test_what_would_have_to_wait_is_not_sent_at_once(
    pair: tuple[AnyChannel, socket.socket],
) -> None:
    made, peer = pair
    assert made.send_at_once(b"first")
    assert peer.recv(5) == b"first"
    with contextlib.suppress(Breach):  # the peer reads nothing: after the stall time that is over
        made.send([bytes(SIZE)])
    assert not made.send_at_once(b"second")


def test_nothing_is_sent_at_once_while_another_thread_sends(
    pair: tuple[AnyChannel, socket.socket],
) -> None:
    made, peer = pair
    sending = threading.Thread(target=made.send, args=([bytes(SIZE)],))
    sending.start()
    assert peer.recv(1)
    assert not made.send_at_once(b"second")
    left = SIZE - 1
    while left:
        left -= len(peer.recv(left))
    sending.join()


@pytest.mark.parametrize("call_bytes", [1000, 1024, 5000, SIZE])
def test_what_is_sent_in_several_calls_comes_whole(
    call_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "UNIX_CALL_BYTES", call_bytes)
    ours, peer = socket.socketpair()
    made = PlainChannel(ours, STALL_SECONDS)
    parts = [bytes([number]) * length for number, length in enumerate((1, 1023, 1024, 0, 9000, 3))]
    made.send(parts)
    made.close()
    with peer, peer.makefile("rb") as sent:
        assert sent.read() == b"".join(parts)
