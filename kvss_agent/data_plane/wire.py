"""The frames of the data plane, and a reader that makes frames of bytes. No sockets.

A frame is a head of 16 bytes, a body whose longest length is known for each kind, and for two kinds the
payloads of columns behind it, which never pass through a buffer here: the reader asks its owner where
they belong and hands out exactly those places to be received into.

    head:  kind 1, flags 1, count 2, length of the body 4, number 8      (little-endian)

| frame      | from   | number  | flags  | count    | body                                             |
|------------|--------|---------|--------|----------|--------------------------------------------------|
| HELLO      | driver |         |        |          | magic 4, versions 2, role 1, 0, features 4, nonce |
|            |        |         |        |          | 32, driver, shard, software (length 1, text)     |
| CHALLENGE  | agent  |         |        |          | version 1, means 1, 0 2, features 4, nonce 32,   |
|            |        |         |        |          | proof 32                                         |
| PROOF      | driver |         |        |          | proof 32                                         |
| WELCOME    | agent  | applied |        | extents  | incarnation 16, slots 8, slot bytes 8,           |
|            |        |         |        |          | slots of each extent 8                           |
| EVICT      | driver | first   |        | columns  | slot 4 and header 64 of each; then the payloads  |
| COUNT      | agent  | applied |        |          |                                                  |
| REFILL     | driver | request |        | columns  | after 8, wait 4 ms, slot 4 of each               |
| REFILLED   | agent  | request |        | columns  | header 64 of each; then the payloads             |
| DELETE     | driver | request | SCRUB  | columns  | after 8, wait 4 ms, slot 4 of each               |
| DELETED    | agent  | request |        |          |                                                  |
| TIER       | driver | request | verb   | columns  | after 8, wait 4 ms; slot 4, key 16, tag 16,      |
|            |        |         |        |          | sequence 8 and note 8 of each; a data key 32, or |
|            |        |         |        |          | none                                             |
| TIERED     | agent  | request |        | answers  | outcome 1 of each; then none, or a note 8 of each|
| LISTED     | agent  | request | MORE   | columns  | key 16, tag 16, bytes 8, seconds 8 of each       |
| REJECTED   | agent  | request |        | reason   |                                                  |
| RESIZED    | agent  | slots   |        | extents  | slots of each extent 8                           |
| SHRUNK     | driver | slots   |        |          |                                                  |
| GOODBYE    | agent  |         |        |          |                                                  |
| ERROR      | agent  |         |        |          | cause, sentence (length 1, text)                 |

Version 2 is spoken here, and version 1: there, every EVICT is answered by a COUNT; since version 2 one
COUNT may answer for several.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, ClassVar, Final, NamedTuple

from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.constants import DATA_KEY_BYTES, VERSION, VERSION_MIN
from kvss_agent.mover import Bytes
from kvss_agent.shard import seal
from kvss_agent.shard.core import BATCH_MAX
from kvss_agent.shard.seal import HEADER_BYTES, Miss

MAGIC: Final = b"TGDP"
HEAD_BYTES: Final = 16
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
INCARNATION_BYTES: Final = 16
TEXT_BYTES_MAX: Final = 255
EXTENTS_MAX: Final = 64

_HEAD = struct.Struct("<BBHIQ")
_HELLO = struct.Struct("<4sBBBxI32s")
_CHALLENGE = struct.Struct("<BBxxI32s32s")
_WELCOME = struct.Struct("<16sQQ")
_ASK = struct.Struct("<QI")
_SLOT = struct.Struct("<I")
_EVICT_BYTES: Final = 4 + HEADER_BYTES
_TIER = struct.Struct("<I16s16sQQ")
_NOTE = struct.Struct("<Q")
_LISTED = struct.Struct("<16s16sQQ")
_LENDER = struct.Struct("<QIBB")  # bytes per second, milliseconds, lengths of address and shard


class Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    EVICT = 5
    COUNT = 6
    REFILL = 7
    REFILLED = 8
    DELETE = 9
    DELETED = 10
    REJECTED = 11
    RESIZED = 12
    SHRUNK = 13
    GOODBYE = 14
    ERROR = 15
    TIER = 16
    TIERED = 17
    LISTED = 18


class Role(IntEnum):
    """What a connection is for. Two queues are two connections: neither stands in the other's way."""

    EVICT = 1  # carries the evict queue
    REFILL = 2  # carries the refill and delete queue
    SHARED = 3  # hands over the arena itself


