"""Between the connections' threads and tier 2, which lives on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvss_agent import seal
from kvss_agent.connection import TierDone
from kvss_agent.hosting import HostedShard
from kvss_agent.seal import Column, Miss
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed
from kvss_agent.tier2.column_file import CLEAR, Form
from kvss_agent.tier2.encryption import Encrypted
from kvss_agent.tier2.store import Outcome, Tier2
from kvss_agent.wire import Tier, TierAnswer, TierVerb

_OUTCOMES = {
    Outcome.STORED: TierAnswer.DONE,
    Outcome.ALREADY: TierAnswer.ALREADY,
    Outcome.FULL: TierAnswer.FULL,
    Outcome.FAILED: TierAnswer.FAILED,
}
Answer = TierAnswer | Miss
Answers = tuple[tuple[Answer, ...], tuple[int, ...]]  # and notes, where there are any


class LoopTiering:
    """Carries out requests on the store of the moment. Without one they are refused: it may be on its
    way. Only if tier 2 is off there is nothing to be removed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.store: Tier2 | None = None
        self.is_off = False  # the document that we follow has no tier 2
        self._loop = loop

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
        finally:
            # Also when something unforeseen is on its way up: slots must not stay claimed.
            then(answers, notes)

    async def _answers(self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...]) -> Answers:
        store = self.store
        if store is None:
            return self._without_store(asked)
        namespace, part = shard.identity.namespace, shard.identity.part
        addresses = [Address(namespace, column.tag, column.key, part) for column in asked.columns]
        if asked.verb is TierVerb.EXISTS:
            there = await store.exists(addresses)
            return tuple(TierAnswer.DONE if found else Miss.ABSENT for found in there), ()
        if asked.verb is TierVerb.PURGE:
            receipt = await store.purge(tag=asked.columns[0].tag, namespace=namespace)
            return (TierAnswer.DONE, TierAnswer.DONE), (receipt.columns, receipt.bytes)
        if asked.verb is TierVerb.DELETE:
            await store.delete(addresses)
            return tuple(TierAnswer.DONE for _ in addresses), ()
        carry_out = _spill if asked.verb is TierVerb.SPILL else _recall
        return await carry_out(store, shard, asked, addresses, slots)

    def _without_store(self, asked: Tier) -> Answers:
        if self.is_off and asked.verb is TierVerb.PURGE:
            return (TierAnswer.DONE, TierAnswer.DONE), (0, 0)
        is_gone = self.is_off and asked.verb is TierVerb.DELETE
        return tuple(TierAnswer.DONE if is_gone else Miss.REFUSED for _ in asked.columns), ()


async def _spill(
    store: Tier2,
    shard: HostedShard,
    asked: Tier,
    addresses: Sequence[Address],
    slots: Sequence[int | Miss],
) -> Answers:
    items = [
        (address, shard.arena.slot(slot), Column(column.key, column.tag, column.sequence), column.note)
        for address, slot, column in zip(addresses, slots, asked.columns, strict=True)
        if not isinstance(slot, Miss)
    ]
    outcomes = iter(await store.spill_many(items, _form(asked)))
    return tuple(slot if isinstance(slot, Miss) else _answer(next(outcomes)) for slot in slots), ()


def _form(asked: Tier) -> Form:
    return Encrypted(asked.data_key) if asked.data_key else CLEAR


def _answer(outcome: Outcome | Miss) -> Answer:
    return outcome if isinstance(outcome, Miss) else _OUTCOMES[outcome]


async def _recall(
    store: Tier2,
    shard: HostedShard,
    asked: Tier,
    addresses: Sequence[Address],
    slots: Sequence[int | Miss],
) -> Answers:
    answers: list[Answer] = [TierAnswer.FAILED] * len(slots)
    notes = [0] * len(slots)
    items, places = [], []
    for place, (address, slot) in enumerate(zip(addresses, slots, strict=True)):
        if isinstance(slot, Miss):
            answers[place] = slot
        elif seal.is_newer(memory := shard.arena.slot(slot), asked.after, shard.core.accepted):
            answers[place] = Miss.STALE
        else:
            items.append((address, memory, asked.after))
            places.append(place)
    for place, found in zip(places, await store.recall_many(items, _form(asked)), strict=True):
        if isinstance(found, Miss):
            answers[place] = found
        else:
            answers[place], notes[place] = TierAnswer.DONE, found.sequence
    return tuple(answers), tuple(notes)
