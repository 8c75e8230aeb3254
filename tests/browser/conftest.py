"""What is waited for in a page may take as long as on a machine that has much else to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.chromium import chromium

SECONDS_MAX = 30

expect.set_options(timeout=SECONDS_MAX * 1000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser
