"""An agent that stores redundant columns elsewhere than its own tier 2, and looks in both.

Fragments are not simulated: what all agents store together is one more disk, which outlives the loss of
any other.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.data_plane.wire import Tier, TierAnswer, TierVerb
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.seal import Miss
from kvss_agent.tier2.store import Tier2
from kvss_agent.tier2.stores import NotOpen

Answers = tuple[tuple[TierAnswer | Miss, ...], tuple[int, ...]]


class SimulatedRedundancy(TierRequests):
    """Deletes and purges are of both stores: the other one counts as retiring."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seen: Counter[str]) -> None:
        self.others = TierRequests(loop)
        self._seen = seen
        super().__init__(loop, self._redundant_store)

    def _redundant_store(self) -> list[Tier2]:
        if self.others.store is None:
            raise NotOpen("The redundant columns are not known yet.")
        return [self.others.store]

    async def _answers(self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...]) -> Answers:
        if asked.verb is TierVerb.SPILL_REDUNDANT:
            self._seen["redundant columns were spilled"] += len(asked.columns)
            return await self.others._answers(shard, asked, slots)
        answers, notes = await super()._answers(shard, asked, slots)
        if asked.verb not in (TierVerb.EXISTS, TierVerb.RECALL):
            return answers, notes
        places = [at for at, answer in enumerate(answers) if answer is not TierAnswer.DONE]
        if not places:
            return answers, notes
        rest = dataclasses.replace(asked, columns=tuple(asked.columns[at] for at in places))
        found, their_notes = await self.others._answers(
            shard, rest, tuple(slots[at] for at in places) if slots else ()
        )
        if asked.verb is TierVerb.RECALL:
            self._seen["redundant columns were recalled"] += found.count(TierAnswer.DONE)
        return _merged((answers, notes), places, (found, their_notes))


def _merged(own: Answers, places: list[int], found: Answers) -> Answers:
    """The answers of our own store, and in these places of the other one where that has the column."""
    answers, notes = list(own[0]), list(own[1])
    for at, place in enumerate(places):
        if found[0][at] is TierAnswer.DONE:
            answers[place] = found[0][at]
            if found[1]:
                notes[place] = found[1][at]
    return tuple(answers), tuple(notes)
