"""Replicas that lie, flood or drip: what they may cost the brain, its clients and other orgs."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from inference_brain import metrics
from inference_brain.api.app import Bounds
from inference_brain.api.events import EventStream, Renaming
from inference_brain.upstream.health import FAILURES_MAX, State
from kvss_agent.http.client.client import WHOLE_BYTES_MAX, Timeouts
from kvss_agent.http.client.failures import Lost
from tests.inference_brain.brains import OPTIONS, RunningBrain, client_of, post, told
from tests.live import wait_until

Script = Callable[[socket.socket], None]
BODY = {"model": "m", "prompt": "Hi"}
# More than two sockets hold: when it has been sent, some of it has been read.
COMMENTS = (b"10000\r\n:" + b"x" * 0xFFFD + b"\n\n\r\n") * 512
EVENT = b'data: {"choices": [{"text": "x"}]}\n\n'
ANSWER = b"%x\r\n%s\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" % (len(EVENT), EVENT)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class RawReplica:
    """Answers each request with what a script sends, and each GET with 200. One connection is one
    request."""

    def __init__(self) -> None:
        self.script: Script = lambda _: None
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(1 << 16)
                if head.startswith(b"GET"):
                    client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    return
                self.requests += 1
                self.script(client)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def replica() -> Iterator[RawReplica]:
    made = RawReplica()
    yield made
    made.close()


@pytest.fixture
def brain(replica: RawReplica) -> Iterator[RunningBrain]:
    with RunningBrain(told([replica.url])) as made:
        yield made


def ask(brain: RunningBrain, **more: Any) -> httpx.Response:
    url = f"{brain.url}/v1/completions"
    return post(url, headers=brain.headers, json={**BODY, **more})


def state(brain: RunningBrain) -> State:
    """Of the replica."""
    return brain.call(lambda: next(iter(brain.brain.fleet)).state(time.monotonic()))


def whole(status: int, value: object) -> Script:
    raw = json.dumps(value).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(raw))
    return lambda client: client.sendall(head + raw)


@pytest.mark.parametrize("status", [201, 204, 206, 301, 304, 307, 600, 999])
def test_only_errors_are_passed_on_as_errors(
    brain: RunningBrain, replica: RawReplica, status: int
) -> None:
    """A 204 with a body would be the beginning of the next answer on the client's connection."""
    replica.script = whole(status, {"error": {"message": "HTTP/1.1 200 OK"}})
    with client_of(brain) as client:
        answer = client.post(f"{brain.url}/v1/completions", json=BODY)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "replica_failed"
        assert client.get(f"{brain.url}/v1/models").status_code == 200


@pytest.mark.parametrize("size", [2 << 20, 9 << 20])
def test_a_long_error_is_what_its_status_says(
    brain: RunningBrain, replica: RawReplica, size: int
) -> None:
    """vLLM repeats in it what it was asked. It is no fault of the replica."""
    replica.script = whole(400, {"error": {"message": "Not so: " + "x" * size}})
    for number in range(1, FAILURES_MAX + 1):
        answer = ask(brain)
        assert answer.status_code == 400
        told = answer.json()["error"]["message"]
        assert told.startswith("Not so: xxx" if size < 8 << 20 else "The engine refused the request")
        assert replica.requests == number
    assert state(brain) is State.READY


def test_an_answer_that_is_too_long_is_asked_for_once(brain: RunningBrain, replica: RawReplica) -> None:
    """As one with many log probabilities may be."""

    def script(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (WHOLE_BYTES_MAX + 1))
        for _ in range(WHOLE_BYTES_MAX >> 20):
            client.sendall(bytes(1 << 20))
        client.sendall(b"x")

    replica.script = script
    for number in range(1, FAILURES_MAX + 1):
        answer = ask(brain)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "answer_too_large"
        assert replica.requests == number
    assert state(brain) is State.READY


def test_an_answer_that_nobody_takes_counts_as_memory_until_its_client_leaves(
    brain: RunningBrain, replica: RawReplica
) -> None:
    size = 40 << 20  # of which the sockets on the way take a part
    replica.script = whole(200, {"choices": [], "text": "x" * size})
    room, body = brain.brain.api.room, json.dumps(BODY).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in brain.headers.items())
    with socket.create_connection(("127.0.0.1", brain.port), timeout=60) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n%scontent-length: %d\r\n\r\n%s"
            % (head.encode(), len(body), body)
        )
        wait_until("all of it has come", lambda: room.used > size)
        [one] = brain.brain.fleet
        wait_until("the replica is done with it", lambda: not one.in_progress)
        assert room.used > size
    wait_until("all is given back", lambda: not room.used)


