"""What lies beyond memory: which columns are copied to tier 2, which are brought back, which must go.

No files and no threads, as in all of the ledger: whoever runs it does what is said here and tells how it
went. Tier 2 itself knows what it has, and is asked. What a column notes of it (`kept_at`) saves copying
twice, and no more than that depends on it.

- *Out.* Before room is short, the columns that would go next are copied, and then given up (`reserve`);
  those that were used again are copied while they stay, so that the loss of an agent costs less. Slots
  that have to be scrubbed are given up ahead of time as well.
- *Back.* `search` asks for what follows a hit, as far as it leads somewhere; `begin_recall` gives the
  columns slots, as a store does. So what is asked for once more is in memory from then on.
- *Away.* What expires, is deleted or purged goes from tier 2 as well, once nobody is copying it.

A tail, and a column with a time to live of its own, stay in memory only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from swdriver_shim.cache.prefix_map import Column, PrefixMap, State
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.room import Account, Payers
from swdriver_shim.cache.slots import Place, Removal, Use
from swdriver_shim.keys import COLUMN_TOKENS, Keys
from swdriver_shim.layout import Group
from swdriver_shim.policy import Policy, Tiers

if TYPE_CHECKING:
    from swdriver_shim.cache.ledger import Ledger

RESERVE_PART: Final = 32  # of the slots, and of a quota, are free before they are needed; or, up to
RESERVE_PART_MAX: Final = 4  # this part, as many as stores have been taking at once
RESERVE_MAX: Final = 4096  # slots
BURST_FADES: Final = 0.98  # with each store
RESTORES_MAX: Final = 256  # columns that are kept for it: nobody can use them, or their room
FORGETS_MAX: Final = 1 << 20  # beyond, what has expired is left to the agents
DELETED_MAX: Final = 1 << 15  # columns that are known to be; of the others, all of their org's
LOOK_AT: Final = 1000  # of the columns that wait to be copied while they stay, in one go
STALE_PART: Final = 4  # of a time to live: what was used so much later than noted is noted anew
AHEAD_MAX: Final = 100_000  # columns that wait to be copied while they stay
ASK_FIRST: Final = 4  # columns; most prompts that miss were never stored
ASK_MOST: Final = 512
RECALL_AT_ONCE: Final = 64  # columns
TRAILS_KEYS_MAX: Final = 1 << 20  # of conversations that may go on, all together

Question = dict[int, list[int]]  # by group: at which depths are there columns in tier 2?
Answer = Mapping[int, Collection[int]]  # by group: at these
Search = Generator[Question, Answer, list[set[int]]]


class Trail(Protocol):
    """What is known of a prompt without its tokens."""

    @property
    def maker(self) -> Keys: ...
    @property
    def keys(self) -> Sequence[bytes]: ...


class Known(NamedTuple):
    """A prompt whose tokens are not here any more."""

    maker: Keys
    keys: Sequence[bytes]


class Dates(NamedTuple):
    stored_at: float
    used_at: float


class Leaving(NamedTuple):
    """Copy this column to tier 2; `again`: in place of the copy that is there."""

    group: int
    slot: int
    key: bytes
    tag: bytes
    tokens: int
    dates: Dates
    again: bool
    encrypted_for: str  # an org; empty for in the clear


@dataclass(slots=True, eq=False)
class Spill(Use):
    """To be copied to tier 2. Some stay in memory; the slots of the others are given up then."""

    leaving: list[Leaving] = field(default_factory=list)
    staying: list[Column] = field(default_factory=list)  # the first of `leaving`

    @property
    def held(self) -> Sequence[Column]:
        return self.staying


@dataclass(slots=True, eq=False)
class Recall(Use):
    """To be brought back, into these slots; of some shards only, where the others have their part."""

    tag: bytes
    encrypted_for: str  # an org; empty for in the clear
    places: list[Place] = field(default_factory=list)
    shards: frozenset[int] | None = None


class Forget(NamedTuple):
    """Remove this column from tier 2, on all shards of its group."""

    group: int
    key: bytes
    tag: bytes
    removal: Removal | None


@dataclass(slots=True, eq=False)
class Purge:
    """Remove all that carries these tags from tier 2."""

    account: Account
    tags: Collection[bytes]
    removal: Removal
    moment: int


@dataclass(slots=True)
class Flow:
    """Columns since the start."""

    spilled: int = 0
    spilled_bytes: int = 0
    not_spilled: int = 0  # tier 2 had no room, or failed
    no_time: int = 0  # evicted at once: room was needed sooner than it could be copied
    recalled: int = 0
    recalled_bytes: int = 0
    restored: int = 0  # of those: whose part was lost with an agent
    not_recalled: int = 0
    late: int = 0  # expired in tier 2, found out when they came


class SecondTier:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.flow = Flow()
        self.orgs_with_keys: Collection[str] = ()  # whose columns can be encrypted
        self.not_worth_it: Collection[str] = ()  # orgs for which computing anew is always faster
        self._orgs: dict[str, Account] = {}  # that have a tier 2
        self._grown: dict[str, Account] = {}  # of those: may be close to their quota
        self._scrubbed: set[str] = set()  # orgs whose slots are not free at once either
        self._burst = [0.0] * len(ledger.layout.groups)  # slots that a store takes at once, lately
        self._ahead: deque[Column] = deque()
        self._restores: deque[tuple[Place, frozenset[int]]] = deque()
        self._forgets: deque[tuple[int, Forget]] = deque()  # once this moment is over
        self._forgetting: Counter[tuple[int, bytes]] = Counter()  # group and key of those
        self._purges: deque[Purge] = deque()
        self._trails: dict[tuple[str, str], Known] = {}  # by org and `continue_id`, the oldest first
        self._trail_keys = 0
        self._purged: dict[str, set[bytes]] = {}  # tags, by org, since the start
        self._deleted: dict[Forget, str] = {}  # and their orgs, likewise; the oldest first
        self._closed: Counter[str] = Counter()  # orgs of which something is being purged

    # Back

    def search(self, trail: Trail, start: int, now: float) -> Search | None:
        """Which columns behind the first so many tier 2 has. None if there is nothing to ask.

        It yields questions and is sent the answers; what it returns is for `begin_recall`.
        """
        account = self._ledger.account(trail.maker.org)
        if start >= len(trail.keys) or not self._may_ask(account):
            return None
        return _search(self._ledger.layout.groups, self._here(account, trail, now), start)

    def begin_recall(self, trail: Trail, there: Sequence[Collection[int]], now: float) -> list[Recall]:
        """Slots for columns that tier 2 has, as far as they make a longer prefix, and as there is room.

        In pieces, the first columns of the prompt first. For each, `start` and `finish_recall` have to
        follow when its turn has come; or only the latter, if it never comes.
        """
        ledger, places = self._ledger, list[Place]()
        account = ledger.account(trail.maker.org)
        if self._may_ask(account):
            groups = ledger.layout.groups
            here = self._here(account, trail, now)
            whole = _longest(groups, [
                [is_here or depth in more for depth, is_here in enumerate(present)]
                for present, more in zip(here, there, strict=True)
            ])  # fmt: skip
            for home, group, more in zip(
                ledger.maps_of(account, trail.maker), groups, there, strict=True
            ):
                first = group.first_needed(whole * COLUMN_TOKENS)
                self._recall_in(home, trail.keys[:whole], first, more, now, places)
        places.sort(key=lambda place: place.column.depth)
        return [
            Recall(trail.maker.tag, _encrypted_for(account), places[at : at + RECALL_AT_ONCE])
            for at in range(0, len(places), RECALL_AT_ONCE)
        ]

    def start(self, recall: Recall, now: float) -> bool:
        """It is carried out from here on. What was purged or taken away since is left out; whether there
        is anything left."""
        recall.places = [
            place for place in recall.places if _is_coming(place) and not place.column.home.purged_by
        ]
        self._ledger.slots.begin(recall, now)
        return bool(recall.places)

    def leave(self, trail: Trail, there: Sequence[Collection[int]]) -> None:
        """It is faster to compute these columns."""
        for depth in set().union(*there):
            self._ledger.ghosts.add(trail.keys[depth], Reason.NOT_WORTH_IT)

    def _recall_in(
        self,
        home: PrefixMap,
        keys: Sequence[bytes],
        first: int,
        there: Collection[int],
        now: float,
        places: list[Place],
    ) -> None:
        ledger, parent = self._ledger, None
        payers = Payers(ledger.accounts, home.group, home.account, home.column_bytes)
        for depth in range(first, len(keys)):
            column = home.columns.get(keys[depth])
            if column is None or column.state is State.EMPTY:
                if depth not in there or (home.group, keys[depth]) in self._forgetting:
                    if ledger.layout.groups[home.group].alone:
                        continue
                    return
                slot = ledger.room_for(home, parent, column, payers, now)
                if slot is None:
                    return
                column = column or home.add(keys[depth], parent, depth)
                ledger.occupy(column, slot, State.COMING)
                places.append(Place(column, slot))
            parent = column

    def remember(self, account: Account, continue_id: str, prompt: Trail) -> None:
        """A conversation that is going to go on has come this far."""
        if not continue_id or not prompt.keys or account.policy.tiers is not Tiers.TIER2:
            return
        name = account.org, continue_id
        self._forget_trail(name)
        self._trails[name] = Known(prompt.maker, list(prompt.keys))
        self._trail_keys += len(prompt.keys)
        while self._trail_keys > TRAILS_KEYS_MAX:
            self._forget_trail(next(iter(self._trails)))

    def _forget_trail(self, name: tuple[str, str]) -> None:
        if known := self._trails.pop(name, None):
            self._trail_keys -= len(known.keys)

    def trail(self, org: str, continue_id: str) -> Trail | None:
        """How far a conversation had come; None if nobody remembers."""
        return self._trails.get((org, continue_id))

    def begin_restore(self, most: int) -> Recall | None:
        """Some of what was lost with an agent, for its shards only. `start` and `finish_recall` have to
        follow."""
        recall: Recall | None = None
        kind = None
        while self._restores and (recall is None or len(recall.places) < most):
            place, shards = self._restores[0]
            home = place.column.home
            if recall and kind != (home, shards):
                break
            self._restores.popleft()
            if _is_coming(place) and not home.purged_by:
                maker = home.account.makers[home.namespace]
                recall = recall or Recall(maker.tag, _encrypted_for(home.account), [], shards)
                recall.places.append(place)
                kind = home, shards
        return recall

    @property
    def may_restore_more(self) -> bool:
        least = min(pool.line for pool in self._ledger.slots.pools)
        return len(self._restores) < min(RESTORES_MAX, max(1, least // RESERVE_PART_MAX))

    def restore(self, column: Column, shards: frozenset[int]) -> bool:
        """Some shards have lost their part of it. Whether tier 2 may have it."""
        account = column.home.account
        is_kept = column.state is State.READY and column.kept_at is not None
        if not is_kept or not self._may_ask(account):
            return False
        account.queue(column).removed(column)
        column.mark = None
        column.state = State.COMING
        self._restores.append((Place(column, column.slot), shards))
        return True

    def finish_recall(self, recall: Recall, now: float, found: Mapping[Column, Dates | Reason]) -> None:
        """These columns are in their slots, or why not. What is not told of did not come."""
        ledger, flow = self._ledger, self.flow
        if recall.number and not ledger.slots.end(recall):
            return
        came: list[Column] = []
        for place in recall.places:
            if not _is_coming(place):
                continue  # purged or taken away meanwhile
            column = place.column
            got = found.get(column, Reason.TIER2_LATE)
            if isinstance(got, Reason):
                flow.not_recalled += 1
                ledger.remove(column, got)
                continue
            flow.recalled += 1
            flow.recalled_bytes += column.bytes
            flow.restored += recall.shards is not None
            if recall.shards is None:
                column.stored_at, column.used_at = min(got.stored_at, now), min(got.used_at, now)
            else:  # its last use is known here
                column.stored_at = min(got.stored_at, column.stored_at)
            column.kept_at = got.used_at
            self.grown(column.home.account)
            if ledger.expires_at(column) <= now:
                flow.late += 1
                ledger.remove(column, Reason.EXPIRED)
                continue
            came.append(column)
        ledger.arrived(came, now)

    # Out

    @property
    def is_short_of_room(self) -> bool:
        """Spilling should go on now, not when it is the next turn."""
        groups = range(len(self._ledger.layout.groups))
        return bool(self._ahead or self._grown) or any(self._lacks(group) > 0 for group in groups)

    def used(self, account: Account, hit: Sequence[Column]) -> None:
        """These were asked for. What was so for the first time is worth a copy."""
        if account.policy.tiers is Tiers.TIER2 and len(self._ahead) < AHEAD_MAX:
            self._ahead.extend(column for column in hit if column.uses == 1 and column.kept_at is None)

    def evicted(self, leaf: Column) -> None:
        """It goes at once, copied or not."""
        self.flow.no_time += self._may_keep(leaf) and leaf.kept_at is None

    def stored(self, store: Sequence[Place]) -> None:
        """A store has taken slots; the next ones may take as many at once."""
        taken = Counter(place.column.home.group for place in store)
        for group, burst in enumerate(self._burst):
            self._burst[group] = max(burst * BURST_FADES, taken[group])
        if store:
            self.grown(store[0].column.home.account)

    def grown(self, account: Account) -> None:
        if account.policy.dram_bytes_max is not None and account.org in self._orgs:
            self._grown[account.org] = account

    def begin_spill(self, now: float, most: int) -> Spill | None:
        """About so many columns to copy now; None if there are none. `finish_spill` has to follow.

        Slots are given up here where nothing has to be copied.
        """
        ledger, spill = self._ledger, Spill()
        if not ledger.reachable:
            return None
        for _ in range(min(LOOK_AT, len(self._ahead))):
            if len(spill.staying) == most:
                break
            column = self._ahead.popleft()
            is_there = column.state is State.READY and column.kept_at is None
            if is_there and self._may_keep(column):
                spill.staying.append(column)
                spill.leaving.append(self._leaving(column))
        ledger.slots.begin(spill, now)  # before slots are given up: so they wait for it
        for group in range(len(ledger.layout.groups)):
            self._make_reserve(group, spill, now, most)
        while self._grown and len(spill.leaving) < most:
            _, account = self._grown.popitem()
            if not self._make_reserve_of(account, spill, now, most):
                self._grown[account.org] = account
                break
        if spill.leaving:
            return spill
        ledger.slots.end(spill)
        return None

    def _lacks(self, group: int) -> int:
        """How many slots more should be free, or be so soon."""
        slots = self._ledger.slots
        pool = slots.pools[group]
        if not self._orgs and not self._scrubbed:
            return 0
        reserve = max(pool.line // RESERVE_PART, int(self._burst[group]))
        reserve = min(reserve, pool.line // RESERVE_PART_MAX, RESERVE_MAX)
        return reserve - pool.free - slots.coming_free[group]

    def _make_reserve(self, group: int, spill: Spill, now: float, most: int) -> None:
        payers = Payers(self._ledger.accounts, group)
        for _ in range(min(self._lacks(group), most - len(spill.leaving))):
            victim = payers.victim(now)
            if victim is None:
                return
            self._give_up(victim, Reason.EVICTED, spill)

    def _make_reserve_of(self, account: Account, spill: Spill, now: float, most: int) -> bool:
        """Below its quota, where it has one. Whether it is done with."""
        limit = account.policy.dram_bytes_max
        groups = range(len(self._ledger.layout.groups))
        for _ in range(most - len(spill.leaving)):
            if limit is None or account.bytes <= limit - limit // RESERVE_PART:
                return True
            victim = next(filter(None, (account.victim(group, now) for group in groups)), None)
            if victim is None:
                return True
            self._give_up(victim, Reason.QUOTA, spill)
        return False

    def _give_up(self, victim: Column, reason: Reason, spill: Spill) -> None:
        """Its slot is free once it has been copied, if it has to be."""
        has_to = self._may_keep(victim) and (victim.kept_at is None or self._is_stale(victim))
        if has_to:
            spill.leaving.append(self._leaving(victim))
        self._ledger.remove(victim, reason, idle=not has_to)

    def finish_spill(self, spill: Spill, kept: Sequence[bool]) -> None:
        """Which of those that were leaving tier 2 has now; none of those that are not told of."""
        staying = [(column, column.state, column.slot) for column in spill.staying]
        if not self._ledger.slots.end(spill):
            return
        for place, one in enumerate(spill.leaving):
            is_kept = place < len(kept) and kept[place]
            if is_kept:
                self.flow.spilled += 1
                self.flow.spilled_bytes += self._ledger.layout.groups[one.group].column_bytes
            else:
                self.flow.not_spilled += 1
            if place >= len(staying):
                continue
            column, state, slot = staying[place]
            is_removed = (
                column.home.account.org in self._closed or (one.group, one.key) in self._forgetting
            )
            if is_kept and state is State.READY and slot == one.slot and not is_removed:
                column.kept_at = one.dates.used_at

    def _leaving(self, column: Column) -> Leaving:
        home = column.home
        return Leaving(
            home.group,
            column.slot,
            column.key,
            home.account.makers[home.namespace].tag,
            column.tokens,
            Dates(column.stored_at, column.used_at),
            column.kept_at is not None,
            _encrypted_for(home.account),
        )

    def _may_keep(self, column: Column) -> bool:
        home = column.home
        return (
            self._may_ask(home.account)
            and home.account.org not in self.not_worth_it
            and not column.tail
            and column.ttl is None
            and home.purged_by is None
        )

    @staticmethod
    def _is_stale(column: Column) -> bool:
        """Tier 2 would take it for older than it is, and let it expire too early."""
        last = column.home.account.policy.ttl_last_use_seconds
        return (
            last is not None
            and column.kept_at is not None
            and column.used_at - column.kept_at > last / STALE_PART
        )

    # Away

    def forget(
        self,
        home: PrefixMap,
        keys: Iterable[bytes],
        removal: Removal | None = None,
        *,
        has_expired: bool = False,
    ) -> None:
        """What tier 2 has under these keys has to go, once nobody is copying it any more."""
        maker = home.account.makers.get(home.namespace)
        if maker is None or (removal is None and len(self._forgets) > FORGETS_MAX):
            return
        for key in keys:
            self._forget(Forget(home.group, key, maker.tag, removal))
            if removal:
                removal.waiting += 1
            if not has_expired:  # which a file says itself, wherever it lies
                self._deleted[Forget(home.group, key, maker.tag, None)] = home.account.org
        while len(self._deleted) > DELETED_MAX:
            deleted, org = next(iter(self._deleted.items()))
            del self._deleted[deleted]
            self._purged.setdefault(org, set()).add(deleted.tag)

    def _forget(self, forget: Forget) -> None:
        self._forgets.append((self._ledger.slots.moment, forget))
        self._forgetting[forget.group, forget.key] += 1

    def take_forgets(self, most: int) -> list[Forget]:
        """Those of one group together. `forgotten` has to follow, or `not_forgotten`."""
        taken: list[Forget] = []
        while self._forgets and len(taken) < most:
            moment, forget = self._forgets[0]
            is_other = taken and forget.group != taken[0].group
            if is_other or not self._ledger.slots.is_over(moment):
                break
            taken.append(self._forgets.popleft()[1])
        return taken

    def forgotten(self, forgets: Iterable[Forget]) -> None:
        for forget in forgets:
            name = forget.group, forget.key
            self._forgetting[name] -= 1
            if not self._forgetting[name]:
                del self._forgetting[name]
            if forget.removal:
                forget.removal.waiting -= 1

    def not_forgotten(self, forgets: Sequence[Forget]) -> None:
        """To be tried again, after the others."""
        self._forgets.extend((0, forget) for forget in forgets)

    def purge(self, account: Account, tags: Collection[bytes], removal: Removal) -> None:
        """All that carries these tags has to go, once nobody is copying it any more. Nothing is copied
        there or back until then."""
        removal.waiting += 1
        self._closed[account.org] += 1
        if removal.reason is Reason.PURGED:
            self._purged.setdefault(account.org, set()).update(tags)
        for name in [name for name in self._trails if name[0] == account.org]:
            self._forget_trail(name)
        self._purges.append(Purge(account, tags, removal, self._ledger.slots.moment))
        for maps in account.maps.values():  # a purge of one namespace is one of all of them there
            for home in maps:
                for column in home.columns.values():
                    column.kept_at = None

    def policy_changed(self, account: Account, before: Policy, tag: bytes | None = None) -> None:
        """What lies there and may not any more has to go. `tag`: the org's, where it is known."""
        now = account.policy
        was_there, is_there = before.tiers is Tiers.TIER2, now.tiers is Tiers.TIER2
        if is_there:
            self._orgs[account.org] = account
            self.grown(account)
        else:
            self._orgs.pop(account.org, None)
        (self._scrubbed.add if now.scrub else self._scrubbed.discard)(account.org)
        if was_there and (not is_there or before.encrypt_tier2 is not now.encrypt_tier2):
            tags = {maker.tag for maker in account.makers.values()} | ({tag} if tag else set())
            if tags:
                self.purge(account, tags, Removal(Reason.PURGED))

    def purge_again(self) -> None:
        """A shard has another home, which may be one that it had before, with files of that time."""
        for org, tags in list(self._purged.items()):
            self.purge(self._ledger.account(org), set(tags), Removal(Reason.PURGED))
        for deleted in self._deleted:
            self._forget(deleted)

    def take_purge(self) -> Purge | None:
        """`purged` has to follow, or `not_purged`."""
        if self._purges and self._ledger.slots.is_over(self._purges[0].moment):
            return self._purges.popleft()
        return None

    def purged(self, purge: Purge) -> None:
        purge.removal.waiting -= 1
        self._closed[purge.account.org] -= 1
        self._closed = +self._closed

    def not_purged(self, purge: Purge) -> None:
        """To be tried again."""
        self._purges.append(purge)

    # Inside

    def _may_ask(self, account: Account) -> bool:
        policy = account.policy
        return (
            policy.tiers is Tiers.TIER2
            and (not policy.encrypt_tier2 or account.org in self.orgs_with_keys)
            and account.org not in self._closed
            and self._ledger.reachable
        )

    def _here(self, account: Account, trail: Trail, now: float) -> list[list[bool]]:
        """For each group and column: whether it can be used, or is on its way from tier 2."""
        here = []
        for path in self._ledger.paths(account, trail, now):
            if path.map.linked:
                usable = [True] * path.fresh
                usable += map(self._is_usable, path.found[path.fresh :], repeat(now))
            else:
                usable = [
                    reach > 0 or (column is not None and column.state is State.COMING)
                    for reach, column in zip(path.reach, path.found, strict=True)
                ]
            here.append(usable)
        return here

    def _is_usable(self, column: Column | None, now: float) -> bool:
        return column is not None and (
            column.state is State.COMING
            or (column.state is State.READY and self._ledger.expires_at(column) > now)
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError if anything here contradicts itself."""
        with_tier2 = {
            org for org, account in self._ledger.accounts.items() if account.policy.tiers is Tiers.TIER2
        }
        if self._orgs.keys() != with_tier2:
            raise RuntimeError("it is known who has a tier 2")
        scrubbed = {org for org, account in self._ledger.accounts.items() if account.policy.scrub}
        if self._scrubbed != scrubbed:
            raise RuntimeError("it is known whose slots are scrubbed")


def _encrypted_for(account: Account) -> str:
    return account.org if account.policy.encrypt_tier2 else ""


def _is_coming(place: Place) -> bool:
    return place.column.state is State.COMING and place.column.slot == place.slot


def _search(groups: Sequence[Group], here: Sequence[Sequence[bool]], start: int) -> Search:
    """From `start` on in full groups, a few columns first and then more, until one is missing. Then what
    windows need for that."""
    there: list[set[int]] = [set() for _ in groups]
    full = [index for index, group in enumerate(groups) if group.linked]
    reach = end = len(here[0])
    step = ASK_FIRST
    if full:
        reach = start
    while reach < end:
        until = min(reach + step, end)
        depths = range(reach, until)
        question = {index: [depth for depth in depths if not here[index][depth]] for index in full}
        if any(question.values()):
            for index, found in (yield question).items():
                there[index].update(found)
        gap = (
            depth
            for depth in depths
            if not all(here[index][depth] or depth in there[index] for index in full)
        )
        reach = next(gap, until)
        if reach < until:
            break
        step = min(8 * step, ASK_MOST)
    question = {
        index: [
            depth
            for depth in range(group.first_needed((start + 1) * COLUMN_TOKENS), reach)
            if not here[index][depth]
        ]
        for index, group in enumerate(groups)
        if not group.linked and reach > start
    }
    if any(question.values()):
        for index, found in (yield question).items():
            there[index].update(found)
    return there


def _longest(groups: Sequence[Group], present: Sequence[Sequence[bool]]) -> int:
    """The most columns from the start that all groups could give back."""
    whole = len(present[0])
    runs: list[list[int]] = []  # of each group: how many in a row, up to each column
    for group, columns in zip(groups, present, strict=True):
        run, counted = 0, []
        for is_there in columns:
            run = run + 1 if is_there else 0
            counted.append(run)
        runs.append(counted)
        if group.linked:
            whole = min(whole, next((at for at, is_there in enumerate(columns) if not is_there), whole))
    while whole and not all(
        group.alone or counted[whole - 1] >= whole - group.first_needed(whole * COLUMN_TOKENS)
        for group, counted in zip(groups, runs, strict=True)
    ):
        whole -= 1
    return whole
