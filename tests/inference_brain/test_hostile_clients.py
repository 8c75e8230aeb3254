"""Clients of one org that mean harm: to other orgs, to limits, to logs, and to engines."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from inference_brain.api import requests
from inference_brain.api.errors import ApiError
from inference_brain.api.requests import CONTAINER_BYTES, PROMPTS_MAX
from inference_brain.body_room import BodyRoom
from inference_brain.desired import Limits
from tests.inference_brain.brains import KEY, RunningBrain, client_of, get, org, post, told
from tests.inference_brain.engines import FakeEngine
from tests.inference_brain.small_tokenizers import llama3
from tests.live import wait_until

AUTHORIZED = f"host: a\r\nauthorization: Bearer {KEY}\r\n".encode()
IMAGE = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as made:
        yield made


@pytest.fixture(scope="module")
def brain(engine: FakeEngine) -> Iterator[RunningBrain]:
    with RunningBrain(told([engine.url], orgs=(org(), org("globex", "sk-globex")))) as made:
        yield made


@pytest.fixture(autouse=True)
def _plain(engine: FakeEngine) -> None:
    engine.behavior = type(engine.behavior)()
    engine.asked.clear()


def used(brain: RunningBrain) -> tuple[float, float]:
    """Requests and tokens of acme in the last minute."""
    limits = brain.brain.router.admission.limits
    return brain.call(lambda: limits._orgs["acme"].own.sums(time.monotonic()))


# Limits


def test_who_leaves_before_the_end_is_charged_for_what_it_got(engine: FakeEngine) -> None:
    """Else one that closes the connection after the last token but one pays for no answer at all."""
    engine.behavior.tokens = 300
    engine.behavior.between_seconds = 0.001
    body = {"model": "m", "prompt": "Hi", "stream": True}
    with RunningBrain(told([engine.url])) as brain:  # in which nobody else uses anything
        url = f"{brain.url}/v1/completions"
        with httpx.stream("POST", url, headers=brain.headers, json=body, timeout=60) as answer:
            lines = (one for one in answer.iter_lines() if one)
            for _ in range(200):
                next(lines)
        wait_until("it is over", lambda: not any(one.in_progress for one in brain.brain.fleet))
        assert used(brain)[1] >= 200
        page = brain.brain.counts._numbers
        tokens = [by for metric, by in page.items() if "tokens" in metric.name]
        assert sum(n for by in tokens for labels, n in by.items() if "completion" in labels) >= 200


# Time and memory of others


def test_what_a_body_becomes_takes_of_the_memory_for_bodies(
    brain: RunningBrain, engine: FakeEngine
) -> None:
    """Empty arrays take twenty times what they take on the wire."""
    engine.behavior.is_held = True
    small = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    body = {**small, "metadata": [[]] * 50_000}
    url = f"{brain.url}/v1/chat/completions"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, url, headers=brain.headers, json=body)
        wait_until("it is there", lambda: engine.now_running == 1)
        assert brain.brain.api.room.used > 50_000 * CONTAINER_BYTES
        engine.behavior.is_held = False
        assert running.result().status_code == 200
    wait_until("all is given back", lambda: not brain.brain.api.room.used)
    many = post(url, headers=brain.headers, json={**small, "metadata": [[]] * 600_000})
    assert many.status_code == 400
    assert "arrays and objects" in many.json()["error"]["message"]


def test_tokens_beyond_the_models_are_not_made_text(brain: RunningBrain) -> None:
    body = {"model": "m", "tokens": [1] * 100_001}
    answer = post(f"{brain.url}/detokenize", headers=brain.headers, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_that_is_far_too_long_is_refused_by_the_same_code_as_one_that_is_a_little(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """The first is not tokenized. Clients take a model with a longer context by this code."""
    llama3().save(str(tmp_path / "tokenizer.json"))
    with RunningBrain(told([engine.url], tokenizer=str(tmp_path), tokens_max=10)) as brain:
        for words in (20, 20_000):
            body = {"model": "m", "prompt": "word " * words}
            answer = post(f"{brain.url}/v1/completions", headers=brain.headers, json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_each_of_several_prompts_is_bounded_by_the_models_length(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """As texts and as tokens, also where the model has no tokenizer."""
    llama3().save(str(tmp_path / "tokenizer.json"))
    tokens, texts = [[1] * 5, [1] * 9], ["a", "<|eot_id|>" * 8]  # each gets one more at its beginning
    for tokenizer, prompt in (("", tokens), (str(tmp_path), tokens), (str(tmp_path), texts)):
        with RunningBrain(told([engine.url], tokenizer=tokenizer, tokens_max=10)) as brain:
            url, body = f"{brain.url}/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1}
            assert post(url, headers=brain.headers, json=body).status_code == 200
            answer = post(url, headers=brain.headers, json={**body, "max_tokens": 2})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert "11: 9 in the prompt and 2 for the answer" in error["message"]


def test_characters_of_a_prompt_beside_one_of_tokens_are_not_counted_as_tokens(
    engine: FakeEngine,
) -> None:
    with RunningBrain(told([engine.url], tokens_max=10)) as brain:
        body = {"model": "m", "prompt": [[1] * 5, "ten words, say, of a model without a tokenizer"]}
        url = f"{brain.url}/v1/completions"
        assert post(url, headers=brain.headers, json=body).status_code == 200


@pytest.mark.slow
def test_tokens_that_nobody_takes_count_as_memory_until_their_client_leaves(
    engine: FakeEngine, tmp_path: Path
) -> None:
    llama3().save(str(tmp_path / "tokenizer.json"))
    text = {"model": "m", "prompt": "\x01" * 450_000, "return_token_strs": True}
    body = json.dumps(text).encode()
    document = told([engine.url], tokenizer=str(tmp_path), tokens_max=1_000_000)
    with RunningBrain(document) as brain:
        answer = post(f"{brain.url}/tokenize", headers=brain.headers, json=text)
        assert answer.json()["token_strs"][1:] == ["\x01"] * 450_000
        room, size = brain.brain.api.room, len(answer.content)
        wait_until("all is given back", lambda: not room.used)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.connect(("127.0.0.1", brain.port))
            length = f"content-length: {len(body)}\r\n\r\n".encode()
            client.sendall(b"POST /tokenize HTTP/1.1\r\n" + AUTHORIZED + length + body)
            wait_until("its answer is there", lambda: room.used > size)
        wait_until("all is given back", lambda: not room.used)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_text_that_is_none_is_refused(brain: RunningBrain, path: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": 5}]}]
    body = {"model": "m", "messages": messages}
    answer = post(f"{brain.url}{path}", headers=brain.headers, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content"


def test_images_are_no_text(engine: FakeEngine) -> None:
    """They are charged as the engine counts them, and nobody knows that before."""
    few, more = Limits(tokens_per_minute=1000), Limits(tokens_per_minute=5000)
    orgs = (org(limits=more), org("globex", "sk-globex", limits=few))
    with RunningBrain(told([engine.url], orgs=orgs)) as brain:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 900_000}}
        content = [{"type": "text", "text": "What is it?"}, image]
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 10}
        url = f"{brain.url}/v1/chat/completions"
        for _ in range(3):
            assert post(url, headers=brain.headers, json=body).status_code == 200
        wait_until("it is charged", lambda: used(brain) == (3, 3 * (7 + engine.behavior.tokens)))
        other = {"authorization": "Bearer sk-globex"}
        assert post(url, headers=other, json=body).status_code == 200


def test_one_request_has_a_bounded_number_of_prompts(brain: RunningBrain) -> None:
    """Each is tokenized, and an engine computes all of them in one place."""
    with pytest.raises(ApiError) as refused:
        requests.completion(msgspec.json.encode({"model": "m", "prompt": ["a"] * (PROMPTS_MAX + 1)}))
    assert refused.value.param == "prompt"
    requests.completion(msgspec.json.encode({"model": "m", "prompt": ["a"] * PROMPTS_MAX}))


def test_slow_bodies_of_one_org_leave_room_for_others() -> None:
    room = BodyRoom(100)
    assert all(room.take("acme", 10) for _ in range(5))
    assert not room.take("acme", 10)
    assert room.take("globex", 20)
    assert not room.take("acme", 1)
    room.give_back("acme", 50)
    room.give_back("globex", 20)
    assert room.take("acme", 100)  # a single one may be as long as there is room
    assert not room.take("globex", 1)


def test_long_detokenizing_is_not_done_where_names_are_looked_up(brain: RunningBrain) -> None:
    """By the threads of the loop: then no replica with a name could be connected to meanwhile."""
    service, goes_on = brain.brain.prompts.service, threading.Event()
    try:
        waiting = [
            brain.call(lambda: asyncio.ensure_future(service.run("acme", goes_on.wait)))
            for _ in range(40)
        ]
        asyncio.run_coroutine_threadsafe(asyncio.to_thread(int), brain._loop).result(60)
        assert not any(one.done() for one in waiting)
    finally:
        goes_on.set()
    wait_until("they are done", lambda: all(one.done() for one in waiting))


# What engines get


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools"])
def test_a_template_cannot_come_with_the_request(
    brain: RunningBrain, engine: FakeEngine, name: str
) -> None:
    """Also where the brain renders no template itself: with images, or without a tokenizer."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [IMAGE]}],
        "chat_template_kwargs": {name: "{% for a in range(10**9) %}{% endfor %}"},
    }
    answer = post(f"{brain.url}/v1/chat/completions", headers=brain.headers, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    assert not engine.asked


# HTTP


def talk(brain: RunningBrain, raw: bytes) -> bytes:
    """All that is answered to these bytes, until the brain closes the connection."""
    got = b""
    with socket.create_connection(("127.0.0.1", brain.port), timeout=60) as client:
        client.sendall(raw)
        while piece := client.recv(1 << 16):
            got += piece
    return got


POST = b"POST /v1/completions HTTP/1.1\r\n" + AUTHORIZED
NEXT = b"GET /v1/models HTTP/1.1\r\n" + AUTHORIZED + b"\r\n"
JSON = b'{"model":"m","prompt":"Hi"}'


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 27\r\ntransfer-encoding: chunked\r\n\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
        b"content-length: 27\r\ncontent-length: 5\r\n\r\n",
        b"content-length: 27\r\ncontent-length: 27\r\n\r\n",
        b"content-length: +27\r\n\r\n",
        b"content-length: 27, 27\r\n\r\n",
        b"content-length : 27\r\n\r\n",
        b"transfer-encoding: chunked, identity\r\n\r\n",
        b"transfer-encoding: xchunked\r\n\r\n",
        b"x: a\r\n content-length: 5\r\ncontent-length: 27\r\n\r\n",
        b"content-length: 27\n\n",
        b'transfer-encoding: chunked\r\n\r\n1b;a="\n"\r\n',
        b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"transfer-encoding: chunked\r\n\r\n0x1b\r\n",
        b"transfer-encoding: chunked\r\n\r\n-1\r\n",
        b"transfer-encoding: chunked\r\n\r\n1b\n",
    ],
)
def test_a_request_whose_end_is_not_clear_is_refused_and_nothing_follows(
    brain: RunningBrain, engine: FakeEngine, head: bytes
) -> None:
    answered = talk(brain, POST + head + JSON + NEXT)
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert answered.count(b"HTTP/1.1 ") == 1
    assert not engine.asked


