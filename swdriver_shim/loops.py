"""What is done for each token and each column of a prompt, in Python and compiled.

A prompt may have a thousand columns, and a request waits while they are looked up. So these loops exist
twice: here, as what is right, and in C (`kvss_agent/native/prompts.c`), which is used as soon as it has
been compiled. Whoever needs one asks `loops.current` each time.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final

from kvss_agent import native
from kvss_agent.mover import Mover

STATE_BYTES: Final = 32
KEY_BYTES: Final = 16
PART_BYTE: Final = 2  # of a key
_log: Final = logging.getLogger(__name__)
_COUNT: Final = struct.Struct("<I")
_SECOND_HALF: Final = struct.Struct(f"<{KEY_BYTES // 2}xQ")

Buffer = bytes | bytearray | memoryview
Column = Any  # of the driver; or, in tests, what has the same fields


def packed(tokens: Sequence[int]) -> bytes:
    """The numbers as 32 bits each, little-endian. Raises OverflowError or TypeError for what is none of
    those."""
    numbers = array("I", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def chained(key: bytes, first: bytes, tokens: Buffer, unit_tokens: int) -> tuple[bytes, list[bytes]]:
    """The states of all whole units, one behind the other: each the SHA-256 of the key, the tokens, the
    state before it and the number of tokens. And the first half of each. `key`: one block of SHA-256.
    `first`: the state before the first one. `unit_tokens`: a multiple of 16."""
    copy = hashlib.sha256(key).copy
    whole = _COUNT.pack(unit_tokens)
    unit = struct.Struct(f"{4 * unit_tokens}s")
    state, states = first, list[bytes]()
    # One update for each, of bytes put together before: an eighth faster than two.
    with memoryview(tokens).cast("B") as raw:
        for (its,) in unit.iter_unpack(raw[: len(raw) // unit.size * unit.size]):
            mixed = copy()
            mixed.update(its + state + whole)
            state = mixed.digest()
            states.append(state)
    return b"".join(states), [state[:KEY_BYTES] for state in states]


def find(
    parts: list[dict[bytes, Column]],
    keys: list[bytes],
    known: list[Column | None],
    count: int,
    ready: object,  # noqa: ARG001 - the compiled one asks columns for those before them
    linked: bool,  # noqa: FBT001
) -> int:
    """Set `known` to the column of each key in a table of these parts, as far as there is one. Returns
    how many in a row are where their prompt has them: each behind the one before it where columns are
    `linked`, else at its own depth.

    `known` is what was found for these keys before. A column is in the table for as long as it is in the
    state `ready`: the first `count` of these, which still are, need no look; nor does the one before a
    column, if it is ready and has the key.
    """
    found = [part_of(parts, key).get(key) for key in keys[count:]]
    before = known[count - 1] if count else None
    known[count:] = found
    for column in found:
        if column is None or (column.parent is not before if linked else column.depth != count):
            break
        count, before = count + 1, column
    return count


def fresh(
    columns: Sequence[Column | None], start: int, state: object, born: float, seen: float, now: float
) -> int:
    """How many of the list in a row, from this place on, are in this state, were stored after `born` and
    used after `seen`, and have not expired by a TTL of their own."""
    for place in range(start, len(columns)):
        column = columns[place]
        if (
            column is None
            or column.state is not state
            or column.stored_at <= born
            or column.used_at <= seen
            or (column.terms.ttl is not None and column.expires_at <= now)
        ):
            return place - start
    return len(columns) - start


def runs_of(columns: list[Column], name: str) -> list[Any]:
    """This field of each column, but once where columns in a row have the same object, or int."""
    values = list[Any]()
    for value in map(attrgetter(name), columns):
        if not values or not _is_same(value, values[-1]):
            values.append(value)
    return values


def _is_same(one: object, other: object) -> bool:
    """Whether they are one object, or equal ints: a compiled column has numbers that are no objects."""
    return one is other or (type(one) is type(other) is int and one == other)


def alike(columns: list[Column], names: tuple[str, ...]) -> bool:
    """Whether all of them are of one class, and have the same objects, or ints, in these fields."""
    return all(
        type(one) is type(columns[0])
        and all(_is_same(getattr(one, name), getattr(columns[0], name)) for name in names)
        for one in columns
    )


def values_of(columns: list[Column], name: str) -> list[Any]:
    """This field of each column."""
    return list(map(attrgetter(name), columns))


def numbers_of(columns: list[Column], name: str) -> array[int]:
    """This field of each column, which is an int of 32 bits."""
    return array("i", map(attrgetter(name), columns))


def sampled(columns: Sequence[Column], bits: int) -> list[Column]:
    """Those whose keys have none of these bits in their first two bytes."""
    return [column for column in columns if not (column.key[0] << 8 | column.key[1]) & bits]


def stamp(columns: list[Column], now: float) -> None:
    """All of them are used now."""
    for column in columns:
        column.used_at = now
        column.uses += 1


def part_of(parts: list[dict[bytes, Column]], key: bytes) -> dict[bytes, Column]:
    """The one of these parts of a table of columns that has the key, if any has it: by one byte of it.
    Samples of columns are taken by those before that."""
    return parts[key[PART_BYTE] % len(parts)]


def put_by_key(parts: list[dict[bytes, Column]], keys: list[bytes], columns: list[Any]) -> None:
    """Put each column into its part, by the key in the same place, of as many."""
    if len(keys) != len(columns):
        raise ValueError("wanted are as many columns as keys")
    for key, column in zip(keys, columns, strict=False):
        part_of(parts, key)[key] = column


def drop_by_key(parts: list[dict[bytes, Column]], keys: list[bytes]) -> None:
    """Remove these keys, each of which is in its part."""
    for key in keys:
        del part_of(parts, key)[key]


def put_new(table: dict[Any, Any], keys: list[Any], value: object) -> list[Any]:
    """Put the value into a dict by each key that is not there. Returns the others."""
    others = [key for key in keys if key in table]
    table.update(dict.fromkeys(keys, value) | {key: table[key] for key in others})
    return others


def drop_known(table: dict[Any, Any], keys: list[Any]) -> None:
    """Remove those of these keys that are there."""
    for key in filter(table.__contains__, keys):
        del table[key]


def values_in(tables: tuple[dict[bytes, Any], ...], keys: list[bytes], otherwise: object) -> list[Any]:
    """The value of each key in the first of these tables that has it, or this other one."""
    found = [otherwise] * len(keys)
    for table in reversed(tables):
        if not table.keys().isdisjoint(keys):  # else, nearly always, nobody has to ask for each
            found = list(map(table.get, keys, found))
    return found


def line_to(column: Column, names: tuple[str, ...], most: int) -> list[Column]:
    """The column and those before it in its prompt, backwards: each is referenced by the one behind it
    alone, of its class, and has the same objects, or ints, in these fields. Up to so many, and one at
    least."""
    line = [column]
    while len(line) < most:
        before = line[-1].parent
        if type(before) is not type(column) or before.ref_count != 1:
            break
        if not all(_is_same(getattr(before, name), getattr(column, name)) for name in names):
            break
        line.append(before)
    return line


def put(columns: list[Column], name: str, value: object) -> None:
    """Set this field of each column to the same value."""
    for column in columns:
        setattr(column, name, value)


def put_each(columns: list[Column], name: str, values: list[Any]) -> None:
    """Set this field of each column to the value in the same place, of as many."""
    if len(columns) != len(values):
        raise ValueError("wanted are as many values as columns")
    for column, value in zip(columns, values, strict=False):
        setattr(column, name, value)


def copies(column: Column, names: tuple[str, ...], count: int) -> list[Any]:
    """So many new columns that have the same objects in these fields, and nothing in others."""
    made = [object.__new__(type(column)) for _ in range(count)]
    for name in names:
        put(made, name, getattr(column, name))
    return made


def note(keys: list[bytes], table: array[int]) -> None:
    """The second half of each key is a number. It is put into its slot (`slot_of`) of the table."""
    slots = len(table)
    for (number,) in _SECOND_HALF.iter_unpack(b"".join(keys)):
        table[slot_of(number, slots)] = number


def noted(keys: list[bytes], table: array[int]) -> list[bool]:
    """Of each key, whether its number is in its slot."""
    slots = len(table)
    numbers = _SECOND_HALF.iter_unpack(b"".join(keys))
    return [table[slot_of(number, slots)] == number for (number,) in numbers]


def slot_of(number: int, slots: int) -> int:
    """The one of so many slots that the lowest bits of a number select: those of the next power of two,
    and one bit less where there is no such slot. So slots can be added a few at a time: a new one gets
    what is in the one with the same lower bits."""
    mask = (1 << (slots - 1).bit_length()) - 1
    slot = number & mask
    return slot if slot < slots else slot & mask >> 1


@dataclass(frozen=True, slots=True)
class Loops:
    """One kind of them. The functions of this module say what each one does."""

    packed: Callable[[Sequence[int]], bytes] = packed
    chained: Callable[[bytes, bytes, Buffer, int], tuple[bytes, list[bytes]]] = chained
    find: Callable[
        [list[dict[bytes, Any]], list[bytes], list[Column | None], int, object, bool], int
    ] = find
    fresh: Callable[[Sequence[Column | None], int, object, float, float, float], int] = fresh
    runs_of: Callable[[list[Column], str], list[Any]] = runs_of
    alike: Callable[[list[Column], tuple[str, ...]], bool] = alike
    values_of: Callable[[list[Column], str], list[Any]] = values_of
    numbers_of: Callable[[list[Column], str], array[int]] = numbers_of
    sampled: Callable[[Sequence[Column], int], list[Column]] = sampled
    stamp: Callable[[list[Column], float], None] = stamp
    put_by_key: Callable[[list[dict[bytes, Any]], list[bytes], list[Any]], None] = put_by_key
    drop_by_key: Callable[[list[dict[bytes, Any]], list[bytes]], None] = drop_by_key
    put_new: Callable[[dict[Any, Any], list[Any], object], list[Any]] = put_new
    drop_known: Callable[[dict[Any, Any], list[Any]], None] = drop_known
    values_in: Callable[[tuple[dict[bytes, Any], ...], list[bytes], object], list[Any]] = values_in
    line_to: Callable[[Column, tuple[str, ...], int], list[Any]] = line_to
    put: Callable[[list[Column], str, object], None] = put
    put_each: Callable[[list[Column], str, list[Any]], None] = put_each
    copies: Callable[[Column, tuple[str, ...], int], list[Any]] = copies
    note: Callable[[list[bytes], array[int]], None] = note
    noted: Callable[[list[bytes], array[int]], list[bool]] = noted


PYTHON: Final = Loops()
current: Loops = PYTHON


def of(mover: Mover) -> Loops:
    """Those that are compiled together with this mover. Without instructions for SHA-256 the keys are
    made in Python, whose library has the next best."""
    if not hasattr(mover, "has_sha"):
        return PYTHON
    left_out = () if mover.has_sha else ("chained",)
    names = [one.name for one in fields(Loops) if one.name not in left_out]
    found = Loops(**{name: getattr(mover, name) for name in names})
    if found.chained(*_TRIED) == chained(*_TRIED):
        return found
    _log.warning("The compiled loops over prompts make wrong keys; those in Python stay in use.")
    return PYTHON


# A compiler may be wrong, and then nothing that others have stored would be found. Five units
# that differ: two at a time, twice, and one alone.
_TRIED: Final = bytes(range(64)), bytes(range(32)), bytes(range(251)) * 6, 64


class _Follower:
    def use_mover(self, mover: Mover) -> None:
        global current  # noqa: PLW0603 - one for the process, as the mover is
        current = of(mover)


_FOLLOWER: Final = _Follower()  # held here, for it is followed weakly
native.follow(_FOLLOWER)
