"""Purges that a console asks for: all stores and all memory of an agent, with a statement of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.redundancy.stores import RedundantStores
from kvss_agent.security.confirmations import (
    AgentStatement,
    MemoryCover,
    NotConfirmedYet,
    Question,
    Scope,
    StoreCover,
)
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.tier2 import address as tier2
from kvss_agent.tier2.backend import Failed
from kvss_agent.tier2.store import Tier2
from kvss_agent.tier2.stores import NotOpen, Stores

log = logging.getLogger(__name__)

OPERATIONS_MAX: Final = 64  # whose counts are kept, and that run at once


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


class Purges:
    """Lives on one event loop."""

    def __init__(
        self,
        identity: str,
        stores: Stores,
        shards: Mapping[str, HostedShard],
        told: Callable[[], Sequence[str]],
        redundant: RedundantStores | None = None,
    ) -> None:
        """`told`: the shards that the agent should have; one that it has not has no memory."""
        self._identity = identity
        self._stores = stores
        self._shards = shards
        self._told = told
        self._redundant = redundant
        self._purges: dict[str, _Purge] = {}

    async def confirm(self, question: Question) -> AgentStatement:
        """Remove all of the scopes, and confirm it. Raises NotConfirmedYet while it is
        running: ask again later.

        A store that was opened or a shard that was made since is looked at before anything is said: what
        was asked for may have been done long before somebody asks again.
        """
        purge = self._purge_of(question)
        now = asyncio.get_running_loop().time
        until = now() + question.seconds
        while True:
            if purge.task is None:
                purge.task = asyncio.create_task(self._run(purge), name=f"purge {question.operation}")
            task = purge.task
            await asyncio.wait([task], timeout=max(0.0, until - now()))
            if not task.done():
                raise NotConfirmedYet("The purge is still running.")
            if purge.task is task:
                purge.task = None  # who asks later has it all looked at again
            if purge.problem:
                raise NotConfirmedYet(purge.problem)
            try:
                if self._covers_all(purge):
                    return self._statement(question, purge)
            except NotOpen as why:
                raise NotConfirmedYet(str(why)) from why

    def _purge_of(self, question: Question) -> _Purge:
        purge = self._purges.get(question.operation)
        if purge is None or purge.scopes != question.scopes:
            if len(self._purges) >= OPERATIONS_MAX:
                self._forget_one()
            purge = self._purges[question.operation] = _Purge(question.scopes)
        return purge

    def _forget_one(self) -> None:
        """One that is confirmed, or else one that is done: whoever asked may never ask again."""
        confirmed = [name for name, one in self._purges.items() if one.task is None]
        done = [name for name, one in self._purges.items() if one.task is not None and one.task.done()]
        if not confirmed and not done:
            raise NotConfirmedYet(f"{OPERATIONS_MAX} purges are running already. Ask again later.")
        del self._purges[(confirmed or done)[0]]

    async def _run(self, purge: _Purge) -> None:
        """All that there is, until nothing is there that was not looked at. Until then nothing goes from
        memory to a store that was, or back."""
        purge.problem, purge.stores, purge.shards = "", {}, {}
        scopes = [tier2.Scope(tag, namespace) for tag, namespace in _as_bytes(purge.scopes)]
        try:
            with contextlib.ExitStack() as closed:
                while not self._covers_all(purge):
                    for place, store in self._new_stores(purge).items():
                        closed.enter_context(store.closed_to(scopes))
                        await self._empty_store(purge, place, store)
                    for shard in self._new_shards(purge):
                        await self._empty_shard(purge, shard)
        except (Failed, NotOpen) as error:
            purge.problem = str(error)
        except Exception:
            log.exception("A purge failed; it runs again with the next request")
            purge.problem = "Internal error; see its log."

    def _covers_all(self, purge: _Purge) -> bool:
        """Raises NotOpen."""
        return not self._new_stores(purge) and not self._new_shards(purge)

    def _new_stores(self, purge: _Purge) -> dict[str, Tier2]:
        """Those that it has not looked at; one that was opened anew is another one. Raises NotOpen."""
        stores = self._stores.everything()
        if self._redundant:
            # What was on its way to holders may arrive after they have confirmed: their turn comes once
            # more, when nothing is on its way. They report the files; no statement names these stores.
            stores |= self._redundant.everything()
        return {place: one for place, one in stores.items() if purge.stores.get(place) is not one}

    def _new_shards(self, purge: _Purge) -> list[HostedShard]:
        done = {shard for shard, _ in purge.shards.values()}
        return [one for one in list(self._shards.values()) if one not in done]

    @staticmethod
    async def _empty_store(purge: _Purge, place: str, store: Tier2) -> None:
        for tag, namespace in _as_bytes(purge.scopes):
            receipt = await store.purge(tag=tag, namespace=namespace)
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
        """Of what was looked at, and of stores that are known to be empty."""
        stores = [
            StoreCover(place, state, *purge.files.get(place, (0, 0)))
            for place, state in self._stores.states().items()
            if place in purge.stores or state == "empty"
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


def _as_bytes(scopes: Sequence[Scope]) -> list[tuple[bytes, bytes | None]]:
    """Tag and namespace of each."""
    return [
        (bytes.fromhex(one.tag), bytes.fromhex(one.namespace) if one.namespace else None)
        for one in scopes
    ]
