"""`python -m tests.browser.incident ADDRESS PASSWORD`: make the pictures of docs/incident.md anew.

ADDRESS is a console that `make up` started, PASSWORD is the admin's. An incident is staged on it, and of
each step there is a picture of the page that it tells of.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

from playwright.sync_api import Page

from console.environment import PROJECT
from tests.browser.chromium import chromium
from tests.browser.screenshots import IMAGES, enter

SIZE = {"width": 1280, "height": 900}
SETTLING_SECONDS = 12.0  # until a chart has the step that the terminal tells of


def main(address: str, password: str) -> None:
    with chromium() as browser:
        context = browser.new_context(base_url=address, viewport=SIZE)  # type: ignore[arg-type]
        page = context.new_page()
        enter(page, password)
        command = [sys.executable, "-m", "console.stack", "incident"]
        with subprocess.Popen(
            command, cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            step = ""
            for line in process.stdout:
                print(f"{time.strftime('%T')} {line}", end="", flush=True)
                if found := re.match(r"(\d)/\d  ", line):
                    step = found[1]
                elif found := re.match(r" +http://[^/]+(/\S+)", line):
                    take(page, found[1], step)
        context.close()


def take(page: Page, path: str, step: str) -> None:
    page.goto(path)
    if "/latency/" in path:
        time.sleep(SETTLING_SECONDS)
    page.wait_for_load_state("load")
    page.screenshot(path=IMAGES / f"incident-{step}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
