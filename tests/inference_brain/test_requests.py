"""Bodies of requests: whatever comes, the answer is one of OpenAI's, and never a failure of ours."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_brain.api import requests
from inference_brain.api.errors import ApiError
from inference_brain.api.requests import Chat, Completion
from tests.inference_brain.brains import RunningBrain, told
from tests.inference_brain.engines import FakeEngine
from tests.live import wait_until

FIELDS = sorted({*Chat.__struct_fields__, *Completion.__struct_fields__, "made_up"})
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=4,
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "tool", "x"]) | ANY, "content": ANY, "name": ANY}
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=6).flatmap(
    lambda some: st.fixed_dictionaries(
        {},
        optional={
            "model": st.just("m") | ANY,
            "messages": st.lists(MESSAGE, max_size=3) | ANY,
            "prompt": st.just("Hi") | ANY,
        },
    ).map(lambda main: {**some, **main})
)


def refused(parse: Any, raw: bytes) -> ApiError | None:
    try:
        parse(raw)
    except ApiError as error:
        return error
    return None


@settings(max_examples=60, deadline=None)
@given(BODIES)
def test_any_body_is_a_request_or_a_refusal(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    for parse in (requests.chat, requests.completion, requests.tokenize, requests.detokenize):
        error = refused(parse, raw)
        if error:
            assert error.status == 400
            told = msgspec.json.decode(error.body())["error"]
            assert told["message"]
            assert told["type"] == "invalid_request_error"


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_request_or_a_refusal(raw: bytes) -> None:
    for parse in (requests.chat, requests.completion):
        error = refused(parse, raw)
        assert error is None or error.status == 400


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 100_000,
        b'{"model":"m","messages":' + b'[{"a":' * 5000,
        b'{"model":"m","prompt":"\xff"}',
        b'{"model":"m","prompt":"a","seed":' + b"9" * 5000 + b"}",
        b'{"model":"m","prompt":"a","temperature":1e999}',
        b'{"model":"m","prompt":"a","temperature":NaN}',
        b'{"model":"m","prompt":"\\ud800"}',
        b"",
        b"null",
    ],
)
def test_hostile_bodies(raw: bytes) -> None:
    for parse in (requests.chat, requests.completion):
        error = refused(parse, raw)
        assert error is None or error.status == 400


@settings(max_examples=60, deadline=None)
@given(BODIES)
def test_what_is_sent_on_is_what_came_but_for_what_clients_may_not_set(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    for parse in (requests.chat, requests.completion):
        try:
            request = parse(raw)
        except ApiError:
            continue
        sent = msgspec.json.decode(msgspec.json.encode(requests.sent_on(request)))
        removed = body.keys() - sent.keys()
        assert removed <= {*requests._REMOVED}
        assert sent.keys() <= body.keys()
        for name in sent.keys() - {"messages", "stream_options"}:
            assert sent[name] == body[name]


@pytest.fixture(scope="module")
def brain() -> Iterator[RunningBrain]:
    with FakeEngine() as engine, RunningBrain(told([engine.url])) as made:
        yield made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BODIES.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=300))
def test_the_api_never_fails(brain: RunningBrain, raw: bytes) -> None:
    with httpx.Client(headers=brain.headers) as client:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            answer = client.post(brain.url + path, content=raw)
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
    wait_until("all is given back", lambda: not brain.brain.api.room.used)
    assert not brain.brain.counts.streams


@pytest.mark.parametrize(
    ("more", "is_plain"),
    [
        ({}, True),
        ({"n": 1, "response_format": {"type": "text"}, "logit_bias": {}, "bad_words": []}, True),
        ({"tools": [{"type": "function"}], "tool_choice": "auto", "prompt_logprobs": None}, True),
        ({"prompt_logprobs": 0}, False),
        ({"n": 2}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"response_format": {}}, False),
        ({"guided_json": {"type": "string"}}, False),
        ({"structured_outputs": {"regex": "a*"}}, False),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
        ({"bad_words": ["a"]}, False),
        ({"use_beam_search": True}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, True),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            False,
        ),
    ],
)
def test_a_request_is_plain_if_nothing_but_its_prompt_takes_time(
    more: dict[str, Any], *, is_plain: bool
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **more}
    assert requests.chat(json.dumps(body).encode()).is_plain is is_plain


def test_a_completion_of_several_prompts_is_not_plain() -> None:
    for prompt, is_plain in (("Hi", True), ([1, 2], True), (["Hi"], True), (["Hi", "Hi"], False)):
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        assert requests.completion(body).is_plain is is_plain


def test_what_a_body_becomes_is_counted_in_all_of_it() -> None:
    """However long it is: short ones, and long ones in pieces with the borders in any place."""
    for size in (0, 1, 4096, 4097, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, (128 << 10) + 7):
        raw = bytes(random.Random(size).choices(b"[{},;Z]k", (1, 2, 1, 4, 1, 1, 1, 1), k=size))
        containers, values = raw.count(b"[") + raw.count(b"{"), raw.count(b",")
        counted = requests.CONTAINER_BYTES * containers + requests.VALUE_BYTES * values
        assert requests.memory_of(raw) == counted


def test_priorities_and_answers() -> None:
    raw = b'{"model":"m","prompt":["a","b"],"n":2,"best_of":3,"priority":9,"max_tokens":5}'
    request = requests.completion(raw)
    assert (request.answers, request.wish, request.answer_tokens_max) == (6, 9, 5)
    newer = requests.chat(
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":5,'
        b'"max_completion_tokens":3}'
    )
    assert (newer.answers, newer.wish, newer.answer_tokens_max) == (1, None, 3)