class Means(IntEnum):
    """How the two sides convince each other."""

    SECRET = 1  # each proves that it knows the driver's secret
    CERTIFICATE = 2  # TLS has done it


class Feature(IntFlag):
    SHARED = 1  # the agent can pass its arena
    SCRUB = 2  # a delete may ask for zeros
    TIER = 4  # the agent has a tier 2
    PURGE = 8  # which can be emptied of a tag
    ENCRYPT = 16  # and encrypts with the key that a request brings
    BORROW = 32  # the agent borrows columns from other shards
    REDUNDANCY = 64  # the agent stores fragments on other agents, and lists the columns of a shard
    FLUSH = 128  # the agent copies behind what waits in front of its tier 2, when it is asked to
    FRONT = 256  # something may wait there now


class Flag(IntFlag):
    NONE = 0
    SCRUB = 1
    MORE = 1  # of a list: there are more columns behind these


class TierVerb(IntEnum):
    """What to do with columns in tier 2, or in a sibling's memory."""

    EXISTS = 1  # is it there?
    SPILL = 2  # copy from the slot, which holds this evict of it
    RECALL = 3  # copy into the slot, sealed as `after`
    DELETE = 4
    PURGE = 5  # of all that carries the tag; there are two answers: notes are how many files and bytes
    BORROW = 6  # copy into the slot from the lender's slot that is its note, sealed as `after`
    SPILL_REDUNDANT = 7  # like SPILL, as fragments on several agents: survives the loss of some
    LIST = 8  # the columns of this shard that follow this one, in the order of tag and key
    FLUSH = 9  # the shard is leaving: copy behind what waits in front; the note is how many still do


class TierAnswer(IntEnum):
    """What became of one column. From MISS on: 32 more than the place of the reason among `Miss`."""

    DONE = 0  # it is there, is stored now, lies in the slot, was deleted
    ALREADY = 1  # it was stored before
    FULL = 2  # no room for it, and none can be made
    FAILED = 3  # the disk or bucket failed; the agent counts why
    MISS = 32


FEATURES: Final = ~Feature(0)  # all of them


@dataclass(frozen=True, slots=True)
class Hello:
    kind: ClassVar = Kind.HELLO
    role: Role
    driver: str
    shard: str
    nonce: bytes
    version_min: int = VERSION_MIN
    version_max: int = VERSION
    features: int = FEATURES
    software: str = ""

    def encode(self) -> bytes:
        fixed = _HELLO.pack(
            MAGIC, self.version_min, self.version_max, self.role, self.features, self.nonce
        )
        return _frame(self.kind, fixed + _texts(self.driver, self.shard, self.software))

    @classmethod
    def decode(cls, body: bytes) -> Hello:
        magic, lowest, highest, role, features, nonce = _unpack(_HELLO, body)
        if magic != MAGIC:
            raise _malformed("this is not the data plane of a driver")
        if role not in _ROLES:
            raise _malformed(f"no role {role}")
        driver, shard, software = _read_texts(body[_HELLO.size :], 3)
        return cls(Role(role), driver, shard, nonce, lowest, highest, features, software)


@dataclass(frozen=True, slots=True)
class Challenge:
    kind: ClassVar = Kind.CHALLENGE
    version: int
    means: Means
    features: int
    nonce: bytes
    proof: bytes

    def encode(self) -> bytes:
        body = _CHALLENGE.pack(self.version, self.means, self.features, self.nonce, self.proof)
        return _frame(self.kind, body)

    @classmethod
    def decode(cls, body: bytes) -> Challenge:
        version, means, features, nonce, proof = _unpack(_CHALLENGE, body, exactly=True)
        if means not in _MEANS:
            raise _malformed(f"no means {means}")
        return cls(version, Means(means), features, nonce, proof)