def test_what_follows_a_closed_request_is_not_answered(brain: RunningBrain) -> None:
    answered = talk(brain, POST + b"connection: close\r\ncontent-length: 27\r\n\r\n" + JSON + NEXT)
    assert answered.count(b"HTTP/1.1 ") == 1


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # and its first frame


def test_strangers_over_http2_leave_places_to_keys(engine: FakeEngine) -> None:
    """Nobody has shown a key on such a connection, and its places are those of clients with keys."""
    with ExitStack() as opened:
        brain = opened.enter_context(RunningBrain(told([engine.url]), connections=60))
        for _ in range(100):
            stranger = opened.enter_context(socket.create_connection(("127.0.0.1", brain.port)))
            stranger.sendall(PREFACE)
        clients = [opened.enter_context(client_of(brain)) for _ in range(30)]
        assert {one.get(f"{brain.url}/v1/models").status_code for one in clients} == {200}


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


NO_WINDOW = PREFACE[:24] + frame(4, 0, 0, struct.pack(">HI", 4, 0))


def test_who_takes_no_answer_over_http2_leaves_few_of_them_open(brain: RunningBrain) -> None:
    """A thousand of each connection were 0.9 MB, of which a stranger could have thousands."""
    answered = refused = 0
    with socket.create_connection(("127.0.0.1", brain.port)) as client, client.makefile("rb") as read:
        client.sendall(NO_WINDOW)
        health = b"\x82\x86\x04\x07/health\x01\x01x"  # GET, http, a path and an authority
        for index in range(200):
            client.sendall(frame(1, 5, 2 * index + 1, health))
        while answered + refused < 200:
            head = read.read(9)
            read.read(int.from_bytes(head[:3], "big"))
            answered += head[3] == 1
            refused += head[3] == 3
    assert (answered, refused) == (100, 100)