@pytest.mark.parametrize("flag", ["--http1.1", "--http2-prior-knowledge"])
def test_a_long_answer_comes_as_it_is(brain: RunningBrain, replica: RawReplica, flag: str) -> None:
    told = {"choices": [], "text": "x" * (3 << 20)}
    replica.script = whole(200, told)
    url, data = f"{brain.url}/v1/completions", json.dumps(BODY)
    key = f"authorization: {brain.headers['authorization']}"
    asked = ["curl", "-sS", flag, "-H", key, "-d", data, "-D-", url]
    done = subprocess.run(asked, capture_output=True, check=True, timeout=60)
    head, _, raw = done.stdout.partition(b"\r\n\r\n")
    assert json.loads(raw) == told
    assert b"content-length: %d\r\n" % len(raw) in head + b"\r\n"


def test_an_answer_for_which_there_is_no_memory_is_asked_for_once(replica: RawReplica) -> None:
    replica.script = whole(200, {"choices": [], "text": "x" * 500_000})
    options = dataclasses.replace(OPTIONS, bounds=Bounds(100_000, 400_000))
    with RunningBrain(told([replica.url]), options) as brain:
        for number in range(1, FAILURES_MAX + 1):
            answer = ask(brain)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "bodies"
            assert replica.requests == number
        assert state(brain) is State.READY
        wait_until("all is given back", lambda: not brain.brain.api.room.used)
        counts = brain.call(lambda: dict(brain.brain.counts._numbers[metrics.REPLICA_RESULTS]))
        assert counts == {("m", "r0", "rejected"): FAILURES_MAX}, "by no fault of the replica"
        served = brain.call(lambda: brain.brain.router.admission.pools["m"].counters["acme"])
        assert served > 0, "the replica has computed it"


def test_an_answer_that_broke_off_takes_no_memory_of_the_next_one(replica: RawReplica) -> None:
    other = RawReplica()

    def script(client: socket.socket) -> None:
        replica.script = other.script = whole(200, {"choices": [], "text": "x" * 300_000})
        client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 400000\r\n\r\n" + bytes(300_000))

    replica.script = other.script = script
    options = dataclasses.replace(OPTIONS, bounds=Bounds(100_000, 800_000))
    with RunningBrain(told([replica.url, other.url]), options) as brain:
        assert ask(brain).status_code == 200
    assert replica.requests == other.requests == 1
    other.close()


@pytest.mark.parametrize("tokens", [1 << 62, -(1 << 62)])
def test_a_replica_charges_an_org_for_no_more_than_can_be(
    brain: RunningBrain, replica: RawReplica, tokens: int
) -> None:
    """Brains add it up in Redis: numbers that are too large would end what they share."""
    usage = {
        "prompt_tokens": tokens,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": -tokens},
    }
    replica.script = whole(200, {"choices": [], "usage": usage})
    assert ask(brain).status_code == 200
    limits = brain.brain.router.admission.limits
    requests, charged = brain.call(lambda: limits._orgs["acme"].own.sums(time.monotonic()))
    assert requests == 1
    assert 0 <= charged <= 2 * 100_000
    served = brain.call(lambda: brain.brain.router.admission.pools["m"].counters["acme"])
    assert 0 <= served <= 4 * 100_000


def test_an_event_in_many_pieces_is_not_searched_again_with_each() -> None:
    stream = EventStream(Renaming("m", "m"), wants_usage=False)
    started = time.process_time()
    for _ in range(16_000):
        stream.feed(b"x" * 1000)
    with pytest.raises(Lost):
        stream.feed(b"x" * (1 << 20))
    assert time.process_time() - started < 2.0


def test_the_end_of_an_event_is_found_wherever_it_is_cut() -> None:
    raw = b'data: {"a": 1}\r\n\r\ndata: {"b": 2}\r\n\r\ndata: [DONE]\r\n\r\n'
    for size in range(1, len(raw)):
        stream = EventStream(Renaming("m", "m"), wants_usage=False)
        got = b"".join(stream.feed(raw[at : at + size]) for at in range(0, len(raw), size))
        assert got == b'data: {"a": 1}\n\ndata: {"b": 2}\n\n'
        assert stream.is_done
        assert stream.passed == 2


