"""The one bounded decoder: bytes of others to typed values, or a sentence. No Django.

Whatever a peer sends (an agent, a driver, an engine, a caller, a viewer, Redis, a file that another
process wrote) becomes a value here and nowhere else:

    decode(raw, Observed)                       # JSON, as a type
    decode(raw, _DECODER, DOCUMENT)             # JSON, by a decoder that is kept, within other limits
    unpack(raw, _PACKED, Limits(1 << 20))       # MessagePack

Bytes, items, nesting and integers are bounded before anything is parsed, and every float is finite.
Either a value of the type comes back or `Malformed` is raised, and nothing else: not RecursionError
(which msgspec raises for deep input even where it skips a field), not UnicodeDecodeError (which is no
DecodeError of msgspec), not OverflowError later on. What a `Malformed` says is one line of printable
text that is safe to store, show and log; of the input it quotes at most a few characters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, TypeVar, overload

import msgspec

T = TypeVar("T")

INTEGER_MIN: Final = -(1 << 63)
INTEGER_MAX: Final = (1 << 64) - 1
SENTENCE_CHARACTERS_MAX: Final = 300
QUOTED_CHARACTERS_MAX: Final = 120

# Types for fields that come from peers and may be stored. What PostgreSQL can't store is no text.
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1 << 33)]
NO_NUL: Final = "^[^\\x00]*$"


class Malformed(ValueError):
    """Why it is not what was expected, in a sentence without a final stop."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`items_max`: values in all arrays and objects together; `depth_max`: how deep those are nested,
    None where the caller looks at that; `containers_max`: how many there are of those, each of which
    takes as much memory as many values."""

    bytes_max: int
    items_max: int = 1 << 18
    depth_max: int | None = 32
    containers_max: int = 1 << 30


MESSAGE: Final = Limits(64 << 10, 4096)  # a heartbeat, an acknowledgment, a question
ANSWER: Final = Limits(8 << 20)  # what a process says of itself: thousands of shards
DOCUMENT: Final = Limits(8 << 20, 1 << 21)  # desired documents, and bodies with tokens


@overload
def decode(raw: bytes | bytearray | memoryview | str, kind: type[T], limits: Limits = ...) -> T: ...


@overload
def decode(
    raw: bytes | bytearray | memoryview | str,
    kind: msgspec.json.Decoder[T],
    limits: Limits = ...,
    is_suspect: Callable[[bytes], bool] = ...,
) -> T: ...


def decode(
    raw: bytes | bytearray | memoryview | str,
    kind: Any,
    limits: Limits = ANSWER,
    is_suspect: Callable[[bytes], bool] | None = None,
) -> Any:
    """JSON as a value of a type, or by a decoder. Raises Malformed. `is_suspect`: a way to tell
    whether a text may have an integer of 19 digits, other than `may_have_long_integer`.

    A dictionary has the last of two values under one name, as in msgspec.
    """
    try:
        decoder = kind if isinstance(kind, msgspec.json.Decoder) else _decoder(kind)
        text = raw.encode() if isinstance(raw, str) else bytes(raw)
        _check(text, limits, is_suspect or may_have_long_integer)
        return decoder.decode(text)
    except RecursionError:  # from a caller that is itself deep in calls: there is no room for more
        raise Malformed("It is nested too deep") from None
    except UnicodeError:
        raise Malformed("It is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise Malformed(_sentence(error)) from None


def decode_once(text: str, limits: Limits = ANSWER) -> Any:
    """JSON that people wrote, in which no object has a name twice. Raises Malformed."""
    decode(text, object, limits)
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise Malformed("A name is there twice")
    return made


def unpack(
    raw: bytes | bytearray | memoryview,
    decoder: msgspec.msgpack.Decoder[T],
    limits: Limits = ANSWER,
    *,
    has_bounds: bool = False,
) -> T:
    """MessagePack as a value of the decoder's type. Raises Malformed.

    Lengths that it announces are msgspec's to distrust (it allocates nothing for what is not there), and
    its integers have 64 bits by nature; it has no end of nesting and any float. `has_bounds`: the types
    of the decoder bound every float, so that none has to be looked at again.
    """
    if len(raw) > limits.bytes_max:
        raise _too_long(limits)
    try:
        value = decoder.decode(raw)
    except RecursionError:
        raise Malformed("It is nested too deep") from None
    except UnicodeError:
        raise Malformed("It is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise Malformed(_sentence(error)) from None
    if not has_bounds and _may_be_infinite(bytes(raw)) and not _is_finite(value):
        raise Malformed("It has a number that is not finite")
    return value


def excerpt(text: str, most: int = SENTENCE_CHARACTERS_MAX) -> str:
    """One line of a peer's text that may be stored, shown and logged: printable, and at most so long."""
    line = "".join(one if one.isprintable() else " " for one in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


# Checking JSON before it is parsed. Each step is a pass in C over all bytes; most input needs the first.

_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_MANY_DIGITS: Final = b"0" * 19  # 2⁶³ has as many
_DIGITS_OF_SIXTHS: Final = b"0" * 3
_LONG_INTEGER: Final = re.compile(rb"(?<![0-9.eE+-])-?[0-9]{19,}+(?![.eE])")
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")


def _but(kept: bytes) -> bytes:
    return bytes(set(range(256)) - set(kept))


_NO_BRACKETS_OR_QUOTES: Final = _but(b'[]{}"')
_NO_BRACKETS_OR_ESCAPES: Final = _but(b'[]{}"\\/bfnrtu')  # what JSON has after a backslash


def _check(text: bytes, limits: Limits, is_suspect: Callable[[bytes], bool]) -> None:
    """Raises Malformed for what is too long, too much, too deep or too large a number."""
    if len(text) > limits.bytes_max:
        raise _too_long(limits)
    # Each item takes a byte at least, and a container two, so short texts need no count of them.
    if len(text) > limits.items_max and _are_more(_items, text, limits.items_max):
        raise Malformed(f"It has more than {limits.items_max} items")
    most = limits.containers_max
    if len(text) > 2 * most and _are_more(_containers, text, most):
        raise Malformed(f"It has more than {most} arrays and objects")
    depth = limits.depth_max
    if depth is not None and has_containers(text, depth) and is_text_deeper(text, depth):
        raise too_deep(depth)
    if is_suspect(text):
        integers = _LONG_INTEGER.findall(_without_strings(text))
        if not all(map(_fits, integers)):
            raise Malformed("It has an integer of more than 64 bits")


def _are_more(count: Callable[[bytes], int], text: bytes, most: int) -> bool:
    """Whether there are more than so many, first with those in strings, which are none."""
    return count(text) > most and count(_without_strings(text)) > most


def _items(text: bytes) -> int:
    return _containers(text) + text.count(b",")


def _containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _without_strings(text: bytes) -> bytes:
    return b" ".join(_unescaped(text).split(b'"')[::2])


def has_containers(text: bytes, many: int) -> bool:
    """Whether it has more than so many. To find is faster than to count, and mostly ends early."""
    found = 0
    for bracket in (b"[", b"{"):
        at = text.find(bracket)
        while at >= 0:
            found += 1
            if found > many:
                return True
            at = text.find(bracket, at + 1)
    return False


def may_have_long_integer(text: bytes) -> bool:
    """Whether it may have one of 19 digits. First by every sixth byte, of which it has three: most texts
    need no more."""
    return _DIGITS_OF_SIXTHS in text[::6].translate(_DIGITS) and _MANY_DIGITS in text.translate(_DIGITS)


def is_text_deeper(text: bytes, most: int) -> bool:
    """Whether arrays and objects of a JSON text are nested deeper."""
    return _is_too_deep(_brackets(text), most)


def _unescaped(text: bytes) -> bytes:
    """So that every quotation mark begins or ends a string, up to where the text stops being JSON."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


def _brackets(text: bytes) -> bytes:
    """Those outside of strings, whatever their kind, as [ and ]. What can't matter goes first."""
    if b"\\" in text:
        text = _unescaped(text.translate(None, _NO_BRACKETS_OR_ESCAPES))
    quoted = text.translate(None, _NO_BRACKETS_OR_QUOTES).replace(b'""', b"")
    return b"".join(quoted.split(b'"')[::2]).translate(_ONE_KIND)


def _is_too_deep(brackets: bytes, depth_max: int) -> bool:
    """Each pass takes out the innermost pairs. What has brackets left that do not pair is no JSON, which
    the parser says better; it gets no deeper than twice the limit."""
    for _ in range(depth_max):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets or brackets.count(b"[") > depth_max


def _fits(digits: bytes) -> bool:
    return len(digits) <= 20 and INTEGER_MIN <= int(digits) <= INTEGER_MAX


# Checking what MessagePack can say and JSON can't

_BEGINS_INFINITE: Final = (b"\xcb\x7f", b"\xcb\xff", b"\xca\x7f", b"\xca\xff")
_MAY_BE_INFINITE: Final = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]|\xca[\x7f\xff][\x80-\xff]")