@dataclass(frozen=True, slots=True)
class Proof:
    kind: ClassVar = Kind.PROOF
    proof: bytes

    def encode(self) -> bytes:
        return _frame(self.kind, self.proof)

    @classmethod
    def decode(cls, body: bytes) -> Proof:
        if len(body) != PROOF_BYTES:
            raise _malformed("a proof of another length")
        return cls(body)


@dataclass(frozen=True, slots=True)
class Welcome:
    kind: ClassVar = Kind.WELCOME
    incarnation: bytes
    applied: int
    slots: int
    slot_bytes: int
    extents: tuple[int, ...] = ()

    def encode(self) -> bytes:
        body = _WELCOME.pack(self.incarnation, self.slots, self.slot_bytes) + _longs(self.extents)
        return _frame(self.kind, body, self.applied, count=len(self.extents))

    @classmethod
    def decode(cls, body: bytes, applied: int, count: int) -> Welcome:
        incarnation, slots, slot_bytes = _unpack(_WELCOME, body)
        return cls(incarnation, applied, slots, slot_bytes, _read_longs(body[_WELCOME.size :], count))


@dataclass(frozen=True, slots=True)
class Evict:
    """A run of sealed columns. The payloads follow, as long as the headers say."""

    kind: ClassVar = Kind.EVICT
    first: int
    columns: tuple[tuple[int, bytes], ...]  # slot, header

    def encode(self) -> bytes:
        body = b"".join(_SLOT.pack(slot) + header for slot, header in self.columns)
        return _frame(self.kind, body, self.first, count=len(self.columns))

    @classmethod
    def decode(cls, body: bytes, first: int, count: int) -> Evict:
        if not 0 < count <= BATCH_MAX or len(body) != count * _EVICT_BYTES:
            raise _malformed("a run of evicts of another length")
        columns = tuple(
            (_SLOT.unpack_from(body, at)[0], body[at + 4 : at + _EVICT_BYTES])
            for at in range(0, len(body), _EVICT_BYTES)
        )
        return cls(first, columns)

    def headers(self) -> list[seal.Header]:
        """The headers, each intact and with the number that is its turn; a breach if not."""
        headers = []
        for sequence, (_, raw) in enumerate(self.columns, self.first):
            header = seal.read(raw)
            if isinstance(header, Miss) or header.sequence != sequence:
                raise _malformed(f"evict {sequence} is not sealed as such")
            headers.append(header)
        return headers


@dataclass(frozen=True, slots=True)
class Count:
    kind: ClassVar = Kind.COUNT
    applied: int

    def encode(self) -> bytes:
        return _frame(self.kind, b"", self.applied)


@dataclass(frozen=True, slots=True)
class Refill:
    kind: ClassVar = Kind.REFILL
    request: int
    after: int
    wait_ms: int
    slots: tuple[int, ...]

    def encode(self) -> bytes:
        body = _ASK.pack(self.after, self.wait_ms) + _slots(self.slots)
        return _frame(self.kind, body, self.request, count=len(self.slots))


@dataclass(frozen=True, slots=True)
class Refilled:
    """The headers of the slots as they lie there. The payloads of those that are intact follow."""

    kind: ClassVar = Kind.REFILLED
    request: int
    headers: tuple[bytes, ...]

    def encode(self) -> bytes:
        return _frame(self.kind, b"".join(self.headers), self.request, count=len(self.headers))

    @classmethod
    def decode(cls, body: bytes, request: int, count: int) -> Refilled:
        if count > BATCH_MAX or len(body) != count * HEADER_BYTES:
            raise _malformed("an answer of another length")
        return cls(
            request, tuple(body[at : at + HEADER_BYTES] for at in range(0, len(body), HEADER_BYTES))
        )

    def lengths(self) -> list[int]:
        """How many bytes of payload follow for each column: none where the header is not intact."""
        found = [seal.read(header) for header in self.headers]
        return [0 if isinstance(header, Miss) else header.length for header in found]


