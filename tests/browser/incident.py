"""`python -m tests.browser.incident ADDRESS PASSWORD`: make the pictures of docs/incident.md anew.

ADDRESS is a console that `make up` started some minutes ago, PASSWORD is the admin's. An incident is
staged on it as at a terminal, and each step is gone on from when there is a picture of its page.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time

from playwright.sync_api import Page

from console.environment import PROJECT
from tests.browser.chromium import chromium
from tests.browser.screenshots import IMAGES, enter

WAITS = ("1", "3", "4")  # for somebody who presses Enter
SETTLING_SECONDS = 25.0  # until charts and figures have what the terminal tells of


def main(address: str, password: str) -> None:
    ours, terminal = pty.openpty()
    with chromium() as browser:
        context = browser.new_context(base_url=address, viewport={"width": 1280, "height": 900})
        page = context.new_page()
        enter(page, password)
        with subprocess.Popen(
            [sys.executable, "-m", "console.stack", "incident"],
            cwd=PROJECT,
            stdin=terminal,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout
            step = ""
            for line in process.stdout:
                print(f"{time.strftime('%T')} {line}", end="", flush=True)
                if found := re.search(r"(\d)/\d  ", line):
                    step = found[1]
                elif found := re.search(r"http://[^/]+(/\S+)", line):
                    take(page, found[1], step)
                    if step in WAITS:
                        os.write(ours, b"\n")
        context.close()


def take(page: Page, path: str, step: str) -> None:
    page.goto(path)
    if "/latency/" in path:
        time.sleep(SETTLING_SECONDS)
    page.screenshot(path=IMAGES / f"incident-{step}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
