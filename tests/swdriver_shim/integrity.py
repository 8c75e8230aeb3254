"""What always holds of a ledger and its parts, whatever has happened: looked up inside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import singledispatch
from itertools import chain
from typing import Any

from swdriver_shim.cache.displacement.arc import Arc
from swdriver_shim.cache.displacement.changeover import Changeover
from swdriver_shim.cache.displacement.competition import SAMPLE_COLUMNS, Competition, _bits
from swdriver_shim.cache.displacement.cost import _SLACK, SAME_AGE_S, Cost, kind_of
from swdriver_shim.cache.displacement.leaves import Leaves
from swdriver_shim.cache.displacement.lru import Lfu, Lru
from swdriver_shim.cache.displacement.returns import SAMPLE_MAX, Returns
from swdriver_shim.cache.displacement.s3fifo import GHOST_SHARE, S3Fifo
from swdriver_shim.cache.displacement.slru import Slru
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.prefix_map import NO_SLOT, Account, Column, PrefixMap, State, Tail
from swdriver_shim.cache.reasons import Tally
from swdriver_shim.cache.slots import Pool, Slots
from swdriver_shim.cache.stock import Stock
from swdriver_shim.policy import Tiers


@singledispatch
def check_integrity(it: object, *_: Any) -> Any:
    """Raise RuntimeError or AssertionError if its state contradicts itself."""
    raise TypeError(f"nothing is known of {type(it).__name__}")


def must(holds: bool, what: str) -> None:  # noqa: FBT001
    if not holds:
        raise RuntimeError(f"the state contradicts itself: {what}")


@check_integrity.register(Ledger)
def _(it: Ledger) -> None:
    """Raise RuntimeError if anything here contradicts itself."""
    check_integrity(it._stock)


@check_integrity.register(Stock)
def _(it: Stock) -> None:
    """Raise RuntimeError if anything here contradicts itself."""
    pins = Counter(it.slots.pins())
    taken: list[tuple[int, int]] = []
    for account in it.accounts.values():
        check_integrity(account)
        for one in chain.from_iterable(account.maps.values()):
            check_integrity(one, pins)
        for one in chain(*account.maps.values(), account.purged):
            taken += [(one.group, each.slot) for each in one.columns.values() if each.slot != NO_SLOT]
    check_integrity(it.slots, taken)
    slow = {
        org
        for org, account in it.accounts.items()
        if account.policy.tiers is Tiers.TIER2 or account.policy.scrub
    }
    if it.slow_orgs != slow:
        raise RuntimeError("it is known whose slots are not free at once")


@check_integrity.register(Slots)
def _(it: Slots, columns: Iterable[tuple[int, int]]) -> None:
    """Raise RuntimeError unless each slot is one of these columns', free, or waiting."""
    clearing = [(clear.group, clear.slot) for clear in it.clears()]
    taken = [*columns, *clearing]
    taken += [(freed.map.group, freed.slot) for _, freed in it._freed]
    for group, pool in enumerate(it.pools):
        check_integrity(pool, (slot for which, slot in taken if which == group))
        waiting = [*clearing, *((freed.map.group, 0) for _, freed in it._freed)]
        if it.freeing[group] != sum(which == group for which, _ in waiting):
            raise RuntimeError("the slots that become free are counted")


@check_integrity.register(Pool)
def _(it: Pool, taken: Iterable[int]) -> None:
    """Raise RuntimeError unless these are the slots in use."""
    slots = [*taken, *it._free, *it._above]
    if sorted(slots) != list(range(it.ever_used)):
        raise RuntimeError("each slot is in use once, or free")
    if len(slots) - len(it._free) - len(it._above) != it.used:
        raise RuntimeError("the slots in use are counted")


@check_integrity.register(Account)
def _(it: Account) -> None:
    check_integrity(it.tally)
    for group, queues in enumerate(it._queues):
        for queue in queues.values():
            check_integrity(queue, list(chain.from_iterable(queue.columns(0))))
        held = sum(one.bytes for one in it.columns(group) if one.slot != NO_SLOT)
        if held != it.group_bytes[group]:
            raise RuntimeError(f"{it.org} has {held} bytes, not {it.group_bytes[group]}")
    if sum(it.group_bytes) != it.bytes:
        raise RuntimeError("the bytes of the groups are those of the org")


@check_integrity.register(PrefixMap)
def _(it: PrefixMap, pins: Counter[Column]) -> None:
    """Raise RuntimeError if the forest contradicts itself."""
    behind: Counter[Column] = Counter()
    tails: Counter[tuple[bytes, int]] = Counter()
    for key, column in chain.from_iterable(part.items() for part in it.columns.parts):
        must(column.key == key and column.map is it, "columns are found by their keys")
        must(it.columns.get(key) is column, "a key is in its part")
        must((column.slot == NO_SLOT) == (column.state is State.EMPTY), "a slot is for bytes")
        if column.parent:
            behind[column.parent] += 1
            is_here = it.columns.get(column.parent.key) is column.parent
            must(is_here or column.parent.state is State.EMPTY, "a parent is here, or was detached")
            must(column.parent.depth == column.depth - 1, "a parent is one column before")
        must(not it.linked or not column.depth or column.parent is not None, "no gaps")
        if isinstance(column, Tail):
            tails[column.before, column.tokens] += 1
    for column in it.columns.values():
        must(column.ref_count == behind[column] + pins[column], "references are children and pins")
        must(column.ref_count > 0 or column.state is not State.EMPTY, "an empty column is referenced")
    noted = {(before, one): many for before, of in it._tails.items() for one, many in of.items()}
    must(noted == tails, "tails are found by what is before them")


