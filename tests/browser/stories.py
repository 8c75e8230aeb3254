"""`python -m tests.browser.stories incident|rollout ADDRESS PASSWORD`: make the pictures of
docs/incident.md or docs/staged-rollouts.md anew.

ADDRESS is a console that `make up` started some minutes ago, PASSWORD is the admin's. The story is
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

# For somebody who presses Enter.
WAITS = {"incident": ("1", "3", "4"), "rollout": ("1", "3", "5")}
# Until the page has what the step is about: charts what the terminal tells of, rollouts new instances.
SETTLING_SECONDS = {"/latency/": 12.0, "/workloads/": 12.0}


def main(story: str, address: str, password: str) -> None:
    ours, terminal = pty.openpty()
    with chromium() as browser:
        context = browser.new_context(base_url=address, viewport={"width": 1280, "height": 900})
        page = context.new_page()
        enter(page, password)
        with subprocess.Popen(
            [sys.executable, "-m", "console.stack", story],
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
                    take(page, found[1], f"{story}-{step}")
                    if step in WAITS[story]:
                        os.write(ours, b"\n")
        context.close()


def take(page: Page, path: str, name: str) -> None:
    page.goto(path)
    time.sleep(max((each for part, each in SETTLING_SECONDS.items() if part in path), default=0.0))
    page.screenshot(path=IMAGES / f"{name}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