@dataclass(frozen=True, slots=True)
class Delete:
    kind: ClassVar = Kind.DELETE
    request: int
    after: int
    wait_ms: int
    slots: tuple[int, ...]
    scrub: bool = False

    def encode(self) -> bytes:
        body = _ASK.pack(self.after, self.wait_ms) + _slots(self.slots)
        flags = Flag.SCRUB if self.scrub else Flag.NONE
        return _frame(self.kind, body, self.request, flags=flags, count=len(self.slots))


@dataclass(frozen=True, slots=True)
class Deleted:
    kind: ClassVar = Kind.DELETED
    request: int

    def encode(self) -> bytes:
        return _frame(self.kind, b"", self.request)


class TierColumn(NamedTuple):
    """A column and its slot. For a spill: `sequence` is the evict that wrote the slot, `note` whatever
    the driver wants to be told when it recalls the column. To borrow it: `note` is the lender's slot."""

    slot: int
    key: bytes
    tag: bytes
    sequence: int = 0
    note: int = 0


@dataclass(frozen=True, slots=True)
class Lender:
    """The shard that columns are borrowed from, the same one of a sibling; for how many seconds at most,
    and how fast, 0 for as fast as it goes."""

    address: str
    shard: str
    seconds: float
    bytes_per_second: int = 0

    def encode(self) -> bytes:
        address, shard = self.address.encode(), self.shard.encode()
        if not (0 < len(address) <= TEXT_BYTES_MAX and 0 < len(shard) <= TEXT_BYTES_MAX):
            raise ValueError(f"an address and a name have 1 to {TEXT_BYTES_MAX} bytes")
        milliseconds = max(1, min(round(self.seconds * 1000), 2**32 - 1))
        head = _LENDER.pack(self.bytes_per_second, milliseconds, len(address), len(shard))
        return head + address + shard

    @classmethod
    def decode(cls, body: bytes) -> Lender:
        if len(body) < _LENDER.size:
            raise _malformed("no lender")
        bytes_per_second, milliseconds, address, shard = _LENDER.unpack_from(body)
        end = _LENDER.size + address
        if not address or not shard or len(body) != end + shard:
            raise _malformed("a lender of another length")
        try:
            texts = body[_LENDER.size : end].decode(), body[end:].decode()
        except UnicodeDecodeError as error:
            raise _malformed("a lender that is no text") from error
        return cls(*texts, milliseconds / 1000, bytes_per_second)


@dataclass(frozen=True, slots=True)
class Tier:
    kind: ClassVar = Kind.TIER
    request: int
    verb: TierVerb
    after: int
    wait_ms: int
    columns: tuple[TierColumn, ...]
    data_key: bytes = field(default=b"", repr=False)  # files are encrypted with it, if there is one
    lender: Lender | None = None

    def encode(self) -> bytes:
        columns = b"".join(_TIER.pack(*column) for column in self.columns)
        body = _ASK.pack(self.after, self.wait_ms) + columns
        body += self.lender.encode() if self.lender else self.data_key
        return _frame(self.kind, body, self.request, flags=self.verb, count=len(self.columns))

    @classmethod
    def decode(cls, body: bytes, request: int, flags: int, count: int) -> Tier:
        end = _ASK.size + count * _TIER.size
        if flags not in _TIER_VERBS:
            raise _malformed(f"no verb {flags}")
        if not 0 < count <= BATCH_MAX or len(body) < end:
            raise _malformed("a request of another length")
        after, wait_ms = _ASK.unpack_from(body)
        columns = tuple(map(TierColumn._make, _TIER.iter_unpack(body[_ASK.size : end])))
        verb, rest = TierVerb(flags), bytes(body[end:])
        if verb is TierVerb.BORROW:
            return cls(request, verb, after, wait_ms, columns, lender=Lender.decode(rest))
        if len(rest) not in (0, DATA_KEY_BYTES):
            raise _malformed("a request of another length")
        return cls(request, verb, after, wait_ms, columns, rest)


