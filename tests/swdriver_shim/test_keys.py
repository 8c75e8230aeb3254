"""Keys: the same for the same prompt of the same org, and for nobody and nothing else."""

from __future__ import annotations

import hashlib
import itertools
import re
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvss_agent.desired import PART
from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.keys import (
    COLUMN_TOKENS,
    Keys,
    Known,
    Media,
    Namespace,
    Prompt,
    encode,
    isolation_tag,
)
from swdriver_shim.layout import SHARDS_MAX, part_name

SECRET = bytes(range(32))
NAMESPACE = Namespace("llama", "r1", "bf16", "full:64")
TAG = isolation_tag("acme", SECRET)
KEYS = Keys("acme", SECRET, NAMESPACE)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300)


def test_whole_columns_have_keys_and_a_tail_has_one_of_its_own() -> None:
    prompt = KEYS.prompt(range(150))
    assert len(prompt.keys) == 2
    assert prompt.tokens == 150
    tails = [prompt.tail(columns, count) for columns in (0, 1, 2) for count in (1, 21, 22)]
    assert len({*prompt.keys, *tails}) == 2 + 9
    assert all(len(key) == 16 for key in (*prompt.keys, *tails))
    for columns, count in [(2, 0), (2, 23), (1, 64), (3, 1)]:
        with pytest.raises(ValueError, match="no tail"):
            prompt.tail(columns, count)


def known_by(prompt: Prompt) -> tuple[int, list[bytes], list[bytes]]:
    whole, rest = divmod(prompt.tokens, COLUMN_TOKENS)
    return prompt.tokens, prompt.keys, [prompt.tail(whole, count + 1) for count in range(rest)]


@given(st.lists(TOKENS, max_size=4))
def test_a_prompt_that_goes_on_is_that_of_all_its_tokens(parts: list[list[int]]) -> None:
    tokens = list(itertools.chain(*parts))
    grown = KEYS.prompt()
    for part in parts:
        grown.extend(part)
    whole = known_by(KEYS.prompt(tokens))
    assert known_by(grown) == whole
    assert known_by(KEYS.prompt(encode(tokens))) == whole
    assert known_by(KEYS.prompt(memoryview(array("I", tokens)).cast("B"))) == whole


@given(TOKENS, st.integers(-5, 305), TOKENS)
def test_a_rewound_prompt_is_that_of_what_is_left(tokens: list[int], left: int, more: list[int]) -> None:
    prompt = KEYS.prompt(tokens)
    prompt.rewind(left)
    kept = tokens[: max(0, left)]
    assert known_by(prompt) == known_by(KEYS.prompt(kept))
    prompt.extend(more)
    assert known_by(prompt) == known_by(KEYS.prompt([*kept, *more]))


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 600)), max_size=5), st.sampled_from([64, 128])
)
def test_a_prompt_that_grows_and_is_rewound_in_turns_is_that_of_what_is_left(
    turns: list[tuple[int, int]], unit: int
) -> None:
    """Wherever it is cut: in the tokens that it began with, or in those that were added."""
    maker = Keys("acme", SECRET, NAMESPACE, unit)
    prompt, tokens, number = maker.prompt(), list[int](), itertools.count()
    for more, left in turns:
        for _ in range(2):
            new = list(itertools.islice(number, more))
            prompt.extend(new)
            tokens += new
        prompt.rewind(left)
        del tokens[left:]
        whole = maker.prompt(tokens)
        assert (prompt.tokens, prompt.keys, prompt.states) == (whole.tokens, whole.keys, whole.states)
        if unit == COLUMN_TOKENS:
            assert known_by(prompt) == known_by(whole)


@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 200), st.sampled_from([64, 128]))
def test_a_prompt_of_which_keys_are_known_has_those_of_all_its_tokens(
    earlier: int, further: int, more: int, unit: int
) -> None:
    maker = Keys("acme", SECRET, NAMESPACE, unit)
    before, tokens = maker.prompt(range(earlier)), range(earlier + further + more)
    known = Known(bytes(before.states), tuple(before.keys))
    prompt, whole = maker.prompt(tokens[: earlier + further], known=known), maker.prompt(tokens)
    prompt.extend(tokens[earlier + further :])
    assert (prompt.tokens, prompt.keys, prompt.states) == (whole.tokens, whole.keys, whole.states)
    assert before.keys == maker.prompt(range(earlier)).keys


