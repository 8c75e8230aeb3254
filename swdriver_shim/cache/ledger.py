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

`stock` has what is held, and `slots` keep it safe while it is used. Beyond memory lies tier 2:
`spilling` says what is copied there, `recalling` and `restoring` what comes back, `forgetting` what has
to go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from msgspec.structs import replace

from swdriver_shim.cache.matching import Look, Match, columns_of
from swdriver_shim.cache.missing import tell
from swdriver_shim.cache.prefix_map import Account, Column, PrefixMap, State
from swdriver_shim.cache.reasons import GHOSTS_MAX, Reason
from swdriver_shim.cache.recalling import Recall, Recalling
from swdriver_shim.cache.removal import Removal
from swdriver_shim.cache.restoring import Restoring
from swdriver_shim.cache.reuse.sample import Sample
from swdriver_shim.cache.room import Room
from swdriver_shim.cache.slots import Use
from swdriver_shim.cache.spilling import Spill, Spilling
from swdriver_shim.cache.stock import NAMESPACES_MAX, Stock
from swdriver_shim.cache.storing import Store, Storing
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, DisplacementName, OrgPolicies, Rules

SLICE: Final = 500  # columns that are looked at in one piece of long work: below a millisecond


class Ledger:
    def __init__(self, layout: Layout, model: str = "", *, ghosts_max: int = GHOSTS_MAX) -> None:
        self.stock = Stock(layout, model, ghosts_max)
        self.slots = self.stock.slots
        self.spilling = Spilling(self.stock)
        self._room = Room(self.stock, self.spilling)
        self._storing = Storing(self.stock, self._room, self.spilling)
        self.recalling = Recalling(self.stock, self._room, self.spilling)
        self.restoring = Restoring(self.stock)
        self.forgetting = self.stock.forgetting

    # Intent

    def set_policies(
        self, policies: Mapping[str, OrgPolicies], now: float, tags: Mapping[str, bytes] | None = None
    ) -> None:
        """All orgs' policies, for what is stored already, too. Who is not in it has the usual one.

        `tags`: the isolation tags of orgs, so that policies reach what lies in tier 2 of those that have
        not been seen yet.
        """
        self.stock.set_policies(policies, now, tags or {})
        for account in self.stock.accounts.values():
            self.spilling.grown(account)

    def set_line(self, group: int, slots: int) -> None:
        """So many slots may be used. What lies above them is gone: agents have given the memory back."""
        shrinks = slots < self.slots.pools[group].line
        self.slots.pools[group].set_line(slots)
        if shrinks:
            for account in self.stock.accounts.values():
                for column in [one for one in account.columns(group) if one.slot >= slots]:
                    self.stock.remove(column, Reason.DISPLACED)

    # Match

    def match(self, prompt: Prompt, now: float) -> Match:
        """The longest prefix of the prompt that every group can give back. `release` has to follow.

        Its tokens are counted as asked for, and as hit or missed, each with its reason.
        """
        account = self.stock.account(prompt.org)
        match = self._find(account, prompt, 0, now)
        match.at_first = match.tokens
        account.tally.requests += 1
        account.tally.requested += prompt.tokens
        match.count(account.tally)
        account.recorder.matched(match.keys, match.tokens, account.tally, now)
        for hit in match.columns:
            account.stamp(hit, now)
            self.spilling.used(account, hit)
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
        account = self.stock.account(match.prompt.org)
        match.count(account.tally, -1)
        found = match.replaced_by = self._find(account, match.prompt, had, now)
        found.at_first = min(match.at_first, max(found.tokens, had))
        account.tally.requested += found.asked - match.asked
        found.count(account.tally)
        before = {id(column) for hit in match.columns for column in hit}
        for hit in found.columns:
            if more := [column for column in hit if id(column) not in before]:
                account.stamp(more, now)
        self.slots.begin(found, now)
        return found

    def _find(self, account: Account, prompt: Prompt, had: int, now: float) -> Match:
        look = Look(self.stock, prompt, now)
        columns, tokens = look.agree(prompt)
        slots = tuple([column.slot for column in hit] for hit in columns)
        match = Match(prompt, prompt.tokens, list(prompt.keys), tokens, columns, slots, had)
        if not max(tokens, had) and _is_elsewhere(account, prompt):
            match.missed[Reason.OTHER_NAMESPACE] = prompt.tokens
        elif max(tokens, had) < prompt.tokens:
            tell(self.stock, match, look.paths, now)
            match.coming = look.coming(tokens // COLUMN_TOKENS)
        return match

    def recount(self, match: Match, now: float) -> None:
        """There is more to know about why its tokens were missed. The prompt may be gone on with: all
        of it that is looked at is in the match."""
        if match.is_counted and Reason.OTHER_NAMESPACE not in match.missed:
            tally = self.stock.account(match.prompt.org).tally
            match.count(tally, -1)
            tell(self.stock, match, Look(self.stock, match.trail, now).paths, now)
            match.count(tally)
            if match.noted:
                known, match.noted = match.noted, match.remembered(match.noted.at)
                self.stock.requests.renew(known, match.noted)

    def release(self, match: Match) -> None:
        """Nobody reads those slots any more."""
        self.slots.end(match)

    def remember(self, match: Match, now: float) -> None:
        """It is over, and people may ask what became of it. Without a name nobody could."""
        if match.prompt.request:
            match.noted = match.remembered(now)
            self.stock.requests.note(match.noted)

    def shorten(self, match: Match, tokens: int, reason: Reason) -> None:
        """Only so many tokens could be used after all: the others are missed, for this reason."""
        tally, lost = self.stock.account(match.prompt.org).tally, match.tokens - tokens
        if lost > 0:
            match.count(tally, -1)
            left = max(match.tokens, match.had) - max(tokens, match.had)
            match.tokens = tokens
            match.settled[reason] += left
            match.missed[reason] += left
            match.at_first = min(match.at_first, max(tokens, match.had))
            match.count(tally)

    def query(self, prompt: Prompt, now: float) -> int:
        """How many tokens `match` would give. Changes nothing, and counts nothing."""
        return Look(self.stock, prompt, now).agree(prompt)[1]

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
        return self._storing.begin(prompt, verified, now, rules, first)

    def finish_store(
        self, store: Store, now: float, failed: Mapping[Column, Reason] | None = None
    ) -> None:
        """The columns are in their slots on every agent, but for those that failed."""
        self._storing.finish(store, now, failed)

    # Verbs

    def delete(self, prompt: Prompt, *, shared: bool = False) -> Removal:
        """Remove a prompt's columns from its end on, up to the first that others go on from; with
        `shared` all of them."""
        removal, pins = Removal(Reason.DELETED), Counter(self.slots.pins())
        for home in self.stock.maps_of(prompt.maker):
            for column in reversed(columns_of(home, prompt)):
                if not shared and column.holds > pins[column]:
                    break
                if column.state is not State.EMPTY:
                    self.stock.remove(column, Reason.DELETED, removal)
            self.forgetting.forget(home, _behind(home, prompt), removal)
        return removal

    def set_priority(self, prompt: Prompt, priority: int, now: float) -> int:
        """Of what is stored of this prompt; how many columns that is."""
        account, columns = self.stock.account(prompt.org), self._stored(prompt)
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
                self.stock.agenda.schedule(column)
        for home in self.stock.maps_of(prompt.maker):
            self.forgetting.forget(home, prompt.keys)  # where nothing can be noted of it
        return len(columns)

    def set_displacement(self, org: str, name: DisplacementName, now: float) -> None:
        """Use another displacement policy, also for stored columns, until policies are set again."""
        account = self.stock.account(org)
        account.set_policy(replace(account.policy, displacement=name), now)

    def purge(self, org: str, namespace: Namespace | None = None, tag: bytes | None = None) -> Removal:
        """Nothing of this org, or of it in one namespace, is found from here on; `reclaim` does the
        rest.

        In tier 2 it is always all of the org that goes. `tag`: its isolation tag, if none of its prompts
        may have been here yet.
        """
        return self.stock.purge(self.stock.account(org), namespace, tag)

    def purge_tag(self, org: str, tag: bytes) -> Removal:
        """As `purge`, of what carries this tag: the org has another one by now, or is gone."""
        return self.stock.purge_tag(self.stock.account(org), tag)

    def is_current(self, maker: Keys) -> bool:
        """Whether its org still has the secret that its keys were made with."""
        account = self.stock.accounts.get(maker.org)
        known = account.makers.get(maker.namespace) if account else None
        return known is not None and known.tag == maker.tag

    def _stored(self, prompt: Prompt) -> list[Column]:
        there = [
            column for home in self.stock.maps_of(prompt.maker) for column in columns_of(home, prompt)
        ]
        return [column for column in there if column.state is not State.EMPTY]

    # Long work, in pieces

    def sweep(self, now: float, columns: int = SLICE) -> bool:
        """Remove what has expired and end what is taken for dead, looking at about so many columns;
        whether there is more to do."""
        for use in self.slots.overdue(now):
            self._give_up(use, now)
        agenda = self.stock.agenda
        columns -= agenda.catch_up(columns)
        due = agenda.take(now, columns)
        for column in due:
            self.stock.look_at(column, now)
        columns -= len(due)
        columns -= self._room.enforce_quotas(columns, now)
        return columns <= 0 or agenda.is_behind

    def reclaim(self, columns: int = SLICE) -> bool:
        """Take apart what was purged or lost, about so many columns; whether there is more to do."""
        columns -= self.stock.take_apart(columns)
        is_restoring = self.restoring.go_on(columns)
        return self.stock.is_taking_apart or is_restoring

    def _give_up(self, use: Use, now: float) -> None:
        match use:
            case Store():
                self.finish_store(use, now, {column: Reason.AGENT_LOST for column, _ in use.places})
            case Recall():
                self.recalling.finish(use, now, {})
            case Spill():
                self.spilling.finish(use, [])
            case _:
                self.slots.end(use)

    # For previews, and tests

    def reuse(self, org: str, now: float) -> Sample | None:
        """How this org's columns come back, as far as is known: what other policies are tried on. None
        for one that has never been here. Any thread may ask."""
        account = self.stock.accounts.get(org)
        if account is None:
            return None
        recorder = account.recorder
        log = recorder.log  # before its share, which may become smaller meanwhile
        column_bytes = sum(group.column_bytes for group in self.stock.layout.groups)
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
        self.stock.check_integrity()


def _is_elsewhere(account: Account, prompt: Prompt) -> bool:
    """In one of its namespaces that are the newest: each costs a hash."""
    here = prompt.maker.namespace
    return any(
        prompt.begins_as(account.makers[namespace]) in maps[0].columns
        for namespace, maps in islice(reversed(account.maps.items()), NAMESPACES_MAX)
        if namespace != here
    )


def _behind(home: PrefixMap, prompt: Prompt) -> list[bytes]:
    """The keys of the prompt's whole columns behind the last one that is still here."""
    here = [column is not None and column.state is not State.EMPTY for column in home.find(prompt.keys)]
    return prompt.keys[len(here) - here[::-1].index(True) if True in here else 0 :]
