"""The columns that are stored: they take slots and give them up, and everything known of them follows.

The other modules of `cache` decide. This one carries out, so that slots, displacement queues, the expiry
schedule, the reasons of misses and tier 2 stay in step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Final, NamedTuple

from msgspec.structs import replace

from swdriver_shim import loops
from swdriver_shim.cache.expiry import ExpirySchedule
from swdriver_shim.cache.fair_queue import FairQueue
from swdriver_shim.cache.listener import Listener
from swdriver_shim.cache.overstay import SWEPT_SECONDS, Overstay
from swdriver_shim.cache.prefix_map import (
    NO_SLOT,
    Account,
    Column,
    PrefixMap,
    State,
    Terms,
)
from swdriver_shim.cache.purge_dates import NEVER_YET, PurgeDates
from swdriver_shim.cache.reasons import GHOSTS_MIN, Ghosts, NoSpill, Reason, Removal
from swdriver_shim.cache.request_log import Conversations, RequestLog
from swdriver_shim.cache.slots import Freed, Slots, prune
from swdriver_shim.cache.tier2_deletes import Tier2Deletes
from swdriver_shim.cache.trails import Trails
from swdriver_shim.cache.victims import Ranking, Victims
from swdriver_shim.keys import Keys, Namespace
from swdriver_shim.layout import Layout
from swdriver_shim.policy import DisplacementName, OrgPolicies, Policy, Tier2Rule, Tiers

BORROWED_MAX: Final = 1 << 16  # columns that nobody has used yet
PURGED_AT_ONCE: Final = 256  # columns of one org
IDLE_SECONDS: Final = 120.0  # before an org that is not served is dropped: its metrics are read first
NAMESPACES_MAX: Final = 64  # of an org that are kept without columns, and searched for a reason
_SCHEDULED_BY: Final = ("map", "terms", "stored_at", "used_at")
_IS_SCHEDULED_BY: Final = attrgetter(*_SCHEDULED_BY)
_CLEARED: Final = frozenset(
    {Reason.EXPIRED, Reason.PREFIX_ONLY, Reason.NO_STORE, Reason.PURGED, Reason.DELETED}
)


class _Idle(NamedTuple):
    """Since when an org was seen without anything, and what there had been until then."""

    since: float
    last_use: int
    requests: int


@dataclass(slots=True)
class _Dropped:
    """What counts of orgs that were dropped, if they return."""

    # A search in tier 2 or at a sibling that began before must not find as many as there are now.
    removals: int = 0
    purges: dict[str, PurgeDates] = field(default_factory=dict)  # a sibling may have what was purged


class Stock:
    def __init__(self, layout: Layout, model: str = "", ghosts_min: int = GHOSTS_MIN) -> None:
        self.layout = layout
        self.model = model
        self.accounts: dict[str, Account] = {}
        self.limited: dict[str, Account] = {}  # those with a quota
        self._changing_over: dict[str, Account] = {}  # to another displacement policy
        self.rankings = [Ranking(group) for group in range(len(layout.groups))]
        self.slots = Slots(len(layout.groups))
        self.expiry = ExpirySchedule()
        self.listeners: list[Listener] = []
        self.deletes = Tier2Deletes(self.slots, self.listeners)
        self.ghosts = Ghosts(ghosts_min)
        self.conversations = Conversations()
        self.requests = RequestLog()
        self.overstay = Overstay()
        self.is_reachable = True  # while an agent is lost nothing is served, and nothing has to go
        self.orgs_with_keys: Collection[str] = ()  # whose columns can be encrypted in tier 2
        self.borrowing: set[Column] = set()  # on their way from a sibling
        self.borrowed: OrderedDict[bytes, None] = OrderedDict()  # keys, until their first hit
        self.trails = Trails()
        self.slow_orgs: set[str] = set()  # whose slots are copied or scrubbed before they are free
        self._policies: Mapping[str, OrgPolicies] = {}
        self._served_tags: Mapping[str, bytes] | None = None  # by org; None: all are served
        self.ttl_seconds_max = _ttl(Policy())  # of the policies
        self._last_number = 0  # of accounts
        # Orgs that are not served, until they are dropped; None: not looked at yet.
        self._leaving: dict[str, _Idle | None] = {}
        self._dropped = _Dropped()
        # Whose columns have to forget their copies in tier 2, before others are made.
        self._forgetting: dict[Account, Iterator[list[Column]]] = {}
        self.on_drop: list[Callable[[str], object]] = []  # called with the org, under the lock
        self._purged: FairQueue[tuple[PrefixMap, Removal]] = FairQueue()

    # Orgs

    def account(self, org: str) -> Account:
        found = self.accounts.get(org)
        if found is None:
            self._last_number += 1
            found = self.accounts[org] = Account(org, len(self.layout.groups), self._last_number)
            found.removals = self._dropped.removals
            found.purges = self._dropped.purges.pop(org, found.purges)
            if not self._is_served(org):
                self._leaving[org] = None
            found.set_policy(self._policy(org), 0)
            self._policy_changed(found, Policy())
            if found.policy.dram_bytes_max is not None:
                self.limited[org] = found
        return found

    def set_policies(
        self, policies: Mapping[str, OrgPolicies], now: float, served_tags: Mapping[str, bytes] | None
    ) -> None:
        earlier, self._policies = self._policies, policies
        self.ttl_seconds_max = max(map(_ttl, [Policy(), *map(self._policy, policies)]))
        self._served_tags, tags = served_tags, served_tags or {}
        for org in tags.keys() - self.accounts.keys():
            before = earlier.get(org, OrgPolicies()).of(self.model)
            if before.tiers is Tiers.TIER2:
                self._policy_changed(self.account(org), before, tags[org], now)
        for account in self.accounts.values():
            before = account.policy
            self._set_policy(account, self._policy(account.org), now)
            self._policy_changed(account, before, tags.get(account.org), now)
            if replace(account.policy, displacement=before.displacement) != before:
                for listener in self.listeners:
                    listener.policy_changed(account)
                for group, ranking in enumerate(self.rankings):
                    ranking.note(account)
                    self.expiry.reschedule(account.pieces(group))
        self.limited = {
            org: account
            for org, account in self.accounts.items()
            if account.policy.dram_bytes_max is not None
        }
        self._leaving = {
            org: self._leaving.get(org) for org in self.accounts if not self._is_served(org)
        }

    def set_displacement(self, org: str, name: DisplacementName, now: float) -> None:
        account = self.account(org)
        self._set_policy(account, replace(account.policy, displacement=name), now)

    def _set_policy(self, account: Account, policy: Policy, now: float) -> None:
        account.set_policy(policy, now)
        if account.is_changing_over:
            self._changing_over[account.org] = account

    def change_over(self, most: int, now: float) -> bool:
        """Move about so many columns of an org to its new displacement policy. Whether there are
        more."""
        if self._changing_over:
            org, account = next(iter(self._changing_over.items()))
            account.change_over(most, now)
            if not account.is_changing_over:
                del self._changing_over[org]
        return bool(self._changing_over)

    def _is_served(self, org: str) -> bool:
        return self._served_tags is None or org in self._served_tags

    def drop_orgs(self, now: float, most: int) -> None:
        """Drop orgs that are not served any more and have been without columns, purges and uses for
        some time. Looks at up to so many."""
        for org in list(islice(self._leaving, most)):
            idle, account = self._leaving.pop(org), self.accounts[org]
            if idle is None or idle.requests != account.tally.requests or not self._is_empty(account):
                idle = _Idle(now, self.slots.last_use, account.tally.requests)
            elif now >= idle.since + IDLE_SECONDS and self.slots.have_ended(idle.last_use):
                self._drop(account)
                continue
            self._leaving[org] = idle  # behind all others

    def _is_empty(self, account: Account) -> bool:
        """Whether all that the org had in memory and in tier 2 is purged, or it never had anything."""
        is_purged = account.purge.done if account.purge else not account.makers
        return is_purged and not self.deletes.is_purging(account)

    def _drop(self, account: Account) -> None:
        """What it counted ends with it."""
        del self.accounts[account.org]
        self.limited.pop(account.org, None)
        self._changing_over.pop(account.org, None)
        self._forgetting.pop(account, None)
        self.slow_orgs.discard(account.org)
        for ranking in self.rankings:
            ranking.drop(account)
        self._dropped.removals = max(self._dropped.removals, account.removals + 1)
        if account.purges:
            self._dropped.purges[account.org] = account.purges
        for call in self.on_drop:
            call(account.org)

    def _policy(self, org: str) -> Policy:
        return self._policies.get(org, OrgPolicies()).of(self.model)

    def _policy_changed(
        self, account: Account, before: Policy, tag: bytes | None = None, now: float = NEVER_YET
    ) -> None:
        """Purge tier 2 of the org if the new policy does not allow what is there."""
        policy = account.policy
        was_there, is_there = before.tiers is Tiers.TIER2, policy.tiers is Tiers.TIER2
        (self.slow_orgs.add if is_there or policy.scrub else self.slow_orgs.discard)(account.org)
        is_other = before.encrypt_tier2 is not policy.encrypt_tier2 or _is_shorter(policy, before)
        if was_there and (not is_there or is_other):
            account.tier2_purges.note(now)
            self._purge_tier2(account, _tags(account, tag), Removal(Reason.PURGED))

    def grown(self, account: Account, group: int, size: int) -> None:
        """The org has so many bytes more in this group."""
        account.bytes += size
        account.group_bytes[group] += size
        account.purge = None
        self.rankings[group].note(account)

    def victims(self, group: int, storing: Account | None = None, more: int = 0) -> Victims:
        """The columns of a group to displace. `more`: how many bytes the storing org is about to have
        in addition."""
        return Victims(self.rankings[group], group, storing, more)

    def maps_of(self, maker: Keys) -> list[PrefixMap]:
        """The maps of its org in its namespace, one for each group; empty ones, which nobody else finds,
        for keys of a secret that the org has no more: a request may have been waiting since."""
        account = self.account(maker.org)
        found = account.maps.get(maker.namespace)
        if found is not None and account.makers[maker.namespace].tag == maker.tag:
            return found
        fresh = [
            PrefixMap(account, maker.namespace, index, group.column_bytes, group.linked)
            for index, group in enumerate(self.layout.groups)
        ]
        if self._served_tags is not None and self._served_tags.get(maker.org) != maker.tag:
            return fresh
        if found is not None:
            self.purge(account, maker.namespace)  # the org has another secret now
        if len(account.makers) >= NAMESPACES_MAX:
            account.drop_empty_maps()
        account.maps[maker.namespace], account.makers[maker.namespace] = fresh, maker
        return fresh

    def tags(self, org: str, tag: bytes | None = None) -> set[bytes]:
        """All tags that columns of the org carry, or carried since the start, as far as is known. `tag`:
        one that the caller knows."""
        account, own = self.accounts.get(org), {tag} if tag else set()
        if account is not None:
            own = _tags(account, tag)
        return own | self.deletes.purged_tags(org)

    def may_use_tier2(self, account: Account) -> bool:
        return (
            self._no_tier2(account) is None
            and not self.deletes.is_purging(account)
            and account not in self._forgetting
            and self.is_reachable
        )

    def why_no_spill(self, column: Column) -> NoSpill | None:
        """Why the column is not copied to tier 2, by the policy, its request or itself; None if it may
        be."""
        account, rule = column.map.account, column.tier2_rule
        if no_tier2 := self._no_tier2(account):
            return no_tier2
        if rule is Tier2Rule.NEVER:
            return NoSpill.REQUEST
        if rule is Tier2Rule.ENCRYPTED and not account.policy.encrypt_tier2:
            return NoSpill.NOT_ENCRYPTED
        if column.ttl is not None:
            return NoSpill.OWN_TTL
        return NoSpill.TAIL if column.tail else None

    def _no_tier2(self, account: Account) -> NoSpill | None:
        if account.policy.tiers is not Tiers.TIER2:
            return NoSpill.POLICY
        if account.policy.encrypt_tier2 and account.org not in self.orgs_with_keys:
            return NoSpill.NO_DATA_KEY
        return None

    # Columns

    def note_borrowed(self, column: Column) -> None:
        """Its first hit is one in a sibling's memory."""
        self.borrowed[column.key] = None
        if len(self.borrowed) > BORROWED_MAX:
            self.borrowed.popitem(last=False)

    def take_borrowed(self, columns: Sequence[Column]) -> int:
        """How many tokens of these were borrowed, and hit for the first time now."""
        if not self.borrowed:
            return 0
        taken = [column for column in columns if column.key in self.borrowed]
        for column in taken:
            del self.borrowed[column.key]
        return sum(column.tokens for column in taken)

    def occupy(self, column: Column, slot: int, state: State, terms: Terms) -> None:
        """Give the column this slot, on these terms. Its bytes are on their way there."""
        owner = column.map
        account, size = owner.account, owner.column_bytes
        column.state, column.slot, column.terms, column.uses = state, slot, terms, 0
        self.grown(account, owner.group, size)

    def arrived(self, columns: Sequence[Column], now: float) -> None:
        """The bytes of these columns of one org are in their slots, on all agents."""
        values_of = loops.current.values_of
        for alike in _scheduled_together(columns):
            loops.current.put(alike, "state", State.READY)
            owner = alike[0].map
            self.slots.overwritten(owner.group, values_of(alike, "slot"))
            if len(self.layout.groups) > 1:  # a group that lacks the column asks why, by the same key
                self.ghosts.forget(values_of(alike, "key"))
            owner.account.queue(alike[0]).stored_all(alike, now)
            if owner.account.policy.columns_max is None:
                self.expiry.put_all(alike, self.expiry.second(alike[0]))
            else:  # some may be beyond it by now
                for column in alike:
                    self.expiry.schedule(column)
        if columns:
            for listener in self.listeners:
                listener.arrived(columns)

    def check_expiry(self, column: Column, now: float) -> None:
        """Remove the column if it has expired; else schedule it again."""
        if column.state is not State.READY:
            return  # it is being restored
        expires_at, account = column.expires_at, column.map.account
        if now < expires_at:
            self.expiry.schedule(column)
            return
        # What expired before the driver could know, in a pause or by a shorter TTL, is no overstay.
        overstay, expired = now - max(expires_at, account.ttl_since), account.expired
        self.overstay.columns += overstay > SWEPT_SECONDS
        self.overstay.seconds_max = max(self.overstay.seconds_max, overstay)
        expired.overstay_seconds_max = max(expired.overstay_seconds_max, overstay)
        self.remove(column, column.not_stored_for or Reason.EXPIRED)

    def remove(
        self,
        column: Column,
        reason: Reason,
        removal: Removal | None = None,
        *,
        idle: bool = False,
        displaced_at: float | None = None,
    ) -> None:
        """Take the column's slot. Columns behind it stay, and can be served once it is stored again.

        `idle`: nobody is using the slot. `displaced_at`: when it is displaced, as its policy's victim.
        """
        owner = column.map
        removal = removal or owner.purged_by
        self.ghosts.add(column.key, reason)
        if reason is Reason.EXPIRED:
            owner.account.expired.dram += 1
            if column.tier2_used_at is not None and owner.account not in self._forgetting:
                owner.account.expired.tier2 += 1
                self.deletes.delete(owner, [column.key], removal, has_expired=True)
        freed = Freed(owner, self.vacate(column, displaced_at), removal, reason in _CLEARED)
        if removal:
            removal.columns += 1
            removal.bytes += owner.column_bytes
            removal.pending += 1
        key, is_tail = column.key, column.tail  # asked once: there may be many deletes
        for one, keys in owner.deletes.items():  # those that are about this column find it no more
            if one is not removal and (key in keys or is_tail):
                self.slots.include(one, (owner.group, freed.slot))
        self.slots.free(freed, idle=idle)
        if not owner.purged_by:  # a purged map keeps no empty columns
            prune(column)

    def remove_misplaced(self, misplaced: Iterable[Column]) -> None:
        """Remove what was found for a prompt and is not where the prompt has it.

        Brains ask for columns by their keys, in whatever order: what somebody has asked for out of
        order would be loaded to, and stored from, another place of the engine's memory.
        """
        for column in misplaced:
            if column.state is not State.EMPTY:
                self.remove(column, Reason.DISPLACED)
            column.map.detach(column)

    def displace(self, run: list[Column], reason: Reason, now: float) -> list[int]:
        """Take the slots of columns whose `Slots.is_free_at_once`, and return them, for others to have
        now. Each column but the first is the parent of the one before it, and is a leaf once that is
        gone: what a displacement policy has named as `victims`."""
        owner = run[0].map
        account, size = owner.account, len(run) * owner.column_bytes
        do = loops.current
        keys, slots = do.values_of(run, "key"), do.values_of(run, "slot")
        self.ghosts.add_all(keys, reason)
        account.displaced(run, now)
        if account in self._forgetting:
            do.put(run, "tier2_used_at", None)
        for listener in self.listeners:
            listener.removed(run)
        self.expiry.put_all(run, 0)
        if self.borrowed:
            for key in keys:
                self.borrowed.pop(key, None)
        do.put(run, "mark", None)
        do.put(run, "state", State.EMPTY)
        do.put(run, "slot", NO_SLOT)
        account.bytes -= size
        account.group_bytes[owner.group] -= size
        self.slots.hand_over(owner, slots)
        if parent := owner.drop_run(run, keys):
            prune(parent)
        return slots

    def withdraw(self, column: Column, displaced_at: float | None = None) -> None:
        """The column can't be served any more."""
        if displaced_at is None:
            column.map.account.removed(column)
        else:
            column.map.account.displaced([column], displaced_at)
        column.mark = None
        if column.map.account in self._forgetting:
            column.tier2_used_at = None
        for listener in self.listeners:
            listener.removed([column])

    def vacate(self, column: Column, displaced_at: float | None = None) -> int:
        """Empty the column and return its slot, which the caller has to free or fill."""
        if column.state is State.READY:
            self.withdraw(column, displaced_at)
        self.expiry.put(column, 0)
        self.borrowed.pop(column.key, None)
        column.state = State.EMPTY
        slot, column.slot = column.slot, NO_SLOT
        owner = column.map
        owner.account.bytes -= owner.column_bytes
        owner.account.group_bytes[owner.group] -= owner.column_bytes
        return slot

    # All columns of an org

    def purge(
        self, account: Account, namespace: Namespace | None = None, tag: bytes | None = None
    ) -> Removal:
        """Hide all columns of the org, or of one namespace; `remove_purged` does the rest. `tag`: the
        org's, where the caller knows it."""

        def belongs(prefix_map: PrefixMap) -> bool:
            return prefix_map.org == account.org and namespace in (None, prefix_map.namespace)

        namespaces = [namespace] if namespace else list(account.maps)
        return self._purge(account, namespaces, belongs, _tags(account, tag))

    def purge_tag(self, account: Account, tag: bytes) -> Removal:
        """Hide all columns of the org that carry this tag; `remove_purged` does the rest."""
        namespaces = [one for one in account.maps if account.makers[one].tag == tag]
        return self._purge(account, namespaces, lambda one: one.org == account.org, {tag})

    def _purge(
        self,
        account: Account,
        namespaces: Iterable[Namespace],
        belongs: Callable[[PrefixMap], bool],
        tags: Collection[bytes],
    ) -> Removal:
        account.removals += 1
        removal = Removal(Reason.PURGED)
        removal.wait_for(earlier for prefix_map, earlier in self._purged if belongs(prefix_map))
        account.recorder.forget()
        account.turns.clear()
        self.requests.forget(account.org)
        self.trails.forget(account.org)
        for namespace in namespaces:
            maps = account.maps.pop(namespace, [])
            for listener in self.listeners:
                listener.purged(maps)
            for purged in maps:
                purged.purged_by = removal
                account.purged.append(purged)
                self._purged.put(account.org, (purged, removal))
                removal.pending += 1
        account.purge = None if account.maps else removal
        self.slots.clear_leftovers(removal, belongs)
        self._purge_tier2(account, tags, removal)
        return removal

    def remove_purged(self, most: int) -> int:
        """Remove about so many purged columns; returns how many."""
        left = most
        while left > 0 and (taken := self._purged.take(1)):
            prefix_map, removal = taken[0]
            for column in prefix_map.columns.take(min(left, PURGED_AT_ONCE)):
                left -= 1
                if column.state is not State.EMPTY:
                    self.remove(column, Reason.PURGED)
            if prefix_map.columns:
                self._purged.put_back(prefix_map.account.org, taken[0])
            else:
                prefix_map.account.purged.remove(prefix_map)
                removal.pending -= 1
        return most - left

    @property
    def has_purged(self) -> bool:
        """Whether `remove_purged` has more to do."""
        return bool(self._purged)

    def forget_tier2(self) -> bool:
        """Have some columns of an org forget their copies in tier 2, which was purged. Whether there are
        more."""
        if self._forgetting:
            account, pieces = next(iter(self._forgetting.items()))
            piece = next(pieces, None)
            if piece is None:
                del self._forgetting[account]
            else:
                loops.current.put(piece, "tier2_used_at", None)
        return bool(self._forgetting)

    def repeat_tier2_deletes(self) -> None:
        """Delete and purge again whatever was since the start: a shard's new home may have files from an
        earlier stay."""
        for org, tags in self.deletes.repeat(self._dated_tags).items():
            self._purge_tier2(self.account(org), tags, Removal(Reason.PURGED))

    def _dated_tags(self, org: str) -> set[bytes]:
        account = self.accounts.get(org)
        if account is None or not account.tier2_purges:
            return set()
        tags = {maker.tag for maker in account.makers.values()}
        return tags if self._served_tags is None else tags & {self._served_tags.get(org)}

    def _purge_tier2(self, account: Account, tags: Collection[bytes], removal: Removal) -> None:
        """Purge these tags, and assume that no column exists there: tier 2 does not tell namespaces
        apart."""
        if not tags:
            return  # the org has never stored anything
        self.deletes.purge(account, tags, removal)
        self.conversations.forget(account.org)
        self.trails.forget(account.org)
        if any(one.columns for maps in account.maps.values() for one in maps):
            groups = range(len(self.layout.groups))
            self._forgetting[account] = chain.from_iterable(map(account.pieces, groups))


def _scheduled_together(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """The columns in a row that expire by the same policy, terms and dates."""
    some = list(columns)
    if some and loops.current.alike(some, _SCHEDULED_BY):
        yield some  # nearly always
    else:
        yield from (list(its) for _, its in groupby(some, _IS_SCHEDULED_BY))


def _ttl(policy: Policy) -> int:
    """The longest of the policy's, 0 for none."""
    return max(policy.ttl_first_use_seconds or 0, policy.ttl_last_use_seconds or 0)


def _is_shorter(now: Policy, before: Policy) -> bool:
    """Whether the policy stores less of each prompt. Tier 2 can't find columns by their depths."""
    return now.columns_max is not None and (
        before.columns_max is None or now.columns_max < before.columns_max
    )


def _tags(account: Account, tag: bytes | None) -> set[bytes]:
    """The tags that columns of the org may carry now, and one that the caller knows."""
    return {maker.tag for maker in account.makers.values()} | ({tag} if tag else set())
