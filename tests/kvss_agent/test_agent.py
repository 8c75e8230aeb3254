"""An agent goes on whatever happens inside it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvss_agent import agent as agents
from kvss_agent import follower
from kvss_agent.agent import Agent
from kvss_agent.desired import ShardSpec
from kvss_agent.settings import Settings
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.tier2.backend import Failed, Fault, Progress
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.store import Tier2
from kvss_agent.tier2.stores import Stores
from tests.kvss_agent.process import document, spec
from tests.kvss_agent.stores import tier2
from tests.kvss_agent.tier2.columns import ACME, BOLT, address_of, files_in, opened, put
from tests.live import wait_until


def made(directory: Path, end: Callable[[], None] = lambda: None) -> Agent:
    settings = Settings(
        name="a",
        state_dir=directory,
        unix=directory / "data.sock",
        control=("127.0.0.1", 0),
        token="t" * 20,
    )
    return Agent(settings, "test", end=end)


async def test_repair_has_the_rate_that_a_setting_says(tmp_path: Path) -> None:
    settings = replace(made(tmp_path).settings, repair_bytes_per_second=1 << 20)
    assert Agent(settings, "test").redundant.beside_bytes_per_second == 1 << 20


async def test_a_document_that_cannot_be_followed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follower, "RETRY_SECONDS", 0.01)
    provide, failures = Agent._provide, [RuntimeError("can't start new thread")] * 2

    async def fail_at_first(self: Agent, told: ShardSpec) -> None:
        if failures:
            raise failures.pop()
        await provide(self, told)

    monkeypatch.setattr(Agent, "_provide", fail_at_first)
    agent = made(tmp_path)
    await agent.start()
    try:
        await agent.set_desired(json.dumps(document(1, spec())).encode())
        await asyncio.to_thread(wait_until, "it is ready", lambda: agent.is_ready)
        assert agent.observed()["observed_generation"] == 1
    finally:
        await agent.stop(0)
    assert caplog.text.count("Cannot apply the desired document") == 2


async def test_tier_2_is_off_only_if_a_document_that_is_followed_says_so(tmp_path: Path) -> None:
    agent = made(tmp_path)
    (tmp_path / "file").write_text("no directory")
    assert not agent.tier_requests.is_off, "nobody knows yet"
    await agent.start()

    async def tell(generation: int, *, state: str, **more: object) -> None:
        await agent.set_desired(json.dumps(document(generation, **more)).encode())
        await asyncio.to_thread(
            wait_until, "it is followed", lambda: agent.observed_generation == generation
        )
        assert agent.stores.progress.state == state
        assert agent.tier_requests.is_off is (state == "off")

    try:
        await tell(1, state="off")
        await tell(2, state="refused", tier2=tier2(tmp_path / "file"))
        await tell(3, state="off")
        await tell(4, state="ready", tier2=tier2(tmp_path / "files"))
        await tell(5, state="ready", tier2={**tier2(tmp_path / "files"), "ttl_seconds": 60})
        await tell(6, state="off")
        await tell(7, state="off")
    finally:
        await agent.stop(0)


async def test_shards_and_newer_documents_do_not_wait_for_a_store_that_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take minutes, or never end."""
    pause = threading.Event()

    def list_for_ever(_: Posix, progress: Progress) -> None:
        while True:
            progress(0, None)
            pause.wait(0.01)

    agent = made(tmp_path)
    await agent.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Posix, "files", list_for_ever)
            told = document(1, spec(), tier2=tier2(tmp_path / "a"))
            await agent.set_desired(json.dumps(told).encode())
            await asyncio.to_thread(wait_until, "the shard is there", lambda: "s" in agent.shards)
            await asyncio.to_thread(
                wait_until, "it is listed", lambda: agent.stores.progress.state == "indexing"
            )
            assert agent.observed_generation == 0, "not all of the document was tried"
            await agent.set_desired(json.dumps(document(2, spec())).encode())
            await asyncio.to_thread(wait_until, "it is followed", lambda: agent.observed_generation == 2)
            assert agent.stores.progress.state == "off"
            again = document(3, spec(), tier2=tier2(tmp_path / "a"))
            await agent.set_desired(json.dumps(again).encode())
            await asyncio.to_thread(
                wait_until, "it is listed again", lambda: agent.stores.progress.state == "indexing"
            )
    finally:
        await asyncio.wait_for(agent.stop(0), 30)


