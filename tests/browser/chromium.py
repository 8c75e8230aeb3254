"""The browser that the machine has."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No sandbox, because tests run as root in containers; and no calls home.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
# What is waited for in a page may take as long as on a machine that has much else to do.
SECONDS_MAX = 30
# No faults of a page: that it is meant to be an error; that a busy machine takes longer to open a
# WebSocket than the page waits for it, which then asks instead; that a page is left while it asks (htmx
# then says that the request was aborted, and that it is over: that one comes with the reason of all that
# fail, and says nothing by itself).
FINE = (
    "status of 404",
    "WebSocket is closed before the connection is established",
    "htmx:sendAbort",
    "htmx:afterRequest",
)

expect.set_options(timeout=SECONDS_MAX * 1000)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        raise RuntimeError("There is no Chromium. Install it (Debian: apt install chromium).")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


def complaints_of(page: Page) -> list[str]:
    """What the browser complains of in it from now on."""
    found: list[str] = []

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(one in message.text for one in FINE):
            found.append(message.text)

    page.on("console", complain)
    page.on("pageerror", lambda error: found.append(str(error)))
    return found