@pytest.mark.parametrize("characters", [50, 700])  # of each of 100 tokens
def test_answers_that_nobody_takes_over_http2_count_as_memory(
    brain: RunningBrain, engine: FakeEngine, characters: int
) -> None:
    """granian took up to 320 KiB of each at once, for as long as the connection lasted."""

    def field(name: bytes, value: bytes) -> bytes:
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

    engine.behavior.tokens, engine.behavior.text = 100, "x" * characters
    head = b"\x83\x86" + field(b":path", b"/v1/completions") + field(b":authority", b"a")
    head += field(b"authorization", b"Bearer " + KEY.encode())
    body = b'{"model":"m","prompt":"Hi","max_tokens":100}'
    with socket.create_connection(("127.0.0.1", brain.port)) as client:
        client.sendall(NO_WINDOW)
        for index in range(10):
            client.sendall(frame(1, 4, 2 * index + 1, head) + frame(0, 1, 2 * index + 1, body))
        wait_until("all are counted", lambda: brain.brain.api.room.used > 10 * 100 * characters)
        wait_until("all have ended", lambda: not engine.now_running)
        assert brain.brain.api.room.used > 10 * 100 * characters
    wait_until("all is given back", lambda: not brain.brain.api.room.used)


# Logs


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/x%20200%20request=req-1%20org=globex", {}),
        ("/v1/x%0aPOST%20/v1/y%20200", {}),
        ("/v1/models", {"x-client-request-id": "a org=globex model=m"}),
    ],
)
def test_a_client_writes_no_field_of_the_access_log(
    brain: RunningBrain, caplog: pytest.LogCaptureFixture, path: str, headers: dict[str, Any]
) -> None:
    def lines() -> list[str]:
        """Of this request; one of a client that has gone may still come."""
        said = [one.message for one in caplog.records if one.name == "inference_brain.access"]
        return [one for one in said if one.startswith("GET ")]

    with caplog.at_level(logging.INFO, "inference_brain.access"):
        get(f"{brain.url}{path}", headers={**brain.headers, **headers})
        wait_until("the request is logged", lines)  # after its answer
    [line] = lines()
    fields = [one.partition("=")[0] for one in line.split() if "=" in one]
    assert len(fields) == len(set(fields))
    assert " org=acme " in line
    assert len(line.splitlines()) == 1
