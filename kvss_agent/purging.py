"""Purges that a console asks for: all stores and all memory of an agent, with a statement of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.confirmations import AgentStatement, MemoryCover, Question, Scope, StoreCover
from kvss_agent.hosting import HostedShard
from kvss_agent.tier2.backend import Failed
from kvss_agent.tier2.store import Tier2
from kvss_agent.tier2.stores import NotOpen, Stores

log = logging.getLogger(__name__)

OPERATIONS_MAX: Final = 64  # whose counts are kept, and that run at once


class NotDone(Exception):
    """Why it can't be confirmed yet, in a sentence."""


@dataclass(eq=False, slots=True)
class _Purge:
    """Of one operation: what was removed so far, and what is known to have nothing left."""

    scopes: tuple[Scope, ...]
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # by place: files, bytes
    columns: dict[str, int] = field(default_factory=dict)  # by shard
    stores: dict[str, Tier2] = field(default_factory=dict)  # done
    shards: dict[str, tuple[HostedShard, int]] = field(default_factory=dict)  # done, with its slots
    problem: str = ""
    task: asyncio.Task[None] | None = None


class Purging:
    """Lives on one event loop."""

    def __init__(
        self,
        identity: str,
        stores: Stores,
        shards: Mapping[str, HostedShard],
        told: Callable[[], Sequence[str]],
    ) -> None:
        """`told`: the shards that the agent should have; one that it has not has no memory."""
        self._identity = identity
        self._stores = stores
        self._shards = shards
        self._told = told
        self._purges: dict[str, _Purge] = {}

    async def confirm(self, question: Question) -> AgentStatement:
        """Remove all of the scopes, and say so. Raises NotDone; it goes on then, and may be asked again.

        A store that was opened or a shard that was made since is looked at before anything is said.
        """
        purge = self._purge_of(question)
        if purge.task is None:
            purge.task = asyncio.create_task(self._run(purge), name=f"purge {question.operation}")
        task = purge.task
        await asyncio.wait([task], timeout=question.seconds)
        if not task.done():
            raise NotDone("It is not done yet.")
        if purge.task is task:
            purge.task = None  # who asks later has it all looked at again
        if purge.problem:
            raise NotDone(purge.problem)
        return self._statement(question, purge)

    def _purge_of(self, question: Question) -> _Purge:
        purge = self._purges.get(question.operation)
        if purge is None or purge.scopes != question.scopes:
            if len(self._purges) >= OPERATIONS_MAX:
                idle = [name for name, one in self._purges.items() if one.task is None]
                if not idle:
                    raise NotDone(f"{OPERATIONS_MAX} purges are running. It waits for its turn.")
                del self._purges[idle[0]]
            purge = self._purges[question.operation] = _Purge(question.scopes)
        return purge

    async def _run(self, purge: _Purge) -> None:
        """All that there is, until nothing is there that was not looked at."""
        purge.problem, purge.stores, purge.shards = "", {}, {}
        try:
            while True:
                stores = self._stores.everything()
                new_stores = {at: one for at, one in stores.items() if purge.stores.get(at) is not one}
                new_shards = [
                    one for one in list(self._shards.values()) if not self._is_done(purge, one)
                ]
                if not new_stores and not new_shards:
                    return
                for place, store in new_stores.items():
                    await self._empty_store(purge, place, store)
                for shard in new_shards:
                    await self._empty_shard(purge, shard)
        except (Failed, NotOpen) as error:
            purge.problem = str(error)
        except Exception:
            log.exception("A purge has failed; it is tried again when it is asked for")
            purge.problem = "It has failed inside; its log tells more."

    @staticmethod
    def _is_done(purge: _Purge, shard: HostedShard) -> bool:
        done = purge.shards.get(shard.identity.name)
        return done is not None and done[0] is shard

    @staticmethod
    async def _empty_store(purge: _Purge, place: str, store: Tier2) -> None:
        for scope in purge.scopes:
            namespace = bytes.fromhex(scope.namespace) if scope.namespace else None
            receipt = await store.purge(tag=bytes.fromhex(scope.tag), namespace=namespace)
            files, size = purge.files.get(place, (0, 0))
            purge.files[place] = files + receipt.columns, size + receipt.bytes
        purge.stores[place] = store

    @staticmethod
    async def _empty_shard(purge: _Purge, shard: HostedShard) -> None:
        namespace = shard.identity.namespace.hex()
        tags = {one.tag for one in purge.scopes if one.namespace in (None, namespace)}
        name = shard.identity.name
        columns, slots = await asyncio.to_thread(shard.purge, frozenset(map(bytes.fromhex, tags)))
        purge.columns[name] = purge.columns.get(name, 0) + columns
        purge.shards[name] = shard, slots

    def _statement(self, question: Question, purge: _Purge) -> AgentStatement:
        stores = [
            StoreCover(place, state, *purge.files.get(place, (0, 0)))
            for place, state in self._stores.states().items()
        ]
        nothing = [MemoryCover(name, 0, 0) for name in self._told() if name not in purge.shards]
        memory = [
            MemoryCover(name, slots, purge.columns.get(name, 0))
            for name, (_, slots) in purge.shards.items()
        ]
        return AgentStatement(
            identity=self._identity,
            operation=question.operation,
            challenge=question.challenge,
            epoch=question.epoch,
            scopes=question.scopes,
            at=time.time(),
            stores=tuple(stores),
            memory=(*memory, *nothing),
        )
