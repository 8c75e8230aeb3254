"""Callers who wait leave room for those of other orgs."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import httpx

from swdriver_shim.daemon import service, shim
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
