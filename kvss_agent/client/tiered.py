"""Tier 2 as all transports have it: requests to the agent, which moves the bytes by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import TypeVar

from kvss_agent.client.interface import TIER_SECONDS, WAIT_SECONDS, Purged, Recalled, ShardClient, Wanted
from kvss_agent.client.requests import Requests
from kvss_agent.data_plane.wire import Feature, TierAnswer, TierColumn, TierVerb
from kvss_agent.shard.core import BATCH_MAX
from kvss_agent.shard.seal import KEY_BYTES, Column, Miss

T = TypeVar("T")


class TieredClient(ShardClient):
    """The verbs of tier 2, over the connection for requests."""

    @property
    @abstractmethod
    def requests(self) -> Requests:
        """The connection for requests; opened when it is first needed."""

    @property
    @abstractmethod
    def number(self) -> int:
        """The number of the last evict so far, applied or not."""

    def exists(self, columns: Sequence[Column]) -> list[bool]:
        asked = [TierColumn(0, column.key, column.tag) for column in columns]
        return [answer is TierAnswer.DONE for answer, _ in self._tier(TierVerb.EXISTS, asked, 0)]

    def spill(
        self,
        columns: Sequence[Wanted],
        *,
        notes: Sequence[int] = (),
        data_key: bytes = b"",
        wait_seconds: float = WAIT_SECONDS,
        seconds: float = TIER_SECONDS,
    ) -> list[TierAnswer | Miss]:
        asked = [
            TierColumn(slot, *column, note)
            for (slot, column), note in zip(columns, notes or repeat(0, len(columns)), strict=True)
        ]
        after = max((one.column.sequence for one in columns), default=0)
        answers = self._tier(TierVerb.SPILL, asked, after, wait_seconds, seconds, data_key)
        return [answer for answer, _ in answers]

    def recall(
        self,
        columns: Sequence[Wanted],
        *,
        data_key: bytes = b"",
        wait_seconds: float = WAIT_SECONDS,
        seconds: float = TIER_SECONDS,
    ) -> list[Recalled | Miss]:
        after = self.number
        asked = [TierColumn(one.slot, one.column.key, one.column.tag) for one in columns]
        answers = self._tier(TierVerb.RECALL, asked, after, wait_seconds, seconds, data_key)
        return [_recalled(answer, after, note) for answer, note in answers]

    def tier_delete(self, columns: Sequence[Column]) -> list[TierAnswer | Miss]:
        if self._is_without_tier2:
            return [TierAnswer.DONE for _ in columns]
        asked = [TierColumn(0, column.key, column.tag) for column in columns]
        return [answer for answer, _ in self._tier(TierVerb.DELETE, asked, 0)]

    def purge(self, tag: bytes, *, seconds: float = TIER_SECONDS) -> Purged | None:
        if self._is_without_tier2:
            return Purged(0, 0)
        asked = [TierColumn(0, bytes(KEY_BYTES), tag)]
        answers = self.requests.tier(TierVerb.PURGE, asked, 0, 0, seconds)
        (first, files), *rest = answers
        if first is TierAnswer.DONE and rest:
            return Purged(files, rest[0][1])
        return None  # also if it was refused: tier 2 may be on its way, and have much of this tag

    @property
    def _is_without_tier2(self) -> bool:
        """This agent never has one. One whose tier 2 is off just now says so when it is asked."""
        return not self.requests.connection.features & Feature.TIER

    def _tier(
        self,
        verb: TierVerb,
        columns: Sequence[TierColumn],
        after: int,
        wait_seconds: float = 0,
        seconds: float = TIER_SECONDS,
        data_key: bytes = b"",
    ) -> list[tuple[TierAnswer | Miss, int]]:
        """Each with its note, 0 where there is none."""
        answers: list[tuple[TierAnswer | Miss, int]] = []
        for batch in batches(columns):
            answers += self.requests.tier(verb, batch, after, wait_seconds, seconds, data_key)
        return answers


def batches(items: Iterable[T]) -> Iterable[list[T]]:
    """In pieces that fit into a frame."""
    rest = iter(items)
    while batch := list(islice(rest, BATCH_MAX)):
        yield batch


def _recalled(answer: TierAnswer | Miss, after: int, note: int) -> Recalled | Miss:
    if answer is TierAnswer.DONE:
        return Recalled(after, note)
    return answer if isinstance(answer, Miss) else Miss.LOST
