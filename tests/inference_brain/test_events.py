"""Streams of events on their way to the client, however they are cut into pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_brain.api.events import DONE, EventStream, Renaming, usage_of

USAGE: dict[str, Any] = {
    "prompt_tokens": 9,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def token(text: str, model: str = "m") -> bytes:
    return event({"model": model, "choices": [{"index": 0, "delta": {"content": text}}]})


LAST = event({"model": "m", "choices": [], "usage": USAGE})


def pieces_of(raw: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(raw), *(one % (len(raw) + 1) for one in cuts)})
    return [raw[start:end] for start, end in pairwise(places)]


@given(
    st.lists(st.text(max_size=12), max_size=6),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_the_client_gets_the_same_events_however_they_come(
    texts: list[str],
    cuts: list[int],
    wants_usage: bool,  # noqa: FBT001
    renames: bool,  # noqa: FBT001
) -> None:
    tokens = [token(text) for text in texts]
    stream = EventStream(Renaming("m", "n" if renames else "m"), wants_usage=wants_usage)
    got = b"".join(stream.feed(piece) for piece in pieces_of(b"".join([*tokens, LAST, DONE]), cuts))
    wanted = [token(text, "n" if renames else "m") for text in texts]
    if wants_usage:
        wanted.append(LAST.replace(b'"model":"m"', b'"model":"n"') if renames else LAST)
    assert got == b"".join(wanted)
    assert stream.is_done
    assert stream.failure is None
    assert stream.usage is not None
    assert (stream.usage.completion_tokens, stream.usage.cached_tokens) == (2, 4)


def test_a_models_name_in_the_text_stays() -> None:
    stream = EventStream(Renaming("m", "n"), wants_usage=False)
    said = token('He said "model":"m".')
    assert stream.feed(said) == said.replace(b'{"model":"m"', b'{"model":"n"')


def test_an_error_is_passed_on_and_noted() -> None:
    stream = EventStream(Renaming("m", "m"), wants_usage=False)
    error = event({"error": {"message": "no", "code": 500}})
    assert stream.feed(error) == error
    assert stream.failure
    assert (stream.failure.status, stream.failure.message, stream.passed) == (500, "no", 0)
    assert not stream.is_done


def test_other_line_ends_are_understood() -> None:
    stream = EventStream(Renaming("m", "m"), wants_usage=False)
    assert stream.feed(b"data: {}\r\n\r\ndata: [DONE]\r\n\r\n") == b"data: {}\n\n"
    assert stream.is_done


@pytest.mark.parametrize("comment", [b": waits\n\n", b":\r\n\r\n", b": one\n: two\n\n", b": [DONE]\n\n"])
def test_a_comment_is_no_token(comment: bytes) -> None:
    stream = EventStream(Renaming("m", "m"), wants_usage=False)
    assert stream.feed(comment) == b""
    assert (stream.passed, stream.is_done) == (0, False)
    assert stream.feed(token("a") + comment + token(":")) == token("a") + token(":")
    assert stream.passed == 2


def test_a_long_comment_is_found_at_once() -> None:
    stream = EventStream(Renaming("m", "m"), wants_usage=False)
    said = b"\n".join([b":" * 10_000] * 100) + b"\nx\n\n"
    assert stream.feed(said) == said


def test_lines_beside_a_comment_are_an_event() -> None:
    stream = EventStream(Renaming("m", "m"), wants_usage=False)
    said = b": of a gateway\n" + token("a")
    assert stream.feed(said) == said
    assert stream.passed == 1


@given(st.binary(max_size=300))
def test_anything_may_come(raw: bytes) -> None:
    stream = EventStream(Renaming("m", "n"), wants_usage=True)
    stream.feed(raw)
    usage_of(raw)


def test_usage_of_a_whole_answer() -> None:
    found = usage_of(msgspec.json.encode({"id": "x", "choices": [{}], "usage": USAGE}))
    assert found is not None
    assert (found.prompt_tokens, found.cached_tokens) == (9, 4)
    assert usage_of(b"{}") is None


def test_the_usage_of_a_long_answer_is_known() -> None:
    """An org is charged for it: logprobs make an answer thousands of times as long as its text."""
    each = {"token": " a", "logprob": -0.1, "top_logprobs": [{"token": " a", "logprob": -1.5}] * 20}
    choice = {"index": 0, "logprobs": {"content": [each] * 20_000}}
    answer = {"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 20_000}}
    usage = usage_of(msgspec.json.encode(answer))
    assert usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 20_000)
