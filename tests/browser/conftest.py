"""A browser, a console with something to see, and pages of somebody who has logged in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.browser.chromium import chromium, complaints_of
from tests.browser.looking import Open, log_in
from tests.live import ANSWER_SECONDS_MAX, LiveConsole, live_console


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


FLEET = """
stamps:
  east:
    leaves: {leaf-1: {spine_links: {up-1: {spine: spine-1, gbits: 400}}}, leaf-2: {}}
    nodes: {ax-1: {nics: {eth0: {leaf: leaf-1}}}, ax-2: {nics: {eth0: {leaf: leaf-2}}}}
    boxes: {cs-1: {domains: [{wio: 8, leaves: [leaf-1]}, {wio: 8, leaves: [leaf-2]}]}}
  west: {}
"""
NODE = {
    "control_url": "http://127.0.0.1:8410",
    "control_token": "t" * 32,
    "data_address": "tcp:127.0.0.1:8411",
    "software_version": "0.1.0",
    "protocol_min": 1,
    "protocol_max": 2,
    "memory_bytes": 1 << 40,
    "cpus": 64,
}
DRIVER = {
    "control_url": "http://127.0.0.1:8420",
    "control_token": "t" * 32,
    "software_version": "0.1.0",
    "model": {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [1024, 2048]}]},
}

BRAIN = {
    "control_url": "http://127.0.0.1:8430",
    "control_token": "t" * 32,
    "software_version": "0.1.0",
    "api_url": "http://127.0.0.1:8440",
}
WORKLOAD = """
from console.orgs.models import Org
from tests.console.workloads.workloads import a_rollout, a_workload, an_instance
workload = a_workload(Org.objects.get(slug="acme"))
an_instance(workload, state="loading", progress_done=1, progress_total=4, sentence="Loading.")
a_rollout(workload)
"""
SERVED = {"name": "chat", "model": "llama-chat", "tokens_max": 8192}
REPLICA = {"name": "chat-1", "url": "http://127.0.0.1:8000", "driver": "job-7"}
BUCKET = {
    "name": "models",
    "endpoint": "https://storage.a-region.example.com:9000",
    "org": "acme",
    "access_key_id": "any",
    "secret_access_key": "any",
}


def join(api: httpx.Client, kind: str, name: str, told: dict[str, Any]) -> None:
    """As an agent or a driver does."""
    key = {"Idempotency-Key": name}
    token = api.post("/join-tokens", json={"kind": kind}, headers=key).json()["token"]
    joined = httpx.post(
        f"{api.base_url}{kind}s/{name}/join",
        json=told,
        headers={"Authorization": f"Bearer {token}"},
        timeout=ANSWER_SECONDS_MAX,
    )
    joined.raise_for_status()


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    """A console with an org, a member of it, a renaming and a token."""
    with live_console(tmp_path_factory.mktemp("console")) as console:
        headers = {"Authorization": f"Bearer {console.token()}", "Idempotency-Key": "k", "If-Match": "*"}
        with httpx.Client(
            base_url=f"{console.address}/api/v1", headers=headers, timeout=ANSWER_SECONDS_MAX
        ) as api:
            made = api.post("/orgs", json={"slug": "acme", "name": "Acme", "reason": "new customer"})
            made.raise_for_status()
            api.put("/orgs/acme/members/admin", json={"role": "org admin"}).raise_for_status()
            api.patch("/orgs/acme", json={"name": "Acme Ltd"}).raise_for_status()
            api.put("/fleet/description", json={"yaml": FLEET}).raise_for_status()
            join(api, "node", "ax-1", NODE)
            join(api, "driver", "job-7", DRIVER)
            join(api, "brain", "east", BRAIN)
            added = {"/models": SERVED, "/models/chat/replicas": REPLICA, "/buckets": BUCKET}
            for path, told in added.items():
                own = {"Idempotency-Key": path.replace("/", ".")}
                api.post(path, json=told, headers=own).raise_for_status()
        console.manage(WORKLOAD)
        yield console


@pytest.fixture(scope="module")
def cookies(browser: Browser, console: LiveConsole) -> Any:
    """Those of somebody who has logged in."""
    context = browser.new_context(base_url=console.address)
    log_in(context.new_page(), console)
    found = context.cookies()
    context.close()
    return found


@pytest.fixture
def open_page(browser: Browser, console: LiveConsole, cookies: Any) -> Iterator[Open]:
    """A page of somebody who is logged in. Whatever the browser complains of fails the test."""
    contexts: list[BrowserContext] = []
    complaints: list[list[str]] = []

    def open_page(path: str = "/", **options: Any) -> Page:
        context = browser.new_context(base_url=console.address, **options)
        contexts.append(context)
        context.add_cookies(cookies)
        page = context.new_page()
        complaints.append(complaints_of(page))
        page.goto(path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not any(complaints), complaints
