"""Two managers of one replica, with drivers in their engines and a real agent: the cache goes from one
to the next, and back, and nobody has it twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kvss_agent.plane import DRIVER
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.daemons import C, told
from tests.swdriver_shim.holder import EACH, NOBODY
from tests.workload_manager.managers import Running, is_alive, manager

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CACHE = {"console": NOBODY, "driver": DRIVER}
ASKED = list(range(3 * C))
OTHER = list(range(5000, 5000 + 2 * C))


@pytest.fixture
def one(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent(tmp_path / "agent") as made:
        made.tell(document(1, spec("s", 20, EACH * C)))
        yield made


def ask(running: Running, **what: Any) -> Any:
    with running.client() as http:
        answer = http.post("/v1/driver", json=what)
        assert answer.status_code == 200, answer.text
        return answer.json()


def test_a_surge_keeps_the_cache_and_an_undone_one_takes_it_back(
    tmp_path: Path, one: AgentProcess
) -> None:
    with (
        manager(tmp_path, "chat-0-r1-aaaa", cache=CACHE) as old,
        manager(tmp_path, "chat-0-r2-bbbb", cache=CACHE, begins=False) as new,
    ):
        old.wait_for("ready", "Serving", cache="attached")
        assert ask(old, tell=told([one])) == 1
        wait_until("its shards are open", lambda: ask(old, store=ASKED) == 3)
        assert ask(old, load=ASKED) == len(ASKED)

        new.start()
        try:
            status = new.wait_for("standby", "WaitingForCache", cache="waiting")
            assert status["url"], "it answers"
            assert (ask(new, load=ASKED), ask(new, store=ASKED)) == (0, 0)

            old.set_goal("RELEASE_CACHE")
            new.wait_for("ready", "Serving", cache="attached")
            old.wait_for("ready", cache="released", goal="RELEASE_CACHE")
            assert ask(new, load=ASKED) == len(ASKED), "the old one's columns, each byte compared"
            assert ask(old, load=ASKED) == 0, "it goes on serving, without a cache"
            assert ask(new, store=OTHER) == 2

            old.set_goal("RUN")
            old.wait_for("ready", cache="waiting", goal="RUN")
            new.set_goal("DRAIN")
            assert new.ends() == 0
            old.wait_for("ready", cache="attached")
            wait_until("its shards are open", lambda: ask(old, load=OTHER) == len(OTHER))
            assert ask(old, load=ASKED) == len(ASKED)
        finally:
            new.process.kill()
            new.process.wait()


def test_whoever_waits_has_the_cache_when_the_manager_of_the_holder_is_killed(
    tmp_path: Path, one: AgentProcess
) -> None:
    """The kernel ends the engine in order, so that it leaves its note."""
    with manager(tmp_path, "chat-0-r1-aaaa", cache=CACHE) as old:
        old.wait_for("ready", cache="attached")
        ask(old, tell=told([one]))
        wait_until("its shards are open", lambda: ask(old, store=ASKED) == 3)
        with manager(tmp_path, "chat-0-r2-bbbb", cache=CACHE) as new:
            new.wait_for("standby", "WaitingForCache")
            [engine] = old.engines
            old.kill()
            new.wait_for("ready", cache="attached")
            wait_until("the kernel has told the engine", lambda: not is_alive(engine))
            assert ask(new, load=ASKED) == len(ASKED)


def test_an_engine_that_crashes_after_its_release_does_not_take_the_cache_back(
    tmp_path: Path, one: AgentProcess
) -> None:
    with manager(tmp_path, "chat-0-r1-aaaa", cache=CACHE) as old:
        old.wait_for("ready", cache="attached")
        old.set_goal("RELEASE_CACHE")
        old.wait_for("ready", cache="released")
        with old.client() as http:
            http.post("/v1/crash")
        status = old.wait_for("ready", "CacheReleased", restarts=1)
        assert status["cache"] == "released"
        old.kill()
        old.start()
        old.wait_for("ready", "CacheReleased", cache="released", goal="RELEASE_CACHE")
