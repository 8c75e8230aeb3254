"""What is waited for in a page may take as long as on a machine that has much else to do."""

from __future__ import annotations

from playwright.sync_api import expect

SECONDS_MAX = 30

expect.set_options(timeout=SECONDS_MAX * 1000)
