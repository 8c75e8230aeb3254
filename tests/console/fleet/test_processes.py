"""Real agents and drivers join a real console, over HTTP, and stay when it goes away."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import LiveConsole, live_console, wait_until
from tests.processes import start
from workload_manager import left_drivers

pytestmark = pytest.mark.slow

FLEET = """
stamps:
  east:
    leaves: {leaf-1: {}}
    nodes:
      ax-1: {nics: {eth0: {leaf: leaf-1}}, labels: {rack: "7"}}
"""
SOON = {"TIDEGATE_LOST_AFTER_SECONDS": "12"}  # a heartbeat every three


class Api:
    """The console's API, as a platform admin."""

    def __init__(self, console: LiveConsole) -> None:
        headers = {"Authorization": f"Bearer {console.token()}"}
        self.http = httpx.Client(base_url=f"{console.address}/api/v1", headers=headers, timeout=30)

    def import_fleet(self) -> None:
        answer = self.http.put("/fleet/description", json={"yaml": FLEET}, headers={"If-Match": "*"})
        answer.raise_for_status()

    def join_token(self, kind: str = "node", uses: int = 1) -> str:
        made = self.http.post("/join-tokens", json={"kind": kind, "uses": uses})
        made.raise_for_status()
        return str(made.json()["token"])

    def one(self, path: str) -> dict[str, Any]:
        answer = self.http.get(path)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def beats_again(self, path: str) -> Callable[[], bool]:
        """Whether there was a heartbeat after now."""
        before = self.one(path)["last_heartbeat_at"]
        return lambda: bool(self.one(path)["last_heartbeat_at"] > before)


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    with live_console(tmp_path_factory.mktemp("console"), SOON) as console:
        yield console


@contextlib.contextmanager
def api_of(console: LiveConsole) -> Iterator[Api]:
    api = Api(console)
    with api.http:
        api.import_fleet()
        yield api


@pytest.fixture(scope="module")
def api(console: LiveConsole) -> Iterator[Api]:
    with api_of(console) as api:
        yield api


def in_plain(console: LiveConsole) -> tuple[str, ...]:
    """So that a test can ask the agent by its token alone."""
    return ("--console", console.address, "--name", "ax-1", "--plain-control", "yes")


def state_of(running: AgentProcess) -> tuple[str, str]:
    standing = running.observed()["console"]
    return standing["state"], standing["reason"]


def test_an_agent_joins_beats_and_is_told_apart_from_others(
    console: LiveConsole, api: Api, tmp_path: Path
) -> None:
    options = (*in_plain(console), "--memory", "64M")
    joining = {"KVSS_AGENT_JOIN_TOKEN": api.join_token()}
    with agent(tmp_path / "a", *options, environment=joining) as running:
        wait_until("it has joined", lambda: state_of(running) == ("joined", ""))
        node = api.one("/nodes/ax-1")
        assert (node["state"], node["memory_bytes"], node["labels"]) == (
            "ready",
            64 << 20,
            {"rack": "7"},
        )
        assert node["data_address"] == f"unix:{tmp_path}/a/data.sock"
        assert re.fullmatch(r"\d+\.\d+\.\d+", node["software_version"])
        assert node["mover"] in ("compiled", "python")
        assert (node["protocol_min"], node["protocol_max"]) == tuple(running.observed()["protocol"])
        wait_until("it beats", api.beats_again("/nodes/ax-1"))
        assert 'kvss_console_calls_total{what="joined"}' in running.http.get("/metrics").text
        # The token is used up; and the name is taken by somebody who is alive.
        with agent(tmp_path / "b", *options, environment=joining) as second:
            wait_until("it is refused", lambda: state_of(second)[0] == "refused")
            assert "make a new one" in state_of(second)[1]
        other = {"KVSS_AGENT_JOIN_TOKEN": api.join_token()}
        with agent(tmp_path / "c", *options, environment=other) as third:
            wait_until("it is refused", lambda: state_of(third)[0] == "refused")
            assert "ax-1 is taken, and alive" in state_of(third)[1]
            third.tell(document(1, spec(slots=1)))  # which does not keep it from its work
            assert third.observed()["ready"]
        # In its next life it is known by its state directory, without any join token.
        running.kill()
        running.environment.clear()
        running.start()
        wait_until("it is known", lambda: state_of(running) == ("joined", ""))


