"""The outcomes of past requests, and the last prompts of conversations.

No tokens: the keys of columns only. No clock and no threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, repeat
from typing import Final, NamedTuple, Protocol

from swdriver_shim.cache.reasons import Reason
from swdriver_shim.keys import COLUMN_TOKENS, KEY_BYTES, Keys

REQUESTS_MAX: Final = 1024
COLUMNS_MAX: Final = 1 << 18  # of all requests together: four megabytes of keys
CONVERSATION_KEYS_MAX: Final = 1 << 20  # of all conversations together
CONVERSATION_OVERHEAD_KEYS: Final = 6  # what one takes besides its keys
ROOM_MADE_AT_ONCE: Final = 64  # such a part of an org's


class HasKeys(Protocol):
    """A prompt, with or without its tokens."""

    @property
    def maker(self) -> Keys: ...
    @property
    def keys(self) -> list[bytes]:
        """Another list once they are others."""


def cut_keys(raw: bytes) -> list[bytes]:
    """The keys that were joined."""
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


class PromptKeys(NamedTuple):
    """A prompt without its tokens."""

    maker: Keys
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The outcome of one request, in tokens: `hit`, and `missed` by reason.

    `unused`: hits that were not used, by reason. `reasons`: of each column behind those.
    """

    request: str
    maker: Keys
    at: float  # when its load ended
    asked: int
    at_first: int  # tokens that were in memory
    borrowed: int  # tokens behind those that came from a sibling
    hit: int
    unused: tuple[tuple[Reason, int], ...]
    missed: Mapping[Reason, int]
    reasons: Sequence[Reason]
    raw_keys: bytes

    @property
    def name(self) -> tuple[str, str]:
        return self.maker.org, self.request

    @property
    def keys(self) -> list[bytes]:
        return cut_keys(self.raw_keys)

    @property
    def columns(self) -> int:
        return len(self.raw_keys) // KEY_BYTES

    def runs(self) -> list[tuple[str, int]]:
        """The outcome of its whole columns, in order: a tier or a reason, of so many in a row."""
        outcomes = islice(self._outcomes(), self.columns)
        return [(outcome, sum(1 for _ in run)) for outcome, run in groupby(outcomes)]

    def _outcomes(self) -> Iterator[str]:
        dram = self.at_first // COLUMN_TOKENS
        sibling = min(self.borrowed // COLUMN_TOKENS, self.hit // COLUMN_TOKENS - dram)
        last = self.reasons[-1] if self.reasons else next(iter(self.missed), Reason.NEVER_STORED)
        return chain(
            repeat("dram", dram),
            repeat("sibling", sibling),
            repeat("tier2", self.hit // COLUMN_TOKENS - dram - sibling),
            *(repeat(reason.value, tokens // COLUMN_TOKENS) for reason, tokens in self.unused),
            (reason.value for reason in self.reasons),
            repeat(last.value),
        )


class RequestLog:
    """The last requests, by org and name. A request replaces an earlier one of the same name."""

    def __init__(self, requests_max: int = REQUESTS_MAX, columns_max: int = COLUMNS_MAX) -> None:
        self._requests_max = requests_max
        self._columns_max = columns_max
        self._columns = 0
        self._records: OrderedDict[tuple[str, str], RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        self._drop(record.name)
        self._records[record.name] = record
        self._columns += record.columns
        while len(self._records) > self._requests_max or self._columns > self._columns_max:
            self._drop(next(iter(self._records)))

    def replace(self, known: RequestRecord, record: RequestRecord) -> None:
        """Replace a record by one of the same columns, unless another request has its name by now."""
        if self._records.get(record.name) is known:
            self._records[record.name] = record

    def find(self, org: str, request: str) -> RequestRecord | None:
        return self._records.get((org, request))

    def orgs_of(self, request: str) -> list[str]:
        """The orgs that have a request of this name."""
        return [org for org, name in self._records if name == request]

    def newest(self, org: str, most: int) -> list[RequestRecord]:
        its = (record for (of, _), record in reversed(self._records.items()) if of == org)
        return list(islice(its, most))

    def forget(self, org: str) -> None:
        for name in [name for name in self._records if name[0] == org]:
            self._drop(name)

    def _drop(self, name: tuple[str, str]) -> None:
        if dropped := self._records.pop(name, None):
            self._columns -= dropped.columns


@dataclass(slots=True)
class _Conversations:
    """Those of an org."""

    # The oldest first: a `dict` would look for its first entry through all that are gone.
    prompts: OrderedDict[str, PromptKeys] = field(default_factory=OrderedDict)
    keys: int = 0

    def add(self, continue_id: str, prompt: PromptKeys) -> None:
        self.drop(continue_id)
        self.prompts[continue_id] = prompt
        self.keys += _size(prompt)

    def drop(self, continue_id: str) -> None:
        if dropped := self.prompts.pop(continue_id, None):
            self.keys -= _size(dropped)

    def shrink(self, keys: int) -> None:
        while self.keys > keys:
            self.drop(next(iter(self.prompts)))


class Conversations:
    """The last prompt of each conversation that is to be continued, by org and `continue_id`."""

    def __init__(self, keys_max: int = CONVERSATION_KEYS_MAX) -> None:
        self._orgs: dict[str, _Conversations] = {}
        self._keys, self._keys_max = 0, keys_max

    def add(self, continue_id: str, prompt: HasKeys) -> None:
        if not continue_id or not prompt.keys:
            return
        org = prompt.maker.org
        its = self._orgs.setdefault(org, _Conversations())
        self._keys -= its.keys
        its.add(continue_id, PromptKeys(prompt.maker, list(prompt.keys)))
        self._keys += its.keys
        while self._keys > self._keys_max:
            self._make_room(org)

    def items(self) -> Iterable[tuple[tuple[str, str], PromptKeys]]:
        """By org and `continue_id`, the oldest of an org first."""
        for org, its in self._orgs.items():
            yield from (((org, continue_id), prompt) for continue_id, prompt in its.prompts.items())

    def find(self, org: str, continue_id: str) -> PromptKeys | None:
        """The last prompt that was stored with this `continue_id`."""
        its = self._orgs.get(org)
        return its.prompts.get(continue_id) if its else None

    def forget(self, org: str) -> None:
        if its := self._orgs.pop(org, None):
            self._keys -= its.keys

    def _make_room(self, org: str) -> None:
        """Of this org, if it has more than its share, or else of the one that has the most: of that so
        much that it need not be found each time."""
        share = self._keys_max // len(self._orgs)
        its = self._orgs[org]
        if its.keys > share:
            least = max(share, its.keys - (self._keys - self._keys_max))
        else:
            org, its = max(self._orgs.items(), key=lambda one: one[1].keys)
            least = its.keys - max(1, its.keys // ROOM_MADE_AT_ONCE)
        self._keys -= its.keys
        its.shrink(least)
        self._keys += its.keys
        if not its.prompts:
            del self._orgs[org]


def _size(prompt: PromptKeys) -> int:
    """Of a conversation, in keys: what it takes besides them counts as well."""
    return len(prompt.keys) + CONVERSATION_OVERHEAD_KEYS
