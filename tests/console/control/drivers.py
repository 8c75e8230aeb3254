"""Real drivers and an agent for them, known to the console as if they had joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from console.control import documents
from console.fleet.models import Driver
from console.sessions.models import DriverOrg
from kvss_agent.security.identity import ProcessIdentity
from tests.kvss_agent.plane import SECRET
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.swdriver_shim.daemons import CONTROL, EACH, C, Daemon

MODEL = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [EACH]}]}


def join(name: str, url: str, token: str = CONTROL, model: Any = MODEL, public_key: str = "") -> Driver:
    now = timezone.now()
    driver = Driver.objects.create(
        name=name,
        control_url=url,
        control_token=token,
        model=model,
        joined_at=now,
        last_heartbeat_at=now,
        heartbeat_sha256=b"x" * 32,
        public_key=public_key,
    )
    DriverOrg.objects.create(driver=driver)  # all orgs
    return driver


@dataclass
class DriverFleet:
    """Drivers of which each has a shard of its own at one agent."""

    directory: Path
    agent: AgentProcess
    daemons: dict[str, Daemon]

    def home(self, name: str) -> Mapping[str, Any]:
        """What the sessions of a real console say."""
        home = {"group": "full", "index": 0, "shard": name}
        home["address"] = f"unix:{self.agent.directory}/data.sock"
        return {"secret": SECRET, "homes": [home]}

    def start(self, name: str) -> Daemon:
        self.daemons[name] = daemon = Daemon(self.directory / name, "--name", name)
        url = str(daemon.http.base_url)
        if not Driver.objects.filter(name=name).update(control_url=url, lost_at=None):
            own = ProcessIdentity.load(self.directory / name, f"driver:{name}")
            join(name, url, public_key=own.public_key_pem)
        return daemon

    def kill(self, name: str) -> None:
        self.daemons.pop(name).kill()


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverFleet]:
    """Two of them, `one` and `two`, whose documents nobody has sent yet."""
    with agent(tmp_path / "agent") as there:
        names = ("one", "two")
        shards = [spec(name, 20, EACH * C, driver=name) for name in names]
        told = document(1, *shards)
        told["peers"] = [{**told["peers"][0], "name": name} for name in (*names, "another-agent")]
        there.tell(told)
        fleet = DriverFleet(tmp_path, there, {})
        monkeypatch.setitem(documents._parts, "driver", [fleet.home])
        for name in names:
            fleet.start(name)
        try:
            yield fleet
        finally:
            for name in list(fleet.daemons):
                fleet.kill(name)
