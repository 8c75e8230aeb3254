"""What a shard does in tier 2, and what it borrows. The agent copies between its memory and tier 2, or
that of a sibling; no bytes pass here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvss_agent.client import (
    Column,
    Lender,
    Lost,
    Miss,
    Purged,
    Recalled,
    ShardClient,
    TierAnswer,
    Wanted,
)
from swdriver_shim.data_plane.shard.columns import RecallColumn, SpillColumn
from swdriver_shim.data_plane.shard.connections import HomeConnections

T = TypeVar("T")


class ShardTier2:
    """All methods may be called from any thread. See `ShardControl` for what each does."""

    def __init__(self, homes: HomeConnections) -> None:
        self._homes = homes

    def exists(self, columns: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        asked = [Column(key, tag, 0) for key, tag in columns]
        return self._ask(lambda client: client.exists(asked), [False] * len(columns))

    def spill(
        self, columns: Sequence[SpillColumn], data_key: bytes = b"", *, redundant: bool = False
    ) -> list[bool]:
        homes, slots = self._homes, self._homes.slots
        with homes.lock:
            slots.grow(max(column.slot for column in columns))
            wanted = [slots.wanted(one.slot, one.key, one.tag) for one in columns]
            here = [
                place
                for place, one in enumerate(wanted)
                if one.slot not in slots.at_old_home and one.column.sequence >= 0
            ]
            client = homes.client
        exist = [False] * len(columns)
        if client is None or not here:
            return exist
        number = homes.former.begin_reading(frozenset((client,)))  # it is not left before this has ended
        try:
            answers = client.spill(
                [wanted[place] for place in here],
                notes=[columns[place].note for place in here],
                data_key=data_key,
                redundant=redundant,
            )
        except Lost as error:
            homes.lose(client, error)
            return exist
        finally:
            homes.former.end_reading(number)
        for place, answer in zip(here, answers, strict=True):
            exist[place] = answer in (TierAnswer.DONE, TierAnswer.ALREADY)
        return exist

    def recall(self, columns: Sequence[RecallColumn], data_key: bytes = b"") -> list[int | Miss]:
        found = self._fill(columns, lambda client, wanted: client.recall(wanted, data_key=data_key))
        return [answer if isinstance(answer, Miss) else answer.note for answer in found]

    def borrow(
        self, columns: Sequence[RecallColumn], slots: Sequence[int], lender: Lender
    ) -> list[Miss | None]:
        found = self._fill(columns, lambda client, wanted: client.borrow(wanted, slots, lender))
        return [answer if isinstance(answer, Miss) else None for answer in found]

    def _fill(
        self,
        columns: Sequence[RecallColumn],
        ask: Callable[[ShardClient, Sequence[Wanted]], list[Recalled | Miss]],
    ) -> list[Recalled | Miss]:
        """Have unused slots filled by the agent."""
        homes, slots = self._homes, self._homes.slots
        with homes.lock:
            slots.wait_for_pull(column.slot for column in columns)
            slots.grow(max(column.slot for column in columns))
            client = homes.client
            if homes.leaving:  # nobody needs what was in these slots, so it is not pulled either
                homes.not_needed_at_old(column.slot for column in columns)
            for one in columns:
                slots.clear(one.slot)
                homes.note_tag(one.tag)
        if client is None:
            return [Miss.LOST] * len(columns)
        try:
            wanted = [Wanted(one.slot, Column(one.key, one.tag, 0)) for one in columns]
            found = ask(client, wanted)
        except Lost as error:
            homes.lose(client, error)
            return [Miss.LOST] * len(columns)
        with homes.lock:
            if homes.client is not client:  # lost or moved meanwhile: what came is at another home
                return [Miss.LOST] * len(columns)
            for one, answer in zip(columns, found, strict=True):
                if not isinstance(answer, Miss):
                    slots.set_number(one.slot, answer.number)
        return found

    def delete(self, columns: Sequence[tuple[bytes, bytes]]) -> bool:
        asked = [Column(key, tag, 0) for key, tag in columns]

        def is_deleted(client: ShardClient) -> bool:
            return all(answer is TierAnswer.DONE for answer in client.tier_delete(asked))

        if not self._is_done_where_it_waits(is_deleted):
            return False
        lost: list[TierAnswer | Miss] = [Miss.LOST]
        answers = self._ask(lambda client: client.tier_delete(asked), lost)
        return all(answer is TierAnswer.DONE for answer in answers)

    def purge(self, tag: bytes) -> Purged | None:
        if not self._is_done_where_it_waits(lambda client: client.purge(tag) is not None):
            return None
        return self._ask(lambda client: client.purge(tag), None)

    def _is_done_where_it_waits(self, is_done: Callable[[ShardClient], bool]) -> bool:
        """First where the shard was: what waits there in front of tier 2 would come back."""
        former = self._homes.former
        for home in former.with_waiting:
            client = home.client
            if client is None:
                return False
            try:
                if not is_done(client):
                    return False
            except Lost as error:
                former.lose(home, client, error)
                return False
        return True

    def _ask(self, ask: Callable[[ShardClient], T], if_lost: T) -> T:
        client = self._homes.client
        if client is None:
            return if_lost
        try:
            return ask(client)
        except Lost as error:
            self._homes.lose(client, error)
            return if_lost