@check_integrity.register(Tally)
def _(it: Tally) -> None:
    if it.hits.total() + it.missed.total() != it.requested:
        raise RuntimeError("each token that is asked for is hit or missed")


@check_integrity.register(Lru)
def _(it: Lru[Any], columns: Iterable[Any]) -> None:
    columns = list(columns)
    assert it._count == len(columns)
    check_integrity(it._leaves, columns)


@check_integrity.register(Lfu)
def _(it: Lfu[Any], columns: Iterable[Any]) -> None:
    columns = list(columns)
    assert it._count == len(columns)
    assert all(0 <= column.mark <= it._age for column in columns)
    check_integrity(it._leaves, columns)


@check_integrity.register(Slru)
def _(it: Slru[Any], columns: Iterable[Any]) -> None:
    columns = list(columns)
    assert it._count == len(columns)
    protected = [column for column in columns if column.mark is it]
    assert it._protected_count == len(protected)
    check_integrity(it._protected, protected)
    check_integrity(it._probation, (column for column in columns if column.mark is not it))


@check_integrity.register(Arc)
def _(it: Arc[Any], columns: Iterable[Any]) -> None:
    columns = list(columns)
    assert it._count == len(columns)
    often = [column for column in columns if column.mark is it]
    assert it._often_count == len(often)
    assert len(it._once_gone) <= len(often) + 1
    assert len(it._once_gone) + len(it._often_gone) <= len(columns) + 1
    check_integrity(it._often, often)
    check_integrity(it._once, (column for column in columns if column.mark is not it))


@check_integrity.register(Competition)
def _(it: Competition[Any], columns: Iterable[Any]) -> None:
    columns = set(columns)
    assert it._count == len(columns)
    check_integrity(it._active, columns)
    sampled = {column for column in columns if not _bits(column.key) & it._mask}
    assert it._sample.keys() == sampled
    assert len(sampled) <= 2 * SAMPLE_COLUMNS
    for column in sampled:
        before = [*_ancestors(column)]
        if columns.issuperset(before):  # else some were purged
            assert it._sample[column] == next((one.key for one in before if one in sampled), b"")
    for one in it._miniatures:
        here = one.columns.values()
        check_integrity(one.policy, here)
        assert len(here) <= 2 * SAMPLE_COLUMNS
        assert all(column.parent is None or column.parent.key in one.columns for column in here)
        children = Counter(column.parent for column in here)
        assert all(column.ref_count == children[column] for column in here)


@check_integrity.register(Changeover)
def _(it: Changeover[Any], columns: Iterable[Any]) -> None:
    """Each column is in one of two policies."""
    columns = set(columns)
    assert len(it) == len(columns)
    moved = set(it._moved)
    if it._old is None:
        assert not moved
        check_integrity(it.to, columns)
        return
    assert moved <= columns
    assert columns - moved, "one that has nothing is forgotten"
    for policy, its in ((it.to, moved), (it._old, columns - moved)):
        listed = list(chain.from_iterable(policy.columns(0)))
        assert len(listed) == len(its) == len(policy)
        assert set(listed) == its
        check_integrity(policy, its)


def _ancestors(column: Any) -> Iterator[Any]:
    while column.parent is not None:
        column = column.parent
        yield column


@check_integrity.register(S3Fifo)
def _(it: S3Fifo[Any], columns: Iterable[Any]) -> None:
    columns = list(columns)
    assert it._count == len(columns)
    main = [column for column in columns if column.mark is not None]
    assert it._main_count == len(main)
    assert len(it._ghosts) <= max(1, GHOST_SHARE * it._count)
    check_integrity(it._main, main)
    check_integrity(it._small, (column for column in columns if column.mark is None))


@check_integrity.register(Cost)
def _(it: Cost[Any], columns: Iterable[Any]) -> None:
    columns = set(columns)
    assert it._count == len(columns)
    assert it._waiting.keys() <= columns
    assert all(column.ref_count or column in it._waiting or column is it._front for column in columns)
    assert it._front is None or (it._front in columns and it._front not in it._waiting)
    for end, sign in enumerate((1, -1)):
        assert sum(len(heaps[end]) for heaps in it._kinds) <= it._entries
        assert it._aside or it._entries <= 2 * len(it._waiting) + _SLACK
        here = {
            entry[3]: (kind, entry)
            for kind in range(len(it._kinds))
            for entry in chain.from_iterable(it._heaps(kind, end))
            if it._waiting.get(entry[3]) == entry[2]
        }
        assert here.keys() == it._waiting.keys()
        for column, (kind, entry) in here.items():
            assert column.ref_count or kind == kind_of(column, column.uses), "of another kind by now"
            used = sign * entry[0]  # below zero for what was used before this machine started
            assert column.ref_count or used == column.used_at // SAME_AGE_S, "used since"
    check_integrity(it._returns)


@check_integrity.register(Leaves)
def _(it: Leaves[Any], columns: Iterable[Any]) -> None:
    """AssertionError unless these are the columns of this heap, leaves or not."""
    for column in columns:
        queued_somewhere = column in it._entries or column is it._front
        assert column.ref_count or queued_somewhere, "each leaf is queued"
    queued = {id(entry) for entry in [*it._heap, *it._aside]}
    assert all(id(entry) in queued for entry in it._entries.values())
    assert all(entry[0] <= (it._rank(entry[-1]) or entry[0]) for entry in it._entries.values())
    assert len(it._heap) <= it._limit


@check_integrity.register(Returns)
def _(it: Returns) -> None:
    assert len(it._followed) <= SAMPLE_MAX
    assert all(it.follows(key) for key in it._followed)
    assert all(rate > 0 for rates in it.rate for rate in rates)
