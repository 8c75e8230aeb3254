"""The keys of columns: a chain of keyed hashes that can't be computed without the org's secret.

A column is 64 consecutive tokens of a prompt, and its KV depends on all tokens before it. So its key is
a hash over its own tokens and its parent's state:

    hash(data, state, count) = SHA-256(K ‖ data ‖ state ‖ count)
                                                    K: one block of secret, tag and namespace
    state(0)  = hash("", ROOT, 0)
    state(n)  = hash(tokens, state(n-1), count)     count: of the tokens, so that tails differ
    key(n)    = the first 16 bytes of state(n)

Tokens are hashed before the state that they follow: most of the work for one column waits for no other.

Where an engine's blocks are no multiple of columns, or can't be cut (blocks of 48 or 128 tokens in a
layout of the engine's own), several columns are one *unit*. A unit is hashed as a whole, and the key of
each of its columns depends on all its tokens, so that the unit's bytes may be cut into any equal slices:

    state(n)  = hash(tokens, state(n-1), count)     of unit n
    key(n, i) = the first 16 bytes of hash(state(n), SLICE, i)

For an image or a sound a prompt has placeholder tokens only, which are equal for all inputs. So where
such an input overlaps a unit, or a tail, the state before it is replaced by one that includes the input:

    state(n-1)' = hash(state(n-1) ‖ offset ‖ length ‖ identifier ‖ …, MEDIA, 0)     of each input

`offset` counts from the unit's first token, and `identifier` is the engine's hash of the input, after
its length. The keys of columns before the input do not depend on it.

Names that an engine brings, which are hashes of prefixes already, are hashed too:

    key(name) = the first 16 bytes of hash(name, NAME, 0)

What is in capitals stands in place of a state, and no state equals it: so what is hashed of one kind is
never what is hashed of another.

Keys that agents, disks and metrics show reveal neither tokens nor whether two orgs asked the same, and
from a key nobody can compute that of a longer prompt: only half of each state is in it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Final, NamedTuple

from swdriver_shim import loops

COLUMN_TOKENS: Final = 64
REQUEST_CHARACTERS_MAX: Final = 200
COLUMN_BYTES: Final = 4 * COLUMN_TOKENS
UNIT_TOKENS_MAX: Final = 1 << 16
KEY_BYTES: Final = loops.KEY_BYTES
STATE_BYTES: Final = loops.STATE_BYTES
TAG_BYTES: Final = 16
SECRET_BYTES_MIN: Final = 32
TOKEN_MAX: Final = 2**32 - 1
_BLOCK: Final = 64  # of SHA-256: what is hashed once before costs nothing per column
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
# In place of a state; no state equals one of these.
_ROOT: Final = hashlib.sha256(b"tidegate root 1").digest()
_SLICE: Final = hashlib.sha256(b"tidegate slice 1").digest()
_NAME: Final = hashlib.sha256(b"tidegate name 1").digest()
_MEDIA: Final = hashlib.sha256(b"tidegate media 1").digest()
_PLACE: Final = struct.Struct("<qI")
_KEY_OF_STATE: Final = struct.Struct(f"{KEY_BYTES}s{STATE_BYTES - KEY_BYTES}x")
_KEYS_OF_STATES: Final = struct.Struct(_KEY_OF_STATE.format * 64)  # at once: a third of the time

Buffer = loops.Buffer


@dataclass(frozen=True, slots=True)
class Namespace:
    """What KV depends on besides the tokens. Columns are shared only within one namespace."""

    model: str
    revision: str
    kv_dtype: str
    layout: str
    adapter: str = ""
    shape: str = ""  # of its columns: those of two sizes can't be in the same files

    def digest(self) -> bytes:
        """16 bytes that identify it in all processes, such as in the paths of tier 2."""
        return hashlib.sha256(b"tidegate namespace 1" + self.encode()).digest()[:KEY_BYTES]

    def encode(self) -> bytes:
        """Each field with its name and length, so that no two namespaces have the same bytes."""
        return b"".join(_field(one.name, getattr(self, one.name)) for one in fields(self))


class Media(NamedTuple):
    """An input that is not tokens, such as an image, from one token of the prompt up to another."""

    start: int
    end: int
    identifier: bytes


def check_unit(tokens: int) -> None:
    """Raises ValueError unless so many tokens are one or more columns."""
    if not COLUMN_TOKENS <= tokens <= UNIT_TOKENS_MAX or tokens % COLUMN_TOKENS:
        raise ValueError(
            f"a unit has a number of columns, of {COLUMN_TOKENS} tokens each, and at most "
            f"{UNIT_TOKENS_MAX} tokens; not {tokens}"
        )


def isolation_tag(org: str, secret: Buffer) -> bytes:
    """The tag in the seals of an org's columns. It does not reveal the org."""
    _check_secret(secret)
    mixed = b"tidegate tag 1" + _bytes_field(bytes(secret)) + _field("org", org)
    return hashlib.sha256(mixed).digest()[:TAG_BYTES]


