"""What is looked at in bodies beside what msgspec checks, compared with what looks at each byte."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from inference_brain.api import requests, scans
from inference_brain.api.errors import ApiError
from telemetry import decoder

FILLING = 'a[{]}"\\,:1 é\n'


def text_of(rng: random.Random, size: int) -> str:
    return "".join(rng.choices(FILLING, k=size))


def nested(depth: int, rng: random.Random) -> object:
    value: object = 1
    for _ in range(depth):
        value = rng.choice([[1, value, "]"], {"[": "}", "a": value}])
    return value


@pytest.mark.parametrize("offset", range(16))
@pytest.mark.parametrize("before", [0, scans.PIECE_BYTES - 24, 2 * scans.PIECE_BYTES])
@pytest.mark.parametrize("filling", [b"x", b"1x", b"?"])
def test_a_long_integer_is_found_wherever_it_is(before: int, offset: int, filling: bytes) -> None:
    text = filling * (before + offset + scans.LONG_BYTES)
    text = text[: before + offset] + b"9" * 19 + text[before + offset :]
    assert scans.may_have_long_integer(text)
    assert scans.may_have_long_integer(text[: before + offset + 19].rjust(scans.LONG_BYTES, b"x"))


def test_few_digits_together_are_no_long_integer() -> None:
    assert not scans.may_have_long_integer(b"20261130 12345678901234567 " * 1000)


@pytest.mark.parametrize("size", [0, 1, 5000, 3 * scans.PIECE_BYTES + 7])
def test_brackets_and_commas_are_counted(size: int) -> None:
    text = text_of(random.Random(size), size).encode()
    brackets = text.count(b"[") + text.count(b"{")
    assert scans.containers_and_commas(text) == (brackets, text.count(b","))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("depth", [1, 61, 62, 63, 64, 65, 300])
def test_bodies_are_as_deep_as_their_text(depth: int, seed: int) -> None:
    """A message is on the third level, and what is in its metadata on the fourth."""
    rng = random.Random(seed)
    message = {"role": "user", "content": text_of(rng, 500), "metadata": nested(depth, rng)}
    tools = [
        {"type": "function", "x": nested(rng.randint(0, 20), rng)} for _ in range(rng.randint(0, 3))
    ]
    raw = json.dumps({"model": "m", "messages": [message], "tools": tools}).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decoder, "has_containers", lambda _text, _many: True)
        limits = decoder.Limits(1 << 30, depth_max=requests.DEPTH_MAX)
        try:
            decoder.decode(raw, object, limits)
            is_deeper = False
        except decoder.Malformed:
            is_deeper = True
    assert is_deeper is (depth > requests.DEPTH_MAX - 3)
    if is_deeper:
        with pytest.raises(ApiError, match="nested deeper than 64 levels"):
            requests.chat(raw)
    else:
        assert (
            requests.chat(raw).messages[0]["metadata"]
            == msgspec.json.decode(raw)["messages"][0]["metadata"]
        )


def test_brackets_in_a_prompt_are_no_nesting() -> None:
    raw = json.dumps({"model": "m", "prompt": '\\"[{' * 10_000}).encode()
    assert requests.completion(raw).prompt == '\\"[{' * 10_000


@pytest.mark.parametrize("depth", [63, 64])
def test_the_values_of_a_long_list_are_not_walked_over(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk over millions of tokens takes forty times as long as one over their text."""
    asked: list[int] = []

    def is_text_deeper(text: bytes, most: int) -> bool:
        asked.append(most)
        return decoder.is_text_deeper(text, most)

    monkeypatch.setattr(scans, "is_text_deeper", is_text_deeper)
    metadata: object = [1] * 1000
    for _ in range(depth - 1):
        metadata = [metadata]
    raw = json.dumps({"model": "m", "prompt": "[x" * 65, "metadata": metadata}).encode()
    if depth < requests.DEPTH_MAX:
        assert requests.completion(raw).prompt == "[x" * 65
        assert asked == [requests.DEPTH_MAX]
    else:
        with pytest.raises(ApiError, match="nested deeper than 64 levels"):
            requests.completion(raw)
        assert not asked  # it is said sooner by what is around the list