@dataclass(frozen=True, slots=True)
class Tiered:
    kind: ClassVar = Kind.TIERED
    request: int
    answers: tuple[TierAnswer | Miss, ...]
    notes: tuple[int, ...] = ()  # of columns that were recalled, 0 for the others; of a purge

    def encode(self) -> bytes:
        body = bytes([one if isinstance(one, TierAnswer) else _MISS_CODES[one] for one in self.answers])
        body += b"".join(map(_NOTE.pack, self.notes))
        return _frame(self.kind, body, self.request, count=len(self.answers))

    @classmethod
    def decode(cls, body: bytes, request: int, count: int) -> Tiered:
        if count > BATCH_MAX or len(body) not in (count, count * (1 + _NOTE.size)):
            raise _malformed("an answer of another length")
        notes = tuple(note for (note,) in _NOTE.iter_unpack(body[count:]))
        try:
            answers = tuple(map(_TIER_ANSWERS.__getitem__, body[:count]))
        except KeyError as error:
            raise _malformed("an unknown answer") from error
        return cls(request, answers, notes)


class ListedColumn(NamedTuple):
    """A column of a shard in tier 2: the bytes of its file, and when that was written, since 1970."""

    key: bytes
    tag: bytes
    bytes: int
    seconds: int


@dataclass(frozen=True, slots=True)
class Listed:
    """Columns of a shard in tier 2, in the order of tag and key. `more`: others follow."""

    kind: ClassVar = Kind.LISTED
    request: int
    columns: tuple[ListedColumn, ...]
    more: bool = False

    def encode(self) -> bytes:
        body = b"".join(_LISTED.pack(*column) for column in self.columns)
        flags = Flag.MORE if self.more else Flag.NONE
        return _frame(self.kind, body, self.request, flags=flags, count=len(self.columns))

    @classmethod
    def decode(cls, body: bytes, request: int, flags: int, count: int) -> Listed:
        if count > BATCH_MAX or len(body) != count * _LISTED.size:
            raise _malformed("a list of another length")
        columns = tuple(ListedColumn(*fields) for fields in _LISTED.iter_unpack(body))
        return cls(request, columns, bool(flags & Flag.MORE))


@dataclass(frozen=True, slots=True)
class Rejected:
    """A refill or delete was rejected: it came late, or there are too many."""

    kind: ClassVar = Kind.REJECTED
    request: int
    reason: Miss

    def encode(self) -> bytes:
        return _frame(self.kind, b"", self.request, count=_MISSES.index(self.reason))


@dataclass(frozen=True, slots=True)
class Resized:
    """The slot limit of the shard has changed. `extents` are the new ones; descriptors come along."""

    kind: ClassVar = Kind.RESIZED
    slots: int
    extents: tuple[int, ...] = ()

    def encode(self) -> bytes:
        return _frame(self.kind, _longs(self.extents), self.slots, count=len(self.extents))


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A driver that shares the arena no longer uses slots above the slot limit."""

    kind: ClassVar = Kind.SHRUNK
    slots: int

    def encode(self) -> bytes:
        return _frame(self.kind, b"", self.slots)


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The agent is going to stop: finish what is under way."""

    kind: ClassVar = Kind.GOODBYE

    def encode(self) -> bytes:
        return _frame(self.kind, b"")


@dataclass(frozen=True, slots=True)
class Error:
    """Why the agent ends this connection. The last frame."""

    kind: ClassVar = Kind.ERROR
    cause: Cause
    sentence: str

    def encode(self) -> bytes:
        return _frame(self.kind, _texts(self.cause, self.sentence))

    @classmethod
    def decode(cls, body: bytes) -> Error:
        cause, sentence = _read_texts(body, 2)
        if cause not in _CAUSES:
            raise _malformed("an unknown cause")
        return cls(Cause(cause), sentence)


Frame = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Evict
    | Count
    | Refill
    | Refilled
    | Delete
    | Deleted
    | Tier
    | Tiered
    | Listed
    | Rejected
    | Resized
    | Shrunk
    | Goodbye
    | Error
)

_MISSES: Final = list(Miss)
_ROLES: Final = frozenset(Role)
_MEANS: Final = frozenset(Means)
_TIER_VERBS: Final = frozenset(TierVerb)
_MISS_CODES: Final = {miss: TierAnswer.MISS + place for place, miss in enumerate(_MISSES)}
_TIER_ANSWERS: Final[dict[int, TierAnswer | Miss]] = {
    **{int(answer): answer for answer in TierAnswer if answer is not TierAnswer.MISS},
    **{code: miss for miss, code in _MISS_CODES.items()},
}
_CAUSES: Final = frozenset(Cause)
_KINDS: Final = frozenset(Kind)

