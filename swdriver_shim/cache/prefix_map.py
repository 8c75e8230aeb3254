"""The columns of each org: found by key, in a forest for each namespace and cache group.

A column is a node while it has bytes or columns behind it. One that expired in the middle of a
conversation stays as an empty node until the columns behind it are removed, and can be stored again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial
from itertools import chain
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final

from kvss_agent import native
from swdriver_shim import loops
from swdriver_shim.cache.column_table import ColumnTable
from swdriver_shim.cache.displacement import (
    POLICIES,
    Changeover,
    Choice,
    Competition,
    DisplacementPolicy,
)
from swdriver_shim.cache.purge_dates import PurgeDates
from swdriver_shim.cache.reasons import Reason, Removal, Tally
from swdriver_shim.cache.reuse.sample import Recorder
from swdriver_shim.cache.turns import Turns
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace
from swdriver_shim.policy import Policy, Tier2Rule, Tiers

NO_SLOT: Final = -1


class State(IntEnum):
    EMPTY = 0  # without a slot
    WRITING = 1  # its bytes are on their way from the engine
    READY = 2
    RECALLING = 3  # its bytes are on their way from tier 2


_EMPTY: Final = State.EMPTY
_READY: Final = State.READY
_DEPTHS_SHARED: Final = 4096
_DEPTHS: Final = tuple(range(_DEPTHS_SHARED))  # one number of 32 bytes for all columns of a depth


_TERMS_SHARED: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """On which terms a column was stored. Many columns share them, so a column gets others rather than
    have its own changed. Other objects may say the same: those that have not been used for long."""

    priority: int
    turn: int  # which prompt of its conversation stored it
    ttl: int | None  # seconds, of its own
    tier2_rule: Tier2Rule  # of the requests that stored it

    def but(
        self,
        *,
        priority: int | None = None,
        ttl: int | EllipsisType | None = ...,
        tier2_rule: Tier2Rule | None = None,
    ) -> Terms:
        """The same terms, except for these."""
        return terms_of(
            self.priority if priority is None else priority,
            self.turn,
            self.ttl if ttl is ... else ttl,
            self.tier2_rule if tier2_rule is None else tier2_rule,
        )


@lru_cache(maxsize=_TERMS_SHARED)
def terms_of(
    priority: int, turn: int, ttl: int | None = None, tier2_rule: Tier2Rule = Tier2Rule.ALLOWED
) -> Terms:
    """These terms, one object for all columns that have them."""
    return Terms(priority, turn, ttl, tier2_rule)


NO_TERMS: Final = terms_of(0, 0)


class PlainFields:
    """The fields of a column, where nothing is compiled; as fields.c of the compiled mover has them."""

    __slots__ = (
        "depth",
        "due",
        "key",
        "map",
        "mark",
        "parent",
        "ref_count",
        "slot",
        "state",
        "stored_at",
        "terms",
        "tier2_used_at",
        "used_at",
        "uses",
    )
    slot: int
    depth: int
    due: int
    uses: int


if TYPE_CHECKING:
    Fields = PlainFields
else:  # once for the process: columns that are there stay as they are
    Fields = PlainFields
    with contextlib.suppress(ValueError):  # a wrong KVSS_NATIVE, which `build_in_background` refuses
        Fields = getattr(native.load(), "Fields", PlainFields)


class Column(Fields):
    """One column. There may be a million, so it has nothing that is not needed for each. Numbers are
    below 2**31."""

    __slots__ = ()

    tokens: int = COLUMN_TOKENS
    tail: bool = False

    def __init__(self, prefix_map: PrefixMap, key: bytes, parent: Column | None, depth: int) -> None:
        self.map = prefix_map
        self.key = key
        self.parent = parent
        self.depth = _DEPTHS[depth] if depth < _DEPTHS_SHARED else depth  # how many are before it
        self.slot = NO_SLOT
        self.state: State = _EMPTY
        self.stored_at = self.used_at = 0.0
        self.uses = 0
        self.terms = NO_TERMS
        self.due = 0  # the second in which the sweeper checks it next
        self.ref_count = 0  # columns behind it, and uses that pin it
        self.tier2_used_at: float | None = (
            None  # in the dates of its copy in tier 2; None: no copy is known
        )
        self.mark: Any = None  # the displacement policy's

    def __repr__(self) -> str:
        return f"<column {self.depth} of {self.map.account.org}, {self.state.name}, slot {self.slot}>"

    @property
    def group(self) -> int:
        return self.map.group

    @property
    def org(self) -> str:
        return self.map.account.org

    @property
    def bytes(self) -> int:
        return self.map.column_bytes

    @property
    def priority(self) -> int:
        return self.terms.priority

    @property
    def turn(self) -> int:
        return self.terms.turn

    @property
    def ttl(self) -> int | None:
        return self.terms.ttl

    @property
    def tier2_rule(self) -> Tier2Rule:
        return self.terms.tier2_rule

    @property
    def expires_at(self) -> float:
        """By its org's policy, which may change; NEVER for never, and 0 for a column that the
        policy does not store any more."""
        if self.not_stored_for:
            return 0.0
        return self.map.account.policy.expires_at(self.stored_at, self.used_at, self.ttl)

    @property
    def not_stored_for(self) -> Reason | None:
        """Why its org's policy does not store such columns; None if it does."""
        if self.map.account.policy.tiers is Tiers.NONE:
            return Reason.NO_STORE
        return Reason.PREFIX_ONLY if self.is_beyond_limit else None

    @property
    def is_beyond_limit(self) -> bool:
        """Whether it is behind the part of prompts that its org's policy stores."""
        limit = self.map.account.policy.columns_max
        return limit is not None and self.depth >= limit

    @property
    def needs(self) -> int:
        """How many columns before it have to be stored as well: all in a full group, none in others."""
        return self.depth if self.map.linked else 0


