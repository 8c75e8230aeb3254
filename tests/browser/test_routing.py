"""A platform engineer's and an org admin's journey: a model is served, its org gets a key and limits, a
client asks a real brain, and the pages say what became of it. Engines only look like some."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.chromium import complaints_of
from tests.browser.looking import NARROW, WIDE, faults, log_in
from tests.hostile.scene import Process, Scene
from tests.inference_brain.engines import FakeEngine
from tests.live import wait_until
from tests.stack.whole import prepared_stack

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(1200)]
SECONDS = 120_000  # for a page, on a machine that has much else to do
MODEL = "acme/llama-chat"


@dataclass
class Account:
    address: str
    username: str
    password: str


@dataclass
class Place:
    account: Account
    brain: Process
    engines: tuple[FakeEngine, FakeEngine]

    def ask(self, key: str) -> httpx.Response:
        """As a client does."""
        return httpx.post(
            f"http://{self.brain.api_address}/v1/completions",
            json={"model": MODEL, "prompt": "What is a wafer?", "max_tokens": 4, "stream": True},
            headers={"authorization": f"Bearer {key}"},
            timeout=60,
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A stack with an org and a brain, and two engines that nobody has told it of."""
    directory: Path = tmp_path_factory.mktemp("routing")
    with prepared_stack(directory) as whole, FakeEngine() as first, FakeEngine() as second:
        whole.up()
        scene = Scene(whole, directory)
        try:
            key = {"Idempotency-Key": "acme"}
            scene.ask("POST", "/orgs", {"slug": "acme", "name": "Acme"}, **key)
            brain = scene.add_process("brain", "east")
            wait_until("it listens", lambda: bool(brain.api_address), 120)
            yield Place(Account(whole.address, "admin", whole.password), brain, (first, second))
        finally:
            scene.stop()
            scene.admin.close()


def test_a_model_is_served_asked_explained_and_limited(place: Place, browser: Browser) -> None:
    context = browser.new_context(base_url=place.account.address, viewport=WIDE)
    context.set_default_timeout(SECONDS)
    page = context.new_page()
    complaints = complaints_of(page)
    log_in(page, place.account)

    # Nothing is served yet, and the page says where to begin.
    page.goto("/routing/")
    page.get_by_role("link", name="Serve a model").click()
    page.get_by_role("link", name="Serve a model").first.click()
    page.get_by_label("Short name").fill("chat")
    page.get_by_label("Model", exact=True).fill(MODEL)
    page.get_by_label("Context length").fill("0")
    page.get_by_label("Orgs").fill("acme")
    page.locator("main form button.button--main").click()
    expect(page.get_by_text("greater than or equal to 1")).to_be_visible()
    page.get_by_label("Context length").fill("8192")
    page.locator("main form button.button--main").click()
    expect(page.get_by_text(f"requests for {MODEL} get 503")).to_be_visible()
    for number, engine in enumerate(place.engines):
        page.get_by_role("link", name="Add a replica").first.click()
        page.get_by_label("Name").fill(f"chat-{number}")
        page.get_by_label("URL").fill(engine.url)
        page.get_by_label("Served as").fill(engine.served_as)
        page.locator("main form button.button--main").click()
        expect(page.get_by_role("row", name=f"chat-{number}")).to_contain_text("guessed")
    assert faults(page) == []

    # A key of the org, which is shown once.
    page.goto("/orgs/acme/limits/")
    expect(page.get_by_text(MODEL)).to_be_visible()
    page.get_by_role("link", name="API key").click()
    page.get_by_label("Name").fill("client")
    page.get_by_role("button", name="Create key").click()
    key = page.locator("#token").inner_text()
    assert faults(page) == []
    wait_until("the brain knows the key", lambda: place.ask(key).is_success, 120)
    answer = place.ask(key)
    assert "[DONE]" in answer.text

    # Why it went there, by the name that the client was told.
    chosen = answer.headers["x-tidegate-replica"]
    page.goto("/orgs/acme/explain/")
    page.get_by_label("Request, tokens or keys").fill(answer.headers["x-request-id"])
    page.get_by_role("button", name="Explain").click()
    why = page.locator("section", has=page.get_by_role("heading", name="Why this replica"))
    expect(why).to_contain_text(f"ok, by {chosen}")
    expect(why.get_by_role("row", name=re.compile(f"^{chosen} .*chosen"))).to_be_visible()
    expect(why.get_by_role("row", name=re.compile("chat-[01]"))).to_have_count(2)
    assert faults(page) == []

    limit(page, place, key)
    see_traffic(page)
    context.close()
    assert complaints == []


def limit(page: Page, place: Place, key: str) -> None:
    """One request a minute: what was asked before counts, so the next one is refused."""
    page.goto("/orgs/acme/limits/")
    page.get_by_label("Requests per minute").fill("0")
    page.get_by_role("button", name="Save limits").click()
    expect(page.get_by_text("greater than or equal to 1")).to_be_visible()
    page.get_by_label("Requests per minute").fill("1")
    page.get_by_label("Reason").fill("a trial contract")
    page.get_by_role("button", name="Save limits").click()
    expect(page.locator(".messages")).to_be_visible()
    facts = page.locator("section[aria-labelledby=limits] dl.facts")

    def is_applied() -> bool:
        page.goto("/orgs/acme/limits/")
        return "on 1 of 1" in facts.inner_text()

    wait_until("the brain has the limits", is_applied, 120)
    answers: list[httpx.Response] = []

    def is_refused() -> bool:
        """On a busy machine a minute may be over before the next one."""
        answers.append(place.ask(key))
        return answers[-1].status_code == httpx.codes.TOO_MANY_REQUESTS

    wait_until("the next one is refused", is_refused)
    assert len(answers) <= 3, "it is one a minute"
    assert int(answers[-1].headers["retry-after"]) > 0
    page.set_viewport_size(NARROW)
    assert faults(page) == []
    page.set_viewport_size(WIDE)
    page.goto("/audit/?action=limits")
    expect(page.get_by_role("row", name=re.compile("a trial contract"))).to_be_visible()


def see_traffic(page: Page) -> None:
    """The org's and the replicas' rows, as brains report them."""

    def is_there() -> bool:
        page.goto("/routing/")
        rows = page.locator("section", has=page.get_by_role("heading", name="By replica", exact=True))
        return "chat-0" in rows.inner_text() and "acme" in page.locator("main").inner_text()

    wait_until("brains report", is_there, 120)
    page.locator("select[name=org]").select_option("acme")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("heading", name="Routing of Acme")).to_be_visible()
    expect(page.get_by_role("heading", name="By replica", exact=True)).to_have_count(0)
    assert faults(page) == []
