"""The one bounded decoder: a value of the type, or Malformed; never anything else."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.decoder import (
    DOCUMENT,
    INTEGER_MAX,
    INTEGER_MIN,
    SENTENCE_CHARACTERS_MAX,
    Count,
    Limits,
    Malformed,
    decode,
    excerpt,
    unpack,
)


def test_the_types_for_fields_are_usable() -> None:
    assert decode("[9223372036854775807, 0]", list[Count]) == [9223372036854775807, 0]


@pytest.mark.parametrize("before", range(8))
@pytest.mark.parametrize("digits", [20, 21, 40])
def test_a_long_integer_is_found_wherever_it_is(before: int, digits: int) -> None:
    text = "[" + " " * before + "9" * digits + "]"
    with pytest.raises(Malformed, match="64 bits"):
        decode(text, list[Any])
    assert decode(text.replace("9" * digits, "9" * 18), list[Any]) == [int("9" * 18)]


class Shard(msgspec.Struct):
    name: str
    slots: Count = 0
    share: float = 0.0
    inner: list[Shard] = []


class Observed(msgspec.Struct):
    generation: Count
    shards: list[Shard] = []


WIDE = Limits(1 << 20)
ANYTHING: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
PACKED: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()

texts = st.text(st.characters(codec="utf-8"))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(INTEGER_MIN, INTEGER_MAX)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.sampled_from(["[", "}{", '\\"[[', "1" * 30, "\\\\", '"', "{" * 40]),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=30,
)


@pytest.mark.slow
@given(values)
def test_what_is_within_the_limits_is_what_msgspec_makes_of_it(value: object) -> None:
    compact = msgspec.json.encode(value)
    for raw in (compact, msgspec.json.format(compact), json.dumps(value).encode()):
        assert decode(raw, ANYTHING, WIDE) == msgspec.json.decode(raw)
        assert decode(raw.decode(), ANYTHING, WIDE) == msgspec.json.decode(raw)
    packed = msgspec.msgpack.encode(value)
    assert unpack(packed, PACKED, WIDE) == msgspec.msgpack.decode(packed)


def depth_of(value: object) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


def items_of(value: object) -> int:
    """As the module counts them: an empty array counts for one."""
    if isinstance(value, list | dict):
        inner = list(value.values()) if isinstance(value, dict) else value
        return max(len(inner), 1) + sum(map(items_of, inner))
    return 0


@given(values, st.integers(0, 6))
def test_nesting_is_measured_exactly(value: object, depth_max: int) -> None:
    raw, limits = msgspec.json.encode(value), Limits(1 << 20, depth_max=depth_max)
    if depth_of(value) <= depth_max:
        assert decode(raw, ANYTHING, limits) == msgspec.json.decode(raw)
    else:
        with pytest.raises(Malformed, match=f"nested deeper than {depth_max} levels"):
            decode(raw, ANYTHING, limits)


@given(values, st.integers(0, 20))
def test_items_are_counted_exactly(value: object, items_max: int) -> None:
    raw, limits = msgspec.json.encode(value), Limits(1 << 20, items_max)
    if items_of(value) <= items_max:
        assert decode(raw, ANYTHING, limits) == msgspec.json.decode(raw)
    else:
        with pytest.raises(Malformed, match=f"more than {items_max} items"):
            decode(raw, ANYTHING, limits)


def containers_of(value: object) -> int:
    if isinstance(value, list | dict):
        return 1 + sum(map(containers_of, value.values() if isinstance(value, dict) else value))
    return 0


@given(values, st.integers(0, 6))
def test_containers_are_counted_exactly(value: object, most: int) -> None:
    raw, limits = msgspec.json.encode(value), Limits(1 << 20, containers_max=most)
    if containers_of(value) <= most:
        assert decode(raw, ANYTHING, limits) == msgspec.json.decode(raw)
    else:
        with pytest.raises(Malformed, match=f"more than {most} arrays and objects"):
            decode(raw, ANYTHING, limits)


@given(st.integers(-(1 << 70), 1 << 70), st.floats(allow_nan=False, allow_infinity=False))
def test_integers_have_64_bits(number: int, fraction: float) -> None:
    fractions = f"{fraction!r}, {'0.' + '1' * 30}, 1e-0000000000000000000000005"
    raw = f'{{"{"9" * 30}": [{fractions}, {number}, "{number}"]}}'
    if INTEGER_MIN <= number <= INTEGER_MAX:
        assert decode(raw, ANYTHING) == msgspec.json.decode(raw)
    else:
        with pytest.raises(Malformed, match="64 bits"):
            decode(raw, ANYTHING)


@given(st.binary() | st.text().map(lambda text: text.encode(errors="surrogatepass")))
def test_any_bytes_are_a_value_or_malformed(raw: bytes) -> None:
    short: msgspec.json.Decoder[str] = msgspec.json.Decoder(Annotated[str, msgspec.Meta(max_length=3)])
    for decoder in (ANYTHING, msgspec.json.Decoder(Observed), msgspec.json.Decoder(list[int]), short):
        try:
            decode(raw, decoder)
        except Malformed as error:
            assert_is_a_sentence(error)
    try:
        unpack(raw, PACKED)
    except Malformed as error:
        assert_is_a_sentence(error)


@given(st.text('[]{}",:\\1e-.u0 a'))
def test_anything_like_json_is_a_value_or_malformed(text: str) -> None:
    """And what msgspec takes, so do we, within the limits."""
    try:
        expected: object = msgspec.json.decode(text)
    except msgspec.DecodeError:
        with pytest.raises(Malformed):
            decode(text, ANYTHING)
        return
    if not re.search("[0-9]{19}", text):
        assert decode(text, ANYTHING) == expected


def assert_is_a_sentence(error: Malformed) -> None:
    text = str(error)
    assert 0 < len(text) <= SENTENCE_CHARACTERS_MAX
    assert text.isprintable()


SKIPPED = b'{"unknown": %s, "generation": 1}'


@pytest.mark.parametrize("depth", [33, 999, 1_000, 5_000, 100_000])
@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("around", [b"%s", SKIPPED])
def test_deep_input_never_recurses(depth: int, pair: tuple[bytes, bytes], around: bytes) -> None:
    """Also where msgspec would only skip it, and where it does not end."""
    first, last = pair
    deep = first * depth + b"1" + last * depth
    for raw in (around % deep, around % (first * depth)):
        with pytest.raises(Malformed, match="nested deeper than 32 levels"):
            decode(raw, Observed)


def test_a_caller_that_is_deep_in_calls_itself() -> None:
    """What msgspec may recurse is what the caller has left, and that may be less than our limit."""
    raw = b"[" * 30 + b"]" * 30

    def ask(frames: int) -> str:
        if frames:
            return ask(frames - 1)
        try:
            return type(decode(raw, ANYTHING)).__name__
        except Malformed as error:
            return str(error)

    deepest = sys.getrecursionlimit() - len(inspect.stack()) - 10  # what decode itself calls needs some
    assert [ask(0), ask(deepest)] == ["list", "It is nested too deep"]


@pytest.mark.parametrize("deep", [b"\x91" * 5_000 + b"\x01", b"\x81\xa1a" * 5_000 + b"\x01"])
def test_deep_messagepack(deep: bytes) -> None:
    with pytest.raises(Malformed, match="nested too deep"):
        unpack(deep, PACKED)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_no_float_is_infinite(number: float) -> None:
    kept: msgspec.msgpack.Decoder[Shard] = msgspec.msgpack.Decoder(Shard)
    with pytest.raises(Malformed, match="not finite"):
        unpack(msgspec.msgpack.encode({"name": "a", "share": number}), kept)
    with pytest.raises(Malformed, match="not finite"):
        unpack(msgspec.msgpack.encode({"name": "a", "inner": [{"name": "b", "share": number}]}), kept)
    with pytest.raises(Malformed):
        decode(json.dumps({"name": "a", "share": number}), Shard)
    for text in ("1e999", "-1e999"):
        with pytest.raises(Malformed, match="out of range"):
            decode(f'{{"name": "a", "share": {text}}}', Shard)


def test_bytes_that_look_like_an_infinite_float_are_none() -> None:
    told = {"key": b"\xcb\x7f\xf0 \xca\xff\x80", "x": 1.5}
    assert unpack(msgspec.msgpack.encode(told), PACKED) == told


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("", "truncated"),
        ('{"generation": 1', "truncated"),
        ('{"generation": "1"}', "Expected `int`, got `str` - at `$.generation`"),
        ('{"generation": -1}', "Expected `int` >= 0 - at `$.generation`"),
        ('{"generation": 9223372036854775808}', "- at `$.generation`"),
        ('{"generation": 1, "shards": ["x"]}', "Expected `object`, got `str` - at `$.shards[0]`"),
        (b'{"generation": 1, "shards": [{"name": "\xff"}]}', "UTF-8"),
        ("\ud800", "UTF-8"),
    ],
)
def test_each_refusal_has_its_sentence(raw: bytes | str, sentence: str) -> None:
    with pytest.raises(Malformed) as caught:
        decode(raw, Observed)
    assert sentence in str(caught.value)
    assert_is_a_sentence(caught.value)


class First(msgspec.Struct, tag="first"):
    pass


class Second(msgspec.Struct, tag="second", forbid_unknown_fields=True):
    pass


@pytest.mark.parametrize(
    "raw",
    [{"type": "x" * 5000}, {"type": "second", "y\n\x00" * 2000: 1}, {"type": "\u202e - at `" * 900}],
)
def test_a_refusal_quotes_little_of_what_was_sent(raw: object) -> None:
    with pytest.raises(Malformed) as caught:
        decode(msgspec.json.encode(raw), msgspec.json.Decoder(First | Second))
    assert_is_a_sentence(caught.value)


def test_what_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(Malformed, match="more than 8388608 bytes"):
        decode(b" " * ((8 << 20) + 1), Observed)
    with pytest.raises(Malformed, match="more than 3 bytes"):
        unpack(b"\x01" * 4, PACKED, Limits(3))


def test_many_items_are_refused_before_they_are_made() -> None:
    with pytest.raises(Malformed, match="more than 262144 items"):
        decode(b"[" + b"[]," * 300_000 + b"[]]", ANYTHING)
    assert len(decode(b"[" + b"1," * 300_000 + b"1]", list[int], DOCUMENT)) == 300_001


def test_an_excerpt_is_one_printable_line() -> None:
    assert excerpt("it is\nso\x00\x1b[31m") == "it is so  [31m"
    assert excerpt("é" * 400, 10) == "é" * 9 + "…"
    assert excerpt("é" * 10, 10) == "é" * 10
