"""A console, its worker, an agent and drivers, all as processes: what an admin has before them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.console.control.drivers import MODEL
from tests.kvss_agent.plane import SECRET
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import LiveConsole, live_console, wait_until
from tests.processes import start
from tests.swdriver_shim.daemons import CONTROL, EACH, C, Daemon

JOIN = """
import json, sys
from django.utils import timezone
from console.fleet.models import Driver
from console.sessions.models import DriverOrg
for name, url, token, model in json.loads(sys.stdin.read()):
    now = timezone.now()
    driver = Driver.objects.create(
        name=name, control_url=url, control_token=token, model=model, joined_at=now,
        last_heartbeat_at=now, heartbeat_sha256=b"x" * 32,
    )
    DriverOrg.objects.create(driver=driver)
"""


@dataclass
class Scene:
    console: LiveConsole
    api: httpx.Client
    drivers: dict[str, Daemon]
    worker: Worker


class Worker:
    """Of Celery, with one process; killed with all that it has started."""

    def __init__(self, console: LiveConsole, log: Path) -> None:
        self._environment, self._log = console.environment, log
        self.start()

    def start(self, *options: str) -> None:
        with self._log.open("ab") as output:
            self.process = start(
                *("celery", "-A", "console.celery", "worker"),
                *("--pool", "prefork", "--concurrency", "1", "--without-gossip", "--without-mingle"),
                *options,
                environment=self._environment,
                descriptors={1: output.fileno(), 2: output.fileno()},
                is_session=True,
            )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextlib.contextmanager
def scene(directory: Path, *names: str) -> Iterator[Scene]:
    """An org `acme`, and these drivers with a shard each; nobody has told them anything yet."""
    homes = directory / "homes.json"
    settings = {
        "DJANGO_SETTINGS_MODULE": "tests.console.control.settings",
        "TESTS_HOMES": str(homes),
    }
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(agent(directory / "agent"))
        homes.write_text(json.dumps({name: _home(there, name) for name in names}))
        _make_shards(there, names)
        drivers = {}
        for name in names:
            drivers[name] = Daemon(directory / name)
            stack.callback(drivers[name].kill)
        console = stack.enter_context(live_console(directory, settings))
        told = [[name, str(one.http.base_url), CONTROL, MODEL] for name, one in drivers.items()]
        console.manage(JOIN, json.dumps(told))
        worker = Worker(console, directory / "worker.log")
        stack.callback(worker.kill)
        headers = {"Authorization": f"Bearer {console.token()}"}
        api = stack.enter_context(
            httpx.Client(base_url=f"{console.address}/api/v1", headers=headers, timeout=30)
        )
        made = api.post(
            "/orgs", json={"slug": "acme", "name": "Acme"}, headers={"Idempotency-Key": "org"}
        )
        made.raise_for_status()
        for name, driver in drivers.items():
            wait_until(f"{name} is told", driver.is_ready, 60)
        yield Scene(console, api, drivers, worker)


def _home(there: AgentProcess, name: str) -> dict[str, Any]:
    home = {"group": "full", "index": 0, "shard": name}
    home["address"] = f"unix:{there.directory}/data.sock"
    return {"secret": base64.b64encode(SECRET).decode(), "homes": [home]}


def _make_shards(there: AgentProcess, names: tuple[str, ...]) -> None:
    told = document(1, *(spec(name, 20, EACH * C, driver=name) for name in names))
    told["peers"] = [{**told["peers"][0], "name": name} for name in (*names, "another-agent")]
    there.tell(told)
