"""What a cache has promised, and whether it was kept: a model that knows of stores, requests and purges,
and of nothing between them.

Every byte that is stored tells who stored it: content is made from the number of its store, the org, the
namespace, all tokens so far, the group and the shard. So whatever comes back, from wherever it may have
lain meanwhile, is either exactly what one store sent, and then it is known when that was and in whose
name; or it is wrong. A miss is always right.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvss_agent.shard import seal
from swdriver_shim.cache.ledger import ALL_DEPTHS, SLICE, Ledger
from swdriver_shim.cache.lookup import Match
from swdriver_shim.cache.prefix_map import Column, PrefixMap
from swdriver_shim.cache.purge_dates import NEVER_YET
from swdriver_shim.cache.reasons import Reason, Removal
from swdriver_shim.cache.stores import Store
from swdriver_shim.decider.removals import Receipt, Removals
from swdriver_shim.keys import COLUMN_TOKENS, Namespace, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, NEVER, OrgPolicies, Policy, Rules, Tiers

C = COLUMN_TOKENS
_HEAD: Final = struct.Struct("<II")  # of a payload: the number of the store, and the same disguised
_DISGUISE: Final = 2_654_435_761  # so that no flipped bit makes it another number

Name = tuple[int, bytes]  # of a column: its group and key


@dataclass(eq=False)
class Written:
    """One store, as whoever asked for it knows."""

    number: int
    org: str
    namespace: Namespace
    tokens: bytes
    verified: int
    rules: Rules
    begun: int = 0  # at this moment
    stored_at: float | None = None  # not before it is

    def content(self, group: int, shard: int, end: int, size: int) -> bytes:
        """What it sends of the tokens up to `end`."""
        head = _HEAD.pack(self.number, self.number * _DISGUISE % 2**32)
        whose = f"{self.org} {self.namespace} {group} {shard} {end <= self.verified}".encode()
        return head + hashlib.shake_128(head + whose + self.tokens[: 4 * end]).digest(size - len(head))


class Sight(NamedTuple):
    """What a request saw, when it looked."""

    moment: int
    now: float
    policy: Policy


@dataclass(eq=False)
class Ask:
    """A purge; or a removal of these columns only, which lay in these slots."""

    moment: int
    org: str
    namespace: Namespace | None
    removal: Removal
    names: frozenset[bytes] | None = None
    slots: Mapping[tuple[int, int], bytes] = field(default_factory=dict)
    is_of_files: bool = True
    is_confirmed: bool = False  # who asked has a receipt
    ended_at: float = math.inf  # its columns are served no more: of a long prompt not all go at once

    def is_of(self, written: Written, key: bytes) -> bool:
        return (
            written.org == self.org
            and self.namespace in (None, written.namespace)
            and (self.names is None or key in self.names)
            and written.begun < self.moment
        )


class Judge:
    """`moment` counts what happened to the ledger: what came before what."""

    def __init__(self, layout: Layout, seen: Counter[str]) -> None:
        self.layout = layout
        self.seen = seen
        self.moment = 0
        self.written: dict[int, Written] = {}
        self.asks: list[Ask] = []
        self.tags: dict[bytes, str] = {}
        self.policies: dict[str, tuple[int, Policy]] = {}  # and since which moment
        self._storing: dict[int, Written] = {}  # by prompt
        self._sights: dict[int, Sight] = {}  # by prompt, of the last look
        self._used: dict[Name, float] = {}
        self._own: dict[Name, list[tuple[int, float]]] = {}  # seconds to live, and since which moment

    # What is done

    def begins(self, asked: Prompt, verified: int, rules: Rules) -> Written:
        number = len(self.written) + 1
        written = self.written[number] = self._storing[id(asked)] = Written(
            number, asked.org, asked.maker.namespace, asked._raw(0, 4 * asked.tokens), verified, rules
        )
        self.tags[asked.maker.tag] = asked.org
        return written

    def policy(self, org: str) -> Policy:
        return self.policies[org][1] if org in self.policies else Policy()

    # What the ledger was asked and said

    def policies_set(self, policies: Mapping[str, OrgPolicies], model: str) -> None:
        self.moment += 1
        for org, of in policies.items():
            if org not in self.policies or self.policies[org][1] != of.of(model):
                self.policies[org] = self.moment, of.of(model)

    def store_begun(self, asked: Prompt, verified: int, rules: Rules, store: Store) -> None:
        self.moment += 1
        written = self._storing[id(asked)]
        written.begun = self.moment
        policy = self.policy(asked.org)
        if store.places:
            assert not rules.no_store
            assert policy.tiers is not Tiers.NONE
        for group in range(len(self.layout.groups)):
            for key in [*asked.keys[: verified // C], *_tail_of(asked, verified)]:
                seconds = NEVER if rules.ttl_seconds is None else rules.ttl_seconds
                own = self._own.setdefault((group, key), [(0, 0)])
                own.append((self.moment, max(own[-1][1], seconds)))

    def store_finished(
        self, written: Written, store: Store, now: float, failed: Iterable[Column]
    ) -> None:
        self.moment += 1
        if written.stored_at is None:
            written.stored_at = now
        lost = set(failed)
        for column, _ in store.places:
            if column not in lost:
                name = column.group, column.key
                self._used[name] = max(now, self._used.get(name, 0))

    def looked(self, match: Match, now: float, before: Match | None = None) -> None:
        self.moment += 1
        asked = match.prompt
        policy = self.policy(asked.org)
        self._sights[id(asked)] = Sight(self.moment, now, policy)
        assert match.tokens <= asked.tokens
        whole, rest = divmod(match.tokens, C)
        assert not match.tokens or policy.tiers is not Tiers.NONE, "nothing of this org is to be served"
        known = {id(column) for hit in before.columns for column in hit} if before else set()
        for group, hit in enumerate(match.columns):
            first = self.layout.groups[group].first_needed(match.tokens)
            needed = asked.keys[first:whole] + ([asked.tail(whole, rest)] if rest else [])
            assert [column.key for column in hit] == needed
            for column in hit:
                name = group, column.key
                until = policy.expires_at(now, self._used[name], self._ttl(name, self.moment))
                assert until > now, "it has not been used for too long"
                if id(column) not in known:
                    self._used[name] = now

    def ttl_set(self, columns: Iterable[Column], seconds: int) -> None:
        self.moment += 1
        for column in columns:
            self._own.setdefault((column.group, column.key), []).append((self.moment, seconds))

    def purged(self, org: str, namespace: Namespace | None, removal: Removal) -> None:
        self.moment += 1
        self.asks.append(Ask(self.moment, org, namespace, removal, ended_at=self.moment))

    def deleted(self, asked: Prompt, slots: Mapping[tuple[int, int], bytes], removal: Removal) -> Ask:
        self.moment += 1
        names = frozenset([*asked.keys, *_tail_of(asked, asked.tokens), *slots.values()])
        is_of_files = self.policy(asked.org).tiers is Tiers.TIER2
        ask = Ask(self.moment, asked.org, asked.maker.namespace, removal, names, slots, is_of_files)
        self.asks.append(ask)
        return ask

    def delete_ended(self, ask: Ask) -> None:
        self.moment += 1
        ask.ended_at = self.moment

    # What came of it

    def check_part(
        self, asked: Prompt, place: tuple[int, int, int, int], part: bytes, sight: Sight
    ) -> None:
        """This part of a column was given to who asked."""
        group, shard, depth, tokens = place
        written = self._whose(part)
        assert written, "nobody has ever stored this"
        end = depth * C + tokens
        assert (written.org, written.namespace) == (asked.org, asked.maker.namespace), "foreign"
        assert written.tokens[: 4 * end] == asked._raw(0, 4 * end), "of other tokens"
        assert end <= written.verified, "it was never verified"
        assert part == written.content(group, shard, end, len(part)), "torn"
        assert written.stored_at is not None, "it was not stored yet"
        assert not written.rules.no_store
        limit = written.rules.store_tokens_max
        assert limit is None or end <= limit, "only what is before it was to be stored"
        key = asked.keys[depth] if tokens == C else asked.tail(depth, tokens)
        until = sight.policy.expires_at(written.stored_at, NEVER, self._ttl((group, key), sight.moment))
        assert until > sight.now, f"it had expired {sight.now - until:.3f} s before"
        for ask in self.asks:
            assert ask.ended_at > sight.moment or not ask.is_of(written, key), "it had been removed"

    def sight(self, asked: Prompt) -> Sight:
        return self._sights[id(asked)]

    def forget(self, asked: Prompt) -> None:
        """Another prompt may get its id."""
        self._sights.pop(id(asked), None)
        self._storing.pop(id(asked), None)

    # What is left

    def confirmed(self, removal: Removal) -> None:
        for ask in self.asks:
            if ask.removal is removal:
                ask.is_confirmed = True
                self.seen["a purge was done" if ask.names is None else "a removal was done"] += 1

    def receipts(self) -> list[Ask]:
        """What is confirmed to be gone."""
        return [ask for ask in self.asks if ask.is_confirmed]

    def check_slot(self, place: tuple[int, int], raw: memoryview, done: Sequence[Ask]) -> None:
        """No slot holds what is confirmed to be gone."""
        header = seal.read(raw[: seal.HEADER_BYTES])
        written = self._whose(raw[seal.HEADER_BYTES :])
        if written is None:
            return
        for ask in done:
            if isinstance(header, seal.Header):
                if ask.names is None:
                    assert not ask.is_of(written, b""), "a slot holds what was purged"
                elif ask.slots.get(place) == header.key:
                    assert not ask.is_of(written, header.key), "a slot holds what was deleted"
            elif ask.names is None and ask.is_of(written, b""):
                since, policy = self.policies.get(ask.org, (0, Policy()))
                assert not policy.scrub or since > written.begun, "a slot was not scrubbed"

    def check_file(
        self, tag: bytes, key: bytes, raw: bytes, published: int, done: Sequence[Ask]
    ) -> None:
        """Nor does a file."""
        written = self._whose(raw[seal.HEADER_BYTES :])
        for ask in done:
            if self.tags.get(tag) != ask.org or not ask.is_of_files:
                continue
            if ask.names is not None and key not in ask.names:
                continue
            assert published > ask.moment, "a file is left of what was purged"
            assert written is None or not ask.is_of(written, key), "a file holds what was purged"

    # Inside

    def _whose(self, part: bytes | memoryview) -> Written | None:
        if len(part) < _HEAD.size:
            return None
        number, disguised = _HEAD.unpack_from(part)
        return self.written.get(number) if disguised == number * _DISGUISE % 2**32 else None

    def _ttl(self, name: Name, moment: int) -> int | None:
        """What it had at that moment."""
        for since, seconds in reversed(self._own.get(name, ())):
            if since <= moment:
                return None if seconds == NEVER else int(seconds)
        return None


def _tail_of(asked: Prompt, tokens: int) -> list[bytes]:
    whole, rest = divmod(tokens, C)
    return [asked.tail(whole, rest)] if rest else []


class WatchedRemovals(Removals):
    """Removals whose receipts are recorded."""

    def __init__(self, judge: Judge, *more: Any) -> None:
        super().__init__(*more)
        self._judge = judge

    def _finish(
        self, begin: Callable[[], Removal], seconds: float, org: str, tag: bytes | None
    ) -> Receipt:
        begun: list[Removal] = []

        def begin_it() -> Removal:
            begun.append(begin())
            return begun[0]

        receipt = super()._finish(begin_it, seconds, org, tag)
        if receipt.done:
            self._judge.confirmed(begun[0])
        return receipt


class Watched(Ledger):
    """A ledger whose every word is noted."""

    def __init__(self, judge: Judge, layout: Layout, model: str = "") -> None:
        super().__init__(layout, model, ghosts_min=25)
        self._judge = judge
        self._begun: dict[Store, Written] = {}
        self._deleting: list[tuple[Ask, list[PrefixMap]]] = []

    def set_policies(
        self, policies: Mapping[str, OrgPolicies], now: float, tags: Mapping[str, bytes] | None = None
    ) -> None:
        super().set_policies(policies, now, tags)
        self._judge.policies_set(policies, self._stock.model)

    def match(self, prompt: Prompt, now: float) -> Match:
        expected = self.query(prompt, now)
        found = super().match(prompt, now)
        assert found.tokens == expected
        self._judge.looked(found, now)
        return found

    def rematch(self, match: Match, now: float, refilled: int = 0) -> Match:
        found = super().rematch(match, now, refilled)
        self._judge.looked(found, now, match)
        return found

    def begin_store(
        self,
        prompt: Prompt,
        verified: int,
        now: float,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        states: Collection[int] = (),
    ) -> Store:
        store = super().begin_store(prompt, verified, now, rules, first, states)
        account = self._stock.account(prompt.org)
        limit = account.policy.dram_bytes_max
        assert not store.places or limit is None or account.bytes <= limit, "more than its quota"
        self._judge.store_begun(prompt, verified, rules, store)
        self._begun[store] = self._judge._storing[id(prompt)]
        return store

    def finish_store(
        self, store: Store, now: float, failed: Mapping[Column, Reason] | None = None
    ) -> None:
        written = self._begun.pop(store, None)
        super().finish_store(store, now, failed)
        if written:
            self._judge.store_finished(written, store, now, failed or ())

    def set_ttl(self, prompt: Prompt, seconds: int, depths: range = ALL_DEPTHS) -> int:
        self._judge.ttl_set(self._stored(prompt, depths), seconds)
        return super().set_ttl(prompt, seconds, depths)

    def delete(self, prompt: Prompt, *, shared: bool = False) -> Removal:
        slots = {(one.group, one.slot): one.key for one in self._stored(prompt, ALL_DEPTHS)}
        maps = self._stock.maps_of(prompt.maker)
        removal = super().delete(prompt, shared=shared)
        if shared:
            self._deleting.append((self._judge.deleted(prompt, slots, removal), maps))
            self._note_ends()
        return removal

    def sweep(self, now: float, columns: int = SLICE) -> bool:
        has_more = super().sweep(now, columns)
        self._note_ends()
        return has_more

    def _note_ends(self) -> None:
        for one in tuple(self._deleting):
            ask, maps = one
            if not any(ask.removal in its.deletes for its in maps):
                self._judge.delete_ended(ask)
                self._deleting.remove(one)

    def purge(
        self,
        org: str,
        namespace: Namespace | None = None,
        tag: bytes | None = None,
        now: float = NEVER_YET,
    ) -> Removal:
        removal = super().purge(org, namespace, tag, now)
        self._judge.purged(org, namespace, removal)
        return removal
