"""The deciding half of the driver: what is cached for whom, until when, what goes first, why it is
missed.

No bytes, no clocks, no sockets, no threads. Whoever runs it passes the time in, moves bytes as it says,
and tells it how that went:

- `match` finds the longest prefix that can be refilled, and keeps its slots as they are until `release`.
- `begin_store` gives the columns of a prompt slots to be evicted to; `finish_store` follows.
- `sweep` and `reclaim` do in small pieces what would take long: expiry, lower quotas, and taking apart
  what was purged.
- `take_clears` says which slots agents have to empty before they are used again; `cleared` follows.

All shards of a group keep a column under the same slot number, so a slot is a number here, no more.

What keeps slots safe. A column that is evicted for room is a leaf that nobody is using. One that goes
for another reason may be in use: its slot waits until every match and store under way has ended.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

from msgspec.structs import replace

from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, NEVER, EvictionName, OrgPolicies, Policy, Rules, Tiers
from swdriver_shim.prefix_map import NO_SLOT, Column, PrefixMap, State
from swdriver_shim.reasons import GHOSTS_MAX, Ghosts, Reason
from swdriver_shim.room import Account, Payers, Pool

DRAM: Final = "dram"
SLICE: Final = 500  # columns that are looked at in one piece of long work: below a millisecond
USE_SECONDS_MAX: Final = 300.0  # for a match or store; who takes longer is taken for dead
NAMESPACES_MAX: Final = 64  # of one org
_CLEARED: Final = frozenset({Reason.EXPIRED, Reason.PURGED, Reason.DELETED})
_ALWAYS: Final = -NEVER


class Place(NamedTuple):
    """Evict this column to this slot."""

    column: Column
    slot: int


@dataclass(slots=True, eq=False)
class Match:
    """What of a prompt can be refilled: `columns` of each group, in order.

    All groups agree on `tokens`, counted from the start. A group with a window has only those columns
    that cover it.
    """

    prompt: Prompt
    asked: int
    tokens: int
    columns: tuple[list[Column], ...]
    number: int = 0

    @property
    def ends(self) -> list[Column]:
        """What holds all of it: the last column of a full group, every one of a window."""
        return [
            column
            for hit in self.columns
            for column in (hit[-1:] if hit and hit[0].home.linked else hit)
        ]


@dataclass(slots=True, eq=False)
class Store:
    """What of a prompt is to be evicted, in this order."""

    places: list[Place]
    number: int = 0


@dataclass(slots=True, eq=False)
class Removal:
    """Something that is being removed for good. Done when nothing of it is left anywhere."""

    reason: Reason
    columns: int = 0
    bytes: int = 0
    waiting: int = 0  # slots that are not empty yet, and maps that are not taken apart
    before: list[Removal] = field(default_factory=list)  # which it has to wait for
    earlier: set[tuple[int, int]] = field(default_factory=set)  # slots likewise
    confirmed: dict[str, float] = field(default_factory=dict)  # by shard: when it last emptied a slot

    @property
    def done(self) -> bool:
        return not self.waiting and not self.earlier and all(one.done for one in self.before)


class Freed(NamedTuple):
    """A slot whose column has gone, and what has to happen to it."""

    home: PrefixMap
    slot: int
    removal: Removal | None
    clear: bool


class Clear(NamedTuple):
    """Empty this slot on all agents, with zeros if `scrub`."""

    group: int
    slot: int
    scrub: bool
    removal: Removal | None


@dataclass(slots=True)
class Overstay:
    """How long bytes lay here beyond their time, never served. Until agents were told to empty them."""

    columns: int = 0
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


@dataclass(slots=True)
class _Path:
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
        self.pools = [Pool() for _ in layout.groups]
        self.ghosts = Ghosts(ghosts_max)
        self.overstay = Overstay()
        self.reachable = True  # while an agent is lost, nothing can be served, and nothing need go
        self._policies: Mapping[str, OrgPolicies] = {}
        self._uses: dict[int, tuple[float, Match | Store]] = {}  # what is under way, oldest first
        self._numbers = 0
        self._limbo: deque[tuple[int, Freed]] = deque()  # until this use has ended
        self._clears: deque[Clear] = deque()
        self._clearing: dict[tuple[int, int], PrefixMap] = {}
        self._removals: list[Removal] = []  # those that wait for what others had removed before
        self._due: dict[int, list[Column]] = {}  # by the second in which they are to be looked at
        self._seconds: list[int] = []  # a heap of those
        self._rescans: deque[list[Column]] = deque()
        self._purged: deque[tuple[PrefixMap, Removal]] = deque()
        self._lost: deque[list[Column]] = deque()

    # Intent

    def set_policies(self, policies: Mapping[str, OrgPolicies], now: float) -> None:
        """All orgs' policies, for what is stored already, too. Who is not in it has the usual one."""
        self._policies = policies
        for account in self.accounts.values():
            before = account.policy
            account.set_policy(policies.get(account.org, OrgPolicies()).of(self.model), now)
            if account.policy != before:
                rescans = [list(account.columns(group)) for group in range(len(self.pools))]
                self._rescans += filter(None, rescans)

    def set_line(self, group: int, slots: int) -> None:
        """So many slots may be used. What lies above them is gone: agents have given the memory back."""
        shrinks = slots < self.pools[group].line
        self.pools[group].set_line(slots)
        if shrinks:
            for account in self.accounts.values():
                for column in [one for one in account.columns(group) if one.slot >= slots]:
                    self._remove(column, Reason.EVICTED)

    def account(self, org: str) -> Account:
        found = self.accounts.get(org)
        if found is None:
            found = self.accounts[org] = Account(org, len(self.pools))
            found.set_policy(self._policies.get(org, OrgPolicies()).of(self.model), 0)
        return found

    # Match

    def match(self, prompt: Prompt, now: float) -> Match:
        """The longest prefix of the prompt that every group can give back. `release` has to follow.

        Its tokens are counted as asked for, and as hit or missed, each with its reason.
        """
        account = self.account(prompt.org)
        paths = self._paths(account, prompt, now)
        columns, tokens = self._agree(account, paths, prompt, now)
        tally = account.tally
        tally.requests += 1
        tally.requested += prompt.tokens
        tally.hits[DRAM] += tokens
        if tokens < prompt.tokens:
            tally.missed += self._why(account, paths, prompt, tokens, now)
        for hit in columns:
            _use(account, hit, now)
        return self._hold(Match(prompt, prompt.tokens, tokens, columns), now)

    def _hold(self, match: Match, now: float) -> Match:
        for column in match.ends:
            column.holds += 1
        self._begin(match, now)
        return match

    def release(self, match: Match) -> None:
        """Nobody reads those slots any more."""
        if self._end(match):
            for column in match.ends:
                column.holds -= 1
                self._prune(column)

    def shorten(self, match: Match, tokens: int, reason: Reason) -> None:
        """Only so many tokens could be used after all: the others are missed, for this reason."""
        tally, lost = self.account(match.prompt.org).tally, match.tokens - tokens
        if lost > 0:
            tally.hits[DRAM] -= lost
            tally.missed[reason] += lost
            match.tokens = tokens

    def refuse(self, column: Column, reason: Reason) -> None:
        """What lay in its slot was not it, or can't be had: it is not served again."""
        if column.state is State.READY:
            self._remove(column, reason)

    def retry(self, match: Match, reason: Reason, now: float) -> Match:
        """Some of it was refused: what of the prompt is left. Takes the place of the first match, also
        where tokens are counted."""
        self.release(match)
        account = self.account(match.prompt.org)
        paths = self._paths(account, match.prompt, now)
        columns, tokens = self._agree(account, paths, match.prompt, now)
        self.shorten(match, min(tokens, match.tokens), reason)
        return self._hold(Match(match.prompt, match.asked, tokens, columns), now)

    def query(self, prompt: Prompt, now: float) -> int:
        """How many tokens `match` would give. Changes nothing, and counts nothing."""
        account = self.account(prompt.org)
        return self._agree(account, self._paths(account, prompt, now), prompt, now)[1]

    def _paths(self, account: Account, prompt: Prompt, now: float) -> list[_Path]:
        maps = self._maps(account, prompt.maker)
        paths = [_Path(one, one.find(prompt.keys)) for one in maps]
        for path in paths:
            if path.map.linked:
                path.fresh = self._fresh(account, path.found, now)
                continue
            rest = iter(path.found)
            while len(path.reach) < len(path.found):
                path.reach += range(1, self._fresh(account, rest, now) + 1)
                path.reach += [0] * (len(path.reach) < len(path.found))  # which ended the run
        return paths

    def lose(self, group: int) -> None:
        """The bytes of this group are gone, or a part of each of its columns is. `reclaim` takes them
        out; refills that come first are refused."""
        self._lost += [list(account.columns(group)) for account in self.accounts.values()]

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
                or (column.ttl is not None and self._expires_at(column) <= now)
            ):
                break
            fresh += 1
        return fresh

    def _agree(
        self, account: Account, paths: list[_Path], prompt: Prompt, now: float
    ) -> tuple[tuple[list[Column], ...], int]:
        """The longest prefix that all groups have, and its columns."""
        whole = min((path.fresh for path in paths if path.map.linked), default=len(prompt.keys))
        tails = self._tails(account, paths, prompt, whole, now)
        while whole and not tails and not self._covers(paths, whole, whole * COLUMN_TOKENS):
            whole -= 1
            tails = self._tails(account, paths, prompt, whole, now)
        tokens = whole * COLUMN_TOKENS + (tails[0].tokens if tails else 0)
        columns = []
        for index, (path, group) in enumerate(zip(paths, self.layout.groups, strict=True)):
            columns.append(_present(path.found[group.first_needed(tokens) : whole]))
            columns[-1] += tails[index : index + 1]
        return tuple(columns), tokens

    def _covers(self, paths: list[_Path], whole: int, tokens: int) -> bool:
        """Do all windows have what comes before so many tokens, as far as it lies in whole columns?"""
        return all(
            path.map.linked or path.reach[whole - 1] >= whole - group.first_needed(tokens)
            for path, group in zip(paths, self.layout.groups, strict=True)
            if group.first_needed(tokens) < whole
        )

    def _tails(
        self, account: Account, paths: list[_Path], prompt: Prompt, whole: int, now: float
    ) -> list[Column]:
        """The longest tail right behind the whole columns that all groups have: one column of each."""
        left = prompt.tokens - whole * COLUMN_TOKENS
        for tail in paths[0].map.tails(_before(prompt, whole)):
            if tail.tokens > left or prompt.tail(whole, tail.tokens) != tail.key:
                continue
            tails = _present(path.map.columns.get(tail.key) for path in paths)
            if len(tails) == self._fresh(account, tails, now) == len(paths) and self._covers(
                paths, whole, whole * COLUMN_TOKENS + tail.tokens
            ):
                return tails
        return []

    def _why(
        self, account: Account, paths: list[_Path], prompt: Prompt, tokens: int, now: float
    ) -> Counter[Reason]:
        """Why each token behind the hit is missed. What is there, behind a gap, has the gap's reason."""
        if not tokens and self._is_elsewhere(account, prompt):
            return Counter({Reason.OTHER_NAMESPACE: prompt.tokens})
        missed: Counter[Reason] = Counter()
        gap = Reason.NEVER_STORED
        for depth in range(tokens // COLUMN_TOKENS, len(prompt.keys)):
            for path in paths:
                if reason := self._reason(path.found[depth], prompt.keys[depth], now):
                    gap = reason
                    break
            missed[gap] += COLUMN_TOKENS
        missed[gap] += prompt.tokens - tokens - missed.total()  # the tail, less what is hit of a column
        return missed

    def _reason(self, column: Column | None, key: bytes, now: float) -> Reason | None:
        """Why this column can't be served; None if it can."""
        if column is None or column.state is State.EMPTY:
            return self.ghosts.why(key)
        if column.state is State.WRITING:
            return Reason.WRITING
        if column.home.account.policy.tiers is Tiers.NONE:
            return Reason.NO_STORE
        if self._expires_at(column) <= now:
            return Reason.EXPIRED
        return None if self.reachable else Reason.AGENT_LOST

    @staticmethod
    def _is_elsewhere(account: Account, prompt: Prompt) -> bool:
        here = prompt.maker.namespace
        return any(
            prompt.begins_as(account.makers[namespace]) in maps[0].columns
            for namespace, maps in account.maps.items()
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
        account = self.account(prompt.org)
        store = Store([])
        if not self.reachable:
            pass  # it could not go everywhere
        elif rules.no_store or account.policy.tiers is Tiers.NONE:
            for key in prompt.keys[: verified // COLUMN_TOKENS]:
                if self.ghosts.why(key) is Reason.NEVER_STORED:
                    self.ghosts.add(key, Reason.NO_STORE)
        else:
            maps = self._maps(account, prompt.maker)
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
        self._begin(store, now)
        return store

    def finish_store(
        self, store: Store, now: float, failed: Mapping[Column, Reason] | None = None
    ) -> None:
        """The columns are in their slots on every agent, but for those that failed."""
        if not self._end(store):
            return
        seconds: dict[int | None, int] = {}  # of columns of this age, by their own time to live
        writing, ready = State.WRITING, State.READY
        for column, slot in store.places:
            if column.state is not writing or column.slot != slot:
                continue  # purged or taken away meanwhile
            if failed and column in failed:
                self._remove(column, failed[column])
                continue
            column.state = ready
            column.stored_at = column.used_at = now
            self.ghosts.forget(column.key)
            column.home.account.queue(column).stored(column, now)
            if column.ttl not in seconds:
                seconds[column.ttl] = self._second(column)
            self._have_looked_at(column, seconds[column.ttl])

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
        payers = Payers(self.accounts, home)
        empty, writing, ready = State.EMPTY, State.WRITING, State.READY
        parent: Column | None = None
        for depth in range(first, whole + (rest > 0)):
            tokens = rest if depth == whole else COLUMN_TOKENS
            key = prompt.tail(whole, rest) if depth == whole else prompt.keys[depth]
            column = home.columns.get(key)
            if (
                column is not None
                and column.state is ready
                and not (column.stored_at > born and column.used_at > seen and column.ttl is None)
                and self._expires_at(column) <= now
            ):
                self._remove(column, Reason.EXPIRED)
                column = home.columns.get(key)
            if column is None or column.state is empty:
                if depth < have_from:
                    if home.linked:
                        return depth * COLUMN_TOKENS
                    continue
                slot = self._slot_for(home, prompt, depth, tokens, parent, column, payers, now)
                if slot is None:
                    return depth * COLUMN_TOKENS
                column = column or self._add(home, prompt, key, parent, depth, tokens)
                column.state, column.slot, column.uses = writing, slot, 0
                column.ttl = rules.ttl_seconds
                column.priority = policy.priority if rules.priority is None else rules.priority
                self._charge(home, home.column_bytes)
                places.append(Place(column, slot))
            elif column.ttl is not None:  # somebody else has the same, and may keep it for longer
                longer = rules.ttl_seconds is None or rules.ttl_seconds > column.ttl
                column.ttl = rules.ttl_seconds if longer else column.ttl
            parent = column
        return verified

    @staticmethod
    def _add(
        home: PrefixMap, prompt: Prompt, key: bytes, parent: Column | None, depth: int, tokens: int
    ) -> Column:
        if tokens == COLUMN_TOKENS:
            return home.add(key, parent, depth)
        return home.add_tail(key, parent, depth, tokens, _before(prompt, depth))

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
        if limit is None and (slot := self.pools[home.group].take()) is not None:
            return slot
        held = [column for column in (parent, place) if column]  # these must not pay for it
        for column in held:
            column.holds += 1
        slot = self._make_room(home, payers, now)
        for column in held:
            column.holds -= 1
            if slot is None or not home.linked:  # else it is about to have another behind it, or bytes
                self._prune(column)
        return slot

    def _take_over(self, home: PrefixMap, prompt: Prompt, depth: int, tokens: int) -> int | None:
        """The slot of a shorter tail that this column goes on from, if nobody is reading it."""
        for tail in home.tails(_before(prompt, depth)):
            is_idle = tail.state is State.READY and not tail.holds
            if is_idle and tail.tokens < tokens and prompt.tail(depth, tail.tokens) == tail.key:
                slot = self._empty(tail)
                parent = tail.parent
                if parent:
                    parent.holds += 1  # it is about to have another behind it
                self._prune(tail)
                if parent:
                    parent.holds -= 1
                return slot
        return None

    def _make_room(self, home: PrefixMap, payers: Payers, now: float) -> int | None:
        account, group, pool = home.account, home.group, self.pools[home.group]
        limit = account.policy.dram_bytes_max
        if limit is not None and account.bytes > limit + SLICE * home.column_bytes:
            return None  # it was lowered by much: the sweeper is at it
        while limit is not None and account.bytes + home.column_bytes > limit:
            victim = account.victim(group, now)
            if victim is None:
                return None
            self._remove(victim, Reason.QUOTA, idle=True)
        while (slot := pool.take()) is None:
            victim = payers.victim(now)
            if victim is None:
                return None
            self._remove(victim, Reason.EVICTED, idle=True)
        return slot

    # Verbs

    def explain(self, prompt: Prompt, now: float) -> dict[str, list[ColumnState]]:
        """Group by group and column by column: what is there, until when, and why not."""
        maps = self._maps(self.account(prompt.org), prompt.maker)
        return {
            group.name: [
                self._describe(one.columns.get(key), key, depth, tokens, now)
                for depth, (key, tokens) in enumerate(_keys(prompt))
            ]
            for group, one in zip(self.layout.groups, maps, strict=True)
        }

    def delete(self, prompt: Prompt, *, shared: bool = False) -> Removal:
        """Remove a prompt's columns from its end on, up to the first that others go on from; with
        `shared` all of them."""
        removal, pins = Removal(Reason.DELETED), self._pins()
        for one in self._maps(self.account(prompt.org), prompt.maker):
            for column in reversed(_columns(one, prompt)):
                if not shared and column.holds > pins[column]:
                    break
                if column.state is not State.EMPTY:
                    self._remove(column, Reason.DELETED, removal)
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
                self._schedule(column)
        return len(columns)

    def evict_policy(self, org: str, name: EvictionName, now: float) -> None:
        """Let another eviction policy decide, also on what is stored; until policies are set again."""
        account = self.account(org)
        account.set_policy(replace(account.policy, eviction=name), now)

    def purge(self, org: str, namespace: Namespace | None = None) -> Removal:
        """Nothing of this org, or of it in one namespace, is found from here on; `reclaim` does the
        rest."""
        removal = Removal(Reason.PURGED)
        account = self.account(org)

        def is_meant(home: PrefixMap) -> bool:
            return home.account is account and namespace in (None, home.namespace)

        slots = [(freed.home, freed.slot) for _, freed in self._limbo]
        slots += [(home, slot) for (_, slot), home in self._clearing.items()]
        removal.earlier = {(home.group, slot) for home, slot in slots if is_meant(home)}
        removal.before = [before for home, before in self._purged if is_meant(home)]
        for one in [namespace] if namespace else list(account.maps):
            for purged in account.maps.pop(one, ()):
                purged.purged_by = removal
                account.purged.append(purged)
                self._purged.append((purged, removal))
                removal.waiting += 1
        for pool in self.pools:
            for home, slot in pool.take_left_by(is_meant):
                removal.waiting += 1
                self._clear(home, slot, removal)
        if removal.earlier:
            self._removals.append(removal)
        return removal

    def _stored(self, prompt: Prompt) -> list[Column]:
        maps = self._maps(self.account(prompt.org), prompt.maker)
        there = [column for one in maps for column in _columns(one, prompt)]
        return [column for column in there if column.state is not State.EMPTY]

    def _describe(
        self, column: Column | None, key: bytes, depth: int, tokens: int, now: float
    ) -> ColumnState:
        reason = self._reason(column, key, now) or "ready"
        if column is None or column.state is not State.READY:
            return ColumnState(depth, tokens, reason)
        expires_at = self._expires_at(column)
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
        while self._uses and (oldest := next(iter(self._uses.values())))[0] + USE_SECONDS_MAX <= now:
            self._give_up(oldest[1], now)
        while self._rescans and columns > 0:
            piece = self._rescans[0][-columns:]
            for column in piece:
                if column.state is State.READY:
                    self._schedule(column)
            columns -= len(piece)
            del self._rescans[0][-len(piece) :]
            if not self._rescans[0]:
                self._rescans.popleft()
        while self._seconds and self._seconds[0] <= now and columns > 0:
            second = self._seconds[0]
            due = self._due[second]
            while due and columns > 0:
                columns -= 1
                self._look_at(due.pop(), second, now)
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
                    self._remove(column, Reason.PURGED)
            if not home.columns:
                self._purged.popleft()
                home.account.purged.remove(home)
                removal.waiting -= 1
        while self._lost and columns > 0:
            while self._lost[0] and columns > 0:
                columns -= 1
                self.refuse(self._lost[0].pop(), Reason.AGENT_LOST)
            if not self._lost[0]:
                self._lost.popleft()
        return bool(self._purged or self._lost)

    def take_clears(self, most: int) -> list[Clear]:
        """Slots to be emptied, those of one group and kind together. `cleared` has to follow."""
        taken: list[Clear] = []
        while self._clears and len(taken) < most:
            clear = self._clears[0]
            if taken and (clear.group, clear.scrub) != (taken[0].group, taken[0].scrub):
                break
            taken.append(self._clears.popleft())
        return taken

    def cleared(self, clears: Iterable[Clear]) -> None:
        """Nothing is left in these slots, on any agent."""
        for clear in clears:
            slot = (clear.group, clear.slot)
            del self._clearing[slot]
            self.pools[clear.group].give_back(clear.slot)
            if clear.removal:
                clear.removal.waiting -= 1
            for removal in self._removals:
                removal.earlier.discard(slot)
        self._removals = [removal for removal in self._removals if removal.earlier]

    def not_cleared(self, clears: Sequence[Clear]) -> None:
        """They could not be emptied; they are to be tried again."""
        self._clears.extendleft(reversed(clears))

    # Inside

    def _maps(self, account: Account, maker: Keys) -> list[PrefixMap]:
        """The maps of an org in a namespace, one for each group."""
        found = account.maps.get(maker.namespace)
        if found is None:
            if len(account.maps) >= NAMESPACES_MAX:
                account.forget_empty_maps()
            found = account.maps[maker.namespace] = [
                PrefixMap(account, maker.namespace, index, group.column_bytes, group.window is None)
                for index, group in enumerate(self.layout.groups)
            ]
            account.makers[maker.namespace] = maker
        return found

    def _begin(self, use: Match | Store, now: float) -> None:
        self._numbers += 1
        use.number = self._numbers
        self._uses[use.number] = (now, use)

    def _end(self, use: Match | Store) -> bool:
        """Whether it was under way. Slots that waited for it, and for none before it, are free."""
        if self._uses.pop(use.number, None) is None:
            return False
        oldest = next(iter(self._uses), self._numbers + 1)
        while self._limbo and self._limbo[0][0] < oldest:
            self._let_go(self._limbo.popleft()[1])
        return True

    def _give_up(self, use: Match | Store, now: float) -> None:
        if isinstance(use, Match):
            self.release(use)
        else:
            self.finish_store(use, now, {column: Reason.AGENT_LOST for column, _ in use.places})

    def _remove(
        self, column: Column, reason: Reason, removal: Removal | None = None, *, idle: bool = False
    ) -> None:
        """Its bytes are given up. Columns behind it stay, and wait for it to come back.

        `idle`: nobody is using its slot.
        """
        home = column.home
        removal = removal or home.purged_by
        self.ghosts.add(column.key, reason)
        freed = Freed(home, self._empty(column), removal, reason in _CLEARED)
        if removal:
            removal.columns += 1
            removal.bytes += home.column_bytes
            removal.waiting += 1
        if self._uses and not idle:
            self._limbo.append((self._numbers, freed))
        else:
            self._let_go(freed)
        if not home.purged_by:  # of which nothing stays
            self._prune(column)

    def _empty(self, column: Column) -> int:
        """Take the slot out of a column."""
        if column.state is State.READY:
            column.home.account.queue(column).removed(column)
            column.mark = None
        column.state = State.EMPTY
        slot, column.slot = column.slot, NO_SLOT
        self._charge(column.home, -column.bytes)
        return slot

    @staticmethod
    def _charge(home: PrefixMap, size: int) -> None:
        home.account.bytes += size
        home.account.group_bytes[home.group] += size

    def _let_go(self, freed: Freed) -> None:
        """Nobody uses this slot any more. It is free, or once it has been emptied."""
        home, slot, removal, clear = freed
        if clear or home.purged_by or home.account.policy.scrub:
            self._clear(home, slot, removal)
        else:
            self.pools[home.group].give_back(slot, home)

    def _clear(self, home: PrefixMap, slot: int, removal: Removal | None) -> None:
        self._clearing[home.group, slot] = home
        self._clears.append(Clear(home.group, slot, home.account.policy.scrub, removal))

    @staticmethod
    def _prune(column: Column) -> None:
        leaf = column.home.prune(column)
        if leaf and leaf.state is State.READY:
            leaf.home.account.queue(leaf).leaf(leaf)

    @staticmethod
    def _expires_at(column: Column) -> float:
        policy = column.home.account.policy
        return policy.expires_at(column.stored_at, column.used_at, column.ttl)

    def _schedule(self, column: Column) -> None:
        """Have the sweeper look at it when it may have expired."""
        self._have_looked_at(column, self._second(column))

    def _second(self, column: Column) -> int:
        """The first in which it may have expired; 0 for never."""
        expires_at = self._expires_at(column)
        return 0 if expires_at == NEVER else max(1, math.ceil(expires_at))

    def _have_looked_at(self, column: Column, second: int) -> None:
        if column.due == second:
            return
        column.due = second
        if not second:
            return
        due = self._due.get(second)
        if due is None:
            due = self._due[second] = []
            heapq.heappush(self._seconds, second)
        due.append(column)

    def _look_at(self, column: Column, second: int, now: float) -> None:
        if column.state is not State.READY or column.due != second:
            return  # gone, or to be looked at another time
        column.due = 0
        expires_at = self._expires_at(column)
        if expires_at > now:
            self._schedule(column)
            return
        self.overstay.columns += 1
        self.overstay.seconds_max = max(self.overstay.seconds_max, now - expires_at)
        self._remove(column, Reason.EXPIRED)

    def _enforce_quotas(self, most: int, now: float) -> int:
        """Quotas may have been lowered. How many columns had to go."""
        count = 0
        for account in self.accounts.values():
            limit = account.policy.dram_bytes_max
            while count < most and limit is not None and account.bytes > limit:
                groups = range(len(self.pools))
                victim = next(filter(None, (account.victim(group, now) for group in groups)), None)
                if victim is None:
                    break  # all of it is in use at the moment
                self._remove(victim, Reason.QUOTA, idle=True)
                count += 1
        return count

    def _pins(self) -> Counter[Column]:
        matches = (use for _, use in self._uses.values() if isinstance(use, Match))
        return Counter(column for match in matches for column in match.ends)

    def check_integrity(self) -> None:
        """Raise RuntimeError if anything here contradicts itself."""
        pins = self._pins()
        taken = [(freed.home.group, freed.slot) for _, freed in self._limbo]
        taken += self._clearing
        for account in self.accounts.values():
            account.check_integrity()
            for one in [*chain.from_iterable(account.maps.values()), *account.purged]:
                if one not in account.purged:
                    one.check_integrity(pins)
                taken += [
                    (one.group, each.slot) for each in one.columns.values() if each.slot != NO_SLOT
                ]
        for group, pool in enumerate(self.pools):
            pool.check_integrity(slot for which, slot in taken if which == group)


def _use(account: Account, hit: Sequence[Column], now: float) -> None:
    """Stamp the columns of a hit. Its eviction policies hear of it before."""
    for priority in {column.priority for column in hit}:
        path = [column for column in hit if column.priority == priority]
        account.queue(path[0]).used(path, now)
    for column in hit:
        column.used_at = now
        column.uses += 1


def _over(policy: Policy, now: float) -> tuple[float, float]:
    """What was stored at the first moment or before, or used last at the second or before, is over."""
    first, last = policy.ttl_first_use_seconds, policy.ttl_last_use_seconds
    return _ALWAYS if first is None else now - first, _ALWAYS if last is None else now - last


def _present(columns: Iterable[Column | None]) -> list[Column]:
    return [column for column in columns if column is not None]


def _before(prompt: Prompt, depth: int) -> bytes:
    """The key of the column before this depth; empty for none."""
    return prompt.keys[depth - 1] if depth else b""


def _keys(prompt: Prompt) -> list[tuple[bytes, int]]:
    """Of all its columns, the tail included, with the tokens of each."""
    whole, rest = divmod(prompt.tokens, COLUMN_TOKENS)
    keys = [(key, COLUMN_TOKENS) for key in prompt.keys]
    return [*keys, (prompt.tail(whole, rest), rest)] if rest else keys


def _columns(home: PrefixMap, prompt: Prompt) -> list[Column]:
    """All columns that hold tokens of this prompt and no others, from its start on."""
    found: list[Column] = []
    for depth, key in enumerate([*prompt.keys, b""]):
        left = min(prompt.tokens - depth * COLUMN_TOKENS, COLUMN_TOKENS - 1)
        tails = [tail for tail in home.tails(_before(prompt, depth)) if tail.tokens <= left]
        found += [tail for tail in tails if prompt.tail(depth, tail.tokens) == tail.key]
        if column := home.columns.get(key):
            found.append(column)
    return found