def test_a_tail_is_known_to_whoever_goes_on_from_it() -> None:
    prompt = KEYS.prompt(range(200))
    assert prompt.tail(1, 40) == KEYS.prompt(range(104)).tail(1, 40)


@given(st.lists(st.integers(0, 9), min_size=COLUMN_TOKENS, max_size=300), st.data())
def test_one_other_token_changes_its_column_and_all_behind_it(
    tokens: list[int], data: st.DataObject
) -> None:
    whole = len(tokens) // COLUMN_TOKENS
    at = data.draw(st.integers(0, whole * COLUMN_TOKENS - 1))
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    one, two = KEYS.prompt(tokens).keys, KEYS.prompt(other).keys
    column = at // COLUMN_TOKENS
    assert one[:column] == two[:column]
    assert all(mine != its for mine, its in zip(one[column:], two[column:], strict=True))


def test_no_other_org_namespace_or_place_has_the_same_key() -> None:
    """Every field counts, and none can be shifted into its neighbour."""
    prompt = [7] * COLUMN_TOKENS * 2
    namespaces = [
        NAMESPACE,
        Namespace("llama", "r1", "bf16", "full:64", "lora"),
        Namespace("llama", "r1", "fp8", "full:64"),
        Namespace("llama", "r2", "bf16", "full:64"),
        Namespace("llamar", "1", "bf16", "full:64"),
        Namespace("llama", "r1", "bf16full", ":64"),
    ]
    secrets = [SECRET, SECRET + b"\0", SECRET[::-1]]
    makers = [Keys(*one) for one in itertools.product(["acme", "acm"], secrets, namespaces)]
    seen = [key for maker in makers for key in maker.prompt(prompt).keys]
    assert len(set(seen)) == len(seen) == 2 * 2 * 3 * 6
    assert len({maker.tag for maker in makers}) == 2 * 3
    assert len({namespace.digest() for namespace in namespaces}) == len(namespaces)


def test_a_tail_is_no_beginning_of_a_longer_one() -> None:
    prompt = KEYS.prompt([0] * (COLUMN_TOKENS - 1))
    tails = [prompt.tail(0, count) for count in range(1, COLUMN_TOKENS)]
    assert len({*tails, *KEYS.prompt([0] * COLUMN_TOKENS).keys}) == COLUMN_TOKENS


def test_the_construction_is_what_its_text_says() -> None:
    def field(data: bytes) -> bytes:
        return len(data).to_bytes(4, "little") + data

    names = {"model": "llama", "revision": "r1", "kv_dtype": "bf16", "layout": "full:64", "adapter": ""}
    names["shape"] = ""
    namespace = b"".join(field(name.encode()) + field(text.encode()) for name, text in names.items())
    block = hashlib.sha512(b"tidegate columns 2" + field(SECRET) + TAG + namespace).digest()
    assert len(block) == 64
    root, name = (hashlib.sha256(b"tidegate %b 1" % kind).digest() for kind in (b"root", b"name"))
    state = hashlib.sha256(block + root + bytes(4)).digest()
    raw = encode(range(COLUMN_TOKENS))
    state = hashlib.sha256(block + raw + state + (64).to_bytes(4, "little")).digest()
    prompt = KEYS.prompt([*range(COLUMN_TOKENS), 7])
    assert prompt.keys == [state[:16]]
    tail = hashlib.sha256(block + encode([7]) + state + (1).to_bytes(4, "little")).digest()
    assert prompt.tail(1, 1) == tail[:16]
    named = hashlib.sha256(block + b"a name" + name + bytes(4)).digest()
    assert KEYS.named([b"a name"]).keys == [named[:16]]


def test_secrets_and_states_are_not_shown() -> None:
    prompt = KEYS.prompt(range(COLUMN_TOKENS))
    for shown in (repr(KEYS), str(KEYS), repr(prompt)):
        assert SECRET.hex() not in shown
        assert repr(SECRET)[2:-1] not in shown
    assert repr(prompt) == "Prompt('acme', 64 tokens)"


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], [1.5], b"abc"])
def test_what_is_no_token_is_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match=r"32-bit|a token is a number"):
        KEYS.prompt(tokens)  # type: ignore[arg-type]


