"""Keys: the same for the same prompt of the same org, and for nobody and nothing else."""

from __future__ import annotations

import hashlib
import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swdriver_shim.keys import COLUMN_TOKENS, Chain, Keys, Namespace, encode, isolation_tag

SECRET = bytes(range(32))
NAMESPACE = Namespace("llama", "r1", "bf16", "full:64")
TAG = isolation_tag("acme", SECRET)
KEYS = Keys(SECRET, TAG, NAMESPACE)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300)


def test_whole_columns_have_keys_and_a_tail_has_one_of_its_own() -> None:
    prompt = list(range(150))
    chain = KEYS.chain(prompt)
    assert len(chain.keys) == 2
    assert chain.tokens == 128
    tail = KEYS.tail(chain, prompt[128:])
    assert len({*chain.keys, tail}) == 3
    assert all(len(key) == 16 for key in (*chain.keys, tail))


@given(TOKENS, st.integers(0, 300))
def test_a_chain_that_goes_on_is_the_chain_of_the_whole(tokens: list[int], cut: int) -> None:
    chain = KEYS.chain(tokens[:cut])
    KEYS.extend(chain, tokens)
    assert chain == KEYS.chain(tokens)
    assert chain == KEYS.chain(encode(tokens)) == KEYS.chain(memoryview(array("I", tokens)).cast("B"))


@given(TOKENS, st.integers(-5, 305))
def test_a_rewound_chain_is_the_chain_of_what_is_left(tokens: list[int], left: int) -> None:
    chain = KEYS.chain(tokens)
    KEYS.rewind(chain, left)
    assert chain == KEYS.chain(tokens[: max(0, left)])


@given(st.lists(st.integers(0, 9), min_size=COLUMN_TOKENS, max_size=300), st.data())
def test_one_other_token_changes_its_column_and_all_behind_it(
    tokens: list[int], data: st.DataObject
) -> None:
    whole = len(tokens) // COLUMN_TOKENS
    at = data.draw(st.integers(0, whole * COLUMN_TOKENS - 1))
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    one, two = KEYS.chain(tokens).keys, KEYS.chain(other).keys
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
    tags = [TAG, isolation_tag("acm", SECRET), isolation_tag("acme", SECRET[::-1])]
    seen = [
        key
        for secret, tag, namespace in itertools.product(secrets, tags, namespaces)
        for key in Keys(secret, tag, namespace).chain(prompt).keys
    ]
    assert len(set(seen)) == len(seen) == 2 * 3 * 3 * 6
    assert len({namespace.digest() for namespace in namespaces}) == len(namespaces)


def test_a_tail_is_no_beginning_of_a_longer_one() -> None:
    chain = KEYS.chain([])
    tails = [KEYS.tail(chain, [0] * count) for count in range(1, COLUMN_TOKENS)]
    assert len({*tails, *KEYS.chain([0] * COLUMN_TOKENS).keys}) == COLUMN_TOKENS


def test_the_construction_is_what_its_text_says() -> None:
    def field(data: bytes) -> bytes:
        return len(data).to_bytes(4, "little") + data

    names = {"model": "llama", "revision": "r1", "kv_dtype": "bf16", "layout": "full:64", "adapter": ""}
    namespace = b"".join(field(name.encode()) + field(text.encode()) for name, text in names.items())
    block = hashlib.sha512(b"tidegate columns 1" + field(SECRET) + TAG + namespace).digest()
    assert len(block) == 64
    state = hashlib.sha256(block + b"root").digest()
    raw = encode(range(COLUMN_TOKENS))
    state = hashlib.sha256(block + state + (64).to_bytes(4, "little") + raw).digest()
    assert KEYS.chain(range(COLUMN_TOKENS)).keys == [state[:16]]


def test_secrets_and_states_are_not_shown() -> None:
    chain = KEYS.chain(range(COLUMN_TOKENS))
    for shown in (repr(KEYS), str(KEYS), repr(chain)):
        assert SECRET.hex() not in shown
        assert repr(SECRET)[2:-1] not in shown
        assert repr(chain.states[0])[2:-1] not in shown


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], [1.5], b"abc"])
def test_what_is_no_token_is_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match=r"32-bit|a token is a number"):
        KEYS.chain(tokens)  # type: ignore[arg-type]


def test_a_secret_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes or more"):
        Keys(b"short", TAG, NAMESPACE)
    with pytest.raises(ValueError, match="32 bytes or more"):
        isolation_tag("acme", b"")
    with pytest.raises(ValueError, match="has 128 tokens already"):
        KEYS.extend(KEYS.chain([1] * 128), [1] * 64)
    for count in (0, COLUMN_TOKENS):
        with pytest.raises(ValueError, match="a tail has 1 to 63"):
            KEYS.tail(Chain(), [1] * count)
