"""What a second process adds: `processes.web.2` and `processes.ingest.2`, times one.

    make bench NAME=processes

All share the processors of one machine, so throughput says little here. What is measured is what a
request, or a record, takes of a processor (web or ingest, and PostgreSQL with them) with one process and
with two, by turns: with processors to spare two do twice as much as one, over what each piece then costs
more.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import httpx
import psutil
import redis

from benchmarks.children import cpu_seconds, running
from benchmarks.harness import Row, options, progress, show
from benchmarks.own_console import set_up, token
from benchmarks.telemetry import AGENTS, let_wait, ours, postgres_cpu
from console.stack.endpoint import free_port
from telemetry.records import STREAM
from tests.embedded import Embedded, embedded_servers
from tests.live import wait_until

GOAL: Final = 1.7
CONNECTIONS: Final = 8
PATH: Final = "/api/v1/orgs"
READY_SECONDS_MAX: Final = 60.0


def processes_row(name: str, what: str, cost: Callable[[int], float], turns: int) -> Row:
    """`cost`: microseconds of a processor for each piece, with so many processes."""
    costs: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(turns):
        for count, found in costs.items():
            progress(f"{name}, {count}, turn {turn + 1} of {turns}")
            found.append(cost(count))
    one, two = (statistics.median(costs[count]) for count in (1, 2))
    gain = 2 * one / two
    more = {f"µs for a {what}, one": one, "two": two, "turns": float(turns)}
    return Row(name, gain, "times one", f"{GOAL:g} times", gain / GOAL, 1.0, more)


# Web


@contextlib.contextmanager
def webs(count: int, directory: Path) -> Iterator[list[tuple[str, psutil.Process]]]:
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(count):
            port = free_port()
            words = ["-m", "console.serve", "--host", "127.0.0.1", "--port", port]
            process = stack.enter_context(running(words, directory / f"web-{number}.log"))
            made.append((f"http://127.0.0.1:{port}", process))
        for address, _ in made:
            wait_until("it serves", lambda: _serves(address), READY_SECONDS_MAX)  # noqa: B023
        yield made


def _serves(address: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{address}/-/health/live").is_success
    return False


async def ask(addresses: Sequence[str], bearer: str, count: int) -> None:
    """So many requests, of some clients for each address that never pause."""
    left = iter(range(count))
    headers = {"Authorization": f"Bearer {bearer}"}

    async def client(session: aiohttp.ClientSession, address: str) -> None:
        for _ in left:
            async with session.get(f"{address}{PATH}", headers=headers) as response:
                await response.read()
                response.raise_for_status()

    async with aiohttp.ClientSession() as session:
        clients = [client(session, one) for one in addresses for _ in range(CONNECTIONS)]
        await asyncio.gather(*clients)


def web_row(servers: Embedded, directory: Path, bearer: str, turns: int, requests: int) -> Row:
    def cost(count: int) -> float:
        with webs(count, directory) as made:
            addresses = [address for address, _ in made]
            asyncio.run(ask(addresses, bearer, requests // 10))  # as it is after a while
            before = sum(cpu_seconds(one) for _, one in made) + postgres_cpu(servers)
            asyncio.run(ask(addresses, bearer, requests))
            after = sum(cpu_seconds(one) for _, one in made) + postgres_cpu(servers)
        return 1e6 * (after - before) / requests

    return processes_row("processes.web.2", "request", cost, turns)


# Ingest


def ingest_row(servers: Embedded, directory: Path, turns: int, batches: int) -> Row:
    client = redis.Redis.from_url(servers.redis_url)

    def cost(count: int) -> float:
        let_wait(client, batches)
        with contextlib.ExitStack() as stack:
            each = [stack.enter_context(ours("ingest", directory)) for _ in range(count)]
            _until_left(client, AGENTS * batches * 0.9)  # all have begun
            left = client.xlen(STREAM)
            before = sum(map(cpu_seconds, each)) + postgres_cpu(servers)
            _until_left(client, AGENTS)
            after = sum(map(cpu_seconds, each)) + postgres_cpu(servers)
            return 1e6 * (after - before) / (left - client.xlen(STREAM))

    return processes_row("processes.ingest.2", "record", cost, turns)


def _until_left(client: redis.Redis, count: float) -> None:
    while not client.exists(STREAM) or client.xlen(STREAM) > count:
        time.sleep(0.01)


def main() -> None:
    given = options(__doc__)
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name,
        embedded_servers(Path(name), durable=True) as servers,
    ):
        directory = Path(name)
        set_up(servers)
        bearer = token()
        from django.db import connections

        connections.close_all()
        turns, requests, batches = (1, 1_000, 10) if given.quick else (3, 2_000, 30)
        rows = [
            web_row(servers, directory, bearer, turns, requests),
            ingest_row(servers, directory, turns, batches),
        ]
    show("Processes", rows, given.json)


if __name__ == "__main__":
    main()
