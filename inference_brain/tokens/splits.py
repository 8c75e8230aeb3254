"""Where a text may be cut, so that its pieces have the same tokens alone as in the whole.

A tokenizer finds added tokens (`<|im_end|>`, `</s>`) in the text before anything else, and tokenizes
what is between two of them by itself. So a text may be cut before an added token, if its occurrence is
found whatever else is in the text. That holds for a token which

- shares no characters with another occurrence of any added token: none begins with an end of it, ends
  with a beginning of it, or contains it, and neither does it itself;
- takes no blanks before it (`lstrip`), is no token of whole words only (`single_word`) and, where there
  are such tokens, begins and ends with punctuation; it begins and ends with no blank, which another
  token could take;
- is found in the text as it is, not after it was normalized; or nothing is normalized.

A piece begins with such a token, never after it: some tokenizers treat what stands at the very
beginning of a text in another way (`prepend_scheme: first`), and tokens may take blanks after them.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer

from telemetry.decoder import Limits, decode

TOKEN_CHARACTERS_MAX: Final = 256  # no model has longer ones
CUTS_MAX: Final = 2  # different tokens that texts are cut before: beginnings, or ends, of turns
_DESCRIBED: Final = Limits(512 << 20, 1 << 26, 200)
_LONG_BYTES: Final = 4 << 10
_HEAD: Final = np.dtype("<u4")
# What no tokenizer takes for a part of a word.
_NO_WORD: Final = frozenset(string.punctuation) - {"_"}


def safe_tokens(tokenizer: Tokenizer) -> list[str]:
    """The texts of all added tokens before which any text may be cut."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    skips_special = bool(tokenizer.encode_special_tokens)
    found = [one for one in added if one.content and not (skips_special and one.special)]
    if any(len(one.content) > TOKEN_CHARACTERS_MAX for one in found):
        return []
    overlapping = _overlapping({one.content for one in found})
    is_normalized = not _is_nothing(_normalizer(tokenizer))
    has_words = any(one.single_word for one in found)
    return [
        one.content
        for one in found
        if not (one.normalized and is_normalized)
        and _stands_alone(one, has_words=has_words)
        and one.content not in overlapping
    ]


def _stands_alone(token: AddedToken, *, has_words: bool) -> bool:
    ends = (token.content[0], token.content[-1])
    if token.lstrip or token.single_word or any(one.isspace() for one in ends):
        return False
    return not has_words or _NO_WORD.issuperset(ends)


def _overlapping(tokens: Collection[str]) -> set[str]:
    """Those of which an occurrence may have characters of another's, or of another of their own.
    Models have thousands: so they are not compared in pairs."""
    begins = {token[:size] for token in tokens for size in range(1, len(token))}
    ends = {token[-size:] for token in tokens for size in range(1, len(token))}
    whole = set(tokens)
    found = set()
    for token in tokens:
        inner = {
            token[start:end]
            for start in range(len(token))
            for end in range(start + 1, len(token) + 1)
            if token[start:end] in whole
        }
        if inner != {token}:  # also what is within it is not always found
            found |= inner
        sizes = range(1, len(token))
        if any(token[:size] in ends or token[-size:] in begins for size in sizes):
            found.add(token)
    return found


def _normalizer(tokenizer: Tokenizer) -> Any:
    if tokenizer.normalizer is None:
        return None
    # The library tells what a normalizer is in JSON only.
    return decode(tokenizer.normalizer.__getstate__(), dict[str, Any], _DESCRIBED)


def _is_nothing(normalizer: Any) -> bool:
    """Whether it changes no text."""
    if normalizer is None:
        return True
    if not isinstance(normalizer, dict) or normalizer.get("type") != "Sequence":
        return False
    return all(_is_nothing(one) for one in normalizer.get("normalizers", ()))


def cuts(safe: Collection[str], templates: Collection[str], ends: Collection[str]) -> tuple[str, ...]:
    """The tokens to cut before: those that the templates write most often, and ends of answers."""
    written = {one: sum(source.count(one) for source in templates) for one in safe}
    wanted = [one for one in safe if written[one] or one in ends]
    return tuple(sorted(wanted, key=lambda one: -written[one])[:CUTS_MAX])


def places(raw: bytes, tokens: Sequence[bytes], start: int = 0) -> Iterator[int]:
    """Where these tokens begin in a text, from `start` on, in order."""
    if len(raw) - start < _LONG_BYTES or any(len(token) < _HEAD.itemsize for token in tokens):
        return iter(sorted(at for token in tokens for at in _found(raw, token, start)))
    sought = tuple(tokens)
    return (at for at in _candidates(raw, tokens, start) if raw.startswith(sought, at))


def _found(raw: bytes, token: bytes, start: int) -> Iterator[int]:
    at = raw.find(token, start)
    while at >= 0:
        yield at
        at = raw.find(token, at + len(token))


def _candidates(raw: bytes, tokens: Sequence[bytes], start: int) -> Iterator[int]:
    """Where any of them may begin, by its first four bytes: a quarter of the time that it takes to find
    each of them."""
    size = _HEAD.itemsize
    heads = {int.from_bytes(token[:size], "little") for token in tokens}
    found: list[int] = []
    for offset in range(start, start + size):
        count = (len(raw) - offset) // size
        words = np.frombuffer(raw, _HEAD, max(0, count), min(offset, len(raw) - 1))
        for head in heads:
            found += (np.flatnonzero(words == head) * size + offset).tolist()
    return iter(sorted(found))