@pytest.mark.parametrize("line", [b"a%d: b\r\n", b"c" * 1000], ids=["many", "one"])
def test_trailers_without_end_are_cut_off(brain: RunningBrain, replica: RawReplica, line: bytes) -> None:
    is_cut_off = threading.Event()

    def script(client: socket.socket) -> None:
        client.sendall(STREAM + b"10\r\ndata: {}        \r\n0\r\n")
        try:
            for number in range(0, 2_000_000, 100):
                lines = (line.replace(b"%d", b"%d" % one) for one in range(number, number + 100))
                client.sendall(b"".join(lines))
        except OSError:
            is_cut_off.set()

    replica.script = script
    assert ask(brain).status_code == 502
    wait_until("it is hung up on", is_cut_off.is_set)


def test_comments_are_no_beginning_of_a_stream(replica: RawReplica) -> None:
    """As a gateway before an engine sends them, for as long as it waits."""
    has_left = threading.Event()

    def script(client: socket.socket) -> None:
        client.sendall(STREAM)
        try:
            while True:
                client.sendall(b"8\r\n: wait\n\n\r\n")
                time.sleep(0.05)
        except OSError:
            has_left.set()

    replica.script = script
    options = dataclasses.replace(OPTIONS, timeouts=Timeouts(20.0, 1.0, 20.0))
    with RunningBrain(told([replica.url]), options) as brain:
        answer = ask(brain, stream=True)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "replica_timeout"
        wait_until("it is left alone", has_left.is_set)


def test_a_head_gives_the_first_token_no_more_time(replica: RawReplica) -> None:
    def script(client: socket.socket) -> None:
        time.sleep(0.6)
        client.sendall(STREAM)
        time.sleep(0.8)  # less than a second after the head, and more than that after the request
        client.sendall(ANSWER)

    replica.script = script
    options = dataclasses.replace(OPTIONS, timeouts=Timeouts(20.0, 1.0, 20.0))
    with RunningBrain(told([replica.url]), options) as brain:
        answer = ask(brain, stream=True)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "replica_timeout"


@pytest.mark.parametrize("begins_with", [b"", COMMENTS], ids=["head", "comments"])
def test_a_replica_that_falls_silent_before_its_first_token_is_given_up(
    replica: RawReplica, begins_with: bytes
) -> None:
    """Engines send the head of a stream before they compute anything, and gateways comments."""
    other = RawReplica()
    other.script = lambda client: client.sendall(STREAM + ANSWER)
    silent, has_begun = threading.Event(), threading.Event()

    def script(client: socket.socket) -> None:
        client.sendall(STREAM + begins_with)
        has_begun.set()
        silent.wait(60)

    replica.script = script
    answers: list[httpx.Response] = []
    options = dataclasses.replace(OPTIONS, timeouts=Timeouts(20.0, 600.0, 20.0))
    with RunningBrain(told([replica.url]), options) as brain:
        asked = threading.Thread(target=lambda: answers.append(ask(brain, stream=True)), daemon=True)
        asked.start()
        wait_until("it is asked, since there is no other one", has_begun.is_set)
        brain.set_desired(told([replica.url, other.url], generation=2))
        hung = next(one for one in brain.brain.fleet if one.spec.url == replica.url)
        brain.call(lambda: brain.brain.fleet.fell_silent(hung))
        wait_until("the other one has answered", lambda: answers, seconds=50)
        silent.set()
    assert [one.status_code for one in answers] == [200]
    other.close()


def test_a_replica_that_closes_kept_connections_gets_a_request_twice_at_most(
    brain: RunningBrain, replica: RawReplica
) -> None:
    """Not once for each connection that is kept."""
    barrier = threading.Barrier(8)
    ends = threading.Event()

    def script(client: socket.socket) -> None:
        if not ends.is_set():
            barrier.wait(60)
            raw = b'{"choices": []}'
            client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(raw), raw))
            # The next request on the same connection, unless the brain closes it or asks for numbers.
            if client.recv(1 << 16).startswith(b"POST"):
                replica.requests += 1

    replica.script = script
    threads = [threading.Thread(target=ask, args=(brain,)) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    ends.set()
    replica.requests = 0
    assert ask(brain).status_code == 502
    assert replica.requests <= 2
