"""Between the connections' threads and tier 2, which lives on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from kvss_agent.data_plane.carrier import TierDone
from kvss_agent.data_plane.lists import Lists
from kvss_agent.data_plane.wire import Listed, ListedColumn, Rejected, Tier, TierAnswer, TierVerb
from kvss_agent.redundancy.stores import RedundantStores
from kvss_agent.shard import seal
from kvss_agent.shard.core import BATCH_MAX
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.seal import Column, Miss
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Failed, Removed
from kvss_agent.tier2.column_file import CLEAR, Form
from kvss_agent.tier2.encryption import Encrypted
from kvss_agent.tier2.store import Outcome, Tier2
from kvss_agent.tier2.stores import NotOpen

log = logging.getLogger(__name__)

PURGE_ANSWER_SECONDS: Final = 10.0  # then it goes on, and its driver asks again: sooner than it gives up
PURGES_MAX: Final = 256  # that run at once, and as many receipts that nobody has fetched
_OUTCOMES: Final[Mapping[Outcome, TierAnswer | Miss]] = {
    Outcome.STORED: TierAnswer.DONE,
    Outcome.ALREADY: TierAnswer.ALREADY,
    Outcome.FULL: TierAnswer.FULL,
    Outcome.FAILED: TierAnswer.FAILED,
    Outcome.LATE: Miss.LATE,
}
# By holders, and what it is counted as if it is stored here alone.
_NOT_STORED: Final[Mapping[TierAnswer | Miss, str]] = {
    TierAnswer.FULL: "full",
    TierAnswer.FAILED: "failed",
    Miss.LATE: "over_budget",
}
Answer = TierAnswer | Miss
Answers = tuple[tuple[Answer, ...], tuple[int, ...]]  # and notes, where there are any


class _Work(NamedTuple):
    """A spill or recall: where its columns are in tier 2, and their slots, or why there is none."""

    shard: HostedShard
    asked: Tier
    addresses: Sequence[Address]
    slots: Sequence[int | Miss]

    def only(self, places: Sequence[int]) -> _Work:
        """The same for some of the columns."""
        return _Work(
            self.shard,
            replace(self.asked, columns=tuple(self.asked.columns[place] for place in places)),
            [self.addresses[place] for place in places],
            [self.slots[place] for place in places],
        )


class TierRequests:
    """Carries out requests on the store of the moment. Without one they are refused: it may be on its
    way. What is to be removed goes from retiring stores, too; if tier 2 is off, from those only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        retiring: Callable[[], Sequence[Tier2]] = tuple,
        redundant: RedundantStores | None = None,
    ) -> None:
        """`retiring`: all retiring stores that may have files. Raises NotOpen if one can't be asked."""
        self.store: Tier2 | None = None
        self.page = BATCH_MAX  # of a list
        self.is_off = False  # the document that we follow has no tier 2
        self._retiring = retiring
        self._redundant = redundant
        self._removals: Counter[bytes] = Counter()  # requests for it so far, by namespace
        self._loop = loop
        self._lists = Lists()
        self._purges: dict[tuple[Tier2, Scope], asyncio.Task[bool]] = {}
        self._unreported: dict[Scope, Removed] = {}  # what is gone, and whose receipt nobody has got

    def start(
        self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...], then: TierDone
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._run(shard, asked, slots, then), self._loop)

    async def _run(
        self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...], then: TierDone
    ) -> None:
        answers: tuple[Answer, ...] = tuple(TierAnswer.FAILED for _ in asked.columns)
        notes: tuple[int, ...] = ()
        try:
            answers, notes = await self._answers(shard, asked, slots)
        except Failed:
            pass  # counted by the store, and told as FAILED
        except NotOpen:
            answers = tuple(Miss.REFUSED for _ in asked.columns)
        except Exception:  # nobody waits for this coroutine, so nobody else would learn of it
            log.exception("%s of shard %s in tier 2 has failed", asked.verb.name, shard.identity.name)
        finally:
            then(answers, notes)  # in any case: slots must not stay claimed

    async def _answers(self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...]) -> Answers:
        namespace, part = shard.identity.namespace, shard.identity.part
        addresses = [Address(namespace, column.tag, column.key, part) for column in asked.columns]
        if asked.verb in (TierVerb.PURGE, TierVerb.DELETE):
            self._removals[namespace] += 1
        if asked.verb is TierVerb.PURGE:
            if shard.identity.is_for_fragments:  # its driver knows nothing of what lies in its slots
                await asyncio.to_thread(shard.purge, {asked.columns[0].tag})
            everything = [*self._everything(), *self._redundant_of(shard)]
            return await self._purge(everything, Scope(asked.columns[0].tag, namespace))
        if asked.verb is TierVerb.DELETE:
            failed: Failed | None = None
            for one in [*self._redundant_of(shard), *self._everything()]:
                try:
                    await one.delete(addresses)
                except Failed as error:
                    failed = error
            if failed:
                raise failed
            return tuple(TierAnswer.DONE for _ in addresses), ()
        if asked.verb is TierVerb.FLUSH:
            waiting = [await one.flush((namespace, part)) for one in self._everything()]
            return (TierAnswer.DONE,), (sum(waiting),)
        store = self.store
        if store is None:
            return tuple(Miss.REFUSED for _ in asked.columns), ()
        redundant = self._redundant.of(shard.identity.name) if self._redundant else None
        if asked.verb is TierVerb.EXISTS:
            there = dict(zip(addresses, await store.exists(addresses), strict=True))
            if redundant and (left := [one for one, found in there.items() if not found]):
                there.update(zip(left, await redundant.exists(left), strict=True))
            return tuple(TierAnswer.DONE if there[one] else Miss.ABSENT for one in addresses), ()
        work = _Work(shard, asked, addresses, slots)
        if asked.verb is TierVerb.RECALL:
            return await _recall(store, redundant, work)
        if asked.verb is TierVerb.SPILL_REDUNDANT and self._redundant:
            return await self._spill_redundant(store, redundant, work)
        return await _spill(store, work)

    async def _spill_redundant(self, store: Tier2, redundant: Tier2 | None, work: _Work) -> Answers:
        """What the holders can't take is stored here alone, unless something was removed meanwhile: that
        may have been among it, and be gone from here already. So is what their links have no room for in
        time: it is less safe so, and displaced without a copy it would be gone for certain."""
        identity = work.shard.identity
        removals = self._removals[identity.namespace]
        left = [*range(len(work.slots))]
        answers: list[Answer] = [TierAnswer.FAILED] * len(work.slots)
        if redundant:
            found, _ = await _spill(redundant, work)
            answers = list(found)
            left = [place for place, one in enumerate(found) if one in _NOT_STORED]
        if left and removals == self._removals[identity.namespace]:
            alone, _ = await _spill(store, work.only(left))
            if self._redundant and self._redundant.has(identity.name):
                self._redundant.stored_alone.update(
                    _NOT_STORED[answers[place]]
                    for place, answer in zip(left, alone, strict=True)
                    if answer is TierAnswer.DONE
                )
            for place, answer in zip(left, alone, strict=True):
                answers[place] = answer
        return tuple(answers), ()

    def _redundant_of(self, shard: HostedShard) -> list[Tier2]:
        """Raises NotOpen."""
        if self._redundant is None:
            return []
        return list(self._redundant.everything([shard.identity.name]).values())

    @property
    def has_front(self) -> bool:
        """Whether columns may wait in front of a store. Any thread may ask."""
        try:
            return any(one.has_front for one in self._everything())
        except NotOpen:
            return True

    @property
    def unsettled(self) -> str:
        """Why a shard that was removed may still have columns that nobody else has; empty if it can't.
        Any thread may ask."""
        try:
            left = sum(one.orphans for one in self._everything())
        except NotOpen as why:
            return f" now, and what waits in front of tier 2 is not known: {why}"
        return f" any more, but {left} columns of such shards wait in front of tier 2" if left else ""

    def list_columns(
        self, shard: HostedShard, asked: Tier, then: Callable[[Listed | Rejected], None]
    ) -> None:
        """The columns of the shard that follow the one that is asked for."""
        asyncio.run_coroutine_threadsafe(self._list_columns(shard, asked, then), self._loop)

    async def _list_columns(
        self, shard: HostedShard, asked: Tier, then: Callable[[Listed | Rejected], None]
    ) -> None:
        answer: Listed | Rejected = Rejected(asked.request, Miss.REFUSED)
        try:
            if store := self.store:
                first, identity = asked.columns[0], shard.identity
                after = first.tag, first.key
                found = await self._lists.of(
                    store, identity.namespace, identity.part, after, self.page + 1
                )
                columns = tuple(ListedColumn(*one) for one in found[: self.page])
                answer = Listed(asked.request, columns, more=len(found) > self.page)
        except Exception:
            log.exception("%s of shard %s in tier 2 has failed", asked.verb.name, shard.identity.name)
        finally:
            then(answer)

    def _everything(self) -> list[Tier2]:
        """All stores that may have files. Raises NotOpen."""
        if self.store is None and not self.is_off:
            raise NotOpen("Tier 2 is not open.")
        return [*([self.store] if self.store else []), *self._retiring()]

    async def _purge(self, stores: Sequence[Tier2], scope: Scope) -> Answers:
        """Who asks while it runs waits for the same one: from its begin on nothing was let in.

        Who asks later has a purge of its own, since there may be more by then. It is told of all that is
        gone and that nobody has been told of.
        """
        new = [store for store in stores if (store, scope) not in self._purges]
        if len(self._purges) + len(new) > PURGES_MAX:
            return (Miss.REFUSED,), ()
        for store in new:
            self._purges[store, scope] = asyncio.create_task(self._purge_all(store, scope))
        purges = [self._purges[store, scope] for store in stores]
        if purges:
            await asyncio.wait(purges, timeout=PURGE_ANSWER_SECONDS)
        if not all(purge.done() and purge.result() for purge in purges):
            return (TierAnswer.FAILED,), ()
        return self._receipt(scope)

    async def _purge_all(self, store: Tier2, scope: Scope) -> bool:
        try:
            receipt = await store.purge(tag=scope.tag, namespace=scope.namespace)
        except Failed:
            return False  # counted by the store; perhaps nobody waits any more
        finally:
            del self._purges[store, scope]
        before = self._unreported.pop(scope, Removed(0, 0))
        self._unreported[scope] = Removed(before.columns + receipt.columns, before.bytes + receipt.bytes)
        if len(self._unreported) > PURGES_MAX:
            del self._unreported[next(iter(self._unreported))]
        return True

    def _receipt(self, scope: Scope) -> Answers:
        """Told once: several shards may have asked for this purge, and their driver adds up."""
        removed = self._unreported.pop(scope, Removed(0, 0))
        return (TierAnswer.DONE, TierAnswer.DONE), (removed.columns, removed.bytes)