async def test_what_is_too_old_is_looked_for_again_whatever_happened_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agents, "EXPIRE_SECONDS", 0.01)
    failures: list[Exception] = [RuntimeError("after shutdown"), Failed(Fault.IO_ERROR, "a bad sector")]
    looked = 0

    async def fail_at_first(_: Tier2) -> int:
        nonlocal looked
        looked += 1
        if failures:
            raise failures.pop()
        return 0

    monkeypatch.setattr(Tier2, "expire", fail_at_first)
    agent = made(tmp_path)
    await agent.start()
    try:
        told = document(1, tier2=tier2(tmp_path / "files"))
        await agent.set_desired(json.dumps(told).encode())
        await asyncio.to_thread(wait_until, "it goes on", lambda: looked > 3)
    finally:
        await agent.stop(0)
    assert caplog.text.count("Cannot remove expired columns") == 1


async def test_an_agent_whose_expiry_ends_stops_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would look well and expire nothing any more."""

    class Panic(BaseException):
        """As compiled libraries raise it."""

    async def panic(_: Stores) -> None:
        raise Panic

    monkeypatch.setattr(agents, "EXPIRE_SECONDS", 0.01)
    monkeypatch.setattr(Stores, "expire", panic)
    ended = asyncio.Event()
    agent = made(tmp_path, end=ended.set)
    await agent.start()
    await asyncio.wait_for(ended.wait(), 30)
    await agent.stop(0)
    assert agent.is_broken
    assert "The task expiry has ended" in caplog.text


async def test_a_store_is_opened_for_the_orgs_of_the_newest_document_while_shards_take_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is nobody's is removed, whoever stored it: nothing of an org that is there."""
    files, is_granted = tmp_path / "files", threading.Event()
    async with opened(files) as others:
        assert await put(others, address_of(1, BOLT)) == "stored"
    make = Agent._make

    def slow(agent: Agent, spec: ShardSpec, progress: Any) -> HostedShard:
        is_granted.wait(30)
        return make(agent, spec, progress)

    monkeypatch.setattr(Agent, "_make", slow)
    (tmp_path / "agent").mkdir()
    agent = made(tmp_path / "agent")
    await agent.start()
    try:
        acme, bolt = ACME.hex(), BOLT.hex()
        before = document(1, spec(), orgs={"tags": [acme]})
        now = document(2, spec(), orgs={"tags": [acme, bolt]}, tier2=tier2(files))
        for told in (before, now):
            await agent.set_desired(json.dumps(told).encode())
        await asyncio.to_thread(wait_until, "it is open", lambda: agent.stores.progress.state == "ready")
        await agent.stores.expire()
        assert len(files_in(files)) == 1
    finally:
        is_granted.set()
        await agent.stop(0)


async def test_what_others_do_in_a_shared_store_is_looked_at_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()

    async def fail_at_first(_: Tier2) -> None:
        monkeypatch.setattr(Tier2, "refresh", look)
        raise RuntimeError("after shutdown")

    async def look(_: Tier2) -> None:
        looked.set()

    monkeypatch.setattr(agents, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(agents, "LISTING_SHARE", 1.0)  # however long the first one took
    monkeypatch.setattr(Tier2, "refresh", fail_at_first)
    agent = made(tmp_path)
    await agent.start()
    try:
        told = document(1, tier2=tier2(tmp_path / "files"))
        await agent.set_desired(json.dumps(told).encode())
        await asyncio.wait_for(looked.wait(), 30)
    finally:
        await agent.stop(0)
