"""How soon an event is in the browsers, and what viewers cost the web process: part of
`python -m benchmarks.telemetry`, on a real server, with real ingest and real WebSockets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import websockets

from benchmarks.children import cpu_seconds, running
from benchmarks.harness import Row, limited, percentile
from benchmarks.own_console import token
from console.environment import PROJECT

SECONDS_MAX = 1.0  # from an event to the last but one in a hundred browsers
CORES_MAX = 0.6
ORGS = 10  # of which each viewer watches one, beside the fleet
EVENTS_A_SECOND = 2.0
SETTLE_SECONDS = 3.0


def live_rows(directory: Path, viewers: tuple[int, ...], seconds: float) -> list[Row]:
    """A hundred viewers, five hundred, while a driver tells the numbers of ten orgs."""
    rows: list[Row] = []
    with _console(directory) as (address, token, server), _numbers():
        for count in viewers:
            rows += _row(address, token, server, count, seconds)
    return rows


def _row(address: str, token: str, server: psutil.Process, count: int, seconds: float) -> Iterator[Row]:
    command = [sys.executable, "-m", "benchmarks.live", "--address", address, "--viewers", str(count)]
    with subprocess.Popen(
        [*command, "--seconds", str(seconds + SETTLE_SECONDS)],
        cwd=PROJECT,
        env={**os.environ, "TOKEN": token},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        connected = json.loads(process.stdout.readline())["connected"]
        time.sleep(SETTLE_SECONDS)
        before, began = cpu_seconds(server), time.monotonic()
        events = _happen(began + seconds)
        cores = (cpu_seconds(server) - before) / (time.monotonic() - began)
        told = json.loads(process.stdout.readline())
    assert connected == count
    latencies = told["latencies"]
    assert len(latencies) == events * count, "an event was missed, or came twice"
    p50, p99 = (percentile(latencies, share) for share in (0.5, 0.99))
    more = {"p50_ms": p50 * 1e3, "max_ms": max(latencies) * 1e3, "events": events}
    yield limited(f"live.{count}.p99", p99, "s", SECONDS_MAX, more)
    more = {
        "viewers": count,
        "frames_a_second": told["frames"] / told["seconds"],
        "MiB": server.memory_info().rss / (1 << 20),
    }
    yield limited("live.cpu" if count >= 500 else f"live.{count}.cpu", cores, "cores", CORES_MAX, more)


def _happen(until: float) -> int:
    """Events of the fleet at random moments, each with when it happened; and how many."""
    from django.db import transaction

    from telemetry.events import note

    randomness, count = random.Random(4), 0
    while (now := time.monotonic()) < until - 1.5:  # the last one has to arrive, too
        with transaction.atomic():
            note("bench.event", [], "Something happened.", {"at": time.time()})
        count += 1
        time.sleep(max(0.0, randomness.expovariate(EVENTS_A_SECOND) + now - time.monotonic()))
    time.sleep(max(0.0, until - time.monotonic()))
    return count


# A console


@contextlib.contextmanager
def _console(directory: Path) -> Iterator[tuple[str, str, psutil.Process]]:
    """Address, a token, and the server process."""
    from console.accounts.principal import SYSTEM
    from console.orgs.models import Org
    from console.orgs.services import create_org

    environment = {**os.environ, "TIDEGATE_STATIC_DIR": str(directory / "static")}
    subprocess.run(
        [sys.executable, "manage.py", "prepare"],
        cwd=PROJECT,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for number in range(ORGS):
        if not Org.objects.filter(slug=f"org-{number}").exists():
            create_org(SYSTEM, slug=f"org-{number}", name=f"Org {number}")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        command = [sys.executable, "-m", "console.serve", "--fd", str(listener.fileno())]
        with (directory / "web.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=PROJECT, env=environment, pass_fds=[listener.fileno()], stderr=log
            )
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            httpx.get(f"http://{address}/-/health", timeout=60).raise_for_status()
            yield address, token(), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def _numbers() -> Iterator[None]:
    """Ingest, and a driver that tells evicts, refills and hits of each org."""
    from swdriver_shim.daemon import metrics
    from telemetry.emit.emitter import Emitter
    from telemetry.histogram import Histogram

    orgs = [f"org-{number}" for number in range(ORGS)]
    evicts = {org: Histogram() for org in orgs}
    requested = dict.fromkeys(orgs, 0)

    def collect(into: Any) -> None:
        for org in orgs:
            for power in range(20):
                evicts[org].record(1e-3 * 1.2**power, 5)
            requested[org] += 10_000
        into.put(metrics.EVICT, [({"org": org}, its) for org, its in evicts.items()])
        into.put(metrics.REFILL, [({"org": org}, its) for org, its in evicts.items()])
        into.put(metrics.REQUESTED, [({"org": org}, its) for org, its in requested.items()])
        into.put(
            metrics.HIT, [({"org": org, "tier": "dram"}, its // 2) for org, its in requested.items()]
        )

    with running(["manage.py", "ingest"], Path(os.devnull)):
        emitter = Emitter(os.environ["REDIS_URL"], "driver", "bench", name="job7", collect=collect)
        emitter.start()
        try:
            yield
        finally:
            emitter.stop()


# Viewers, in a process of their own


async def _watch(address: str, token: str, viewers: int, seconds: float) -> None:
    latencies: list[float] = []
    frames = 0
    gate = asyncio.Semaphore(20)
    opened = asyncio.Event()
    waiting = viewers

    async def view(number: int) -> None:
        nonlocal frames, waiting
        headers = {"Authorization": f"Bearer {token}"}
        async with gate:
            wire = await websockets.connect(
                f"ws://{address}/ws/v1/live", additional_headers=headers, compression=None
            )
            for topic in ("fleet", f"org:org-{number % ORGS}"):
                await wire.send(json.dumps({"type": "subscribe", "topic": topic}))
                await wire.recv()
        waiting -= 1
        if not waiting:
            opened.set()
        async with wire:
            async for text in wire:
                frames += 1
                if '"bench.event"' in text and '"delta"' in text:
                    now = time.time()
                    events = json.loads(text)["data"].get("events", ())
                    latencies.extend(now - one["data"]["at"] for one in events if "at" in one["data"])

    tasks = [asyncio.create_task(view(number)) for number in range(viewers)]
    async with asyncio.timeout(60):
        await opened.wait()
    print(json.dumps({"connected": viewers - waiting}), flush=True)
    frames, began = 0, time.monotonic()
    await asyncio.sleep(seconds)
    print(
        json.dumps({"latencies": latencies, "frames": frames, "seconds": time.monotonic() - began}),
        flush=True,
    )
    for task in tasks:
        if task.done():
            task.result()  # raises what ended it
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--viewers", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    asyncio.run(_watch(given.address, os.environ["TOKEN"], given.viewers, given.seconds))


if __name__ == "__main__":
    main()
