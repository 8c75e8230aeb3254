"""Values that engines keep under keys of their own, at a driver: one column each, whatever their length.

All that holds for columns holds for them, since they are columns: expiry, quotas, tier 2, purges, seals.
Many go under one lock and in batches to the agents. Where the group has several shards, a value fills
their parts of the column one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Protocol, TypeVar

from kvss_agent.client import Miss
from kvss_agent.shard.core import BATCH_MAX
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.object_ledger import Found, ObjectLedger
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.shard.columns import EvictColumn, RefillColumn
from swdriver_shim.data_plane.tier2 import Tier2Transfers, reason_of
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Named
from swdriver_shim.policy import AS_USUAL, Rules

WAIT_SECONDS_MAX: Final = 0.05  # between looks at what has come
NOTHING: Final = 1  # tokens, by which a seal tells that the value has ended before this part
_NOTHING_BYTES: Final = memoryview(b"\0")  # no column is empty

T = TypeVar("T")


class TooLarge(ValueError):
    """A value does not fit a column."""


def check(values: Sequence[memoryview], value_bytes_max: int) -> None:
    """Raises TooLarge, and ValueError for an empty value, which nobody could tell from none."""
    sizes = [value.nbytes for value in values]
    if max(sizes, default=0) > value_bytes_max:
        raise TooLarge(
            f"A value has {max(sizes)} bytes and a column holds {value_bytes_max}: the layout has to "
            f"have {-(-max(sizes) // COLUMN_TOKENS)} bytes per token or more."
        )
    if min(sizes, default=1) == 0:
        raise ValueError("an empty value is not kept: nobody could tell it from none")


class OnEach(Protocol):
    def __call__(
        self, work: Callable[[int, int], T], groups: Iterable[int]
    ) -> dict[tuple[int, int], T]: ...


class ObjectStore:
    """All methods may be called from any thread."""

    def __init__(
        self,
        ledger: Ledger,
        lock: threading.Lock,
        shards: Sequence[Shard],
        carrier: Tier2Transfers,
        on_each: OnEach,
        is_served: Callable[[Keys], bool],
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """`lock` is the ledger's. `wake` is called when there is more to keep house of."""
        self._ledger = ledger
        self._objects = ObjectLedger(ledger)
        self._lock = lock
        self._shards = shards
        self._carrier = carrier
        self._on_each = on_each
        self._is_served = is_served
        self._clock = clock
        self._wake = wake
        each = [size * COLUMN_TOKENS for size in ledger.stock.layout.groups[0].bytes_per_token]
        ends = list(accumulate(each))
        self._parts = [slice(end - size, end) for end, size in zip(ends, each, strict=True)]
        self.value_bytes_max = ends[-1]
        self.too_large = 0  # values that were refused

    def exists(self, asked: Named, seconds: float = 0.0) -> list[bool]:
        """Which of them are in memory. What tier 2 has of the others is brought there meanwhile; this
        waits for it at most so long."""
        with self._lock:
            here = self._objects.here(asked, self._clock())
        if self._bring_more(asked, here, seconds):
            with self._lock:
                here = self._objects.here(asked, self._clock())
        return here

    def get(self, asked: Named, into: Sequence[memoryview], seconds: float = 0.0) -> list[int | None]:
        """Bring them to the front of `into`: how many bytes each has, None for what is missed. Where it
        is, memory may hold anything.

        What tier 2 has of the others is brought into memory meanwhile; this waits at most so long.
        """
        with self._lock:
            found = self._objects.find(asked, self._clock())
        refused: Mapping[int, Miss] = {}
        try:
            if self._bring_more(asked, [place in found.columns for place in range(len(into))], seconds):
                with self._lock:
                    self._objects.again(found, self._clock())
            lengths, refused = self._fetch(found, into)
        finally:
            with self._lock:
                self._refuse(found, refused)
                self._objects.finish(found, refused, self._clock())
        return [lengths.get(place) for place in range(len(into))]

    def put(
        self,
        asked: Named,
        values: Sequence[memoryview],
        rules: Rules = AS_USUAL,
        permit: Callable[[], bool] = lambda: True,
    ) -> list[bool]:
        """Keep these; which of them are kept now. What is there already stays as it is: a key stands for
        one value. Without room for all, the first ones are kept, and the last ones go first. Without
        `permit`, or if the org has another tag by now, none is kept, be it that this shows at the end.

        Raises TooLarge for a value that does not fit a column, and ValueError for an empty one, before
        anything is kept.
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
            kept = self._objects.stored(asked)
            begun.places.reverse()  # policies that go by order give the last ones up first
        failed = {column: Reason.AGENT_LOST for column, _ in begun.places}
        try:
            by_key = dict(zip(asked.keys, values, strict=True))
            columns = [(slot, column.key, by_key[column.key]) for column, slot in begun.places]
            if self._send(asked.maker.tag, columns):
                failed = {}
        finally:
            with self._lock:
                if not permit():
                    failed = {column: Reason.PURGED for column, _ in begun.places}
                self._ledger.finish_store(begun, self._clock(), failed)
                if self._ledger.spilling.is_short_of_room:
                    self._wake()
        lost = {column.key for column in failed}
        return [is_kept and key not in lost for key, is_kept in zip(asked.keys, kept, strict=True)]

    def _send(self, tag: bytes, columns: Sequence[tuple[int, bytes, memoryview]]) -> bool:
        def send(_group: int, index: int) -> bool:
            for at in range(0, len(columns), BATCH_MAX):
                outs = []
                for slot, key, value in columns[at : at + BATCH_MAX]:
                    part = value[self._parts[index]]
                    tokens = COLUMN_TOKENS if part else NOTHING
                    outs.append(EvictColumn(slot, key, tag, tokens, part or _NOTHING_BYTES))
                if not self._shards[index].evict(outs):
                    return False
            return True

        return not columns or all(self._on_each(send, [0]).values())

    def _fetch(self, found: Found, into: Sequence[memoryview]) -> tuple[dict[int, int], dict[int, Miss]]:
        """How many bytes of each have come, and which have not."""
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
        parts = self._on_each(lambda group, index: list(fetch(group, index)), [0]) if places else {}
        for place, *answers in zip(places, *parts.values(), strict=True):
            misses = [answer for answer in answers if isinstance(answer, Miss)]
            if misses:
                refused[place] = Miss.LOST if Miss.LOST in misses else misses[0]
            else:
                lengths[place] = sum(answer for answer in answers if not isinstance(answer, Miss))
        return lengths, refused

    def _refuse(self, found: Found, refused: Mapping[int, Miss]) -> None:
        """Under the lock. As for prefixes: an agent that is lost may come back with everything."""
        if Miss.LOST in refused.values():
            self._ledger.stock.reachable = False
            self._wake()
            return
        for place, miss in refused.items():
            self._ledger.restoring.refuse(found.columns[place], reason_of(miss))

    def _bring_more(self, asked: Named, here: Sequence[bool], seconds: float) -> bool:
        """Have tier 2 asked for what is not here, and wait for it at most so long; whether there may be
        more now."""
        missing = [key for key, is_here in zip(asked.keys, here, strict=True) if not is_here]
        if not missing:
            return False
        rest = Named(asked.maker, missing)
        seeking = self._carrier.seek(rest, 0)
        until = time.monotonic() + seconds
        if seeking and seconds > 0:
            seeking.done.wait(seconds)
        while (left := until - time.monotonic()) > 0:  # somebody else is bringing it
            with self._lock:
                if not self._objects.is_coming(rest):
                    break
            with self._carrier.arrived:
                self._carrier.arrived.wait(min(left, WAIT_SECONDS_MAX))
        return seconds > 0