def test_a_secret_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes or more"):
        Keys("acme", b"short", NAMESPACE)
    with pytest.raises(ValueError, match="32 bytes or more"):
        isolation_tag("acme", b"")


@pytest.mark.parametrize("unit", [128, 192])
def test_all_columns_of_a_unit_depend_on_all_its_tokens_and_differ(unit: int) -> None:
    maker = Keys("acme", SECRET, NAMESPACE, unit)
    columns = unit // COLUMN_TOKENS
    tokens = list(range(2 * unit + 70))
    prompt = maker.prompt(tokens)
    assert len(prompt.keys) == len(set(prompt.keys)) == 2 * columns, "what is no whole unit has none"
    other = maker.prompt([*tokens[: unit - 1], 10**6, *tokens[unit:]])
    assert not set(prompt.keys) & set(other.keys)
    behind = maker.prompt([*tokens[: 2 * unit - 1], 10**6])
    assert prompt.keys[:columns] == behind.keys[:columns]
    assert not set(prompt.keys[columns:]) & set(behind.keys[columns:])
    assert not set(prompt.keys) & set(KEYS.prompt(tokens).keys)


@given(st.lists(TOKENS, max_size=4), st.integers(0, 800))
def test_a_prompt_of_units_grows_and_shrinks_as_any_other(parts: list[list[int]], left: int) -> None:
    maker = Keys("acme", SECRET, NAMESPACE, 192)
    tokens = list(itertools.chain(*parts))
    grown = maker.prompt()
    for part in parts:
        grown.extend(part)
    assert grown.keys == maker.prompt(tokens).keys
    assert grown.begins_as(maker) == (grown.keys[0] if grown.keys else None)
    grown.rewind(left)
    grown.extend(tokens[left:])
    assert grown.keys == maker.prompt(tokens).keys


def test_the_keys_of_a_unit_are_what_the_text_says() -> None:
    maker = Keys("acme", SECRET, NAMESPACE, 128)
    keyed, raw = maker._keyed.copy, encode(range(128))

    def mixed(data: bytes, state: bytes, count: int) -> bytes:
        made = keyed()
        made.update(data + state + count.to_bytes(4, "little"))
        return made.digest()

    root, part = (hashlib.sha256(b"tidegate %b 1" % kind).digest() for kind in (b"root", b"slice"))
    state = mixed(raw, mixed(b"", root, 0), 128)
    slices = [mixed(state, part, at)[:16] for at in range(2)]
    assert maker.prompt(range(128)).keys == slices


@pytest.mark.parametrize("tokens", [0, 32, 96, 1 << 20])
def test_a_unit_is_a_number_of_columns(tokens: int) -> None:
    with pytest.raises(ValueError, match="a number of columns"):
        Keys("acme", SECRET, NAMESPACE, tokens)


@given(
    st.integers(0, 400),
    st.integers(1, 200),
    st.sampled_from([COLUMN_TOKENS, 2 * COLUMN_TOKENS]),
    st.lists(st.integers(1, 150), max_size=4),
)
def test_two_images_have_other_keys_from_their_first_column_on_and_only_from_there(
    start: int, length: int, unit: int, parts: list[int]
) -> None:
    maker, tokens = Keys("acme", SECRET, NAMESPACE, unit), [7] * 500
    end = min(start + length, 500)
    one, two = ([Media(start, end, image)] for image in (b"one", b"two"))
    first, second = maker.prompt(tokens, media=one), maker.prompt(tokens, media=two)
    plain = maker.prompt(tokens)
    before = start // unit * unit // COLUMN_TOKENS
    assert first.keys[:before] == second.keys[:before] == plain.keys[:before]
    behind = {*first.keys[before:], *second.keys[before:], *plain.keys[before:]}
    assert len(behind) == 3 * len(plain.keys[before:])
    grown, at = maker.prompt(media=one), 0
    for part in [*parts, 500]:
        grown.extend(tokens[at : at + part])
        at += part
    assert grown.keys == first.keys