async def _spill(store: Tier2, work: _Work) -> Answers:
    items = [
        (address, work.shard.arena.slot(slot), Column(one.key, one.tag, one.sequence), one.note)
        for address, slot, one in zip(work.addresses, work.slots, work.asked.columns, strict=True)
        if not isinstance(slot, Miss)
    ]
    outcomes = iter(await store.spill_many(items, _form(work.asked)))
    return tuple(slot if isinstance(slot, Miss) else _answer(next(outcomes)) for slot in work.slots), ()


def _form(asked: Tier) -> Form:
    return Encrypted(asked.data_key) if asked.data_key else CLEAR


def _answer(outcome: Outcome | Miss) -> Answer:
    return outcome if isinstance(outcome, Miss) else _OUTCOMES[outcome]


async def _recall(store: Tier2, redundant: Tier2 | None, work: _Work) -> Answers:
    shard, asked = work.shard, work.asked
    answers: list[Answer] = [TierAnswer.FAILED] * len(work.slots)
    notes = [0] * len(work.slots)
    items, places = [], []
    for place, (address, slot) in enumerate(zip(work.addresses, work.slots, strict=True)):
        if isinstance(slot, Miss):
            answers[place] = slot
        elif seal.is_newer(memory := shard.arena.slot(slot), asked.after, shard.core.accepted):
            answers[place] = Miss.STALE
        else:
            items.append((address, memory, asked.after))
            places.append(place)
    results = await store.recall_many(items, _form(asked))
    if redundant and (absent := [at for at, found in enumerate(results) if found is Miss.ABSENT]):
        again = await redundant.recall_many([items[at] for at in absent], _form(asked))
        for at, found in zip(absent, again, strict=True):
            results[at] = found
    for place, found in zip(places, results, strict=True):
        if isinstance(found, Miss):
            answers[place] = found
        else:
            answers[place], notes[place] = TierAnswer.DONE, found.sequence
    return tuple(answers), tuple(notes)
