"""What has to be known of a body beside what msgspec checks, at the cost of a long prompt.

`bytes` looks at one byte at a time, and a long prompt has brackets and digits in it: to tell them from
those of JSON took several times as long as to decode it.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple

from telemetry.decoder import has_containers, is_text_deeper
from telemetry.decoder import may_have_long_integer as in_short_text

LONG_BYTES: Final = 8 << 10  # in shorter ones numpy's calls take longer than all else
PIECE_BYTES: Final = 64 << 10  # at once: what is made of them meanwhile stays small
# For each value: with fewer bytes, as in lists of tokens, the text says how deep a body is nested sooner
# than a walk over its values does.
FEW_VALUES_BYTES: Final = 16
_CONTAINERS: Final = frozenset({dict, list})
_OPENS, _COMMA = np.frombuffer(b"{,", np.uint8)
_ONE_BIT: Final = _OPENS ^ np.frombuffer(b"[", np.uint8)[0]  # in which { is not [
# Eight bytes at once. Digits are 0x30 to 0x39, so the upper half of each says almost all.
_UPPER: Final = np.uint64(0xF0F0F0F0F0F0F0F0)
_THREES: Final = np.uint64(0x3030303030303030)
_SIXES: Final = np.uint64(0x0606060606060606)  # with which a byte above 9 has another upper half


def containers_and_commas(text: bytes) -> tuple[int, int]:
    """How many brackets open, and how many commas there are, also in strings."""
    containers = commas = 0
    for start in range(0, len(text), PIECE_BYTES):
        piece = np.frombuffer(text, np.uint8, min(PIECE_BYTES, len(text) - start), start)
        containers += int(np.count_nonzero((piece | _ONE_BIT) == _OPENS))
        commas += int(np.count_nonzero(piece == _COMMA))
    return containers, commas


def may_have_long_integer(text: bytes) -> bool:
    """Whether it may have an integer of 19 digits. Wherever that begins, eight of them are looked at
    together here."""
    if len(text) < LONG_BYTES:
        return in_short_text(text)
    words = np.frombuffer(text, np.uint64, len(text) // 8)
    at_once = PIECE_BYTES // 8
    for start in range(0, words.size, at_once):
        piece = words[start : start + at_once]
        are_near = (piece & _UPPER) == _THREES
        if are_near.any() and (((piece[are_near] + _SIXES) & _UPPER) == _THREES).any():
            return in_short_text(text)
    return False


def is_deeper(value: Struct, text: bytes, most: int) -> bool:
    """Whether arrays and objects of a body are nested deeper, the body included. `value`: the decoded
    `text`. Only lists and dicts are looked into, so no Struct in it may have any in turn."""
    if not has_containers(text, most):
        return False
    level: list[Any] = [astuple(value)]
    count = 0
    for _ in range(most):
        count += sum(map(len, level))
        if count * FEW_VALUES_BYTES > len(text):
            return is_text_deeper(text, most)
        values = [*chain.from_iterable([one.values() if type(one) is dict else one for one in level])]
        if _CONTAINERS.isdisjoint(map(type, values)):
            return False
        level = [one for one in values if type(one) is dict or type(one) is list]
    return True
