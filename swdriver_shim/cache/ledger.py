"""The deciding half of the driver: what is cached for whom, until when, what goes first, why it is
missed.

No bytes, no clocks, no sockets, no threads. Whoever runs it passes the time in, moves bytes as it says,
and tells it how that went:

- `match` finds the longest prefix that can be refilled, and keeps its slots as they are until `release`.
- `begin_store` gives the columns of a prompt slots to be evicted to; `finish_store` follows.
- `sweep` and `reclaim` do in small pieces what would take long: expiry, lower quotas, and taking apart
  what was purged.
- `slots.take_clears` says which slots agents have to empty before they are used again.

All shards of a group keep a column under the same slot number, so a slot is a number here, no more.

`slots` keeps them safe while they are used, and `tier2` says what lies beyond memory.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import Final, Protocol

from msgspec.structs import replace

from swdriver_shim.cache.eviction import Eviction
from swdriver_shim.cache.prefix_map import NO_SLOT, Column, PrefixMap, State
from swdriver_shim.cache.reasons import GHOSTS_MAX, Ghosts, Reason, Tally
from swdriver_shim.cache.remembered import Requests
from swdriver_shim.cache.reuse.sample import Sample
from swdriver_shim.cache.room import Account, Payers
from swdriver_shim.cache.second_tier import Recall, SecondTier, Spill, Trail
from swdriver_shim.cache.slots import Freed, Place, Removal, Slots, Use, prune
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, NEVER, EvictionName, OrgPolicies, Policy, Rules, Tiers

DRAM: Final = "dram"
TIER2: Final = "tier2"
SWEPT_SECONDS: Final = 5.0  # after its time a column is gone, where the sweeper comes each second
SLICE: Final = 500  # columns that are looked at in one piece of long work: below a millisecond
LOOK_AHEAD_SECONDS: Final = 3600  # what expires later is looked at before: no longer a list of seconds
NAMESPACES_MAX: Final = 64  # of one org that are kept without columns, and looked into for a reason
_CLEARED: Final = frozenset({Reason.EXPIRED, Reason.PURGED, Reason.DELETED})
_ON_THEIR_WAY: Final = {State.WRITING: Reason.WRITING, State.COMING: Reason.TIER2_LATE}
_ALWAYS: Final = -NEVER


class Watch(Protocol):
    """Whoever wants to hear what can be served, as it comes and goes."""

    def arrived(self, column: Column) -> None: ...
    def gone(self, column: Column) -> None: ...


@dataclass(slots=True, eq=False)
class Match(Use):
    """What of a prompt can be refilled: `columns` of each group, in order.

    All groups agree on `tokens`, counted from the start. A group with a window has only those columns
    that cover it. `slots` are theirs until `release`, though they be removed meanwhile.
    """

    prompt: Prompt
    asked: int  # tokens of the prompt, which may go on since
    keys: Sequence[bytes]  # of the columns that it had then
    tokens: int
    columns: tuple[list[Column], ...]
    slots: tuple[list[int], ...]
    had: int = 0  # so many tokens have been refilled already
    at_first: int = 0  # so many were in memory when they were asked for
    missed: Counter[Reason] = field(default_factory=Counter)
    coming: int = 0  # so many more are on their way from tier 2
    settled: Counter[Reason] = field(default_factory=Counter)  # of those missed: hits that were left
    reasons: Sequence[Reason] = ()  # of each of its columns that is missed and was no hit
    is_counted: bool = False
    replaced_by: Match | None = None

    @property
    def held(self) -> list[Column]:
        """What holds all of it: the last column of a full group, every one of a window."""
        return [
            column
            for hit in self.columns
            for column in (hit[-1:] if hit and hit[0].home.linked else hit)
        ]

    def count(self, tally: Tally, by: int = 1) -> None:
        """Enter its tokens; take them out again with -1."""
        self.is_counted = by > 0
        tally.hits[DRAM] += by * self.at_first
        if more := max(self.tokens, self.had) - self.at_first:
            tally.hits[TIER2] += by * more
        for reason, tokens in self.missed.items():
            tally.missed[reason] += by * tokens


@dataclass(slots=True, eq=False)
class Store(Use):
    """What of a prompt is to be evicted, in this order."""

    places: list[Place]


@dataclass(slots=True)
class Overstay:
    """How long bytes lay here beyond their time, never served. Until agents were told to empty them."""

    columns: int = 0  # that the sweeper came late for
    seconds_max: float = 0.0


@dataclass(frozen=True, slots=True)
class ColumnState:
    """One column of a prompt, for people: what it is, and why not."""

    depth: int
    tokens: int
    state: str  # "ready", or the reason why it is missed
    age_seconds: float | None = None
    idle_seconds: float | None = None
    expires_in_seconds: float | None = None
    uses: int | None = None
    priority: int | None = None
    slot: int | None = None
    tier2: bool = False  # it is there, and would be brought back


@dataclass(slots=True)
class Path:
    """What one group has of a prompt. `reach`: how many columns in a row, up to each, can be used."""

    map: PrefixMap
    found: list[Column | None]
    fresh: int = 0  # so many from the start can be used
    reach: list[int] = field(default_factory=list)  # of a window


class Ledger:
    def __init__(self, layout: Layout, model: str = "", *, ghosts_max: int = GHOSTS_MAX) -> None:
        self.layout = layout
        self.model = model
        self.accounts: dict[str, Account] = {}
        self.slots = Slots(len(layout.groups))
        self.ghosts = Ghosts(ghosts_max)
        self.overstay = Overstay()
        self.requests = Requests()
        self.reachable = True  # while an agent is lost, nothing can be served, and nothing need go
        self.tier2 = SecondTier(self)
        self.watch: Watch | None = None
        self._policies: Mapping[str, OrgPolicies] = {}
        self._due: dict[int, dict[Column, None]] = {}  # by the second in which they are to be looked at
        self._seconds: list[int] = []  # a heap of those
        self._swept_at = 0.0
        self._rescans: deque[list[Column]] = deque()
        self._purged: deque[tuple[PrefixMap, Removal]] = deque()
        self._lost: deque[tuple[deque[Column], frozenset[int]]] = deque()
        self._losing: dict[int, frozenset[int]] = {}  # by group: the shards of those

    # Intent

    def set_policies(
        self, policies: Mapping[str, OrgPolicies], now: float, tags: Mapping[str, bytes] | None = None
    ) -> None:
        """All orgs' policies, for what is stored already, too. Who is not in it has the usual one.

        `tags`: the isolation tags of orgs, so that policies reach what lies in tier 2 of those that have
        not been seen yet.
        """
        tags = tags or {}
        before_that, self._policies = self._policies, policies
        for org in tags.keys() - self.accounts.keys():
            before = before_that.get(org, OrgPolicies()).of(self.model)
            if before.tiers is Tiers.TIER2:
                self.tier2.policy_changed(self.account(org), before, tags[org])
        for account in self.accounts.values():
            before = account.policy
            account.set_policy(policies.get(account.org, OrgPolicies()).of(self.model), now)
            self.tier2.policy_changed(account, before, tags.get(account.org))
            if account.policy != before:
                rescans = [list(account.columns(group)) for group in range(len(self.layout.groups))]
                self._rescans += filter(None, rescans)

    def set_line(self, group: int, slots: int) -> None:
        """So many slots may be used. What lies above them is gone: agents have given the memory back."""
        shrinks = slots < self.slots.pools[group].line
        self.slots.pools[group].set_line(slots)
        if shrinks:
            for account in self.accounts.values():
                for column in [one for one in account.columns(group) if one.slot >= slots]:
                    self.remove(column, Reason.EVICTED)

    def account(self, org: str) -> Account:
        found = self.accounts.get(org)
        if found is None:
            found = self.accounts[org] = Account(org, len(self.layout.groups))
            found.set_policy(self._policies.get(org, OrgPolicies()).of(self.model), 0)
            self.tier2.policy_changed(found, Policy())
        return found

    # Match

    def match(self, prompt: Prompt, now: float) -> Match:
        """The longest prefix of the prompt that every group can give back. `release` has to follow.

        Its tokens are counted as asked for, and as hit or missed, each with its reason.
        """
        account = self.account(prompt.org)
        match = self._find(account, prompt, 0, now)
        match.at_first = match.tokens
        account.tally.requests += 1
        account.tally.requested += prompt.tokens
        match.count(account.tally)
        account.recorder.matched(match.keys, match.tokens, account.tally, now)
        for hit in match.columns:
            stamp(account, hit, now)
            self.tier2.used(account, hit)
        self.slots.begin(match, now)
        return match

    def again(self, match: Match, now: float, had: int = 0) -> Match:
        """What of the prompt can be refilled by now: some of it was refused, or tier 2 has brought more.
        Takes the place of the first match, also where tokens are counted.

        `had`: so many tokens have been refilled, whatever has become of their columns since.
        """
        while match.replaced_by:
            match = match.replaced_by
        self.release(match)
        account = self.account(match.prompt.org)
        match.count(account.tally, -1)
        found = match.replaced_by = self._find(account, match.prompt, had, now)
        found.at_first = min(match.at_first, max(found.tokens, had))
        account.tally.requested += found.asked - match.asked
        found.count(account.tally)
        before = {id(column) for hit in match.columns for column in hit}
        for hit in found.columns:
            if more := [column for column in hit if id(column) not in before]:
                stamp(account, more, now)
        self.slots.begin(found, now)
        return found

    def _find(self, account: Account, prompt: Prompt, had: int, now: float) -> Match:
        paths = self.paths(account, prompt, now)
        columns, tokens = self._agree(account, paths, prompt, now)
        slots = tuple([column.slot for column in hit] for hit in columns)
        match = Match(prompt, prompt.tokens, list(prompt.keys), tokens, columns, slots, had)
        if not max(tokens, had) and self._is_elsewhere(account, prompt):
            match.missed[Reason.OTHER_NAMESPACE] = prompt.tokens
        elif max(tokens, had) < prompt.tokens:
            self._tell_why(match, paths, now)
            match.coming = _coming(paths, tokens // COLUMN_TOKENS)
        return match

    def recount(self, match: Match, now: float) -> None:
        """There is more to know about why its tokens were missed. The prompt may be gone on with: all
        of it that is looked at is in the match."""
        if match.is_counted and Reason.OTHER_NAMESPACE not in match.missed:
            account = self.account(match.prompt.org)
            match.count(account.tally, -1)
            maps = self.maps_of(account, match.prompt.maker)
            self._tell_why(match, [Path(one, one.find(match.keys)) for one in maps], now)
            match.count(account.tally)
            self.requests.renew(match)

    def release(self, match: Match) -> None:
        """Nobody reads those slots any more."""
        self.slots.end(match)

    def shorten(self, match: Match, tokens: int, reason: Reason) -> None:
        """Only so many tokens could be used after all: the others are missed, for this reason."""
        tally, lost = self.account(match.prompt.org).tally, match.tokens - tokens
        if lost > 0:
            match.count(tally, -1)
            left = max(match.tokens, match.had) - max(tokens, match.had)
            match.tokens = tokens
            match.settled[reason] += left
            match.missed[reason] += left
            match.at_first = min(match.at_first, max(tokens, match.had))
            match.count(tally)

    def refuse(self, column: Column, reason: Reason) -> None:
        """What lay in its slot was not it, or can't be had: it is not served again, unless it was lost
        with an agent and comes back from tier 2."""
        lost = self._losing.get(column.home.group)
        if column.state is State.READY and not (lost and self.tier2.restore(column, lost)):
            self.remove(column, reason)

    def query(self, prompt: Prompt, now: float) -> int:
        """How many tokens `match` would give. Changes nothing, and counts nothing."""
        account = self.account(prompt.org)
        return self._agree(account, self.paths(account, prompt, now), prompt, now)[1]

    def paths(self, account: Account, prompt: Trail, now: float) -> list[Path]:
        """What each group has of a prompt."""
        maps = self.maps_of(account, prompt.maker)
        paths = [Path(one, one.find(prompt.keys)) for one in maps]
        for path in paths:
            if path.map.linked:
                path.fresh = self._fresh(account, path.found, now)
                continue
            rest = iter(path.found)
            while len(path.reach) < len(path.found):
                path.reach += range(1, self._fresh(account, rest, now) + 1)
                path.reach += [0] * (len(path.reach) < len(path.found))  # which ended the run
        return paths

    def lose(self, group: int, shards: frozenset[int]) -> None:
        """What these shards have of a group is gone. `reclaim` goes through it: what tier 2 has is
        brought back from there, the others are taken out. Refills that come first are refused."""
        self._losing[group] = self._losing.get(group, frozenset()) | shards
        for account in self.accounts.values():
            self._lost.append((deque(account.columns(group)), shards))

    def _fresh(self, account: Account, columns: Iterable[Column | None], now: float) -> int:
        """How many of these, from the first on, may be served at this moment. This is where expiry is
        enforced, however late sweepers run."""
        policy = account.policy
        if policy.tiers is Tiers.NONE or not self.reachable:
            return 0
        born, seen = _over(policy, now)
        ready = State.READY
        fresh = 0
        for column in columns:
            if (
                column is None
                or column.state is not ready
                or column.stored_at <= born
                or column.used_at <= seen
                or (column.ttl is not None and self.expires_at(column) <= now)
            ):
                break
            fresh += 1
        return fresh

    def _agree(
        self, account: Account, paths: list[Path], prompt: Prompt, now: float
    ) -> tuple[tuple[list[Column], ...], int]:
        """The longest prefix that all groups have, and its columns."""
        unit = prompt.maker.unit_columns
        whole = min((path.fresh for path in paths if path.map.linked), default=len(prompt.keys))
        whole -= whole % unit
        tails = self._tails(account, paths, prompt, whole, now)
        while whole and not tails and not self._covers(paths, whole, whole * COLUMN_TOKENS):
            whole -= unit
            tails = self._tails(account, paths, prompt, whole, now)
        tokens = whole * COLUMN_TOKENS + (tails[0].tokens if tails else 0)
        columns = []
        for index, (path, group) in enumerate(zip(paths, self.layout.groups, strict=True)):
            columns.append(_present(path.found[group.first_needed(tokens) : whole]))
            columns[-1] += tails[index : index + 1]
        return tuple(columns), tokens

    def _covers(self, paths: list[Path], whole: int, tokens: int) -> bool:
        """Do all windows have what comes before so many tokens, as far as it lies in whole columns?"""
        return all(
            path.map.linked or path.reach[whole - 1] >= whole - group.first_needed(tokens)
            for path, group in zip(paths, self.layout.groups, strict=True)
            if group.first_needed(tokens) < whole
        )

    def _tails(
        self, account: Account, paths: list[Path], prompt: Prompt, whole: int, now: float
    ) -> list[Column]:
        """The longest tail right behind the whole columns that all groups have: one column of each."""
        for tail in _tails_of(paths[0].map, prompt, whole, prompt.tokens - whole * COLUMN_TOKENS):
            tails = _present(path.map.columns.get(tail.key) for path in paths)
            if len(tails) == self._fresh(account, tails, now) == len(paths) and self._covers(
                paths, whole, whole * COLUMN_TOKENS + tail.tokens
            ):
                return tails
        return []

    def _tell_why(self, match: Match, paths: list[Path], now: float) -> None:
        """Why each token behind the hit is missed. What is there, behind a gap, has the gap's reason."""
        tokens = max(match.tokens, match.had) + match.settled.total()
        missed = match.missed = Counter(match.settled)
        match.reasons = self._reasons(match.keys, paths, tokens // COLUMN_TOKENS, now)
        for why, count in Counter(match.reasons).items():
            missed[why] += count * COLUMN_TOKENS
        left = match.asked - tokens - (missed.total() - match.settled.total())
        # The tail, less what is hit of a column.
        missed[match.reasons[-1] if match.reasons else Reason.NEVER_STORED] += left

    def _reasons(self, keys: Sequence[bytes], paths: list[Path], first: int, now: float) -> list[Reason]:
        """Why each column from this one on is missed."""
        if first < len(keys) and not any(paths[0].found[first:]):  # most often there is nothing
            return self.ghosts.reasons(keys[first:])
        gap, reasons = Reason.NEVER_STORED, list[Reason]()
        for depth in range(first, len(keys)):
            for path in paths:
                if reason := self.reason(path.found[depth], keys[depth], now):
                    gap = reason
                    break
            reasons.append(gap)
        return reasons

    def reason(self, column: Column | None, key: bytes, now: float) -> Reason | None:
        """Why this column can't be served; None if it can."""
        if column is None or column.state is State.EMPTY:
            return self.ghosts.why(key)
        if column.state in _ON_THEIR_WAY:
            return _ON_THEIR_WAY[column.state]
        if column.home.account.policy.tiers is Tiers.NONE:
            return Reason.NO_STORE
        if self.expires_at(column) <= now:
            return Reason.EXPIRED
        return None if self.reachable else Reason.AGENT_LOST

    @staticmethod
    def _is_elsewhere(account: Account, prompt: Prompt) -> bool:
        """In one of its namespaces that are the newest: each costs a hash."""
        here = prompt.maker.namespace
        return any(
            prompt.begins_as(account.makers[namespace]) in maps[0].columns
            for namespace, maps in islice(reversed(account.maps.items()), NAMESPACES_MAX)
            if namespace != here
        )

    # Store

    def begin_store(
        self,
        prompt: Prompt,
        verified: int,
        now: float,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
    ) -> Store:
        """Slots for what is not stored yet of the first so many tokens, those that are verified.

        `first`: the token from which on there is KV of each group, if not from the start. Fewer if there
        is no room for more. `finish_store` has to follow.
        """
        if not 0 <= verified <= prompt.tokens:
            raise ValueError(f"the prompt has {prompt.tokens} tokens; {verified} can't be verified")
        if prompt.maker.unit_columns > 1:
            verified -= verified % prompt.maker.unit_tokens  # of a unit there is no tail
        account = self.account(prompt.org)
        if not rules.no_store:
            account.recorder.stored(prompt, verified, now)
        store = Store([])
        if not self.reachable:
            pass  # it could not go everywhere
        elif rules.no_store or account.policy.tiers is Tiers.NONE:
            for key in prompt.keys[: verified // COLUMN_TOKENS]:
                if self.ghosts.why(key) is Reason.NEVER_STORED:
                    self.ghosts.add(key, Reason.NO_STORE)
        else:
            self.tier2.remember(account, rules.continue_id, prompt)
            maps = self.maps_of(account, prompt.maker)
            have = [-(-token // COLUMN_TOKENS) for token in first or [0] * len(maps)]
            for one, have_from in zip(maps, have, strict=True):
                if one.linked:
                    stored = self._store_in(
                        one, prompt, 0, verified, now, rules, store.places, have_from
                    )
                    verified = min(verified, stored)
            for one, have_from in zip(maps, have, strict=True):
                if not one.linked:
                    self._store_window(one, prompt, verified, now, rules, store.places, have_from)
        self.slots.begin(store, now)
        return store

    def finish_store(
        self, store: Store, now: float, failed: Mapping[Column, Reason] | None = None
    ) -> None:
        """The columns are in their slots on every agent, but for those that failed."""
        if not self.slots.end(store):
            return
        self.tier2.stored(store.places)
        writing, came = State.WRITING, list[Column]()
        for column, slot in store.places:
            if column.state is not writing or column.slot != slot:
                continue  # purged or taken away meanwhile
            if failed and column in failed:
                self.remove(column, failed[column])
                continue
            column.stored_at = column.used_at = now
            column.kept_at = None
            came.append(column)
        self.arrived(came, now)

    def _store_window(
        self,
        home: PrefixMap,
        prompt: Prompt,
        verified: int,
        now: float,
        rules: Rules,
        places: list[Place],
        have_from: int,
    ) -> None:
        """Places for a group with a window: first for its end, and with the room that is left for what
        is before it, since other prompts may go on from there. That goes out first, and is evicted
        first."""
        first = self.layout.groups[home.group].first_needed(verified)
        window: list[Place] = []
        self._store_in(home, prompt, first, verified, now, rules, window, have_from)
        self._store_in(home, prompt, 0, first * COLUMN_TOKENS, now, rules, places, have_from)
        places += window

    def _store_in(
        self,
        home: PrefixMap,
        prompt: Prompt,
        first: int,
        verified: int,
        now: float,
        rules: Rules,
        places: list[Place],
        have_from: int,
    ) -> int:
        """Places for one group, of columns from `have_from` on. Up to how many tokens its columns are
        here, or on their way."""
        whole, rest = divmod(verified, COLUMN_TOKENS)
        policy = home.account.policy
        born, seen = _over(policy, now)
        payers = Payers(self.accounts, home.group, home.account, home.column_bytes)
        is_unlimited, take = policy.dram_bytes_max is None, self.slots.pools[home.group].take
        empty, ready = State.EMPTY, State.READY
        parent: Column | None = None
        for depth in range(first, whole + (rest > 0)):
            tokens = rest if depth == whole else COLUMN_TOKENS
            key = prompt.tail(whole, rest) if depth == whole else prompt.keys[depth]
            column = home.columns.get(key)
            if (
                column is not None
                and column.state is ready
                and not (column.stored_at > born and column.used_at > seen and column.ttl is None)
                and self.expires_at(column) <= now
            ):
                self.remove(column, Reason.EXPIRED)
                column = home.columns.get(key)
            if column is None or column.state is empty:
                if depth < have_from:
                    if home.linked:
                        return depth * COLUMN_TOKENS
                    continue
                # Behind a column that holds nothing there is no tail to take over.
                slot = take() if is_unlimited and home.linked and parent and not parent.holds else None
                if slot is None:
                    slot = self._slot_for(home, prompt, depth, tokens, parent, column, payers, now)
                    if slot is None:
                        return depth * COLUMN_TOKENS
                if column is None and tokens == COLUMN_TOKENS:
                    column = home.add(key, parent, depth)
                elif column is None:
                    column = home.add_tail(key, parent, depth, tokens, _before(prompt, depth))
                self.occupy(column, slot, State.WRITING)
                column.ttl = rules.ttl_seconds
                if rules.priority is not None:
                    column.priority = rules.priority
                places.append(Place(column, slot))
            elif column.ttl is not None:  # somebody else has the same, and may keep it for longer
                longer = rules.ttl_seconds is None or rules.ttl_seconds > column.ttl
                column.ttl = rules.ttl_seconds if longer else column.ttl
            parent = column
        return verified

    def _slot_for(
        self,
        home: PrefixMap,
        prompt: Prompt,
        depth: int,
        tokens: int,
        parent: Column | None,
        place: Column | None,
        payers: Payers,
        now: float,
    ) -> int | None:
        """A slot for a column: that of the tail which it goes on from, a free one, or room is made."""
        limit = home.account.policy.dram_bytes_max
        may_have_tails = not (home.linked and parent and not parent.holds)  # which are behind it
        if may_have_tails and (limit is None or home.account.bytes <= limit):  # it may have been lowered
            slot = self._take_over(home, prompt, depth, tokens)
            if slot is not None:
                return slot
        return self.room_for(home, parent, place, payers, now)

    def room_for(
        self, home: PrefixMap, parent: Column | None, place: Column | None, payers: Payers, now: float
    ) -> int | None:
        """A free slot, or room is made."""
        limit = home.account.policy.dram_bytes_max
        if limit is None and (slot := self.slots.pools[home.group].take()) is not None:
            return slot
        held = [column for column in (parent, place) if column]  # these must not pay for it
        for column in held:
            column.holds += 1
        slot = self._make_room(home, payers, now)
        for column in held:
            column.holds -= 1
            if slot is None or not home.linked:  # else it is about to have another behind it, or bytes
                prune(column)
        return slot

    def _take_over(self, home: PrefixMap, prompt: Prompt, depth: int, tokens: int) -> int | None:
        """The slot of a shorter tail that this column goes on from, if nobody is reading it."""
        for tail in _tails_of(home, prompt, depth, tokens - 1):
            if tail.state is State.READY and not tail.holds:
                slot = self._empty(tail)
                parent = tail.parent
                if parent:
                    parent.holds += 1  # it is about to have another behind it
                prune(tail)
                if parent:
                    parent.holds -= 1
                return slot
        return None

    def _make_room(self, home: PrefixMap, payers: Payers, now: float) -> int | None:
        account, group, pool = home.account, home.group, self.slots.pools[home.group]
        limit, coming_free = account.policy.dram_bytes_max, self.slots.coming_free
        coming = coming_free[group]
        if limit is not None and account.bytes > limit + SLICE * home.column_bytes:
            return None  # it was lowered by much: the sweeper is at it
        while limit is not None and account.bytes + home.column_bytes > limit:
            victim = account.victim(group, now)
            if victim is None:
                return None
            self.evict(victim, Reason.QUOTA)
        while (slot := pool.take()) is None:
            if coming_free[group] > coming:
                return None  # a slot is scrubbed first: it is for whoever stores next
            victim = payers.victim(now)
            if victim is None:
                return None
            self.evict(victim, Reason.EVICTED)
        return slot

    # Verbs

    def explain(self, prompt: Prompt, now: float) -> dict[str, list[ColumnState]]:
        """Group by group and column by column: what is there, until when, and why not."""
        return self._explained(prompt.maker, _keys(prompt), now)

    def explain_keys(self, trail: Trail, now: float) -> dict[str, list[ColumnState]]:
        """The same of whole columns whose tokens are not here."""
        return self._explained(trail.maker, [(key, COLUMN_TOKENS) for key in trail.keys], now)

    def _explained(
        self, maker: Keys, keys: Sequence[tuple[bytes, int]], now: float
    ) -> dict[str, list[ColumnState]]:
        maps = self.maps_of(self.account(maker.org), maker)
        return {
            group.name: [
                self._describe(one.columns.get(key), key, depth, tokens, now)
                for depth, (key, tokens) in enumerate(keys)
            ]
            for group, one in zip(self.layout.groups, maps, strict=True)
        }

    def is_current(self, maker: Keys) -> bool:
        """Whether its org still has the secret that its keys were made with."""
        account = self.accounts.get(maker.org)
        known = account.makers.get(maker.namespace) if account else None
        return known is not None and known.tag == maker.tag

    def delete(self, prompt: Prompt, *, shared: bool = False) -> Removal:
        """Remove a prompt's columns from its end on, up to the first that others go on from; with
        `shared` all of them."""
        removal, pins = Removal(Reason.DELETED), Counter(self.slots.pins())
        for one in self.maps_of(self.account(prompt.org), prompt.maker):
            for column in reversed(_columns(one, prompt)):
                if not shared and column.holds > pins[column]:
                    break
                if column.state is not State.EMPTY:
                    self.remove(column, Reason.DELETED, removal)
            self.tier2.forget(one, self._behind(one, prompt), removal)
        return removal

    def set_priority(self, prompt: Prompt, priority: int, now: float) -> int:
        """Of what is stored of this prompt; how many columns that is."""
        account, columns = self.account(prompt.org), self._stored(prompt)
        for column in columns:
            if column.state is State.READY:
                account.queue(column).removed(column)
            column.mark, column.priority = None, priority
            if column.state is State.READY:
                account.queue(column).stored(column, now)
        return len(columns)

    def set_ttl(self, prompt: Prompt, seconds: int) -> int:
        """Give what is stored of this prompt a time to live of its own, which only shortens the
        policy's; how many columns that is."""
        columns = self._stored(prompt)
        for column in columns:
            column.ttl = seconds
            if column.state is State.READY:
                self.schedule(column)
        for one in self.maps_of(self.account(prompt.org), prompt.maker):
            self.tier2.forget(one, prompt.keys)  # where nothing can be noted of it
        return len(columns)

    def evict_policy(self, org: str, name: EvictionName, now: float) -> None:
        """Let another eviction policy decide, also on what is stored; until policies are set again."""
        account = self.account(org)
        account.set_policy(replace(account.policy, eviction=name), now)

    def purge(self, org: str, namespace: Namespace | None = None, tag: bytes | None = None) -> Removal:
        """Nothing of this org, or of it in one namespace, is found from here on; `reclaim` does the
        rest.

        In tier 2 it is always all of the org that goes. `tag`: its isolation tag, if none of its prompts
        may have been here yet.
        """
        removal = Removal(Reason.PURGED)
        account = self.account(org)

        def is_meant(home: PrefixMap) -> bool:
            return home.account is account and namespace in (None, home.namespace)

        account.recorder.forget()
        self.requests.forget(org)
        removal.before = [before for home, before in self._purged if is_meant(home)]
        for one in [namespace] if namespace else list(account.maps):
            for purged in account.maps.pop(one, ()):
                purged.purged_by = removal
                account.purged.append(purged)
                self._purged.append((purged, removal))
                removal.waiting += 1
        self.slots.remove_rest(removal, is_meant)
        tags = {maker.tag for maker in account.makers.values()} | ({tag} if tag else set())
        if tags:
            self.tier2.purge(account, tags, removal)
        return removal

    @staticmethod
    def _behind(home: PrefixMap, prompt: Prompt) -> list[bytes]:
        """The keys of the prompt's whole columns behind the last one that is still here."""
        here = [
            column is not None and column.state is not State.EMPTY for column in home.find(prompt.keys)
        ]
        return prompt.keys[len(here) - here[::-1].index(True) if True in here else 0 :]

    def _stored(self, prompt: Prompt) -> list[Column]:
        maps = self.maps_of(self.account(prompt.org), prompt.maker)
        there = [column for one in maps for column in _columns(one, prompt)]
        return [column for column in there if column.state is not State.EMPTY]

    def _describe(
        self, column: Column | None, key: bytes, depth: int, tokens: int, now: float
    ) -> ColumnState:
        reason = self.reason(column, key, now) or "ready"
        if column is None or column.state is not State.READY:
            return ColumnState(depth, tokens, reason)
        expires_at = self.expires_at(column)
        return ColumnState(
            depth,
            tokens,
            reason,
            now - column.stored_at,
            now - column.used_at,
            None if expires_at == NEVER else expires_at - now,
            column.uses,
            column.priority,
            column.slot,
        )

    # Long work, in pieces

    def sweep(self, now: float, columns: int = SLICE) -> bool:
        """Remove what has expired and end what is taken for dead, looking at about so many columns;
        whether there is more to do."""
        self._swept_at = now
        for use in self.slots.overdue(now):
            self._give_up(use, now)
        while self._rescans and columns > 0:
            piece = self._rescans[0][-columns:]
            for column in piece:
                if column.state is State.READY:
                    self.schedule(column)
            columns -= len(piece)
            del self._rescans[0][-len(piece) :]
            if not self._rescans[0]:
                self._rescans.popleft()
        while self._seconds and self._seconds[0] <= now and columns > 0:
            second = self._seconds[0]
            due = self._due[second]
            while due and columns > 0:
                columns -= 1
                self._look_at(due.popitem()[0], now)
            if not due:
                heapq.heappop(self._seconds)
                del self._due[second]
        columns -= self._enforce_quotas(columns, now)
        return columns <= 0 or bool(self._rescans)

    def reclaim(self, columns: int = SLICE) -> bool:
        """Take apart what was purged or lost, about so many columns; whether there is more to do."""
        while self._purged and columns > 0:
            home, removal = self._purged[0]
            while home.columns and columns > 0:
                columns -= 1
                _, column = home.columns.popitem()
                if column.state is not State.EMPTY:
                    self.remove(column, Reason.PURGED)
            if not home.columns:
                self._purged.popleft()
                home.account.purged.remove(home)
                removal.waiting -= 1
        while self._lost and columns > 0 and self.tier2.may_restore_more:
            left, shards = self._lost[0]
            while left and columns > 0 and self.tier2.may_restore_more:
                columns -= 1
                column = left.popleft()
                if column.state is State.READY and not self.tier2.restore(column, shards):
                    self.remove(column, Reason.AGENT_LOST)
            if not left:
                self._lost.popleft()
        if not self._lost:
            self._losing.clear()
        return bool(self._purged or (self._lost and self.tier2.may_restore_more))

    # Inside

    def maps_of(self, account: Account, maker: Keys) -> list[PrefixMap]:
        """The maps of an org in a namespace, one for each group."""
        found = account.maps.get(maker.namespace)
        if found is not None and account.makers[maker.namespace].tag != maker.tag:
            self.purge(account.org, maker.namespace)  # its secret is another one now
            found = None
        if found is None:
            if len(account.maps) >= NAMESPACES_MAX:
                account.forget_empty_maps()
            found = account.maps[maker.namespace] = [
                PrefixMap(account, maker.namespace, index, group.column_bytes, group.linked)
                for index, group in enumerate(self.layout.groups)
            ]
            account.makers[maker.namespace] = maker
        return found

    def _give_up(self, use: Use, now: float) -> None:
        match use:
            case Store():
                self.finish_store(use, now, {column: Reason.AGENT_LOST for column, _ in use.places})
            case Recall():
                self.tier2.finish_recall(use, now, {})
            case Spill():
                self.tier2.finish_spill(use, [])
            case _:
                self.slots.end(use)

    def evict(self, leaf: Column, reason: Reason) -> None:
        """Its slot is needed at once: there is no time to spill it."""
        if leaf.home.account.policy.tiers is Tiers.TIER2:
            self.tier2.evicted(leaf)
        self.remove(leaf, reason, idle=True)

    def occupy(self, column: Column, slot: int, state: State) -> None:
        """It has this slot from here on; its bytes are on their way there."""
        home = column.home
        column.state, column.slot, column.uses = state, slot, 0
        account, size = home.account, home.column_bytes
        column.ttl, column.priority = None, account.policy.priority
        account.bytes += size
        account.group_bytes[home.group] += size

    def arrived(self, columns: Iterable[Column], now: float) -> None:
        """The bytes of these, which are one org's, are in their slots, on all agents."""
        ready, forget = State.READY, self.ghosts.forget if self.ghosts else None
        leftovers = [self.slots.has_leftovers(group) for group in range(len(self.layout.groups))]
        queues: dict[tuple[int, int], Eviction[Column]] = {}
        seconds: dict[tuple[float, float, int | None], int] = {}  # of columns of one age
        for column in columns:
            column.state = ready
            home = column.home
            if leftovers[home.group]:  # others' may have lain there
                self.slots.overwritten(home.group, column.slot)
            if forget:
                forget(column.key)
            queue = queues.get((home.group, column.priority))
            if queue is None:
                queue = queues[home.group, column.priority] = home.account.queue(column)
            queue.stored(column, now)
            age = column.stored_at, column.used_at, column.ttl
            second = seconds.get(age)
            if second is None:
                second = seconds[age] = self._second(column)
            self._look_at_in(column, second)
            if self.watch:
                self.watch.arrived(column)

    def remove(
        self, column: Column, reason: Reason, removal: Removal | None = None, *, idle: bool = False
    ) -> None:
        """Its bytes are given up. Columns behind it stay, and wait for it to come back.

        `idle`: nobody is using its slot.
        """
        home = column.home
        removal = removal or home.purged_by
        self.ghosts.add(column.key, reason)
        if reason is Reason.EXPIRED:
            home.account.expired.dram += 1
            if column.kept_at is not None:
                home.account.expired.tier2 += 1
                self.tier2.forget(home, [column.key], removal, has_expired=True)
        freed = Freed(home, self._empty(column), removal, reason in _CLEARED)
        if removal:
            removal.columns += 1
            removal.bytes += home.column_bytes
            removal.waiting += 1
        self.slots.free(freed, idle=idle)
        if not home.purged_by:  # of which nothing stays
            prune(column)

    def _empty(self, column: Column) -> int:
        """Take the slot out of a column."""
        if column.state is State.READY:
            column.home.account.queue(column).removed(column)
            column.mark = None
            if self.watch:
                self.watch.gone(column)
        self._look_at_in(column, 0)
        column.state = State.EMPTY
        slot, column.slot = column.slot, NO_SLOT
        home = column.home
        home.account.bytes -= home.column_bytes
        home.account.group_bytes[home.group] -= home.column_bytes
        return slot

    @staticmethod
    def expires_at(column: Column) -> float:
        policy = column.home.account.policy
        return policy.expires_at(column.stored_at, column.used_at, column.ttl)

    def schedule(self, column: Column) -> None:
        """Have the sweeper look at it when it may have expired."""
        self._look_at_in(column, self._second(column))

    def _second(self, column: Column) -> int:
        """The first in which it may have expired, or one before that; 0 for never."""
        expires_at = self.expires_at(column)
        if expires_at == NEVER:
            return 0
        return max(1, math.ceil(min(expires_at, self._swept_at + LOOK_AHEAD_SECONDS)))

    def _look_at_in(self, column: Column, second: int) -> None:
        if column.due == second:
            return
        if column.due:
            del self._due[column.due][column]
        column.due = second
        if not second:
            return
        due = self._due.get(second)
        if due is None:
            due = self._due[second] = {}
            heapq.heappush(self._seconds, second)
        due[column] = None

    def _look_at(self, column: Column, now: float) -> None:
        column.due = 0
        if column.state is not State.READY:
            return  # it is coming back
        expires_at = self.expires_at(column)
        if expires_at > now:
            self.schedule(column)
            return
        overstay, expired = now - expires_at, column.home.account.expired
        self.overstay.columns += overstay > SWEPT_SECONDS
        self.overstay.seconds_max = max(self.overstay.seconds_max, overstay)
        expired.overstay_seconds_max = max(expired.overstay_seconds_max, overstay)
        self.remove(column, Reason.EXPIRED)

    def _enforce_quotas(self, most: int, now: float) -> int:
        """Quotas may have been lowered. How many columns had to go."""
        count = 0
        for account in self.accounts.values():
            limit = account.policy.dram_bytes_max
            while count < most and limit is not None and account.bytes > limit:
                groups = range(len(self.layout.groups))
                victim = next(filter(None, (account.victim(group, now) for group in groups)), None)
                if victim is None:
                    break  # all of it is in use at the moment
                self.evict(victim, Reason.QUOTA)
                count += 1
        return count

    def reuse(self, org: str, now: float) -> Sample | None:
        """How this org's columns come back, as far as is known: what other policies are tried on. None
        for one that has never been here. Any thread may ask."""
        account = self.accounts.get(org)
        if account is None:
            return None
        recorder = account.recorder
        log = recorder.log  # before its share, which may become smaller meanwhile
        column_bytes = sum(group.column_bytes for group in self.layout.groups)
        coming = self.slots.coming_free
        free = min(pool.free + coming[group] for group, pool in enumerate(self.slots.pools))
        return Sample(
            org=org,
            now=now,
            complete=recorder.complete,
            stride=recorder.share.stride,
            threshold=recorder.share.threshold,
            requests=account.tally.requests,
            requested=account.tally.requested,
            columns=recorder.columns,
            hit=account.tally.hits.total(),
            held_bytes=account.bytes,
            room_bytes=account.bytes + free * column_bytes,
            column_bytes=column_bytes,
            log=log,
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError if anything here contradicts itself."""
        pins = Counter(self.slots.pins())
        taken = []
        for account in self.accounts.values():
            account.check_integrity()
            for one in [*chain.from_iterable(account.maps.values()), *account.purged]:
                if one not in account.purged:
                    one.check_integrity(pins)
                taken += [
                    (one.group, each.slot) for each in one.columns.values() if each.slot != NO_SLOT
                ]
        self.slots.check_integrity(taken)
        self.tier2.check_integrity()


def stamp(account: Account, hit: Sequence[Column], now: float) -> None:
    """Stamp the columns of a hit. Its eviction policies hear of it before."""
    priorities = {column.priority for column in hit}
    for priority in priorities:
        path = hit
        if len(priorities) > 1:
            path = [column for column in hit if column.priority == priority]
        account.queue(path[0]).used(path, now)
    for column in hit:
        column.used_at = now
        column.uses += 1


def _over(policy: Policy, now: float) -> tuple[float, float]:
    """What was stored at the first moment or before, or used last at the second or before, is over."""
    first, last = policy.ttl_first_use_seconds, policy.ttl_last_use_seconds
    return _ALWAYS if first is None else now - first, _ALWAYS if last is None else now - last


def _coming(paths: Sequence[Path], whole: int) -> int:
    """How many tokens right behind so many columns will be here soon, since tier 2 is at it."""
    full = [path.found[whole:] for path in paths if path.map.linked]
    there = (State.READY, State.COMING)
    run = list(takewhile(lambda row: all(one and one.state in there for one in row), zip(*full)))  # noqa: B905
    is_coming = any(one and one.state is State.COMING for row in run for one in row)
    return len(run) * COLUMN_TOKENS if is_coming else 0


def _present(columns: Iterable[Column | None]) -> list[Column]:
    return [column for column in columns if column is not None]


def _before(prompt: Prompt, depth: int) -> bytes:
    """The key of the column before this depth; empty for none."""
    return prompt.keys[depth - 1] if depth else b""


def _tails_of(home: PrefixMap, prompt: Prompt, depth: int, most: int) -> Iterator[Column]:
    """Tails behind so many columns of this prompt, of at most so many tokens and all of them its own;
    the longest first."""
    for tokens in home.tail_lengths(_before(prompt, depth)):
        if tokens <= most and (tail := home.columns.get(prompt.tail(depth, tokens))):
            yield tail


def _keys(prompt: Prompt) -> list[tuple[bytes, int]]:
    """Of all its columns, the tail included, with the tokens of each."""
    whole, rest = divmod(prompt.tokens, COLUMN_TOKENS)
    keys = [(key, COLUMN_TOKENS) for key in prompt.keys]
    if prompt.maker.unit_columns > 1:
        return keys
    return [*keys, (prompt.tail(whole, rest), rest)] if rest else keys


def _columns(home: PrefixMap, prompt: Prompt) -> list[Column]:
    """All columns that hold tokens of this prompt and no others, from its start on."""
    found: list[Column] = []
    for depth, key in enumerate([*prompt.keys, b""]):
        found += _tails_of(home, prompt, depth, prompt.tokens - depth * COLUMN_TOKENS)
        if column := home.columns.get(key):
            found.append(column)
    return found
