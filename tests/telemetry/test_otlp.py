"""Numbers over OTLP, told by real agents, drivers and a console to a collector that decodes them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from console.environment import PROJECT, ConfigurationError, Environment
from console.metrics.catalog import METRICS
from telemetry.emit import extras
from telemetry.histogram import COARSE_BOUNDS, Histogram
from telemetry.metrics import Kind
from tests.kvss_agent.process import agent, document, spec
from tests.live import live_console, wait_until
from tests.swdriver_shim.daemons import ACME, EACH, C, Daemon, kv, told
from tests.telemetry.collector import Collector, collector
from tests.telemetry.ends import ingest_of

SOON = {"OTEL_METRIC_EXPORT_INTERVAL": "200"}
KINDS = {"sum": Kind.COUNTER, "gauge": Kind.GAUGE, "histogram": Kind.HISTOGRAM}
pytestmark = pytest.mark.timeout(180)


def hold_to_the_catalog(it: Collector) -> None:
    """What it was told has the names, kinds and labels of docs/metrics.md."""
    for point in it.points():
        metric = METRICS[point["name"]]
        assert KINDS[point["kind"]] is metric.kind
        assert set(point["labels"]) == set(metric.labels)
        assert point["is_monotonic"] in (None, not metric.corrected)


@pytest.mark.slow
def test_what_an_agent_and_a_driver_count_is_told_to_a_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)
    with (
        collector(tmp_path) as it,
        agent(tmp_path / "agent", "--name", "ax-7", "--otlp", it.url) as node,
        contextlib.ExitStack() as ending,
    ):
        node.tell(document(1, spec("s", 20, EACH * C)))
        daemon = Daemon(tmp_path / "driver", "--name", "job7", "--otlp", it.url)
        ending.callback(daemon.stop)
        daemon.control("desired", told([node]))
        wait_until("it is ready", daemon.is_ready)
        daemon.store(ACME, list(range(3 * C)), kv(3 * C))
        assert daemon.load(ACME, list(range(3 * C)))[0] == 3 * C

        def evicts() -> float:
            point = it.last("kvss_shard_events_total", shard="s", event="evicts")
            return point["value"] if point else 0

        wait_until("evicts", lambda: evicts() == 3)

        def refills() -> dict[str, Any]:
            return it.last("swdriver_refill_seconds", org="acme") or {"count": 0}

        wait_until("refills", lambda: refills()["count"])
        refill = refills()
        assert (refill["count"], sum(refill["counts"]), refill["unit"]) == (1, 1, "s")
        assert refill["bounds"] == pytest.approx(COARSE_BOUNDS)
        assert len(refill["counts"]) == len(COARSE_BOUNDS) + 1
        assert refill["resource"]["service.name"] == "tidegate-driver"
        assert refill["resource"]["tidegate.name"] == "job7"
        daemon.store(ACME, [7] * C, kv(C))
        ending.close()
        wait_until("the last moment of a driver", lambda: evicts() == 4)
        hold_to_the_catalog(it)
        node.kill()


@pytest.mark.slow
def test_the_console_tells_a_collector_too(tmp_path: Path) -> None:
    with (
        collector(tmp_path) as it,
        live_console(tmp_path, {"TIDEGATE_OTLP_URL": it.url, **SOON}) as console,
    ):
        with ingest_of(console, tmp_path / "ingest.log"):
            wait_until("ingest", lambda: it.last("telemetry_ingest_waiting_records"))
            wait_until("the console", lambda: it.last("tidegate_stream_records"))
        hold_to_the_catalog(it)


@pytest.mark.slow
def test_a_collector_that_is_away_is_told_of_once_and_hinders_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)
    with agent(tmp_path / "a", "--otlp", "http://127.0.0.1:1") as node:
        node.tell(document(1, spec("s", 20, EACH * C)))
        with node.client("shm") as shard:
            assert shard.evict(0, b"k" * 16, b"t" * 16, 64, memoryview(bytes(EACH * C))) == 1
        wait_until("it says so", lambda: "The OTLP collector does not accept the numbers" in node.log)
        assert node.http.get("/metrics").status_code == httpx.codes.OK
        assert node.stop() == 0
        assert node.log.count("OTLP") == 1


def test_coarse_counts_are_the_same_counts() -> None:
    histogram = Histogram()
    for power in range(-24, 8):
        for times, factor in ((1, 1.0), (2, 1.1)):
            histogram.record(2.0**power * factor, times)
    counts = histogram.coarse()
    assert len(counts) == len(COARSE_BOUNDS) + 1
    assert sum(counts) == histogram.count
    assert counts[0] == sum(
        n for p in range(-24, 8) for n, f in ((1, 1.0), (2, 1.1)) if 2.0**p * f <= 1e-6
    )


def test_without_the_extra_it_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if they were not installed: a module of that name that is no package has no parts.
    (tmp_path / "opentelemetry.py").touch()
    for module in (["kvss_agent"], ["swdriver_shim", "serve"]):
        done = subprocess.run(
            [sys.executable, "-m", *module, "--state-dir", str(tmp_path), "--otlp", "http://x:4318"],
            cwd=PROJECT,
            env={"PYTHONPATH": str(tmp_path), "PATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (78, f"--otlp {extras.NO_OTLP}.\n")
    monkeypatch.setattr("console.environment.has_otlp", lambda: False)
    given = {
        "DATABASE_URL": "postgresql://x/",
        "REDIS_URL": "redis://x/",
        "TIDEGATE_SECRET_KEY": "x" * 50,
        "TIDEGATE_MODE": "embedded",
        "TIDEGATE_OTLP_URL": "http://x:4318",
    }
    with pytest.raises(ConfigurationError) as error:
        Environment.read(given)
    assert error.value.problems == [f"TIDEGATE_OTLP_URL {extras.NO_OTLP}."]