_FIELDS: Final = PlainFields.__slots__


class Tail(Column):
    """A column of fewer tokens than a whole one. Only a prompt that begins with exactly these uses
    it."""

    __slots__ = ("before", "tokens")
    tail = True
    before: bytes  # the key of the column before it; empty for none
    tokens: int


class PrefixMap:
    def __init__(
        self,
        account: Account,
        namespace: Namespace,
        group: int,
        column_bytes: int,
        linked: bool,  # noqa: FBT001
    ) -> None:
        """`linked`: a column can't be used without the one before it, as in a full group."""
        self.account = account
        self.namespace = namespace
        self.group = group
        self.column_bytes = column_bytes
        self.linked = linked
        self.purged_by: Removal | None = None  # it is not found any more, and its columns are removed
        self.deletes: dict[Removal, Collection[bytes]] = {}  # of prompts, under way, with their keys
        self.columns = ColumnTable[Column]()
        # The tails behind a column, by its key: how many of each length. A prompt has one key for each
        # length, and there may be any number of tails.
        self._tails: dict[bytes, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def org(self) -> str:
        return self.account.org

    def find(
        self, keys: list[bytes], known: list[Column | None] | None = None, count: int = 0
    ) -> tuple[list[Column | None], int]:
        """The columns of these keys of a prompt, and how many in a row are where the prompt has them.
        `known`: the list that was found for them earlier, of which the first `count` are still ready. It
        is changed, and is what is found."""
        found = [] if known is None else known
        return found, loops.current.find(self.columns.parts, keys, found, count, _READY, self.linked)

    def find_prefix(
        self, keys: list[bytes], known: list[Column | None] | None = None, count: int = 0
    ) -> tuple[list[Column | None], int]:
        """As `find`, but where columns are linked and the first one whose key has to be looked up is not
        there, the others are not looked up. A column stays for as long as there are columns behind it:
        what is behind one that is not there is misplaced, and can't be served."""
        parts = self.columns.parts
        if not self.linked or count == len(keys) or keys[count] in loops.part_of(parts, keys[count]):
            return self.find(keys, known, count)
        found: list[Column | None] = [] if known is None else known
        found[count:] = [None] * (len(keys) - count)
        return found, count

    def add(self, key: bytes, parent: Column | None, depth: int) -> Column:
        """A new, empty, whole column."""
        parent = parent if self.linked else None
        column = self.columns[key] = Column(self, key, parent, depth)
        if parent:
            parent.ref_count += 1
        return column

    def add_behind(
        self, parent: Column | None, keys: list[bytes], slots: list[int], terms: Terms
    ) -> list[Column]:
        """New whole columns of a prompt, the first one behind this column, if there is one. Their bytes
        are on their way to these slots."""
        if not keys:
            return []
        do, first = loops.current, Column(self, keys[0], parent, 0)
        first.state, first.terms, first.ref_count = State.WRITING, terms, 1
        made: list[Column] = do.copies(first, _FIELDS, len(keys))
        begin = parent.depth + 1 if parent else 0
        end = begin + len(keys)
        do.put_each(made, "key", keys)
        do.put_each(made, "parent", [parent, *made[:-1]])
        do.put_each(
            made, "depth", list(_DEPTHS[begin:end] if end <= _DEPTHS_SHARED else range(begin, end))
        )
        do.put_each(made, "slot", slots)
        made[-1].ref_count = 0
        if parent:
            parent.ref_count += 1
        self.columns.put(keys, made)
        return made

    def add_tail(
        self, key: bytes, parent: Column | None, depth: int, tokens: int, before: bytes
    ) -> Tail:
        """A new, empty tail. `before` is the key of the column before it, empty for none."""
        parent = parent if self.linked else None
        tail = self.columns[key] = Tail(self, key, parent, depth)
        if parent:
            parent.ref_count += 1
        tail.tokens, tail.before = tokens, before
        self._tails.setdefault(before, Counter())[tokens] += 1
        return tail

    def tail_lengths(self, before: bytes) -> list[int]:
        """How many tokens the tails behind the column of this key have, the longest first."""
        lengths = self._tails.get(before)
        return sorted(lengths, reverse=True) if lengths else []

    def prune(self, column: Column) -> Column | None:
        """Remove the column if it is empty and unreferenced, and then those before it likewise.

        Returns the column that stays and is unreferenced, if there is one: a leaf.
        """
        while column.state is State.EMPTY and not column.ref_count:
            self._drop(column)
            parent, column.parent = column.parent, None
            if parent is None:
                return None
            parent.ref_count -= 1
            column = parent
        return None if column.ref_count else column

    def drop_run(self, run: list[Column], keys: list[bytes]) -> Column | None:
        """Remove these empty columns of these keys, each of which was the only reference to the next
        one. Returns the parent of the last, which has one reference less."""
        self._drop(run[0])  # it may be a tail; the others have columns behind them
        self.columns.drop(keys[1:])
        parent = run[-1].parent
        loops.current.put(run, "parent", None)
        if parent:
            parent.ref_count -= 1
        return parent

    def take_misplaced(self, found: list[Column | None], count: int) -> list[Column]:
        """Take out of what `find` has found for the keys of a prompt those that are not where it has
        them, and return them. The first `count` ones are. Not for columns that stand alone."""
        new = found[count:]
        if not any(new):
            return []  # nearly always
        before = [found[count - 1] if count else None, *new] if self.linked else [None] * len(new)
        wrong = (
            place
            for place, one in enumerate(new)
            if one is not None and (one.depth != count + place or one.parent is not before[place])
        )
        # Where they are linked all columns behind a misplaced one go with it.
        places = range(next(wrong, len(new)), len(new)) if self.linked else list(wrong)
        for place in places:
            found[count + place] = None
        return [one for place in places if (one := new[place]) is not None]

    def detach(self, column: Column) -> None:
        """Another column may have its key from now on. It is gone once those behind it are."""
        if self.columns.get(column.key) is column:
            del self.columns[column.key]

    def _drop(self, column: Column) -> None:
        if self.columns.get(column.key) is not column:
            return
        del self.columns[column.key]
        if isinstance(column, Tail):
            lengths = self._tails[column.before]
            lengths[column.tokens] -= 1
            if not lengths[column.tokens]:
                del lengths[column.tokens]
            if not lengths:
                del self._tails[column.before]


@dataclass(slots=True)
class ExpiredColumns:
    """Expired columns of an org by tier, and the longest time that one stayed in memory past its TTL."""

    dram: int = 0
    tier2: int = 0
    overstay_seconds_max: float = 0.0


class Account:
    """An org: its policy, its columns and their size, its requests."""

    def __init__(self, org: str, groups: int, number: int = 0) -> None:
        """`number`: of the driver's orgs, in the order in which they came."""
        self.org = org
        self.number = number
        self.policy = Policy()
        self.ttl_since = 0.0  # when these TTLs and limits came into force, or the driver started
        self.maps: dict[Namespace, list[PrefixMap]] = {}  # one for each group
        self.makers: dict[Namespace, Keys] = {}
        self.purged: list[PrefixMap] = []  # not found any more; their columns are being removed
        self.purge: Removal | None = None  # of all columns, unless any came since
        self.removals = 0  # how often somebody has had something removed
        self.purges = PurgeDates()  # what a sibling stored before is not borrowed
        self.tier2_purges = PurgeDates()  # what comes back with dates from before is not served
        self.bytes = 0
        self.group_bytes = [0] * groups
        self.tally = Tally()
        self.expired = ExpiredColumns()
        self.recorder = Recorder()
        self.turns = Turns()
        self._queues: list[dict[int, DisplacementPolicy[Column]]] = [{} for _ in range(groups)]

    def set_policy(self, policy: Policy, now: float) -> None:
        """It applies to stored columns as well. Those that are displaced by another policy from now on
        come to it in pieces: `change_over` has to follow."""
        before, self.policy = self.policy, policy
        if _limits(policy) != _limits(before):
            self.ttl_since = now
        if policy.priority != before.priority:
            for group, queues in enumerate(self._queues):
                for priority in list(queues):
                    self._drop_empty(group, priority)
        for group, queues in enumerate(self._queues):
            for priority, queue in list(queues.items()):
                if not isinstance(queue, Changeover):  # else it is looked at again when that ends
                    self._use(group, priority, queue)

    def _use(self, group: int, priority: int, queue: DisplacementPolicy[Column]) -> None:
        """Use this queue, and change it if it has not the policy that it should have."""
        queues = self._queues[group]
        queues[priority] = queue
        if queue.name != self.policy.displacement:
            fresh = queues[priority] = self._new_queue(group, priority)
            if len(queue):
                use = partial(self._use, group, priority)
                queues[priority] = Changeover(queue, fresh, fresh.columns, use)

    @property
    def is_changing_over(self) -> bool:
        """Whether columns wait for another displacement policy."""
        return any(isinstance(one, Changeover) for queues in self._queues for one in queues.values())

    def change_over(self, most: int, now: float) -> None:
        """Move up to so many columns to the displacement policy that is used from now on."""
        for queues in self._queues:
            for queue in queues.values():
                if isinstance(queue, Changeover):
                    queue.move(most, now)
                    return

    @property
    def encrypted_for(self) -> str:
        """The org whose data key encrypts its columns in tier 2; empty for unencrypted."""
        return self.org if self.policy.encrypt_tier2 else ""

    def columns(self, group: int) -> Iterable[Column]:
        return chain.from_iterable(one.columns.values() for one in self._maps_of(group))

    def pieces(self, group: int) -> Iterator[list[Column]]:
        """The same in lists: see `ColumnTable.pieces`."""
        return chain.from_iterable(one.columns.pieces() for one in self._maps_of(group))

    def _maps_of(self, group: int) -> list[PrefixMap]:
        maps = [maps[group] for maps in self.maps.values()]
        return maps + [one for one in self.purged if one.group == group]

    def drop_empty_maps(self) -> None:
        """Forget namespaces without columns, those that were purged included."""
        self.maps = {namespace: maps for namespace, maps in self.maps.items() if any(map(len, maps))}
        left = self.maps.keys() | {one.namespace for one in self.purged}
        self.makers = {namespace: maker for namespace, maker in self.makers.items() if namespace in left}

    def _queued(self, group: int, priority: int, bits: int = 0) -> Iterator[Iterator[Column]]:
        """The columns of a displacement queue whose keys have none of these bits in their first two
        bytes, in pieces. They may come and go meanwhile: those that have left it by then are not among
        them."""

        def still_queued(piece: list[Column]) -> Iterator[Column]:
            return (one for one in piece if one.state is _READY and one.terms.priority == priority)

        for one in self._maps_of(group):
            for piece in one.columns.pieces():
                yield still_queued(loops.current.sampled(piece, bits))

    def _new_queue(self, group: int, priority: int) -> DisplacementPolicy[Column]:
        queue: DisplacementPolicy[Column] = POLICIES[self.policy.displacement]()
        queue.columns = partial(self._queued, group, priority)
        return queue

    def queue(self, column: Column) -> DisplacementPolicy[Column]:
        """The displacement queue of the column."""
        queues, priority = self._queues[column.map.group], column.terms.priority
        found = queues.get(priority)
        if found is None:
            found = queues[priority] = self._new_queue(column.map.group, priority)
        return found

    def removed(self, column: Column) -> None:
        """The column leaves its displacement queue: it can't be served any more, or not from there."""
        self.queue(column).removed(column)
        self._drop_empty(column.map.group, column.priority)

    def displaced(self, run: Sequence[Column], now: float) -> None:
        """These columns of one queue, which `victims` has named, were displaced."""
        self.queue(run[0]).displaced(run, now)
        self._drop_empty(run[0].map.group, run[0].priority)

    def _drop_empty(self, group: int, priority: int) -> None:
        """Drop the queue if it is empty, so that an org has as many as it has priorities in use. That of
        the policy's priority stays, with what it has learned: most of what is stored comes there."""
        if not len(self._queues[group][priority]) and priority != self.policy.priority:
            del self._queues[group][priority]

    def choice(self, now: float) -> Choice | None:
        """The displacement policy that won, where most of the columns are; None where none compete."""
        queues = chain.from_iterable([list(queues.values()) for queues in self._queues])
        used = [queue.to if isinstance(queue, Changeover) else queue for queue in queues]
        competing = [queue for queue in used if isinstance(queue, Competition)]
        return max(competing, key=len).choice(now) if competing else None

    def stamp(self, hit: list[Column], now: float) -> None:
        """These columns are used now. Displacement policies are notified before the columns are
        stamped."""
        if not hit:
            return
        queues = self._queues[hit[0].map.group]
        if len(queues) == 1:  # nearly always, and then all are of that one
            [queue] = queues.values()
            queue.used(hit, now)
        else:
            for priority in {one.priority for one in loops.current.runs_of(hit, "terms")}:
                queues[priority].used([one for one in hit if one.priority == priority], now)
        loops.current.stamp(hit, now)

    def victims(self, group: int, now: float, most: int = 1) -> list[Column]:
        """The columns to displace next: of the lowest priority, by the displacement policy, each the
        parent of the one before it. At most so many, and perhaps fewer; empty if there is none."""
        queues = self._queues[group]
        for priority in sorted(queues):
            queue = queues[priority]
            if len(queue) and (run := queue.victims(now, most)):
                if len(run) == 1:
                    return run  # which is of this queue
                do = loops.current
                priorities = {one.priority for one in do.runs_of(run, "terms")}
                if do.runs_of(run, "state") == [_READY] and priorities == {priority}:
                    return run  # nearly always
                of_queue = (one.state is _READY and one.priority == priority for one in run)
                return run[: [*of_queue, False].index(False)]  # the others are not of this queue
        return []

    def victim_of_any(self, now: float) -> Column | None:
        """The column to displace next, of whichever group has one."""
        groups = range(len(self._queues))
        run = next(filter(None, (self.victims(group, now) for group in groups)), None)
        return run[0] if run else None


def _limits(policy: Policy) -> tuple[int | None, int | None, int | None, bool]:
    """What decides when a column is removed."""
    stores = policy.tiers is not Tiers.NONE
    return policy.ttl_first_use_seconds, policy.ttl_last_use_seconds, policy.columns_max, stores
