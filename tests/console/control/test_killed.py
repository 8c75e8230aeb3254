"""Promises survive whoever keeps them: a worker that is killed between the commit and the push."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.console.control.live import Scene, scene
from tests.live import wait_until
from tests.swdriver_shim.daemons import C, kv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOKENS = list(range(2 * C))


def put(there: Scene, ttl: int, key: str) -> None:
    told = {"policy": {"ttl_last_use_seconds": ttl}, "reason": "GDPR"}
    headers = {"If-Match": "*", "Idempotency-Key": key}
    there.api.put("/orgs/acme/policy", json=told, headers=headers).raise_for_status()


def reached(there: Scene) -> bool:
    applied = there.api.get("/orgs/acme/policy").json()["applied"]
    return bool(applied["has_it"] == applied["drivers"] == 2)


def test_a_change_reaches_drivers_though_its_worker_was_killed_and_its_task_lost(tmp_path: Path) -> None:
    with scene(tmp_path, "one", "two") as there:
        one, two = there.drivers["one"], there.drivers["two"]
        two.process.send_signal(signal.SIGSTOP)  # its worker is killed while it waits for this one
        caller = there.api.post("/orgs/acme/callers", json={"name": "engine"}).json()["token"]
        wait_until("it knows the caller", lambda: one.ask(caller, "query", tokens=[1]).is_success)
        one.store(caller, TOKENS, kv(len(TOKENS)))

        there.worker.kill()  # kill -9: the change is committed, and nobody tells drivers of it
        two.process.send_signal(signal.SIGCONT)
        put(there, 1, "after-the-kill")
        assert not reached(there)
        lost = "from django.conf import settings; import redis; "
        lost += "broker = redis.Redis.from_url(settings.REDIS_URL); "
        lost += "assert broker.delete(*broker.keys('tidegate:celery:celery*')), 'a task is waiting'"
        there.console.manage(lost)  # and Redis forgets that there was something to do

        # The next reconcile may find that somebody is still asking: then it is one of those after it.
        there.worker.start("--beat")
        wait_until("it is in force on both", lambda: reached(there), 120)
        wait_until("what is over is not served", lambda: one.load(caller, TOKENS)[0] == 0)
        history = there.api.get("/audit", params={"action": "policy"}).json()["items"]
        assert [entry["action"] for entry in history].count("policy.set") == 1
