"""`python -m tests.browser.screenshots ADDRESS PASSWORD`: make the pictures of the README anew.

ADDRESS is a console that `make up` started; PASSWORD is the admin's.
"""

from __future__ import annotations

import sys

from playwright.sync_api import Page

from console.environment import PROJECT
from tests.browser.chromium import chromium

IMAGES = PROJECT / "docs" / "images"
SHOTS = (
    ("home-light", "/", "light", 1280, 720),
    ("home-dark", "/", "dark", 1280, 720),
    ("audit-light", "/audit/", "light", 1280, 720),
    ("fleet-light", "/fleet/", "light", 1280, 720),
    ("audit-narrow", "/audit/", "dark", 390, 844),
)


def main(address: str, password: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    with chromium() as browser:
        for name, path, scheme, width, height in SHOTS:
            context = browser.new_context(
                base_url=address,
                color_scheme="dark" if scheme == "dark" else "light",
                viewport={"width": width, "height": height},
            )
            page = context.new_page()
            enter(page, password)
            page.goto(path)
            page.wait_for_load_state("networkidle")
            page.screenshot(path=IMAGES / f"{name}.png")
            context.close()


def enter(page: Page, password: str) -> None:
    page.goto("/log-in/")
    page.get_by_label("User name").fill("admin")
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/")


if __name__ == "__main__":
    main(*sys.argv[1:])