_BODY_BYTES_MAX: Final[dict[int, int]] = {
    Kind.HELLO: _HELLO.size + 3 * (1 + TEXT_BYTES_MAX),
    Kind.CHALLENGE: _CHALLENGE.size,
    Kind.PROOF: PROOF_BYTES,
    Kind.WELCOME: _WELCOME.size + 8 * EXTENTS_MAX,
    Kind.EVICT: BATCH_MAX * _EVICT_BYTES,
    Kind.REFILL: _ASK.size + 4 * BATCH_MAX,
    Kind.REFILLED: BATCH_MAX * HEADER_BYTES,
    Kind.DELETE: _ASK.size + 4 * BATCH_MAX,
    Kind.TIER: _ASK.size
    + BATCH_MAX * _TIER.size
    + max(DATA_KEY_BYTES, _LENDER.size + 2 * TEXT_BYTES_MAX),
    Kind.TIERED: BATCH_MAX * (1 + _NOTE.size),
    Kind.LISTED: BATCH_MAX * _LISTED.size,
    Kind.RESIZED: 8 * EXTENTS_MAX,
    Kind.ERROR: 2 * (1 + TEXT_BYTES_MAX),
}
BODY_BYTES_MAX: Final = max(_BODY_BYTES_MAX.values())
HANDSHAKE_BODY_BYTES_MAX: Final = max(_BODY_BYTES_MAX[kind] for kind in (Kind.HELLO, Kind.PROOF))


def decode(kind: int, flags: int, count: int, number: int, body: bytes) -> Frame:
    """The frame that a head and a body make, or a breach."""
    match kind:
        case Kind.HELLO:
            return Hello.decode(body)
        case Kind.CHALLENGE:
            return Challenge.decode(body)
        case Kind.PROOF:
            return Proof.decode(body)
        case Kind.WELCOME:
            return Welcome.decode(body, number, count)
        case Kind.EVICT:
            return Evict.decode(body, number, count)
        case Kind.COUNT:
            return Count(number)
        case Kind.REFILL:
            return Refill(number, *_read_ask(body, count))
        case Kind.REFILLED:
            return Refilled.decode(body, number, count)
        case Kind.DELETE:
            return Delete(number, *_read_ask(body, count), scrub=bool(flags & Flag.SCRUB))
        case Kind.DELETED:
            return Deleted(number)
        case Kind.TIER:
            return Tier.decode(body, number, flags, count)
        case Kind.TIERED:
            return Tiered.decode(body, number, count)
        case Kind.LISTED:
            return Listed.decode(body, number, flags, count)
        case Kind.REJECTED:
            if count >= len(_MISSES):
                raise _malformed("an unknown reason")
            return Rejected(number, _MISSES[count])
        case Kind.RESIZED:
            return Resized(number, _read_longs(body, count))
        case Kind.SHRUNK:
            return Shrunk(number)
        case Kind.GOODBYE:
            return Goodbye()
        case Kind.ERROR:
            return Error.decode(body)
        case _:
            raise _malformed(f"no kind {kind}")


@dataclass(frozen=True, slots=True)
class Filled:
    """The place with this index has got all its bytes. `last`: and it was the last one."""

    index: int
    last: bool


