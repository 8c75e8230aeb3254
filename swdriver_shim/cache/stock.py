"""What is held of whom: columns come into slots, and go; with them whatever is known of them.

Everything else in `cache` decides what to hold. Here it is carried out, so that slots, queues, the
sweeper's agenda, ghosts and tier 2 stay in step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

from swdriver_shim.cache.agenda import Agenda
from swdriver_shim.cache.displacement import DisplacementPolicy
from swdriver_shim.cache.forgetting import Forgetting
from swdriver_shim.cache.prefix_map import NO_SLOT, Account, Column, PrefixMap, State
from swdriver_shim.cache.reasons import GHOSTS_MAX, Ghosts, Reason
from swdriver_shim.cache.remembered import Requests
from swdriver_shim.cache.removal import Removal
from swdriver_shim.cache.rounds import Rounds
from swdriver_shim.cache.slots import Freed, Slots, prune
from swdriver_shim.cache.trails import Trails
from swdriver_shim.keys import Keys, Namespace
from swdriver_shim.layout import Layout
from swdriver_shim.policy import OrgPolicies, Policy, Tiers

SWEPT_SECONDS: Final = 5.0  # after its time a column is gone, where the sweeper comes each second
TAKEN_APART: Final = 256  # columns of one org in a row
NAMESPACES_MAX: Final = 64  # of one org that are kept without columns, and looked into for a reason
_CLEARED: Final = frozenset({Reason.EXPIRED, Reason.PURGED, Reason.DELETED})


class Watch(Protocol):
    """Whoever wants to hear what can be served, as it comes and goes."""

    def arrived(self, column: Column) -> None: ...
    def gone(self, column: Column) -> None: ...


@dataclass(slots=True)
class Overstay:
    """How long bytes lay here beyond their time, never served. Until agents were told to empty them."""

    columns: int = 0  # that the sweeper came late for
    seconds_max: float = 0.0


class Stock:
    def __init__(self, layout: Layout, model: str = "", ghosts_max: int = GHOSTS_MAX) -> None:
        self.layout = layout
        self.model = model
        self.accounts: dict[str, Account] = {}
        self.slots = Slots(len(layout.groups))
        self.agenda = Agenda()
        self.forgetting = Forgetting(self.slots)
        self.ghosts = Ghosts(ghosts_max)
        self.trails = Trails()
        self.requests = Requests()
        self.overstay = Overstay()
        self.reachable = True  # while an agent is lost, nothing can be served, and nothing need go
        self.watch: Watch | None = None
        self.orgs_with_keys: Collection[str] = ()  # whose columns can be encrypted in tier 2
        self.slow_orgs: set[str] = set()  # whose slots are not free at once: they are copied or scrubbed
        self._policies: Mapping[str, OrgPolicies] = {}
        self._purged: Rounds[tuple[PrefixMap, Removal]] = Rounds()

    # Orgs

    def account(self, org: str) -> Account:
        found = self.accounts.get(org)
        if found is None:
            found = self.accounts[org] = Account(org, len(self.layout.groups))
            found.set_policy(self._policy(org), 0)
            self._policy_changed(found, Policy())
        return found

    def set_policies(
        self, policies: Mapping[str, OrgPolicies], now: float, tags: Mapping[str, bytes]
    ) -> None:
        before_that, self._policies = self._policies, policies
        for org in tags.keys() - self.accounts.keys():
            before = before_that.get(org, OrgPolicies()).of(self.model)
            if before.tiers is Tiers.TIER2:
                self._policy_changed(self.account(org), before, tags[org])
        for account in self.accounts.values():
            before = account.policy
            account.set_policy(self._policy(account.org), now)
            self._policy_changed(account, before, tags.get(account.org))
            if account.policy != before:
                for group in range(len(self.layout.groups)):
                    self.agenda.schedule_anew(account.columns(group))

    def _policy(self, org: str) -> Policy:
        return self._policies.get(org, OrgPolicies()).of(self.model)

    def _policy_changed(self, account: Account, before: Policy, tag: bytes | None = None) -> None:
        """What lies in tier 2 and may not any more has to go."""
        now = account.policy
        was_there, is_there = before.tiers is Tiers.TIER2, now.tiers is Tiers.TIER2
        (self.slow_orgs.add if is_there or now.scrub else self.slow_orgs.discard)(account.org)
        if was_there and (not is_there or before.encrypt_tier2 is not now.encrypt_tier2):
            self._purge_tier2(account, _tags(account, tag), Removal(Reason.PURGED))

    def maps_of(self, maker: Keys) -> list[PrefixMap]:
        """The maps of its org in its namespace, one for each group."""
        account = self.account(maker.org)
        found = account.maps.get(maker.namespace)
        if found is not None and account.makers[maker.namespace].tag != maker.tag:
            self.purge(account, maker.namespace)  # its secret is another one now
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

    def tags(self, org: str, tag: bytes | None = None) -> set[bytes]:
        """All that columns of this org carry or have carried since the start, as far as is known; one of
        them may be known from elsewhere."""
        account = self.accounts.get(org)
        if account is None:
            return {tag} if tag else set()
        return _tags(account, tag) | self.forgetting.purged_tags(account)

    def may_use_tier2(self, account: Account) -> bool:
        policy = account.policy
        return (
            policy.tiers is Tiers.TIER2
            and (not policy.encrypt_tier2 or account.org in self.orgs_with_keys)
            and not self.forgetting.is_closed(account)
            and self.reachable
        )

    # Columns

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
        ready, forget, agenda = State.READY, self.ghosts.forget if self.ghosts else None, self.agenda
        leftovers = [self.slots.has_leftovers(group) for group in range(len(self.layout.groups))]
        queues: dict[tuple[int, int], DisplacementPolicy[Column]] = {}
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
                second = seconds[age] = agenda.second(column)
            agenda.put(column, second)
            if self.watch:
                self.watch.arrived(column)

    def look_at(self, column: Column, now: float) -> None:
        """Its time has come: remove it if it has expired."""
        if column.state is not State.READY:
            return  # it is coming back
        expires_at, account = column.expires_at, column.home.account
        if now < expires_at:
            self.agenda.schedule(column)
            return
        # What ran out before anybody could know, in a pause or by a shorter TTL, was not left lying.
        overstay, expired = now - max(expires_at, account.held_since), account.expired
        self.overstay.columns += overstay > SWEPT_SECONDS
        self.overstay.seconds_max = max(self.overstay.seconds_max, overstay)
        expired.overstay_seconds_max = max(expired.overstay_seconds_max, overstay)
        self.remove(column, Reason.EXPIRED)

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
                self.forgetting.forget(home, [column.key], removal, has_expired=True)
        freed = Freed(home, self.vacate(column), removal, reason in _CLEARED)
        if removal:
            removal.columns += 1
            removal.bytes += home.column_bytes
            removal.waiting += 1
        self.slots.free(freed, idle=idle)
        if not home.purged_by:  # of which nothing stays
            prune(column)

    def withdraw(self, column: Column) -> None:
        """It could be served, and can't any more."""
        column.home.account.queue(column).removed(column)
        column.mark = None
        if self.watch:
            self.watch.gone(column)

    def vacate(self, column: Column) -> int:
        """Take its slot out of a column."""
        if column.state is State.READY:
            self.withdraw(column)
        self.agenda.put(column, 0)
        column.state = State.EMPTY
        slot, column.slot = column.slot, NO_SLOT
        home = column.home
        home.account.bytes -= home.column_bytes
        home.account.group_bytes[home.group] -= home.column_bytes
        return slot

    # All of an org

    def purge(
        self, account: Account, namespace: Namespace | None = None, tag: bytes | None = None
    ) -> Removal:
        """None of its columns is found from here on; `take_apart` does the rest. `tag`: the org's."""
        removal = Removal(Reason.PURGED)

        def is_meant(home: PrefixMap) -> bool:
            return home.account is account and namespace in (None, home.namespace)

        account.recorder.forget()
        self.requests.forget(account.org)
        removal.before = [before for home, before in self._purged if is_meant(home)]
        for one in [namespace] if namespace else list(account.maps):
            self._give_up(account, one, removal)
        self.slots.remove_rest(removal, is_meant)
        self._purge_tier2(account, _tags(account, tag), removal)
        return removal

    def purge_tag(self, account: Account, tag: bytes) -> Removal:
        """As `purge`, of what carries this tag only: its org may have another one by now."""
        removal = Removal(Reason.PURGED)
        removal.before = [before for home, before in self._purged if home.account is account]
        account.recorder.forget()
        self.requests.forget(account.org)
        for namespace in [one for one in account.maps if account.makers[one].tag == tag]:
            self._give_up(account, namespace, removal)
        self.slots.remove_rest(removal, lambda home: home.account is account)
        self._purge_tier2(account, {tag}, removal)
        return removal

    def _give_up(self, account: Account, namespace: Namespace, removal: Removal) -> None:
        for purged in account.maps.pop(namespace, ()):
            purged.purged_by = removal
            account.purged.append(purged)
            self._purged.put(account.org, (purged, removal))
            removal.waiting += 1

    def take_apart(self, most: int) -> int:
        """What was purged; how many columns were looked at."""
        left = most
        while left > 0 and (taken := self._purged.take(1)):
            home, removal = taken[0]
            for _ in range(min(left, TAKEN_APART, len(home.columns))):
                left -= 1
                _, column = home.columns.popitem()
                if column.state is not State.EMPTY:
                    self.remove(column, Reason.PURGED)
            if home.columns:
                self._purged.put_back(home.account.org, taken[0])
            else:
                home.account.purged.remove(home)
                removal.waiting -= 1
        return most - left

    @property
    def is_taking_apart(self) -> bool:
        return bool(self._purged)

    def purge_again(self) -> None:
        """A shard has another home, which may be one that it had before, with files of that time."""
        for account, tags in self.forgetting.forget_again().items():
            self._purge_tier2(account, tags, Removal(Reason.PURGED))

    def _purge_tier2(self, account: Account, tags: Collection[bytes], removal: Removal) -> None:
        """Always all of the org: a purge of one namespace is one of all of them there."""
        if not tags:
            return  # it has never had anything
        self.forgetting.purge(account, tags, removal)
        self.trails.forget(account.org)
        for home in chain.from_iterable(account.maps.values()):
            for column in home.columns.values():
                column.kept_at = None

    def check_integrity(self) -> None:
        """Raise RuntimeError if anything here contradicts itself."""
        pins = Counter(self.slots.pins())
        taken: list[tuple[int, int]] = []
        for account in self.accounts.values():
            account.check_integrity()
            for one in chain.from_iterable(account.maps.values()):
                one.check_integrity(pins)
            for one in chain(*account.maps.values(), account.purged):
                taken += [
                    (one.group, each.slot) for each in one.columns.values() if each.slot != NO_SLOT
                ]
        self.slots.check_integrity(taken)
        slow = {
            org
            for org, account in self.accounts.items()
            if account.policy.tiers is Tiers.TIER2 or account.policy.scrub
        }
        if self.slow_orgs != slow:
            raise RuntimeError("it is known whose slots are not free at once")


def _tags(account: Account, tag: bytes | None) -> set[bytes]:
    """All that its columns may carry; one of them may be known from elsewhere."""
    return {maker.tag for maker in account.makers.values()} | ({tag} if tag else set())