def test_an_image_elsewhere_or_of_another_length_or_beside_another_is_another_prompt() -> None:
    tokens = [7] * (3 * COLUMN_TOKENS)
    seen = [
        KEYS.prompt(tokens, media=media).keys[1]
        for media in (
            [],
            [Media(70, 80, b"one")],
            [Media(71, 81, b"one")],
            [Media(70, 81, b"one")],
            [Media(10, 80, b"one")],
            [Media(70, 80, b"on"), Media(80, 81, b"e")],
            [Media(70, 75, b"one"), Media(75, 80, b"one")],
            [Media(10, 11, b"one")],
        )
    ]
    assert len(set(seen)) == len(seen)
    behind = KEYS.prompt(tokens, media=[Media(2 * COLUMN_TOKENS, 3 * COLUMN_TOKENS, b"one")])
    assert behind.keys[:2] == KEYS.prompt(tokens).keys[:2]


def test_an_image_that_a_tail_overlaps_is_in_its_key() -> None:
    tokens = [7] * 100
    plain, seen = KEYS.prompt(tokens), KEYS.prompt(tokens, media=[Media(80, 130, b"one")])
    assert plain.tail(1, 16) == seen.tail(1, 16), "it ends before the image"
    assert plain.tail(1, 17) != seen.tail(1, 17)
    assert plain.begins_as(KEYS) == seen.begins_as(KEYS)
    at_first = KEYS.prompt(tokens, media=[Media(0, 5, b"one")])
    assert at_first.begins_as(KEYS) == at_first.keys[0] != plain.keys[0]


def test_the_keys_of_a_prompt_with_an_image_are_what_the_text_says() -> None:
    raw = encode(range(2 * COLUMN_TOKENS))
    image = Media(60, 100, b"an image")

    def mixed(data: bytes, state: bytes, count: int) -> bytes:
        return KEYS._hash(data, state, count)

    media = hashlib.sha256(b"tidegate media 1").digest()
    state = KEYS._root
    for column, offset in enumerate((60, -4)):
        place = offset.to_bytes(8, "little", signed=True) + (40).to_bytes(4, "little")
        identifier = len(image.identifier).to_bytes(4, "little") + b"an image"
        state = mixed(state + place + identifier, media, 0)
        tokens = raw[4 * COLUMN_TOKENS * column :][: 4 * COLUMN_TOKENS]
        state = mixed(tokens, state, COLUMN_TOKENS)
        assert KEYS.prompt(raw, media=[image]).keys[column] == state[:16]


def test_a_request_has_a_name_that_everybody_can_show() -> None:
    """A client may have chosen it, and it stands beside those of other orgs."""
    keys = Keys("acme", b"s" * 32, Namespace("llama", "", "bf16", ""))
    assert keys.prompt(request="chat-1").request == "chat-1"
    assert keys.prompt(request="a\0b\nc\ud800").request == "abc"
    assert keys.prompt(request="é" * (10 << 20)).request == "é" * 200


def test_models_that_differ_in_the_shape_of_their_columns_only_have_namespaces_of_their_own() -> None:
    """Else the one that is wrong, or lies, would overwrite the other's columns in tier 2."""

    def model(**changes: Any) -> ModelSpec:
        group: dict[str, Any] = {"name": "full", "bytes_per_token": (64, 64), **changes}
        return ModelSpec("llama", (GroupSpec(**group),), "r1", "bf16", "full:64")

    one = model()
    assert one.namespace() == model().namespace()
    others = [
        model(bytes_per_token=(64,)),
        model(bytes_per_token=(64, 128)),
        model(window=1024),
        model(name="b"),
    ]
    digests = {each.namespace().digest() for each in (one, *others)}
    assert len(digests) == 5
    assert one.namespace("lora").digest() not in digests


@pytest.mark.parametrize("name", ["Full", "a:b", "a/b", ".a", "", "g" * 59])
def test_a_group_whose_name_can_t_be_that_of_a_part_in_tier_2_is_refused(name: str) -> None:
    """An agent would refuse the whole document of its node. `Full` and `full` would be one part."""
    with pytest.raises(msgspec.ValidationError, match="matching regex"):
        msgspec.convert({"name": "m", "groups": [{"name": name, "bytes_per_token": [64]}]}, ModelSpec)


@pytest.mark.parametrize("name", ["full", "window-2", "_x.1", "g" * 58])
def test_any_other_name_of_a_group_can_be_that_of_a_part(name: str) -> None:
    group = msgspec.convert({"name": name, "bytes_per_token": [64]}, GroupSpec)
    assert re.fullmatch(PART, part_name(group.name, SHARDS_MAX - 1))
