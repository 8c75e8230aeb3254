"""How fast pages are with 1,000 nodes, 200 orgs, 500 sessions and 30 days of history: every page that
there is, by the list of addresses.

`p95` is from a request to the last byte, asked one after another over a socket; beside it what that took
of the server's CPU, which says more on a busy machine. The rest is as Chromium meets it, with nothing of
ours in its cache: `first_chart` from the click to the first drawn plot, `kib` what comes over the wire,
without the script of charts, and `busy` the longest time for which the page did not listen to keys.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import psutil
from playwright.sync_api import Browser, Page

from benchmarks.children import cpu_seconds
from benchmarks.harness import Row, limited, options, percentile, progress, show
from benchmarks.journeys import journey_rows
from benchmarks.own_console import settings
from tests.browser.chromium import chromium
from tests.browser.looking import WIDE, log_in
from tests.embedded import embedded_servers
from tests.every_page import addresses
from tests.live import LiveConsole, live_console
from tests.prepared import DIRECTORY

P95_MS: Final = 150.0
FIRST_CHART_S: Final = 1.5
CHART: Final = "data-chart="
CHART_SCRIPT: Final = "plotly.min"
# What those of the list want to know, and besides: the widest ranges, and what a list is searched for.
MORE: Final = {
    "latency-events": "/latency/events/?topic=org:org-0",
    "policies-bulk": "/policies/bulk/?org=org-0&org=org-1",
    "latency.30d": "/latency/?topic=org:org-0&range=30d",
    "latency.fleet": "/latency/?topic=fleet&range=24h",
    "fleet-nodes.search": "/fleet/nodes/?q=ax-99",
    "audit.search": "/audit/?q=org-77",
    "audit.last": "/audit/?page=100",
}
# What a page has seen of itself, from the beginning on: noted where it can be waited for.
_WATCH: Final = """
window.busy = 0;
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.busy = Math.max(window.busy, task.duration);
}).observe({type: 'longtask', buffered: true});
new MutationObserver((_, observer) => {
  if (!document.querySelector('[data-chart] :is(.js-line, .point, .heatmaplayer image)')) return;
  document.documentElement.dataset.drawn = performance.now();
  observer.disconnect();
}).observe(document, {childList: true, subtree: true});
"""
_HAS_CHART: Final = """
  [...document.querySelectorAll('[data-chart]')].some((one) => !one.matches('.plot--empty'))
"""
_WEIGHT: Final = """(script) => [
  ...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource'),
].filter((one) => !one.name.includes(script)).reduce((sum, one) => sum + one.transferSize, 0)"""


@contextlib.contextmanager
def large_console(directory: Path, *, quick: bool) -> Iterator[tuple[LiveConsole, dict[str, str]]]:
    """It, and the paths of its pages."""
    with embedded_servers(directory) as servers:
        os.environ |= settings(servers.database_url, servers.redis_url) | {
            "TIDEGATE_STATIC_DIR": str(directory / "static"),
            DIRECTORY: str(directory),
        }
        with live_console(directory) as console:
            os.environ["DATABASE_URL"] = console.environment["DATABASE_URL"]
            import django

            django.setup()
            from django.db import connections

            from benchmarks import large_console as made

            try:
                began = time.monotonic()
                things = made.fill(0.1 if quick else 1.0)
                print(f"The console was filled in {time.monotonic() - began:.0f} s.", flush=True)
                yield console, {**addresses(things), **MORE}
            finally:
                connections.close_all()
                os.environ["DATABASE_URL"] = servers.database_url  # by which the console's is dropped


def server_rows(
    console: LiveConsole, client: httpx.Client, paths: dict[str, str], rounds: int
) -> Iterator[Row]:
    server = psutil.Process(console.process.pid)
    for name, path in paths.items():
        times = []
        cpu = cpu_seconds(server)
        for _ in range(rounds):
            began = time.perf_counter()
            answer = client.get(path)
            times.append(1e3 * (time.perf_counter() - began))
            answer.raise_for_status()  # a page that fails, or sends on, is a fast one
        more = {"p50": percentile(times, 0.5), "CPU ms": 1e3 * (cpu_seconds(server) - cpu) / rounds}
        yield limited(f"page.{name}.p95", percentile(times, 0.95), "ms", P95_MS, more)


def _is_page(client: httpx.Client, path: str) -> bool:
    """Not what only takes forms, sends on, or is to be taken away."""
    with client.stream("GET", path) as answer:
        if answer.status_code >= 400 and answer.status_code != 405:
            answer.raise_for_status()
        return answer.is_success and answer.headers["content-type"].startswith("text/html")


def browser_rows(browser: Browser, console: LiveConsole, paths: dict[str, str]) -> Iterator[Row]:
    """A browser that has only its charts' script, which comes with the first of these pages."""
    context = browser.new_context(base_url=console.address, viewport=WIDE)
    context.add_init_script(_WATCH)
    page = context.new_page()
    log_in(page, console)
    page.goto("/latency/")
    network = context.new_cdp_session(page)
    for name, path in paths.items():
        network.send("Network.clearBrowserCache")
        page.goto(path, wait_until="load")
        yield from _seen(page, name)
    yield from journey_rows(page)
    context.close()


def _seen(page: Page, name: str) -> Iterator[Row]:
    if page.evaluate(_HAS_CHART):
        page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
        seconds = float(page.evaluate("document.documentElement.dataset.drawn")) / 1e3
        yield limited(f"page.{name}.first_chart", seconds, "s", FIRST_CHART_S)
    weight = page.evaluate(_WEIGHT, CHART_SCRIPT) / 1024
    yield Row(f"page.{name}.kib", weight, "KiB", more={"busy ms": page.evaluate("window.busy")})


def main() -> None:
    chosen = options(__doc__)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        progress("filling a large console")
        console, paths = stack.enter_context(large_console(directory, quick=chosen.quick))
        browser = stack.enter_context(chromium())
        context = browser.new_context(base_url=console.address)
        log_in(context.new_page(), console)
        cookies = {str(one["name"]): str(one["value"]) for one in context.cookies()}
        context.close()
        client = stack.enter_context(
            httpx.Client(base_url=console.address, cookies=cookies, timeout=120)
        )
        paths = {name: path for name, path in paths.items() if _is_page(client, path)}
        progress(f"{len(paths)} pages, over HTTP")
        rows = list(server_rows(console, client, paths, 5 if chosen.quick else 40))
        if chosen.quick:  # only those with charts
            paths = {name: path for name, path in paths.items() if CHART in client.get(path).text}
        progress(f"{len(paths)} pages and the journeys, in a browser")
        rows += browser_rows(browser, console, paths)
    show("Pages", rows, chosen.json)


if __name__ == "__main__":
    main()