def test_an_agent_that_joins_is_asked_over_tls_and_goes_on_so_after_it_was_killed(
    console: LiveConsole, api: Api, tmp_path: Path
) -> None:
    options = ("--console", console.address, "--name", "ax-2", "--nics", "eth0=leaf-1")
    token = {"KVSS_AGENT_JOIN_TOKEN": api.join_token()}
    with agent(tmp_path / "a", *options, environment=token) as running:
        issued = "The console has issued a certificate"
        wait_until("it has a certificate", lambda: issued in running.log)
        wait_until("the console hears of it", lambda: "node ax-2" not in api.one("/authority")["behind"])
        with pytest.raises(httpx.TransportError):
            running.http.get("/v1/observed")  # plain HTTP
        running.kill()
        running.environment.clear()
        running.start()
        wait_until("it beats again", api.beats_again("/nodes/ax-2"))
        assert issued not in running.log, "it has the one of before"
        assert "node ax-2" not in api.one("/authority")["behind"]


def test_agents_and_drivers_beat_on_after_the_console_was_away(tmp_path: Path) -> None:
    """And do their work meanwhile."""
    with live_console(tmp_path, SOON) as console, api_of(console) as api:
        options = in_plain(console)
        token = {"KVSS_AGENT_JOIN_TOKEN": api.join_token()}
        with agent(tmp_path / "a", *options, environment=token) as running:
            wait_until("it has joined", lambda: state_of(running)[0] == "joined")
            console.process.kill()
            console.process.wait(30)
            running.tell(document(1, spec(slots=1)))
            assert running.observed()["ready"]
            # The address still listens: who calls now waits, and gives up by itself.
            wait_until("it notices", lambda: state_of(running)[0] == "away")
            console.restart()
            wait_until("it is heard again", lambda: state_of(running)[0] == "joined")
            assert api.one("/nodes/ax-1")["state"] == "ready"
            assert running.stop() == 0


def test_a_driver_joins_with_its_model(console: LiveConsole, api: Api, tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text('{"name": "llama", "groups": [{"name": "full", "bytes_per_token": [1024]}]}')
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = start(
            *("swdriver_shim", "serve"),
            *("--state-dir", str(tmp_path), "--name", "job-7", "--control", "127.0.0.1:0"),
            *("--console", console.address, "--join-token", api.join_token("driver")),
            *("--model", str(model)),
            descriptors={2: stderr.fileno()},
        )
    try:
        wait_until("it has joined", lambda: api.http.get("/drivers/job-7").status_code == 200)
        driver = api.one("/drivers/job-7")
        assert driver["model"]["name"] == "llama"
        assert driver["lost_at"] is None
        wait_until("it beats", api.beats_again("/drivers/job-7"))
    finally:
        process.terminate()
        assert process.wait(30) == 0, log.read_text()


def test_what_a_removed_driver_has_left_is_deleted_from_its_machine(
    console: LiveConsole, api: Api, tmp_path: Path
) -> None:
    drivers, log = tmp_path / "drivers", tmp_path / "log"
    directory = drivers / "job-9"
    with log.open("w") as stderr:
        process = start(
            *("swdriver_shim", "serve"),
            *("--state-dir", str(directory), "--name", "job-9", "--control", "127.0.0.1:0"),
            *("--console", console.address, "--join-token", api.join_token("driver")),
            descriptors={2: stderr.fileno()},
        )
    try:
        wait_until("it has joined", lambda: api.http.get("/drivers/job-9").status_code == 200)
        left_drivers.note_console(directory, console.address, None)
        (drivers / "stranger").mkdir()
        api.http.post("/drivers/job-9/remove", json={}, headers={"Idempotency-Key": "1"})
        assert left_drivers.delete_left(drivers) == [], "it still runs"
    finally:
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
    assert (directory / "token").exists()
    left_drivers.note_console(directory, "http://127.0.0.1:9", None)
    assert left_drivers.delete_left(drivers) == [], "nobody says that it was removed"
    left_drivers.note_console(directory, console.address, None)
    assert left_drivers.delete_left(drivers) == ["job-9"]
    assert [path.name for path in directory.iterdir()] == ["lock"]
    assert left_drivers.delete_left(drivers) == []


def test_what_a_driver_of_the_fleet_has_is_left_alone_when_it_does_not_run(
    console: LiveConsole, api: Api, tmp_path: Path
) -> None:
    directory = tmp_path / "job-10"
    process = start(
        *("swdriver_shim", "serve"),
        *("--state-dir", str(directory), "--name", "job-10", "--control", "127.0.0.1:0"),
        *("--console", console.address, "--join-token", api.join_token("driver")),
    )
    try:
        wait_until("it has joined", lambda: api.http.get("/drivers/job-10").status_code == 200)
    finally:
        process.terminate()
        process.wait(30)
    left_drivers.note_console(directory, console.address, None)
    before = {path.name for path in directory.iterdir()}
    assert left_drivers.delete_left(tmp_path) == []
    assert {path.name for path in directory.iterdir()} == before
