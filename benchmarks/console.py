"""How fast the console answers: one authenticated API read and one page, and how fast it starts.

Everything is real: PostgreSQL, Redis and one web process as `make up` runs them. A trivial answer of
the same process in the same run (`/-/health/live`) is the limit that the others are compared with.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from benchmarks.harness import Row, limited, options, percentile, progress, show
from console.environment import PROJECT
from telemetry.units import parse_duration

CONNECTIONS = 8
ROUNDS = 5


async def load(
    address: str, path: str, headers: dict[str, str], seconds: float
) -> tuple[float, list[float]]:
    """Requests a second, and the milliseconds of each, of CONNECTIONS clients that never pause."""
    took: list[float] = []
    ends = time.perf_counter() + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        while (began := time.perf_counter()) < ends:
            async with session.get(f"{address}{path}", headers=headers) as response:
                await response.read()
                response.raise_for_status()
            took.append((time.perf_counter() - began) * 1000)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(CONNECTIONS)))
        return len(took) / (time.perf_counter() - began), took


def start(state: Path) -> tuple[subprocess.Popen[str], str, dict[str, str], float]:
    """`make up` without the make, until its panel is complete: (process, address, facts, seconds)."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "console.stack", "up"],
        cwd=PROJECT,
        env={**os.environ, "TIDEGATE_STATE_DIR": str(state), "COLUMNS": "200", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    facts: dict[str, str] = {}
    assert process.stdout
    for line in process.stdout:
        if found := re.match(r"│ (Address|Password)\s+(\S+)", line):
            facts[found[1]] = found[2]
        if found := re.match(r"(.+): (?:ready after )?([0-9.]+ (?:µs|ms|s))$", line):
            facts[f"stage {found[1]}"] = str(parse_duration(found[2]))
        if line.startswith("╰"):
            return process, facts["Address"], facts, time.perf_counter() - began
    raise SystemExit("the stack did not start")


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.stdout
    process.stdout.read()
    process.wait(60)


async def log_in(address: str, password: str) -> tuple[dict[str, str], dict[str, str]]:
    """Headers of a token for the API, and of a browser's session for pages."""
    jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address without a name
    async with aiohttp.ClientSession(cookie_jar=jar) as session:
        await session.get(f"{address}/log-in/")
        cookies = {cookie.key: cookie.value for cookie in jar}
        form = {
            "username": "admin",
            "password": password,
            "csrfmiddlewaretoken": cookies["tidegate_csrf"],
        }
        await session.post(f"{address}/log-in/", data=form, headers={"Referer": address})
        cookies = {cookie.key: cookie.value for cookie in jar}
        made = await session.post(
            f"{address}/api/v1/tokens",
            json={"name": "bench"},
            headers={"X-CSRFToken": cookies["tidegate_csrf"]},
        )
        token = (await made.json())["token"]
    browser = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
    return {"Authorization": f"Bearer {token}"}, browser


async def measure(address: str, password: str, seconds: float) -> list[Row]:
    """The rounds take turns, so that a slow moment of the machine slows them all."""
    api, browser = await log_in(address, password)
    kinds = {
        "trivial": ("/-/health/live", {}),
        "api.read": ("/api/v1/me", api),
        "page.home": ("/", browser),
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS):
        progress(f"requests, round {turn + 1} of {ROUNDS}")
        for kind, (path, headers) in kinds.items():
            rate, took = await load(address, path, headers, seconds)
            rates[kind].append(rate)
            times[kind] += took
    limit = statistics.median(rates["trivial"])
    rows = []
    for kind in kinds:
        rate = statistics.median(rates[kind])
        rows += [
            Row(f"{kind}.rate", rate, "requests/s", "trivial", rate / limit),
            Row(f"{kind}.p50", percentile(times[kind], 0.50), "ms"),
            Row(f"{kind}.p99", percentile(times[kind], 0.99), "ms"),
        ]
    return rows


def main() -> None:
    chosen = options(__doc__)
    seconds = 1.0 if chosen.quick else 4.0
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as directory:
        state = Path(directory)
        progress("first start")
        process, _, first, cold = start(state)
        stop(process)
        progress("warm start")
        process, address, again, warm = start(state)
        try:
            rows = [
                limited("start.first", cold, "s", 90),
                limited("start.warm", warm, "s", 6),
                *(
                    Row(f"start.warm.{found[1].replace(': ', '.')}", float(value), "s")
                    for name, value in again.items()
                    if (found := re.match("stage (.+)", name))
                ),
                *asyncio.run(measure(address, first["Password"], seconds)),
            ]
        finally:
            stop(process)
    show(f"Console ({CONNECTIONS} connections, one web process)", rows, chosen.json)


if __name__ == "__main__":
    main()
