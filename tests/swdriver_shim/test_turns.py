"""Callers who wait leave room for those of other orgs."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest
from starlette.types import Message

from kvss_agent.http.extension import EXTENSION
from kvss_agent.http.pace import Pace
from kvss_agent.http.server import HttpConnection, HttpPolicy
from swdriver_shim.daemon import service, shim
from swdriver_shim.daemon.admission import PIECE_BYTES, OrgAdmission
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.desired import OrgSpec


class Slow:
    """A shim whose driver answers `acme` when it is told to, and others at once."""

    def __init__(self) -> None:
        self.orgs = {name: OrgSpec(name, name.encode().ljust(32, b"!")) for name in ("acme", "globex")}
        self.goes_on = threading.Event()
        self.begun: Counter[str] = Counter()
        self.driver = self
        self.transfers, self.verbs = shim.shares_of(1 << 30)

    def caller(self, token: str) -> OrgSpec | None:
        return self.orgs.get(token)

    def permit(self, _token: str, _org: OrgSpec) -> Callable[[], bool]:
        return lambda: True

    def prefetch(self, org: str, _continue_id: str) -> bool:
        self.begun[org] += 1
        return org == "globex" or self.goes_on.wait(60)


class Noted(Pace):
    """A pace that notes who takes how much."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def moved(self, owner: str, size: int, now: float) -> float:
        self.bytes[owner] += size
        return super().moved(owner, size, now)


@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
async def test_every_byte_of_an_answer_takes_the_time_of_its_org(size: int) -> None:
    """Also of one that fits in a piece: who asks for many of those takes as much."""
    slow, sent = Slow(), bytearray()
    connection = HttpConnection(HttpPolicy(), "10.0.0.7")
    connection.owner = "org:acme"
    connection.policy.pace = noted = Noted()

    async def send(message: Message) -> None:
        sent.extend(message.get("body", b""))

    answer = OrgAdmission(cast("Shim", slow)).answer(slow.orgs["acme"], size, lambda: bytes(size))
    await answer({"type": "http", "extensions": {EXTENSION: connection}}, cast("Any", None), send)
    assert noted.bytes == {"org:acme": size}
    assert len(sent) == size
    assert slow.transfers.used == 0


async def test_an_org_whose_calls_all_wait_does_not_hold_up_another() -> None:
    slow = Slow()
    made = service.Service(cast("Shim", slow), "")
    transport = httpx.ASGITransport(made.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://driver", timeout=60) as http:

        async def ask(org: str) -> Any:
            headers = {"authorization": f"Bearer {org}"}
            answer = await http.post("/v1/prefetch", json={"continue_id": "c"}, headers=headers)
            return answer.json()

        waiting = [asyncio.create_task(ask("acme")) for _ in range(2 * shim.VERBS_AT_ONCE)]
        try:
            assert await ask("globex") == {"begun": True}
            assert not any(one.done() for one in waiting)
            assert slow.begun["acme"] <= shim.VERBS_OF_ONE_ORG
        finally:
            slow.goes_on.set()
        assert await asyncio.gather(*waiting) == [{"begun": True}] * len(waiting)