class FrameReader:
    """Makes frames of the bytes of one connection. Holds a few kilobytes, whatever is sent to it.

    Use: receive into `want()`, at most as much as it holds, and say with `fed(n)` how much it was. What
    comes back is a frame once it is complete. After a frame that is followed by payloads, `expect` says
    where those belong; `want` hands out these places then, and `fed` tells as each is full.
    """

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        """`body_bytes_max`: less for a peer that has not proved who it is."""
        self._body_bytes_max = body_bytes_max
        self._buffer = memoryview(bytearray(HEAD_BYTES + body_bytes_max))
        self._have = 0
        self._need = HEAD_BYTES
        self._places: Sequence[memoryview] = ()
        self._index = 0

    def want(self) -> memoryview:
        """Where the next bytes belong. Never empty."""
        if self._places:
            return self._places[self._index][self._have :]
        return self._buffer[self._have : self._need]

    @property
    def place(self) -> tuple[int, memoryview]:
        """Among payloads: the index of the place that is being filled, and what is left of it."""
        return self._index, self._places[self._index][self._have :]

    def expect(self, places: Sequence[memoryview]) -> None:
        """What comes next are payloads, into these places, none of them empty."""
        self._places = places
        self._index = 0
        self._have = 0

    @property
    def between_frames(self) -> bool:
        """Nothing of a frame has come yet: the one moment at which a peer may leave or be slow."""
        return self._have == 0 and not self._places

    def fed(self, count: int) -> Frame | Filled | None:
        """So many bytes have been received into `want()`. Raises Breach on what is no frame."""
        self._have += count
        if self._places:
            return self._filled()
        if self._have < self._need:
            return None
        kind, flags, columns, length, number = _HEAD.unpack_from(self._buffer)
        if self._need == HEAD_BYTES:
            if kind not in _KINDS:
                raise _malformed(f"no kind {kind}")
            if length > min(_BODY_BYTES_MAX.get(kind, 0), self._body_bytes_max):
                raise _malformed(f"a body of {length} bytes")
            if length:
                self._need = HEAD_BYTES + length
                return None
        body = bytes(self._buffer[HEAD_BYTES : HEAD_BYTES + length])
        self._have, self._need = 0, HEAD_BYTES
        return decode(kind, flags, columns, number, body)

    def _filled(self) -> Filled | None:
        if self._have < len(self._places[self._index]):
            return None
        filled = Filled(self._index, last=self._index + 1 == len(self._places))
        self._have = 0
        self._index += 1
        if filled.last:
            self._places = ()
        return filled


def _frame(kind: Kind, body: bytes, number: int = 0, flags: int = 0, count: int = 0) -> bytes:
    return _HEAD.pack(kind, flags, count, len(body), number) + body


def _malformed(sentence: str) -> Breach:
    return Breach(Cause.MALFORMED, sentence)


def _unpack(layout: struct.Struct, body: Bytes, *, exactly: bool = False) -> tuple[Any, ...]:
    if len(body) < layout.size or (exactly and len(body) != layout.size):
        raise _malformed("a body of another length")
    return layout.unpack_from(body)


def _texts(*texts: str) -> bytes:
    cut = [_printable(text).encode()[:TEXT_BYTES_MAX] for text in texts]
    encoded = [text.decode(errors="ignore").encode() for text in cut]
    return b"".join(bytes([len(text)]) + text for text in encoded)


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text)


def _read_texts(body: bytes, count: int) -> list[str]:
    """They are logged, shown and reported further, so a peer may not say what can't be printed."""
    texts = []
    for _ in range(count):
        length = body[0] if body else -1
        if length < 0 or len(body) < 1 + length:
            raise _malformed("a text that is cut off")
        try:
            texts.append(body[1 : 1 + length].decode())
        except UnicodeDecodeError as error:
            raise _malformed("a text that is not UTF-8") from error
        if not texts[-1].isprintable():
            raise _malformed("a text with what can't be printed")
        body = body[1 + length :]
    if body:
        raise _malformed("something after the last text")
    return texts


def _slots(slots: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(slots)}I", *slots)


def _read_ask(body: bytes, count: int) -> tuple[int, int, tuple[int, ...]]:
    if count > BATCH_MAX or len(body) != _ASK.size + 4 * count:
        raise _malformed("a request of another length")
    after, wait_ms = _ASK.unpack_from(body)
    return after, wait_ms, struct.unpack_from(f"<{count}I", body, _ASK.size)


def _longs(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _read_longs(body: bytes, count: int) -> tuple[int, ...]:
    if count > EXTENTS_MAX or len(body) != 8 * count:
        raise _malformed("a list of extents of another length")
    return struct.unpack(f"<{count}Q", body)
