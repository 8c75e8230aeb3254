"""The frames of LMCache's `lm://`: what a client asks, and what it is answered. No sockets.

A request is 186 bytes: nine numbers and a key, padded with spaces. After a PUT so many bytes of value
follow, and it is not answered. An answer is 36 bytes; after a GET that was a hit the value follows. All
numbers are of 32 bits, in the byte order of the machine. As spoken by LMCache 0.5.6.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

KEY_BYTES: Final = 150
LENGTH_MAX: Final = 1 << 30
_REQUEST: Final = struct.Struct(f"=9i{KEY_BYTES}s")
_ANSWER: Final = struct.Struct("=9i")
SHAPE: Final = struct.Struct("=6i")  # as it is kept in front of the value
REQUEST_BYTES: Final = _REQUEST.size
ANSWER_BYTES: Final = _ANSWER.size
SHAPE_BYTES: Final = SHAPE.size

Shape = tuple[int, int, int, int, int, int]  # format, dtype, four dimensions

NO_SHAPE: Final[Shape] = (1, 2, 0, 0, 0, 0)  # what the stock server says where there is nothing


class Malformed(Exception):
    """Not a request of this protocol. A sentence."""


class Command(IntEnum):
    PUT = 1
    GET = 2
    EXIST = 3
    LIST = 4
    HEALTH = 5


class Code(IntEnum):
    SUCCESS = 200
    FAIL = 400


class Request(NamedTuple):
    command: Command
    key: bytes
    length: int  # of the value that follows a PUT
    shape: Shape


def parse(raw: bytes | bytearray) -> Request:
    """Raises Malformed."""
    command, length, format_, dtype, _location, *dimensions, padded = _REQUEST.unpack(raw)
    key = padded.rstrip(b" ")
    if command not in iter(Command):
        raise Malformed(f"{command} is no command")
    if not 0 <= length <= LENGTH_MAX:
        raise Malformed(f"a value has up to {LENGTH_MAX} bytes, not {length}")
    if not key or not key.isascii():
        raise Malformed("a key is made of ASCII characters")
    first, second, third, fourth = dimensions
    return Request(Command(command), key, length, (format_, dtype, first, second, third, fourth))


def answer(code: Code, length: int = 0, shape: Shape = NO_SHAPE) -> bytes:
    return _ANSWER.pack(code, length, *shape, 0)
