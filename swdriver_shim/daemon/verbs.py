"""The verbs that callers of an org may ask of a daemon: one entry for each.

The daemon routes and describes verbs by this table (`callers`, `openapi`), and clients send bodies and
read answers by it (`adapters.remote`). Bodies and answers are JSON; where bytes follow, see `binary`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from kvss_agent.documents import decode
from swdriver_shim.cache.misses import ColumnState
from swdriver_shim.daemon import binary
from swdriver_shim.daemon.binary import KV_BYTES_MAX, LoadHead, ObjectsHead
from swdriver_shim.decider.removals import Receipt
from swdriver_shim.decider.statistics import BreakEvenTokens
from swdriver_shim.driver import Stored
from swdriver_shim.keys import TOKEN_MAX
from swdriver_shim.layout import GROUPS_MAX
from swdriver_shim.policy import DisplacementName, Priority, Rules, Seconds
from telemetry.records import NO_NUL

TOKENS_MAX: Final = 4 << 20
LOAD_SECONDS_MAX: Final = 60.0
COMPUTE_SECONDS_MAX: Final = 3600.0
OBJECTS_MAX: Final = 4096  # in one request
STATES_MAX: Final = 4096

Token = Annotated[int, Meta(ge=0, le=TOKEN_MAX)]
RequestName = Annotated[str, Meta(max_length=200, pattern=NO_NUL)]
ObjectKey = Annotated[str, Meta(pattern="^(?:[0-9a-f]{2}){1,512}$")]


# Bodies


class Body(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A field that is not known is an error."""


class PromptBody(Body, frozen=True, kw_only=True):
    """A prompt: its tokens, and the adapter that the model runs with.

    `namespace`: the hex digest of the `Namespace` that the caller expects; the verb is refused if the
    driver has another one. `request`: the engine's name of the request, for explanations.
    """

    tokens: Annotated[list[Token], Meta(max_length=TOKENS_MAX)]
    adapter: Annotated[str, Meta(max_length=500)] = ""
    namespace: Annotated[str, Meta(max_length=100)] = ""
    request: RequestName = ""


class LoadBody(PromptBody, frozen=True, kw_only=True):
    """`seconds`: how long to wait for tier 2, at most."""

    seconds: Annotated[float, Meta(ge=0, le=LOAD_SECONDS_MAX)] = 0.0


class PrefetchBody(Body, frozen=True, kw_only=True):
    """The `continue_id` that the conversation was stored with."""

    continue_id: Annotated[str, Meta(min_length=1, max_length=200)]


class ComputedBody(Body, frozen=True, kw_only=True):
    """How long the engine took to compute so many tokens."""

    tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    seconds: Annotated[float, Meta(gt=0, le=COMPUTE_SECONDS_MAX)]


class StoreBody(PromptBody, frozen=True, kw_only=True):
    """The header of a store. The KV of the first `verified` tokens follows; of all tokens by default.

    `first_tokens`: by group, the token that its KV starts at, if not the first. `states`: after how many
    tokens each of the states is that are among the bytes; those at the ends of columns are stored.
    """

    verified: Annotated[int, Meta(ge=0)] | None = None
    first_tokens: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(max_length=GROUPS_MAX)] = field(
        default_factory=dict
    )
    states: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(max_length=STATES_MAX)] = field(
        default_factory=list
    )
    rules: Rules = field(default_factory=Rules)


class DeleteBody(PromptBody, frozen=True, kw_only=True):
    """`shared`: delete also the columns that other prompts continue from."""

    shared: bool = False


class PriorityBody(PromptBody, frozen=True, kw_only=True):
    priority: Priority


class TtlBody(PromptBody, frozen=True, kw_only=True):
    """A TTL of its own, never longer than the policy's."""

    seconds: Seconds


class DisplacementBody(Body, frozen=True, kw_only=True):
    """Until the next document says otherwise."""

    displacement: DisplacementName


class PurgeBody(Body, frozen=True, kw_only=True):
    """Purge everything of the org, or of one adapter."""

    adapter: Annotated[str, Meta(max_length=500)] | None = None


class ObjectsBody(Body, frozen=True, kw_only=True):
    """Objects, by the engine's keys in hex, in the order of a prompt. `namespace`: see `PromptBody`."""

    keys: Annotated[list[ObjectKey], Meta(max_length=OBJECTS_MAX)]
    namespace: Annotated[str, Meta(max_length=100)] = ""


