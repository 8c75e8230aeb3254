"""Purges that an agent confirms: what it removes, what it says of it, and who may believe it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from kvss_agent import purges
from kvss_agent.client import Header, Miss, Recalled, TierAnswer, Wanted
from kvss_agent.purges import Purges
from kvss_agent.security.confirmations import (
    AgentStatement,
    DriverStatement,
    NotConfirmed,
    NotConfirmedYet,
    Question,
    Scope,
    opened,
)
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.shard.arena import Arena, slot_bytes_for
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.settings import Tier2Settings
from kvss_agent.tier2.stores import Stores
from tests.kvss_agent.plane import DRIVER, PAYLOAD, TAG, column, kv, place
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.stores import tier2
from tests.kvss_agent.tier2.columns import put
from tests.live import wait_until

OTHER = b"org-b".ljust(16, b"\0")
NAME = "node:ax-1"


def question(*tags: bytes, **more: Any) -> Question:
    scopes = tuple(Scope(tag.hex()) for tag in tags)
    return Question(str(uuid4()), secrets.token_hex(16), 7, scopes, seconds=5.0, **more)


def ask(running: AgentProcess, asked: Question) -> bytes:
    """Again where it takes longer than whoever asks waits, as a console does."""
    status = 202
    while status == 202:
        answer = running.http.post("/v1/purges", content=msgspec.json.encode(asked))
        status = answer.status_code
    assert status == 200, answer.text
    return answer.content


def key_of(running: AgentProcess) -> str:
    return ProcessIdentity.load(running.directory, NAME).public_key_pem


def confirm(running: AgentProcess, *tags: bytes) -> AgentStatement:
    asked = question(*tags)
    return opened(ask(running, asked), key_of(running), asked, NAME, AgentStatement)


def keep(running: AgentProcess, name: str = "x", tag: bytes = TAG, slot: int = 0) -> int:
    """A column in memory and in the store that is in use."""
    with running.client() as shard:
        number = shard.evict(slot, column(name).key, tag, 64, kv())
        assert shard.spill([Wanted(slot, column(name, number, tag=tag))]) == [TierAnswer.DONE]
        return number


def files(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()]


def test_an_agent_confirms_what_it_covers_with_its_signature(tmp_path: Path) -> None:
    """Memory, too: whoever evicted it may have lost all that it knew."""
    with agent(tmp_path / "a", "--name", "ax-1") as running:
        running.tell(document(1, spec(), tier2=tier2(tmp_path / "old")))
        keep(running)
        running.tell(document(2, spec(), spec("t", 4), tier2=tier2(tmp_path / "new")))
        number = keep(running, "y")
        other = keep(running, "z", OTHER, slot=1)
        said = confirm(running, TAG)
        covered = {one.place: (one.state, one.files) for one in said.stores}
        assert covered == {
            f"posix:{tmp_path / 'new'}": ("in use", 1),
            f"posix:{tmp_path / 'old'}": ("retiring", 1),
        }
        assert {one.shard: (one.slots, one.columns) for one in said.memory} == {"s": (8, 1), "t": (4, 0)}
        assert not files(tmp_path / "old")
        assert len(files(tmp_path / "new")) == 1, "the other org's"
        with running.client() as shard:
            [gone] = shard.refill([Wanted(0, column("y", number))], [place()])
            [there] = shard.refill([Wanted(1, column("z", other, tag=OTHER))], [place()])
        assert gone is Miss.ABSENT
        assert isinstance(there, Header)


@pytest.mark.parametrize("kind", ["shm", "unix"])
def test_who_writes_while_memory_is_purged_gets_their_own_bytes_or_a_miss(
    tmp_path: Path, kind: str
) -> None:
    """Whoever writes into shared memory is seen by nobody between two looks at a slot: a column that
    lands there in just that moment may be emptied with what it replaces. That is a miss."""
    with agent(tmp_path / "a", "--name", "ax-1") as running:
        running.tell(document(1, spec(slots=64)))
        with running.client(kind) as shard:
            for slot in range(64):
                shard.evict(slot, column("old").key, TAG, 64, kv())
            purge = threading.Thread(target=confirm, args=(running, TAG))
            purge.start()
            numbers = {}
            payloads = {slot: kv() for slot in range(0, 64, 2)}
            for slot, payload in payloads.items():
                numbers[slot] = shard.evict(slot, column(f"n{slot}").key, OTHER, 64, payload)
            purge.join()
            misses = 0
            for slot, number in numbers.items():
                into = place()
                [found] = shard.refill([Wanted(slot, column(f"n{slot}", number, tag=OTHER))], [into])
                misses += isinstance(found, Miss)
                assert isinstance(found, Miss) or into == payloads[slot]
            assert misses <= (len(numbers) // 4 if kind == "shm" else 0)


def test_nothing_but_its_own_fresh_statement_is_a_confirmation(tmp_path: Path) -> None:
    with agent(tmp_path / "a", "--name", "ax-1") as running:
        running.tell(document(1, spec()))
        asked, key = question(TAG), key_of(running)
        answer = ask(running, asked)
        opened(answer, key, asked, NAME, AgentStatement)
        stranger = ProcessIdentity.load(tmp_path / "b", NAME).public_key_pem
        later = msgspec.structs.replace(asked, challenge=secrets.token_hex(16))
        another = msgspec.structs.replace(asked, operation=str(uuid4()))
        more = msgspec.structs.replace(asked, scopes=(*asked.scopes, Scope(OTHER.hex())))
        epoch = msgspec.structs.replace(asked, epoch=8)
        forged = msgspec.json.decode(answer)
        payload = base64.b64decode(forged["payload"]).replace(b'"memory":[', b'"memory":[ ')
        forged["payload"] = base64.b64encode(payload).decode()
        for raw, public, about, name, said in (
            (answer, stranger, asked, NAME, "not signed with its key"),
            (answer, "", asked, NAME, "no identity"),
            (answer, key, asked, "node:ax-2", "of another process"),
            (answer, key, later, NAME, "of an earlier time"),
            (answer, key, another, NAME, "on another purge"),
            (answer, key, epoch, NAME, "on another purge"),
            (answer, key, more, NAME, "does not speak of all"),
            (msgspec.json.encode(forged), key, asked, NAME, "not signed with its key"),
            (b'{"done": true}', key, asked, NAME, "is not a confirmation"),
            (b"<html>It works!</html>", key, asked, NAME, "is not a confirmation"),
            (b"[" * 100_000, key, asked, NAME, "is not a confirmation"),
            (b"", key, asked, NAME, "is not a confirmation"),
        ):
            with pytest.raises(NotConfirmed, match=said):
                opened(raw, public, about, name, AgentStatement)
        with pytest.raises(NotConfirmed, match="is not a confirmation"):
            opened(answer, key, asked, NAME, DriverStatement)


def test_what_cannot_be_looked_into_is_not_confirmed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with agent(tmp_path / "a", "--name", "ax-1") as running:
        running.tell(document(1, tier2=tier2(tmp_path / "file")))
        answer = running.http.post("/v1/purges", content=msgspec.json.encode(question(TAG)))
        assert (answer.status_code, "not open" in answer.json()["detail"]) == (202, True)
        running.tell(document(2))
        assert confirm(running, TAG).stores == ()


@pytest.mark.slow
def test_a_tag_that_is_nobodys_is_not_served_and_goes_wherever_it_comes_back(tmp_path: Path) -> None:
    """A directory that was away while its org was purged."""
    store = tmp_path / "files"
    with agent(tmp_path / "a", "--name", "ax-1") as running:
        running.tell(document(1, spec(), tier2=tier2(store)))
        keep(running)
        keep(running, "z", OTHER, slot=1)
    live = {"orgs": {"tags": [TAG.hex()]}}
    with agent(tmp_path / "b", "--name", "ax-1") as running:
        running.tell(document(1, spec(), tier2=tier2(store), **live))
        with running.client() as shard:
            wanted = [Wanted(4, column("x")), Wanted(5, column("z", tag=OTHER))]
            [kept, gone] = shard.recall(wanted)
            number = shard.evict(0, column("w").key, OTHER, 64, kv())
            assert shard.spill([Wanted(0, column("w", number, tag=OTHER))]) == [Miss.REFUSED]
        assert isinstance(kept, Recalled)
        assert gone is Miss.ABSENT
        wait_until("it is removed", lambda: len(files(store)) == 1)


# What has changed between two questions


@dataclass
class Here:
    """Stores and shards of an agent in this process, and its purges."""

    stores: Stores
    shards: dict[str, HostedShard] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    purges: Purges = field(init=False)

    def __post_init__(self) -> None:
        self.purges = Purges(NAME, self.stores, self.shards, lambda: self.told)

    def add_shard(self, name: str, slots: int) -> None:
        identity = ShardIdentity(name, slot_bytes_for(PAYLOAD), DRIVER)
        self.shards[name] = HostedShard(identity, Arena.allocate(identity.slot_bytes, slots))
        self.told.append(name)

    async def use(self, path: Path, number: int) -> None:
        """A store with one column, from now on the one in use."""
        await self.stores.use(Tier2Settings("posix", 1 << 30, path=str(path)))
        assert self.stores.current
        await put(self.stores.current, Address(b"n" * 16, TAG, number.to_bytes(16), "s"))

    async def begin(self, asked: Question) -> None:
        """It takes longer than whoever asks will wait, and is done before they ask again."""
        with pytest.raises(NotConfirmedYet, match="still running"):
            await self.purges.confirm(msgspec.structs.replace(asked, seconds=0.0))
        name = f"purge {asked.operation}"
        await asyncio.wait([one for one in asyncio.all_tasks() if one.get_name() == name])


@contextlib.asynccontextmanager
async def here(directory: Path) -> AsyncIterator[Here]:
    made = Here(Stores(directory, lambda _: None))
    made.stores.remember()
    try:
        yield made
    finally:
        await made.stores.close()


async def test_what_was_opened_or_made_after_a_purge_is_looked_at_before_it_is_confirmed(
    tmp_path: Path,
) -> None:
    async with here(tmp_path) as made:
        made.add_shard("s", 8)
        await made.use(tmp_path / "old", 1)
        asked = question(TAG)
        await made.begin(asked)
        made.add_shard("t", 4)
        await made.use(tmp_path / "new", 2)
        said = await made.purges.confirm(asked)
        assert {one.place: (one.state, one.files) for one in said.stores} == {
            f"posix:{tmp_path / 'new'}": ("in use", 1),
            f"posix:{tmp_path / 'old'}": ("retiring", 1),
        }
        assert {one.shard: one.slots for one in said.memory} == {"s": 8, "t": 4}
        assert not files(tmp_path / "new")


async def test_a_store_that_cannot_be_asked_since_is_not_confirmed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    async with here(tmp_path) as made:
        await made.use(tmp_path / "old", 1)
        asked = question(TAG)
        await made.begin(asked)
        await made.stores.use(Tier2Settings("posix", 1 << 30, path=str(tmp_path / "file")))
        with pytest.raises(NotConfirmedYet, match="Tier 2 is not open"):
            await made.purges.confirm(asked)


async def test_purges_whose_confirmation_nobody_fetches_keep_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purges, "OPERATIONS_MAX", 2)
    async with here(tmp_path) as made:
        await made.use(tmp_path / "old", 1)
        for _ in range(2):
            await made.begin(question(TAG))
        assert (await made.purges.confirm(question(TAG))).stores


async def test_what_is_on_its_way_from_memory_to_a_store_that_was_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until memory was looked at, too: else a statement says that nothing is in the store."""
    async with here(tmp_path) as made:
        made.add_shard("s", 8)
        await made.use(tmp_path / "files", 1)
        store, loop, look = made.stores.current, asyncio.get_running_loop(), HostedShard.purge
        assert store is not None

        def spill_and_look(shard: HostedShard, tags: frozenset[bytes]) -> tuple[int, int]:
            spill = put(store, Address(b"n" * 16, TAG, (2).to_bytes(16), "s"))
            outcomes.append(asyncio.run_coroutine_threadsafe(spill, loop).result(30))
            return look(shard, tags)

        outcomes: list[str] = []
        monkeypatch.setattr(HostedShard, "purge", spill_and_look)
        said = await made.purges.confirm(question(TAG))
        assert outcomes == ["refused"]
        assert [one.files for one in said.stores] == [1]
        assert not files(tmp_path / "files")
