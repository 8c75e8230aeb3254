"""Promises survive whoever keeps them: a worker that is killed between the commit and the push."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.console.control.live import Scene, manage, scene
from tests.live import wait_until
from tests.swdriver_shim.test_service import C, kv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TOKENS = list(range(2 * C))
RECONCILE = "from console.control.tasks import reconcile; reconcile.delay()"


def put(there: Scene, ttl: int, key: str) -> None:
    told = {"policy": {"ttl_last_use_seconds": ttl}, "reason": "GDPR"}
    headers = {"If-Match": "*", "Idempotency-Key": key}
    there.api.put("/orgs/acme/policy", json=told, headers=headers).raise_for_status()


def reached(there: Scene) -> bool:
    applied = there.api.get("/orgs/acme/policy").json()["applied"]
    return bool(applied["has_it"] == applied["drivers"] == 2)


def test_a_change_reaches_drivers_though_its_worker_was_killed_and_its_task_lost(tmp_path: Path) -> None:
    with scene(tmp_path, "one", "two") as there:
        driver = there.drivers["one"]
        caller = there.api.post("/orgs/acme/callers", json={"name": "engine"}).json()["token"]
        wait_until("it knows the caller", lambda: driver.ask(caller, "query", tokens=[1]).is_success)
        driver.store(caller, TOKENS, kv(len(TOKENS)))

        there.worker.kill()  # kill -9: the change is committed, and nobody tells drivers of it
        put(there, 1, "after-the-kill")
        assert not reached(there)
        lost = "from django.conf import settings; import redis; "
        lost += "redis.Redis.from_url(settings.REDIS_URL).delete('tidegate:celery:celery')"
        manage(there.console, lost)  # and Redis forgets that there was something to do

        there.worker.start()
        manage(there.console, RECONCILE)  # what beat sends every few seconds
        wait_until("it is in force on both", lambda: reached(there), 60)
        wait_until("what is over is not served", lambda: driver.load(caller, TOKENS)[0] == 0)
        history = there.api.get("/audit", params={"action": "policy"}).json()["items"]
        assert [entry["action"] for entry in history].count("policy.set") == 1