class Known(NamedTuple):
    """The states and keys of the first units of a prompt, which an earlier one with the same tokens
    had."""

    states: bytes
    keys: Sequence[bytes]


class Keys:
    """Computes the keys of one org in one namespace. Keeps only a hash of the secret."""

    __slots__ = ("_key", "_keyed", "_root", "namespace", "org", "tag", "unit_tokens")

    def __init__(
        self, org: str, secret: Buffer, namespace: Namespace, unit_tokens: int = COLUMN_TOKENS
    ) -> None:
        """`unit_tokens`: tokens that are stored and found together. Raises ValueError for a unit that is
        not a number of columns, and for a secret that is too short."""
        check_unit(unit_tokens)
        self.org = org
        self.unit_tokens = unit_tokens
        self.tag = isolation_tag(org, secret)
        self.namespace = namespace
        mixed = b"tidegate columns 2" + _bytes_field(bytes(secret)) + self.tag + namespace.encode()
        self._key = hashlib.sha512(mixed).digest()
        self._keyed = hashlib.sha256(self._key)
        if self._keyed.block_size != _BLOCK:
            raise RuntimeError("SHA-256 has blocks of 64 bytes")
        self._root = self._hash(b"", _ROOT)

    def __repr__(self) -> str:
        return f"Keys({self.org!r}, …)"

    def prompt(
        self,
        tokens: Sequence[int] | Buffer = (),
        request: str = "",
        media: Sequence[Media] = (),
        known: Known | None = None,
    ) -> Prompt:
        """A prompt of this org in this namespace. `request`: the name of its request, if it has one.
        `media`: its inputs that are not tokens. `known`: of an earlier prompt of these keys whose first
        tokens and media were the same; they are not hashed again."""
        made = Prompt(self, request, media)
        if known is not None:
            made.states += known.states
            made.keys = list(known.keys)
        made.extend(tokens)
        return made

    @property
    def identity(self) -> bytes:
        """Equal for those that make the same keys of the same tokens. It is secret, as the keys are."""
        return self._root + _COUNT.pack(self.unit_tokens)

    @property
    def unit_columns(self) -> int:
        return self.unit_tokens // COLUMN_TOKENS

    def chain(
        self, state: bytes | None, raw: Buffer, media: Sequence[Media] = (), start: int = 0
    ) -> tuple[bytes, list[bytes]]:
        """The states of the whole units of these tokens, after `state`, or from the start without one,
        one behind the other; and the keys of their columns. `start`: the place of the first token, if
        there are `media`."""
        state = state or self._root
        if media:
            states = self._states_with_media(state, memoryview(raw), media, start)
            return states, self.keys_of(states)
        states, keys = loops.current.chained(self._key, state, raw, self.unit_tokens)
        return states, keys if self.unit_tokens == COLUMN_TOKENS else self.keys_of(states)

    def _states_with_media(
        self, state: bytes, raw: memoryview, media: Sequence[Media], start: int
    ) -> bytes:
        """In runs, each from a unit that an input overlaps up to the next one."""
        states = b""
        unit, size, units = self.unit_tokens, 4 * self.unit_tokens, len(raw) // (4 * self.unit_tokens)
        overlapped = {
            place
            for one in media
            for place in range(
                max(1, (one.start - start) // unit), min(units, -(-(one.end - start) // unit))
            )
        }
        places = [0, *sorted(overlapped)]
        for place, end in zip(places, [*places[1:], units], strict=True):
            first = start + place * unit
            state = self._with_media(state, media, first, first + unit)
            made, _ = loops.current.chained(self._key, state, raw[place * size : end * size], unit)
            states += made
            state = made[-STATE_BYTES:] or state
        return states

    def _with_media(self, state: bytes, media: Sequence[Media], start: int, end: int) -> bytes:
        """The state before these tokens, if some of them are placeholders of an input."""
        here = [one for one in media if one.start < end and one.end > start]
        if not here:
            return state
        inputs = [
            _PLACE.pack(one.start - start, one.end - one.start) + _bytes_field(one.identifier)
            for one in here
        ]
        return self._hash(state + b"".join(inputs), _MEDIA)

    def keys_of(self, states: bytes) -> list[bytes]:
        """The keys of all columns of the units in these states, which are one behind the other."""
        if self.unit_tokens == COLUMN_TOKENS:
            left = len(states) // _KEYS_OF_STATES.size * _KEYS_OF_STATES.size
            keys = [*chain.from_iterable(_KEYS_OF_STATES.iter_unpack(states[:left]))]
            return keys + [key for (key,) in _KEY_OF_STATE.iter_unpack(states[left:])]
        places = range(0, len(states), STATE_BYTES)
        return [
            self._hash(states[at : at + STATE_BYTES], _SLICE, index)[:KEY_BYTES]
            for at in places
            for index in range(self.unit_columns)
        ]

    def tail(
        self, state: bytes | None, raw: bytes, media: Sequence[Media] = (), start: int = 0
    ) -> bytes:
        """The key of a tail: a column of these tokens, fewer than a whole one has."""
        state = self._with_media(state or self._root, media, start, start + len(raw) // 4)
        return self._hash(raw, state, len(raw) // 4)[:KEY_BYTES]

    def named(self, names: Iterable[bytes]) -> Named:
        """Columns with names that the engine gives them."""
        return Named(self, [self._hash(name, _NAME)[:KEY_BYTES] for name in names])

    def _hash(self, data: bytes, state: bytes, count: int = 0) -> bytes:
        mixed = self._keyed.copy()
        mixed.update(data + state + _COUNT.pack(count))
        return mixed.digest()


def _shown(request: str) -> str:
    """A client may have chosen it: as much of it as everybody who shows it can take."""
    return "".join(filter(str.isprintable, request[:REQUEST_CHARACTERS_MAX]))


class Prompt:
    """The tokens of one request, and the keys of its columns. Tokens may be added: only new columns are
    hashed. Tokens are kept nowhere else, and no longer than the request."""

    __slots__ = ("_first", "_media", "_more", "keys", "maker", "memo", "request", "states")

    def __init__(self, maker: Keys, request: str = "", media: Sequence[Media] = ()) -> None:
        self.maker = maker
        self._media = media
        self.request = _shown(request)  # the engine's name of it, for explanations
        # Of the columns of whole units. Once they are others it is another list; `forget` empties it.
        self.keys: list[bytes] = []
        # Of whole units, one behind the other; further keys are computed from them.
        self.states = bytearray()
        # What somebody who looked these keys up remembers, until they are others.
        self.memo: Mapping[Any, Any] = {}
        self._first = b""  # the tokens that it began with, which are not copied,
        self._more = bytearray()  # and those that were added

    def __repr__(self) -> str:
        return f"Prompt({self.maker.org!r}, {self.tokens} tokens)"

    @property
    def org(self) -> str:
        return self.maker.org

    @property
    def tokens(self) -> int:
        return (len(self._first) + len(self._more)) // 4

    def extend(self, more: Sequence[int] | Buffer) -> None:
        """Add tokens: numbers, or a buffer of 32-bit ones, little-endian. Raises ValueError."""
        raw = encode(more)
        done = len(self.keys)
        start, before = done * COLUMN_BYTES, 4 * self.tokens
        # From a unit that was not whole on; or, where keys are known already, behind theirs.
        left = self._raw(start, before) + raw[max(0, start - before) :]
        if self._first:
            self._more += raw
        else:
            self._first = raw
        state = bytes(self.states[-STATE_BYTES:])
        states, keys = self.maker.chain(state, left, self._media, done * COLUMN_TOKENS)
        self.states += states
        if keys:
            self.keys = self.keys + keys if done else keys

    def tail(self, columns: int, count: int) -> bytes:
        """The key of the tail column of so many tokens after the first so many whole columns, where
        columns are units."""
        start = columns * COLUMN_BYTES
        raw = self._raw(start, start + 4 * count)
        if not 0 < count < COLUMN_TOKENS or len(raw) != 4 * count:
            raise ValueError(f"there is no tail of {count} tokens after {columns} columns")
        return self.maker.tail(self._state(columns), raw, self._media, columns * COLUMN_TOKENS)

    def begins_as(self, maker: Keys) -> bytes | None:
        """The key of its first column in another namespace of its org; None if it has no whole
        column."""
        _, keys = maker.chain(None, self._raw(0, 4 * maker.unit_tokens), self._media)
        return keys[0] if keys else None

    def rewind(self, tokens: int) -> None:
        """Forget what follows the first so many tokens. Not while somebody looks it up: what that finds
        would be remembered for the keys of other tokens."""
        end = 4 * max(0, tokens)
        del self._more[max(0, end - len(self._first)) :]
        self._first = self._first[:end]
        units = self.tokens // self.maker.unit_tokens
        self.keys = self.keys[: units * self.maker.unit_columns]
        del self.states[STATE_BYTES * units :]
        self.memo = {}

    def forget(self) -> None:
        """Nothing is left of it, also for whoever has taken its list of keys."""
        self.keys.clear()
        self.rewind(0)

    def _raw(self, start: int, end: int) -> bytes:
        """The tokens as bytes, from one place up to another or to the last."""
        first = len(self._first)
        if end <= first or start == end:
            return self._first[start:end]
        return self._first[start:] + self._more[max(0, start - first) : end - first]

    def _state(self, columns: int) -> bytes | None:
        end = STATE_BYTES * (columns // self.maker.unit_columns)
        return bytes(self.states[end - STATE_BYTES : end]) if columns else None


class Named(Prompt):
    """Columns with names that an engine gives them. Each stands alone, and counts as a whole one."""

    __slots__ = ()

    def __init__(self, maker: Keys, keys: list[bytes]) -> None:
        super().__init__(maker)
        self.keys = keys

    @property
    def tokens(self) -> int:
        return COLUMN_TOKENS * len(self.keys)


def encode(tokens: Sequence[int] | Buffer) -> bytes:
    """Token numbers as bytes; a buffer has them already. Raises ValueError for what is no token."""
    if isinstance(tokens, Buffer):
        raw = bytes(tokens)
        if len(raw) % 4:
            raise ValueError("a buffer of tokens holds 32-bit numbers")
        return raw
    try:
        return loops.current.packed(tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token is a number from 0 to {TOKEN_MAX}: {error}") from error


def _field(name: str, text: str) -> bytes:
    return _bytes_field(name.encode()) + _bytes_field(text.encode())


def _bytes_field(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _check_secret(secret: Buffer) -> None:
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"an org's secret has {SECRET_BYTES_MIN} bytes or more")
