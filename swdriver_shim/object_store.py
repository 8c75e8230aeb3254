"""Values that engines store under keys of their own: one column each, whatever their length.

Expiry, quotas, tier 2, purges and seals are those of columns. Many values are handled under one lock and
in batches. Where the group has several shards, a value fills their parts of the column one after the
other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeVar

from kvss_agent.client import Evict, Miss
from kvss_agent.shard.core import BATCH_MAX
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.object_ledger import Found
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.shard.columns import RefillColumn
from swdriver_shim.data_plane.tier2 import Tier2Transfers, reason_of, warn_of_damage
from swdriver_shim.decider.shard_threads import ShardThreads
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Named
from swdriver_shim.policy import AS_USUAL, Rules

WAIT_SECONDS_MAX: Final = 0.05  # between two checks of what was recalled
NOTHING: Final = 1  # the tokens in the seal of a part behind the end of the value
_NOTHING_BYTES: Final = memoryview(b"\0")  # no column is empty

T = TypeVar("T")


class TooLarge(ValueError):
    """A value does not fit a column."""


def too_large(what: str, size: int, value_bytes_max: int) -> str:
    """A sentence, with the layout that would hold it."""
    return (
        f"{what} has {size} bytes and a column of this driver holds {value_bytes_max}: bytes_per_token "
        f"in its document has to add up to {-(-size // COLUMN_TOKENS)} bytes per token or more."
    )


def check(values: Sequence[memoryview], value_bytes_max: int) -> None:
    """Raises TooLarge, and ValueError for an empty value, which could not be told from none."""
    sizes = [value.nbytes for value in values]
    if max(sizes, default=0) > value_bytes_max:
        raise TooLarge(too_large("A value", max(sizes), value_bytes_max))
    if min(sizes, default=1) == 0:
        raise ValueError("an empty value can't be stored: it could not be told from none")


class ObjectStore:
    """All methods may be called from any thread."""

    def __init__(
        self,
        ledger: Ledger,
        lock: FairLock,
        shards: Sequence[Shard],
        tier2: Tier2Transfers,
        shard_threads: ShardThreads,
        is_served: Callable[[Keys], bool],
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """`lock` is the ledger's. `wake` is called when housekeeping has something to do."""
        self._ledger = ledger
        self._objects = ledger.objects()
        self._lock = lock
        self._shards = shards
        self._tier2 = tier2
        self._each_shard = shard_threads.each
        self._is_served = is_served
        self._clock = clock
        self._wake = wake
        each = [size * COLUMN_TOKENS for size in ledger.layout.groups[0].bytes_per_token]
        ends = list(accumulate(each))
        self._parts = [slice(end - size, end) for end, size in zip(ends, each, strict=True)]
        self.value_bytes_max = ends[-1]
        self.too_large = 0  # values that were refused

    def exists(self, asked: Named, seconds: float = 0.0) -> list[bool]:
        """Which values are in memory. Others are recalled from tier 2 meanwhile; this waits at most so
        long."""
        with self._lock:
            in_memory = self._objects.query(asked, self._clock())
        if self._recall_more(asked, in_memory, seconds):
            with self._lock:
                in_memory = self._objects.query(asked, self._clock())
        return in_memory

    def get(self, asked: Named, into: Sequence[memoryview], seconds: float = 0.0) -> list[int | None]:
        """Copy each value to the front of its buffer; returns its length, or None for a miss, whose
        buffer may then have any content.

        Missing values are recalled from tier 2 meanwhile; this waits at most so long.
        """
        with self._lock:
            found = self._objects.find(asked, self._clock())
        refused: Mapping[int, Miss] = {}
        try:
            if self._recall_more(asked, [place in found.columns for place in range(len(into))], seconds):
                with self._lock:
                    self._objects.refresh(found, self._clock())
            lengths, refused = self._fetch(found, into)
        finally:
            with self._lock:
                self._refuse(found, refused)
                reasons = {place: reason_of(miss) for place, miss in refused.items()}
                self._objects.finish(found, reasons, self._clock())
            warn_of_damage(refused.values())
        return [lengths.get(place) for place in range(len(into))]

    def put(
        self,
        asked: Named,
        values: Sequence[memoryview],
        rules: Rules = AS_USUAL,
        permit: Callable[[], bool] = lambda: True,
    ) -> list[bool]:
        """Store values; returns which of them are stored now. A value that exists already is not
        replaced. Without room for all, the first ones are stored, and the last ones are displaced first.
        Without `permit`, or if the org has another tag by now, none is stored, even if that shows at the
        end only.

        Raises TooLarge for a value that does not fit a column, and ValueError for an empty one, before
        anything is stored.
        """
        try:
            check(values, self.value_bytes_max)
        except TooLarge:
            with self._lock:
                self.too_large += 1
            raise
        with self._lock:
            if not (self._is_served(asked.maker) and permit()):
                return [False] * len(values)
            begun = self._ledger.begin_store(asked, asked.tokens, self._clock(), rules)
            stored = self._objects.stored(asked)
            for each in (begun.columns, begun.slots):
                each.reverse()  # policies that go by order displace the last ones first
        failed = dict.fromkeys(begun.columns, Reason.AGENT_LOST)
        try:
            by_key = dict(zip(asked.keys, values, strict=True))
            columns = [(slot, column.key, by_key[column.key]) for column, slot in begun.places]
            if self._send(asked.maker.tag, columns):
                failed = {}
        finally:
            with self._lock:
                if not permit():
                    failed = dict.fromkeys(begun.columns, Reason.PURGED)
                self._ledger.finish_store(begun, self._clock(), failed)
                if self._ledger.is_short_of_room:
                    self._wake()
        lost = {column.key for column in failed}
        return [is_stored and key not in lost for key, is_stored in zip(asked.keys, stored, strict=True)]

    def _send(self, tag: bytes, columns: Sequence[tuple[int, bytes, memoryview]]) -> bool:
        def send(_group: int, index: int) -> bool:
            for at in range(0, len(columns), BATCH_MAX):
                outs = []
                for slot, key, value in columns[at : at + BATCH_MAX]:
                    part = value[self._parts[index]]
                    tokens = COLUMN_TOKENS if part else NOTHING
                    outs.append(Evict(slot, key, tag, tokens, part or _NOTHING_BYTES))
                if not self._shards[index].evict(outs):
                    return False
            return True

        return not columns or all(self._each_shard(send, [0]).values())

    def _fetch(self, found: Found, into: Sequence[memoryview]) -> tuple[dict[int, int], dict[int, Miss]]:
        """The lengths of the values that were refilled, and why the others were not."""
        places = list(found.columns)

        def fetch(_group: int, index: int) -> Iterator[int | Miss]:
            for at in range(0, len(places), BATCH_MAX):
                wanted = []
                for place in places[at : at + BATCH_MAX]:
                    room = into[place][self._parts[index]]
                    slot, key = found.slots[place], found.columns[place].key
                    tokens = COLUMN_TOKENS if room else NOTHING
                    room = room or memoryview(bytearray(len(_NOTHING_BYTES)))
                    wanted.append(RefillColumn(slot, key, found.asked.maker.tag, tokens, room))
                for answer, one in zip(self._shards[index].fetch(wanted), wanted, strict=True):
                    if isinstance(answer, Miss):
                        yield answer
                    elif answer.tokens == NOTHING:
                        yield 0
                    else:
                        yield answer.length if one.tokens == COLUMN_TOKENS else Miss.CORRUPT

        lengths: dict[int, int] = {}
        refused: dict[int, Miss] = {}
        parts = self._each_shard(lambda group, index: list(fetch(group, index)), [0]) if places else {}
        for place, *answers in zip(places, *parts.values(), strict=True):
            misses = [answer for answer in answers if isinstance(answer, Miss)]
            if misses:
                refused[place] = Miss.LOST if Miss.LOST in misses else misses[0]
            else:
                lengths[place] = sum(answer for answer in answers if not isinstance(answer, Miss))
        return lengths, refused

    def _refuse(self, found: Found, refused: Mapping[int, Miss]) -> None:
        """The caller holds the lock. Values of a lost agent may be served again when it is back."""
        if Miss.LOST in refused.values():
            self._ledger.is_reachable = False
            self._wake()
            return
        for place, miss in refused.items():
            self._ledger.refuse(found.columns[place], reason_of(miss))

    def _recall_more(self, asked: Named, in_memory: Sequence[bool], seconds: float) -> bool:
        """Recall values that are not in memory, and wait for that at most so long. Whether there may be
        more in memory now."""
        missing = [key for key, is_there in zip(asked.keys, in_memory, strict=True) if not is_there]
        if not missing:
            return False
        rest = Named(asked.maker, missing)
        lookup = self._tier2.seek(rest, 0)
        until = time.monotonic() + seconds
        if lookup and seconds > 0:
            lookup.wait(seconds)
        while (left := until - time.monotonic()) > 0:  # another request may have recalled it
            with self._lock:
                if not self._objects.is_pending(rest):
                    break
            with self._tier2.arrived:
                self._tier2.arrived.wait(min(left, WAIT_SECONDS_MAX))
        return seconds > 0
