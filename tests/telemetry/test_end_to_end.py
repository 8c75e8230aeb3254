"""From an evict on a real agent to a number from the API of a real console, all real processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from django.conf import settings

from tests.kvss_agent.process import agent, document, spec
from tests.live import live_console, wait_until
from tests.processes import finish
from tests.swdriver_shim.daemons import ACME, EACH, C, Daemon, kv, told
from tests.telemetry.ends import ingest_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_an_evict_on_an_agent_is_a_number_of_its_node_its_driver_its_org_and_the_fleet(
    tmp_path: Path,
) -> None:
    redis.Redis.from_url(settings.REDIS_URL).flushdb()
    telling = ("--telemetry", settings.REDIS_URL)
    with (
        live_console(tmp_path) as console,
        ingest_of(console, tmp_path / "ingest.log"),
        agent(tmp_path / "agent", "--name", "ax-7", *telling) as node,
        httpx.Client(
            base_url=f"{console.address}/api/v1",
            headers={"authorization": f"Bearer {console.token()}"},
            timeout=30,
        ) as api,
        contextlib.ExitStack() as ending,
    ):
        api.post(
            "/orgs", json={"slug": "acme", "name": "Acme"}, headers={"Idempotency-Key": "1"}
        ).raise_for_status()
        node.tell(document(1, spec("s", 20, EACH * C)))
        daemon = Daemon(tmp_path / "driver", "--name", "job7", *telling)
        ending.callback(daemon.stop)
        daemon.control("desired", told([node]))
        wait_until("it is ready", daemon.is_ready)
        tokens = list(range(3 * C))
        stored = daemon.store(ACME, tokens, kv(3 * C), request="r-7").json()["bytes"]
        assert daemon.load(ACME, [*tokens, *tokens[:C]])[0] == 3 * C

        def sum_of(topic: str, name: str, fold: str = "sum", **more: Any) -> float | None:
            asked = {"topic": topic, "name": name, "fold": fold, **more}
            answer = api.get("/metrics/query", params=asked)
            if answer.status_code == 404:  # nobody has told anything of it yet
                return None
            assert answer.status_code == 200, answer.text
            [*lines] = answer.json()["series"]
            values = [value for line in lines for value in line["values"] if value is not None]
            return sum(values) if fold == "sum" else max(values, default=None)

        events: dict[str, Any] = {"name": "kvss_shard_events_total", "label": "event:evicts"}
        for topic in ("node:ax-7", "fleet"):
            wait_until("evicts", lambda: sum_of(topic, **events) == 3, 90)  # noqa: B023
        wait_until("bytes", lambda: sum_of("driver:job7", "swdriver_bytes_total") == 2 * stored, 90)
        paths = {"name": "tidegate_driver_path_bytes_total", "label": "tier:unknown"}
        payload = 3 * C * EACH  # out, and in again: without what slots have beside it
        wait_until("by path", lambda: sum_of("fleet", **paths) == 2 * payload, 90)
        # Each is counted once it has happened, so a record may have the bytes and not yet the time.
        wait_until("of the org", lambda: sum_of("org:acme", "swdriver_evict_seconds") == 1, 90)
        wait_until("hits", lambda: sum_of("org:acme", "swdriver_hit_tokens_total") == 3 * C, 90)
        ratio = {"over": "swdriver_requested_tokens_total"}
        assert sum_of("org:acme", "swdriver_hit_tokens_total", "ratio", **ratio) == 0.75
        refill = sum_of("org:acme", "swdriver_refill_seconds", "p99")
        assert refill is not None
        assert 0 < refill < 10
        granted = sum_of("node:ax-7", "kvss_granted_bytes", "max")
        assert granted == node.observed()["memory"]["granted_bytes"]
        daemon.store(ACME, [7] * C, kv(C))
        ending.close()
        wait_until("the last moment of a driver", lambda: sum_of("fleet", **events) == 4, 90)
        slow = api.get("/slowest", params={"topic": "org:acme", "direction": "out"}).json()
        [first] = [one for one in slow if one["request"] == "r-7"]
        assert (first["driver"], first["stream"], first["columns"]) == ("job7", "full.0", 3)
        assert (first["slot_first"], first["slot_last"], first["bytes"]) == (0, 2, payload)
        assert first["tier"] == "unknown", "nobody has told this driver its paths"
        kinds = api.get(f"{console.address}/metrics").text
        assert 'tidegate_sources{kind="agent"} 1' in kinds


def test_an_agent_does_not_notice_that_redis_is_away(tmp_path: Path) -> None:
    nowhere = "redis://127.0.0.1:1/0"
    with agent(tmp_path / "a", "--telemetry", nowhere) as node:
        node.tell(document(1, spec("s", 20, EACH * C)))
        with node.client("shm") as shard:
            assert shard.evict(0, b"k" * 16, b"t" * 16, 64, memoryview(bytes(EACH * C))) == 1
        wait_until("it says so", lambda: "Numbers are queued, waiting for Redis" in node.log)
        text = node.http.get("/metrics").text
        assert 'kvss_shard_events_total{shard="s",event="evicts"} 1' in text
        assert node.stop() == 0


@pytest.mark.parametrize("url", ["http://x", "redis:", "redis://:secret@host:port"])
def test_an_address_that_makes_no_sense_stops_the_start_and_hides_its_password(
    url: str, tmp_path: Path
) -> None:
    for module in (["kvss_agent"], ["swdriver_shim", "serve"]):
        done = finish(*module, "--state-dir", str(tmp_path), "--telemetry", url)
        assert done.code == os.EX_CONFIG
        assert "--telemetry is (hidden): it should be a URL that begins with redis://" in done.errors
        assert "secret" not in done.errors
