"""The console under people who have not shown who they are: a real server, real sockets, real Argon2."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from console.guard import Guard, Message, Receive, Scope, Send
from console.shell.request_context import note_known
from kvss_agent.limits.shares import FairShare, Shares
from tests.live import ANSWER_SECONDS_MAX, LiveConsole, live_console, wait_until

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    with live_console(tmp_path_factory.mktemp("console")) as made:
        # It loads the API once it is ready, which takes most of the memory that a test here allows for.
        httpx.get(f"{made.address}/api/v1/me", timeout=ANSWER_SECONDS_MAX)
        yield made


def connected(console: LiveConsole) -> socket.socket:
    parts = urlsplit(console.address)
    return socket.create_connection((parts.hostname or "", parts.port or 80), timeout=30)


def resident(console: LiveConsole) -> int:
    return int(psutil.Process(console.process.pid).memory_info().rss)


def spooled(console: LiveConsole) -> int:
    """Bytes in files of the process that have no name: where Django stores what is large."""
    total = 0
    for descriptor in Path(f"/proc/{console.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "deleted" in str(descriptor.readlink()):
                total += descriptor.stat().st_size
    return total


@contextlib.contextmanager
def peaks(console: LiveConsole) -> Iterator[dict[str, int]]:
    """The most memory and spooled bytes while this lasts, beyond what was there."""
    before, stop = resident(console), threading.Event()
    found = {"memory": 0, "spooled": 0}

    def watch() -> None:
        while not stop.wait(0.02):
            found["memory"] = max(found["memory"], resident(console) - before)
            found["spooled"] = max(found["spooled"], spooled(console))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def answer(sock: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            said += piece
    return said


def send(sock: socket.socket, most: int) -> None:
    with contextlib.suppress(OSError):
        for _ in range(most // 65536):
            sock.sendall(b"x" * 65536)


def post(
    console: LiveConsole, path: str, content: bytes, headers: dict[str, str] | None = None
) -> httpx.Response:
    return httpx.post(
        f"{console.address}{path}", content=content, headers=headers, timeout=ANSWER_SECONDS_MAX
    )


PATHS = (b"/log-in/", b"/api/v1/sessions", b"/fleet/nodes/x/heartbeat")
FRAMINGS = (b"content-length: 536870912", b"transfer-encoding: chunked")


def test_a_body_of_nobody_in_particular_is_not_stored(console: LiveConsole) -> None:
    """Of each path, announced and chunked, all at once; together they take no more than one may."""

    def flood(path: bytes, framing: bytes) -> bytes:
        head = b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncookie: tidegate_session=made0up\r\n%s\r\n\r\n"
        with connected(console) as sock:
            sock.sendall(head % (path, framing))
            if b"chunked" in framing:
                sock.sendall(b"20000000\r\n")
            send(sock, 256 * MIB)
            return answer(sock)

    bodies = list(itertools.product(PATHS, FRAMINGS))
    with peaks(console) as most, ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(flood, *zip(*bodies, strict=True)))
    assert most["spooled"] < MIB
    assert most["memory"] < 32 * MIB
    # A server that resets the connection may take its answer along.
    assert [one for one in answers if one and not re.match(rb"HTTP/1.1 (401|413) ", one)] == []


def test_the_refusal_is_a_sentence_and_in_the_api_a_problem(console: LiveConsole) -> None:
    much = b"x" * (100 << 10)
    page = post(console, "/log-in/", much)
    assert page.status_code == 401
    assert page.text.startswith("Log in or send a token: without, a request has at most 64 KiB.")
    problem = post(console, "/api/v1/sessions", much).json()
    assert problem["reason"] == "Unauthenticated"
    large = post(console, "/api/v1/sessions", b"x" * (3 << 20))
    assert large.json()["reason"] == "TooLarge"


def test_who_has_a_token_may_send_more_at_once(console: LiveConsole) -> None:
    """Also with the first request of a process that has never seen it."""
    token = console.token()
    console.restart()
    httpx.get(f"{console.address}/-/health", timeout=ANSWER_SECONDS_MAX)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    sent = post(console, "/api/v1/orgs", b" " * (200 << 10), headers)
    assert sent.status_code in (400, 422), sent.text  # it was read, and is no JSON


def test_half_requests_and_endless_heads_end(console: LiveConsole) -> None:
    halves = [b"", b"GET /log", b"POST /log-in/ HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\nx"]
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(console)) for _ in halves]
        for sock, half in zip(socks, halves, strict=True):
            sock.sendall(half)
        endless = stack.enter_context(connected(console))
        endless.sendall(b"GET / HTTP/1.1\r\nx: ")
        send(endless, MIB)
        assert not answer(endless).startswith(b"HTTP/1.1 200 ")
        assert all(answer(sock).startswith(b"HTTP/1.1 408 ") for sock in socks)


def test_people_get_in_while_strangers_hold_all_of_their_places(console: LiveConsole) -> None:
    """Both with connections and with requests that have come halfway."""
    token = console.token()
    headers = {"authorization": f"Bearer {token}"}
    with contextlib.ExitStack() as stack:
        for number in range(600):
            sock = stack.enter_context(connected(console))
            if number % 2:
                sock.sendall(b"POST /log-in/ HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\nx")
        for _ in range(20):
            me = httpx.get(f"{console.address}/api/v1/me", headers=headers, timeout=60)
            assert me.status_code == 200
        process = psutil.Process(console.process.pid)
        wait_until("few are kept", lambda: len(process.net_connections()) < 400)


async def test_who_has_many_credentials_has_one_share() -> None:
    """Credentials say `ada 1`; the application, whose they are."""
    release, came = asyncio.Event(), Counter[str]()

    async def application(scope: Scope, _receive: Receive, _send: Send) -> None:
        (_, shown), *_ = scope["headers"]
        owner = shown.decode().split()[0]
        came[owner] += 1
        note_known(scope, owner)
        if scope["path"] == "/waits":
            await release.wait()

    guard = Guard(application)
    guard.known = FairShare(Shares(total=2, per_owner=1))

    async def ask(path: str, shown: str) -> None:
        async def receive() -> Message:
            return {"type": "http.request"}

        async def send(_: Message) -> None:
            return

        headers = [(b"authorization", shown.encode())]
        await guard({"type": "http", "path": path, "headers": headers}, receive, send)

    for shown in ("ada 1", "ada 2", "bob 1"):
        await ask("/", shown)  # they are known from here on
    held = [asyncio.create_task(ask("/waits", shown)) for shown in ("ada 1", "ada 2")]
    for _ in range(20):  # all on this loop: nothing of it waits for anything else
        await asyncio.sleep(0)
    assert (guard.known.used, guard.known.waiting) == (1, 1)
    await ask("/", "bob 1")
    assert (came["ada"], came["bob"]) == (3, 2)
    release.set()
    await asyncio.gather(*held)
    assert came["ada"] == 4


def test_forty_log_ins_at_once_are_hashed_a_few_at_a_time(console: LiveConsole) -> None:
    """Each takes 100 MiB. Whoever can't have a turn is told when to come again."""
    # One page for all: forty that ask for it at once may be told to come again, too.
    page = httpx.get(f"{console.address}/log-in/", timeout=ANSWER_SECONDS_MAX)
    token = page.cookies["tidegate_csrf"]

    def log_in(number: int) -> httpx.Response:
        return httpx.post(
            f"{console.address}/log-in/",
            data={"username": f"nobody-{number}", "password": "wrong", "csrfmiddlewaretoken": token},
            headers={"cookie": f"tidegate_csrf={token}"},
            timeout=120,
        )

    assert log_in(99).status_code == 401
    with peaks(console) as most, ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(log_in, range(40)))
    assert most["memory"] < 400 * MIB
    found = {one.status_code for one in answers}
    assert found <= {401, 503}
    assert 401 in found
    assert all(one.headers["retry-after"] for one in answers if one.status_code == 503)
