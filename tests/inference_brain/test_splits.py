"""A text that is cut where it may be has the tokens of the whole, for tokenizers of all shapes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inference_brain.tokens.splits import cuts, places, safe_tokens
from tests.inference_brain.small_tokenizers import SHAPES

TOKENIZERS = {name: make() for name, make in SHAPES.items()}
BLANKS = ["", " ", "  ", "\n", "\n\n\n", "\t", " \n ", "\u00a0", "\u3000"]
WORDS = [
    "the",
    " weather",
    "word",
    "Word",
    "sword",
    "12345",
    "é",
    "e\u0301",
    "ﬁ",
    "東京",
    "▁",
    "▁▁",
    "'s",
]
TEXTS = ["<", ">", "|", "<|", "|>", "<a", "b>", "<c", "x", "xy", "[", "]", "</", "İ", "ß", "\x00", "🏳️‍🌈"]


def fragments(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    """Its added tokens, parts of them, and what stands around them."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    halves = [text[: len(text) // 2] for text in added] + [text[len(text) // 2 :] for text in added]
    known = st.sampled_from([*added, *added, *BLANKS, *WORDS, *TEXTS, *halves])
    return st.lists(known | st.text(max_size=6), max_size=24).map("".join)


@pytest.mark.parametrize("name", SHAPES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_have_the_tokens_of_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    text = data.draw(fragments(tokenizer))
    text = text.encode("utf-8", "ignore").decode()
    raw = text.encode()
    allowed = list(places(raw, [token.encode() for token in safe_tokens(tokenizer)]))
    chosen = data.draw(st.lists(st.booleans(), min_size=len(allowed), max_size=len(allowed)))
    ends = [0, *(at for at, is_cut in zip(allowed, chosen, strict=True) if is_cut), len(raw)]
    pieces = [raw[start:end].decode() for start, end in pairwise(ends)]
    apart = [number for one in pieces for number in tokenizer.encode(one, add_special_tokens=False).ids]
    assert apart == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "awkward"])
def test_families_have_tokens_to_cut_before(name: str) -> None:
    assert len(safe_tokens(TOKENIZERS[name])) >= 3


def test_what_is_not_safe() -> None:
    safe = set(safe_tokens(TOKENIZERS["awkward"]))
    assert safe == {"<end>", "<right>", "<start>"}
    assert "<mask>" not in safe_tokens(TOKENIZERS["unigram"])


def test_cutting_elsewhere_would_be_wrong() -> None:
    """So that the test above would notice."""
    tokenizer = TOKENIZERS["unigram"]
    text = "the <mask>"
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    parts = [tokenizer.encode(one, add_special_tokens=False).ids for one in ("the ", "<mask>")]
    assert parts[0] + parts[1] != whole
    tokenizer = TOKENIZERS["mistral"]
    whole = tokenizer.encode("[INST]the", add_special_tokens=False).ids
    parts = [tokenizer.encode(one, add_special_tokens=False).ids for one in ("[INST]", "the")]
    assert parts[0] + parts[1] != whole


def test_where_special_tokens_are_text_they_are_no_places() -> None:
    tokenizer = SHAPES["qwen"]()
    tokenizer.encode_special_tokens = True
    assert "<|im_end|>" not in safe_tokens(tokenizer)
    assert "<tool_call>" in safe_tokens(tokenizer)


def test_texts_are_cut_before_what_templates_write() -> None:
    safe = ["<a>", "<b>", "<c>", "<d>"]
    assert cuts(safe, ["<b> <b> <a>"], ["<d>"]) == ("<b>", "<a>")
    assert cuts(safe, ["<b>"], ["<d>"]) == ("<b>", "<d>")


@given(
    st.text("ab<>é", max_size=30),
    st.lists(st.sampled_from(["<a>", "<b>", "<ab>", "<éb>"]), unique=True),
    st.sampled_from([0, 5_000]),
    st.integers(0, 40),
)
@example("<a><a>", ["<a>"], 0, 0)
def test_places_are_all_and_in_order(text: str, tokens: list[str], more: int, start: int) -> None:
    raw = (text + "x" * more + text).encode()
    sought = [one.encode() for one in tokens]
    wanted = {at for at in range(start, len(raw)) for one in sought if raw.startswith(one, at)}
    assert list(places(raw, sought, start)) == sorted(wanted)