def _may_be_infinite(raw: bytes) -> bool:
    """Whether it has the bytes of such a float. To find two of them is twenty times as fast as a pattern
    is, and most records have none."""
    return any(begins in raw for begins in _BEGINS_INFINITE) and bool(_MAY_BE_INFINITE.search(raw))


def _is_finite(value: object) -> bool:
    """Whether all floats in it are. Without recursion; nesting has been bounded by the parser."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, float):
            if not math.isfinite(one):
                return False
        elif isinstance(one, dict):
            waiting += (*one.keys(), *one.values())
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif isinstance(one, msgspec.Struct):
            waiting += (getattr(one, name) for name in one.__struct_fields__)
    return True


# Sentences


def _too_long(limits: Limits) -> Malformed:
    return Malformed(f"It has more than {limits.bytes_max} bytes")


def too_deep(depth_max: int) -> Malformed:
    return Malformed(f"It is nested deeper than {depth_max} levels")


def _sentence(error: msgspec.DecodeError) -> str:
    """What msgspec says of it, which may quote any length of the input, and then where."""
    what, at, where = str(error).rpartition(" - at `")
    return excerpt(what or where, QUOTED_CHARACTERS_MAX) + (
        f"{at}{excerpt(where, QUOTED_CHARACTERS_MAX)}" if at else ""
    )
