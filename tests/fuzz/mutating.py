"""Mutations that keep a document a document: of JSON and of MessagePack, one value at a time.

The parsers are compiled, so coverage can't lead a fuzzer through their grammar. What a document says is
changed here instead, and what lies behind the parser is found by coverage as ever.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

EVIL: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    63,
    64,
    4096,
    (1 << 31) - 1,
    1 << 32,
    (1 << 53) - 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -(1 << 63),
    0.0,
    -0.0,
    0.5,
    1e308,
    5e-324,
    "",
    "\0",
    "x" * 300,
    "../..",
    "\u202e",
    "\U0001f4a5",
    "0" * 32,
    "c" * 44,
    [],
    {},
    [[[[[[]]]]]],
    {"": {"": {}}},
)
Mutate = Callable[[bytes, int], bytes]


def json_of(raw: bytes, seed: int) -> bytes:
    """The text with one value changed; what is no JSON comes back as it is."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    return json.dumps(_changed(value, random.Random(seed)), ensure_ascii=False).encode(errors="replace")


def msgpack_of(raw: bytes, seed: int) -> bytes:
    try:
        value = msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return raw
    changed = _changed(value, random.Random(seed))
    try:
        return msgspec.msgpack.encode(changed)
    except (OverflowError, TypeError, UnicodeEncodeError):
        return raw


def behind_a_byte(mutate: Mutate) -> Mutate:
    """Where the first byte chooses what the rest is."""
    return lambda raw, seed: raw[:1] + mutate(raw[1:], seed)


def with_a_header(raw: bytes, seed: int) -> bytes:
    """Four bytes of length, a JSON header, and what follows."""
    length = int.from_bytes(raw[:4], "little")
    head = json_of(raw[4 : 4 + length], seed)
    return len(head).to_bytes(4, "little") + head + raw[4 + length :]


Place = tuple[Any, Any]  # a container, and a key or an index of it


def _places(value: Any) -> Iterator[Place]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        keys = one if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            yield one, key
            waiting.append(one[key])


def _changed(value: Any, chosen: random.Random) -> Any:
    places = list(_places(value))
    if not places:
        return chosen.choice(EVIL)
    container, key = chosen.choice(places)
    deed = chosen.randrange(5)
    if deed == 0:
        del container[key]
    elif deed == 1:
        other, name = chosen.choice(places)
        container[key] = copy.deepcopy(other[name])
    elif deed == 2 and isinstance(container, dict):
        container[chosen.choice(("", "x", *container))] = container.pop(key)
    elif deed == 3 and isinstance(container, list):
        container *= chosen.choice((2, 17))
    else:
        container[key] = chosen.choice(EVIL)
    return value
