"""What the controller asks of a driver, over its application: nothing waits for what takes long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvss_agent.security.confirmations import NotConfirmedYet, Question, Scope
from kvss_agent.security.identity import ProcessIdentity
from swdriver_shim.daemon import service
from swdriver_shim.daemon.service import Service
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.decider.statistics import OrgState, Statistics
from swdriver_shim.policy import Policy
from tests.kvss_agent.plane import DRIVER
from tests.swdriver_shim.shims import document

TOKEN = "token-of-the-control-api"
SECONDS = 60.0  # for what comes at once
QUESTION = Question(
    operation="0" * 36, challenge="c" * 32, epoch=1, scopes=(Scope(tag="ab" * 16),), org="acme"
)


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    made = Shim(DRIVER, None)
    made.set_desired(document(tmp_path / "nobody.sock", {"acme": Policy()}))
    yield made
    made.stop()


def client(shim: Shim, directory: Path) -> httpx.AsyncClient:
    identity = ProcessIdentity.load(directory, f"driver:{DRIVER}")
    transport = httpx.ASGITransport(app=Service(shim, TOKEN, identity).application())
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(transport=transport, base_url="http://driver", headers=headers)


def test_documents_are_taken_while_purges_wait(
    shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may say where the shard is now that they wait for."""
    is_over, waiting = threading.Event(), threading.Semaphore(0)

    def purge(_question: Question) -> Any:
        waiting.release()
        is_over.wait(2 * SECONDS)
        raise NotConfirmedYet("A shard is lost.")

    monkeypatch.setattr(shim, "purge", purge)
    told = document(tmp_path / "nobody.sock", {"acme": Policy(scrub=True)}, generation=2)

    async def ask() -> None:
        async with client(shim, tmp_path) as http:
            body = msgspec.json.encode(QUESTION)
            count = 2 * service.CONTROLS_AT_ONCE
            purges = [asyncio.create_task(http.post("/v1/purges", content=body)) for _ in range(count)]
            try:
                for _ in range(service.PURGES_AT_ONCE):
                    assert await asyncio.to_thread(waiting.acquire, timeout=SECONDS)
                async with asyncio.timeout(SECONDS):
                    assert (await http.put("/v1/desired", content=told)).status_code == 202
                    assert (await http.get("/v1/observed")).json()["observed_generation"] == 2
            finally:
                is_over.set()
            assert {one.status_code for one in await asyncio.gather(*purges)} == {202}

    asyncio.run(ask())


def test_others_are_answered_while_all_orgs_are_looked_at(
    shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, was_answered = threading.Event(), threading.Event()
    orgs = Statistics.orgs

    def looked(statistics: Statistics) -> list[OrgState]:
        looks.set()
        assert was_answered.wait(SECONDS), "nobody was answered meanwhile"
        return orgs(statistics)

    monkeypatch.setattr(Statistics, "orgs", looked)

    async def ask() -> None:
        async with client(shim, tmp_path) as http:
            stats = asyncio.create_task(http.get("/v1/stats"))
            assert await asyncio.to_thread(looks.wait, SECONDS)
            assert (await http.get("/-/health")).status_code == 503
            was_answered.set()
            assert (await stats).json() == []

    asyncio.run(ask())
