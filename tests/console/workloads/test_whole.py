"""From `POST /workloads` to a token that a client reads, with every part real but the wafer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, Self

import httpx
import psutil
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.chromium import chromium
from tests.browser.looking import WIDE, log_in
from tests.console.workloads.whole import UP_SECONDS, Served, served
from tests.live import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]

STORY = "The whole of the story is told again and again. "


@pytest.fixture(scope="module")
def scene() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name, served(Path(name)) as made:
        yield made


@pytest.fixture
def no_workload(scene: Served) -> Iterator[None]:
    """None is there before, and none is left for the next test, also where this one fails."""
    delete_all(scene)
    yield
    delete_all(scene)


def delete_all(scene: Served) -> None:
    left = [one["name"] for one in scene.ask("GET", "/workloads")["items"]]
    for name in left:
        scene.begin_to_delete(name)
    for name in left:
        scene.wait_until_gone(name)
    wait_until("no process is left", lambda: not scene.processes_of(), UP_SECONDS)


@pytest.fixture
def chat(scene: Served) -> str:
    """A workload that serves with its cache: that of the test before, if it was left so."""
    if not is_settled(scene, "chat"):
        delete_all(scene)
        scene.create("chat")
        scene.wait_until_ready("chat")
    wait_until("its brain has been told", lambda: scene.chat(text(0)).is_success, UP_SECONDS)
    wait_until("it hits", lambda: scene.cached(text(0)) > 0, UP_SECONDS)
    return "chat"


def is_settled(scene: Served, name: str) -> bool:
    """Whether it is there, and all that it was told is done."""
    return not scene.is_gone(name) and scene.rolled_out(name, scene.workload(name)["revision"])


def roll_out(scene: Served, name: str, *, start_seconds: float) -> int:
    """Begin a revision that there was not before. Its number."""
    revision = int(scene.workload(name)["revision"]) + 1
    argument = str(start_seconds + revision / 1000)
    scene.patch(name, engine={"arguments": ["--start-seconds", argument]})
    return revision


def text(number: int) -> str:
    """A prompt that others do not begin like."""
    return f"{number}. " + STORY * 60


class Clients:
    """Some who ask without a pause, of a few prompts."""

    def __init__(self, scene: Served, prompts: int = 3) -> None:
        self._scene = scene
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(text(number),)) for number in range(prompts)
        ]
        self.failed: list[str] = []
        self.asked = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, prompt: str) -> None:
        while not self._ends.wait(0.1):
            self.asked += 1
            try:
                answer = self._scene.chat(prompt)
            except httpx.HTTPError as error:
                self.failed.append(repr(error))
            else:
                if answer.status_code != httpx.codes.OK:
                    self.failed.append(f"{answer.status_code} {answer.text[:300]}")


def test_a_workload_serves_and_the_second_request_hits(scene: Served, chat: str) -> None:
    assert scene.cached(text(9)) == 0
    wait_until("it hits", lambda: scene.cached(text(9)) > 0, UP_SECONDS)
    [instance] = scene.instances(chat)
    assert (instance["state"], instance["cache"]) == ("ready", "attached")
    wait_until("it is warm", lambda: scene.conditions(chat)["CacheWarm"][0] == "True", UP_SECONDS)


def test_a_rollout_fails_no_request_and_keeps_the_cache(scene: Served, chat: str) -> None:
    wait_until(
        "all are cached", lambda: all(scene.cached(text(number)) for number in range(3)), UP_SECONDS
    )
    [before] = scene.instances(chat)
    with Clients(scene) as clients:
        revision = roll_out(scene, chat, start_seconds=0.2)
        wait_until("it is rolled out", lambda: scene.rolled_out(chat, revision), UP_SECONDS)
    assert clients.failed == []
    assert clients.asked > 3
    [after] = scene.instances(chat)
    assert after["name"] != before["name"]
    assert after["driver"] == before["driver"]
    assert all(scene.cached(text(number)) for number in range(3)), "of the one before it"
    newest = scene.ask("GET", f"/workloads/{chat}/rollouts")["items"][0]
    assert newest["phase"] == "done"


@pytest.mark.parametrize("victim", ["manager", "engine", "cluster", "orchestrator"])
def test_whatever_is_killed_in_a_rollout_it_ends_with_one_instance(
    scene: Served, chat: str, victim: str
) -> None:
    before = {one["name"] for one in scene.instances(chat, with_ended=True)}
    revision = roll_out(scene, chat, start_seconds=0.5)

    def later() -> list[str]:
        """The first may have gone when we look."""
        found = [one["name"] for one in scene.instances(chat, with_ended=True)]
        return [name for name in found if name not in before]

    wait_until("there is a second one", later, UP_SECONDS)
    newest = later()[0]
    if victim in ("cluster", "orchestrator"):
        kill(scene, victim)
    else:
        found = scene.managers if victim == "manager" else scene.engines
        wait_until("it is killed", lambda: all_killed(found(newest)), UP_SECONDS)
    wait_until("it is rolled out", lambda: scene.rolled_out(chat, revision), UP_SECONDS)

    def is_alone() -> bool:
        """One that is killed when all is over is not missed at once."""
        its = [one["name"] for one in scene.instances(chat)]
        counts = [(len(scene.managers(name)), len(scene.engines(name))) for name in its]
        return counts == [(1, 1)] and of_nobody(scene, *its) == []

    wait_until("one runs, and nothing else", is_alone, UP_SECONDS)
    wait_until("it hits", lambda: scene.cached(text(0)) > 0, UP_SECONDS)


@pytest.mark.browser
def test_in_a_browser_one_is_created_seen_to_come_up_broken_and_seen_to_be_rolled_back(
    scene: Served, no_workload: None
) -> None:
    """Everything that happens on the page is done by the orchestrator; nobody reloads it."""
    with chromium() as browser:
        page = browser.new_page(base_url=scene.whole.address, viewport=WIDE, reduced_motion="reduce")
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        log_in(page, scene)
        page.goto("/workloads/")
        page.get_by_role("link", name="Create workload").click()
        rewrite(page, "replicas: 2", "replicas: 1")
        page.get_by_role("button", name="Create workload").click()
        is_shown(page, "chat")
        watch(row(page, "status", "Ready"), "yes")
        [good] = scene.instances("chat")
        watch(row(page, "replicas", "chat-0"), f"{good['name']}.*serving")
        watch(row(page, "status", "RolloutComplete"), "yes")  # else there is nothing to go back to

        with Clients(scene) as clients:
            page.get_by_role("link", name="Edit").click()
            rewrite(page, "kind: emulator", "kind: emulator\n  arguments: [--fail-start]")
            rewrite(page, "deadline_seconds: 600", "deadline_seconds: 8")
            page.get_by_role("button", name="Apply").click()
            is_shown(page, "chat")
            watch(row(page, "rollouts", r"2\s+from 1"), "rolled back.* was not ready within 8 s")
            watch(row(page, "revisions", "3"), "current.*same as revision 1")
            watch(row(page, "status", "RolloutComplete"), "yes")
        assert clients.failed == []
        assert clients.asked > 3
        assert [one["name"] for one in scene.instances("chat")] == [good["name"]]

        page.get_by_label("Type the name to confirm").fill("chat")
        page.get_by_role("button", name="Delete workload").click()
        scene.wait_until_gone("chat")
        assert complaints == []


def rewrite(page: Page, old: str, new: str) -> None:
    """In the spec of the form."""
    spec = page.get_by_label("Spec")
    text = spec.input_value()
    assert old in text
    spec.fill(text.replace(old, new))


def is_shown(page: Page, name: str) -> None:
    """What a form asks for may wait for whatever else changes the fleet."""
    expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible(timeout=60_000)


def row(page: Page, section: str, begins: str) -> Locator:
    """The row of a table of the page that begins so."""
    rows = page.locator(f"section[aria-labelledby={section}] tbody tr")
    return rows.filter(has_text=re.compile(rf"^\s*{begins}\b"))


def watch(found: Locator, says: str) -> None:
    expect(found).to_have_text(re.compile(says, re.DOTALL), timeout=1000 * UP_SECONDS)


VICTIMS: Final = ("orchestrator", "cluster", "manager", "engine")


def test_whatever_is_killed_while_workloads_are_created_and_deleted_nothing_is_doubled_or_left(
    scene: Served, no_workload: None
) -> None:
    """One workload for each of the processes, which are killed at other points of its life."""
    for victim in VICTIMS:
        slow = {"answer_tokens_per_second": 20, "parameters": 70e9}
        engine = {"kind": "emulator", "emulator": slow, "arguments": ["--start-seconds", "1"]}
        scene.create(victim, model=model_of(victim), engine=engine)
    wait_until("one is being compiled", lambda: compile_jobs(scene), UP_SECONDS)
    kill(scene, "orchestrator")
    wait_until("there is an instance", lambda: scene.instances("cluster"), UP_SECONDS)
    kill(scene, "cluster")
    kill(scene, "manager")
    kill(scene, "engine")
    for victim in VICTIMS:
        scene.wait_until_ready(victim, UP_SECONDS * 2)
    serving = [the_one_that_serves(scene, victim) for victim in VICTIMS]
    wait_until("nothing else runs", lambda: of_nobody(scene, *serving) == [], UP_SECONDS)

    with contextlib.ExitStack() as reading:  # so that they do not go before they are killed
        for victim in VICTIMS:
            reading.enter_context(scene.streaming(model_of(victim)))
        for victim in VICTIMS:
            scene.begin_to_delete(victim)
        wait_until("the first drains", lambda: drains(scene, "engine"), UP_SECONDS)
        for victim in reversed(VICTIMS):
            kill(scene, victim)
    for victim in VICTIMS:
        scene.wait_until_gone(victim)
    wait_until("no process is left", lambda: not scene.processes_of(), UP_SECONDS)
    assert scene.ask("GET", "/sessions")["items"] == []
    assert scene.ask("GET", "/drivers")["items"] == []
    assert [scene.endpoints(model_of(victim)) for victim in VICTIMS] == [[]] * len(VICTIMS)
    kept = [*scene.cluster_folder.glob("workloads/*"), *scene.cluster_folder.glob("instances/*")]
    assert kept == []


def model_of(victim: str) -> str:
    return f"example/{victim}"


def compile_jobs(scene: Served) -> list[Path]:
    return list(scene.cluster_folder.glob("jobs/compile-*"))


def kill(scene: Served, victim: str) -> None:
    """The process of the stack, or the one of the workload of this name, wherever that is just now."""
    if victim in ("orchestrator", "cluster"):
        before = scene.whole.pid(victim)
        os.kill(before, signal.SIGKILL)
        wait_until(f"{victim} is back", partial(scene.whole.is_back, victim, before), UP_SECONDS)
        return
    found = scene.managers if victim == "manager" else scene.engines

    def killed() -> bool:
        running = [one for name in states(scene, victim) for one in found(name)]
        return all_killed(running) or scene.is_gone(victim)

    wait_until(f"a {victim} is killed", killed, UP_SECONDS)


def all_killed(running: list[psutil.Process]) -> bool:
    """Whether there was one that had not ended by itself when it was its turn."""
    killed = 0
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    return killed > 0


def the_one_that_serves(scene: Served, name: str) -> str:
    """Its only instance: another one was never needed, and brains know its address."""
    [only] = scene.instances(name, with_ended=True)
    instance = str(only["name"])
    told: list[object] = []

    def serves() -> bool:
        """A workload was ready in the last round, and one that was killed is not yet missed."""
        [now] = scene.instances(name)
        endpoints = scene.endpoints(model_of(name))
        told[:] = [now, endpoints]
        return (
            (now["name"], now["state"], now["serving"]) == (instance, "ready", True)
            and (len(scene.managers(instance)), len(scene.engines(instance))) == (1, 1)
            and [(one.instance, one.url, one.state) for one in endpoints]
            == [(instance, now["url"], "ready")]
        )

    try:
        wait_until(f"{name} serves, and brains are told of it", serves, UP_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}: {told}") from None
    assert [one["name"] for one in scene.instances(name, with_ended=True)] == [instance]
    return instance


def states(scene: Served, workload: str) -> dict[str, str]:
    """Of its instances, by name; none of a workload that is gone."""
    found = scene.admin.get(f"/workloads/{workload}/instances?ended=false")
    return {one["name"]: one["state"] for one in found.json()["items"]} if found.is_success else {}


def drains(scene: Served, workload: str) -> bool:
    return "draining" in states(scene, workload).values() or scene.is_gone(workload)


def of_nobody(scene: Served, *names: str) -> list[str]:
    """Processes of other instances and of jobs."""
    ours = {one.pid for name in names for one in scene.processes_of(name)}
    return [str(one) for one in scene.processes_of() if one.pid not in ours]