class FindBody(ObjectsBody, frozen=True, kw_only=True):
    """`seconds`: how long to wait for tier 2, at most."""

    seconds: Annotated[float, Meta(ge=0, le=LOAD_SECONDS_MAX)] = 0.0


class PutBody(ObjectsBody, frozen=True, kw_only=True):
    """The header of a put. The values follow; `lengths` are their bytes."""

    lengths: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(max_length=OBJECTS_MAX)]
    rules: Rules = field(default_factory=Rules)


# Answers


class QueryAnswer(Struct, frozen=True):
    """How many of the tokens a load would return."""

    tokens: int
    asked: int


class PrefetchAnswer(Struct, frozen=True):
    """Whether the conversation is being fetched from tier 2."""

    begun: bool


class ColumnsAnswer(Struct, frozen=True):
    """How many columns were changed."""

    columns: int


class ExistAnswer(Struct, frozen=True):
    """Which of the objects a get would return, and how large a value may be."""

    exists: list[bool]
    value_bytes_max: Annotated[int, Meta(ge=1, le=KV_BYTES_MAX)]


class PutAnswer(Struct, frozen=True):
    """Which of the objects are stored now."""

    stored: list[bool]


# The table

B = TypeVar("B")
A = TypeVar("A")


@dataclass(frozen=True)
class Verb(Generic[B, A]):
    """`path` is behind `/v1/`. With `sends_bytes` the body is a header and bytes follow it; with
    `returns_bytes` the answer is."""

    path: str
    summary: str
    body: type[B]
    answer: type[A]
    sends_bytes: bool = False
    returns_bytes: bool = False

    def pack(self, body: B, *payload: memoryview) -> bytes:
        return binary.pack(body, *payload) if self.sends_bytes else msgspec.json.encode(body)

    def unpack(self, raw: memoryview) -> tuple[B, memoryview]:
        """A body, and the bytes that follow it. Raises Invalid."""
        return _unpack(raw, self.body, has_bytes=self.sends_bytes)

    def unpack_answer(self, raw: memoryview) -> tuple[A, memoryview]:
        """An answer, and the bytes that follow it. Raises Invalid."""
        return _unpack(raw, self.answer, has_bytes=self.returns_bytes)


def _unpack(raw: memoryview, kind: type[B], *, has_bytes: bool) -> tuple[B, memoryview]:
    decoder = msgspec.json.Decoder(kind)
    if has_bytes:
        return binary.unpack(raw, decoder)
    return decode(bytes(raw), decoder), raw[:0]


QUERY: Final = Verb(
    "query", "Count how many tokens of a prompt a load would return.", PromptBody, QueryAnswer
)
EXPLAIN: Final = Verb(
    "explain", "Explain each column of a prompt.", PromptBody, dict[str, list[ColumnState]]
)
LOAD: Final = Verb(
    "load", "Load the longest stored prefix of a prompt.", LoadBody, LoadHead, returns_bytes=True
)
STORE: Final = Verb(
    "store", "Store the KV of a prompt's verified tokens.", StoreBody, Stored, sends_bytes=True
)
PREFETCH: Final = Verb(
    "prefetch", "Fetch a conversation from tier 2 before it continues.", PrefetchBody, PrefetchAnswer
)
COMPUTED: Final = Verb(
    "computed",
    "Report how long computing took, to compare with fetching.",
    ComputedBody,
    BreakEvenTokens,
)
DELETE: Final = Verb("delete", "Delete a prompt, with a receipt.", DeleteBody, Receipt)
SET_PRIORITY: Final = Verb(
    "set_priority", "Set the priority of a stored prompt.", PriorityBody, ColumnsAnswer
)
SET_TTL: Final = Verb("set_ttl", "Shorten the TTL of a stored prompt.", TtlBody, ColumnsAnswer)
SET_DISPLACEMENT: Final = Verb(
    "displacement", "Set which columns are displaced to make room.", DisplacementBody, DisplacementBody
)
PURGE: Final = Verb("purge", "Purge everything of the org, with a receipt.", PurgeBody, Receipt)
OBJECTS_EXIST: Final = Verb("objects/exists", "Check which objects are stored.", FindBody, ExistAnswer)
GET_OBJECTS: Final = Verb(
    "objects/get", "Get the values of stored objects.", FindBody, ObjectsHead, returns_bytes=True
)
PUT_OBJECTS: Final = Verb("objects/put", "Store objects.", PutBody, PutAnswer, sends_bytes=True)
REMOVE_OBJECTS: Final = Verb("objects/remove", "Delete objects, with a receipt.", ObjectsBody, Receipt)
