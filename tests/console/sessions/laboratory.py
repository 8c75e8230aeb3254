"""A plane on a network of its own: nodes and boxes as hosts on leaves, and this thread as the console.

A driver runs where its box is: what it moves takes the box's port. Agents are asked beside the leaves,
as over a network for management, so that leaves and spine carry columns only. Redis and PostgreSQL are
reached over their Unix sockets, which no network parts.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import redis
from django.conf import settings

from console.fleet.models import Driver, Node, SpineLink
from kvss_agent.security.certificates import Role
from swdriver_shim.cache_map.codec import FIELD, SPACE_BYTES
from swdriver_shim.cache_map.recalls import request
from swdriver_shim.daemon.metrics import PATH_BYTES
from swdriver_shim.keys import Keys
from telemetry.ingest.service import Ingest
from telemetry.queries import Fold, Question, ask
from telemetry.records import RECALL_STREAM
from telemetry.store.rollup import RollUp
from tests.console.sessions import network
from tests.console.sessions.fleets import leaf, make_box, make_driver, make_node
from tests.console.sessions.network import WITH_US, Namespace, Network
from tests.console.sessions.planes import Plane, declared_with
from tests.control_api import NO_CONSOLE, as_console, certified
from tests.kvss_agent.process import agent
from tests.live import wait_until
from tests.swdriver_shim.daemons import CONTROL, C, Daemon, stored_document

LEAVES: Final = ("l1", "l2")
EACH: Final = 2048  # bytes per token of each of the four domains: 128 KiB of a column
MODEL: Final = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [EACH] * 4}]}
COLUMNS: Final = 4  # of a prompt, which so has 2 MiB
MEMORY_BYTES: Final = 64 << 20
DATA_PORT: Final = 8411


def why_not() -> str:
    """Why there can be no laboratory here; empty if there can."""
    if not settings.REDIS_URL.startswith("unix:"):
        return "Redis has no Unix socket here, and a namespace reaches no other"
    return network.why_not()


@dataclass
class Laboratory(Plane):
    """The node `ax1` and the box `cs1` on leaf `l1`; `ax2` on leaf `l2`, across the spine."""

    network: Network = field(default_factory=lambda: Network(LEAVES))
    hosts: dict[str, Namespace] = field(default_factory=dict)  # of nodes

    def __post_init__(self) -> None:
        self.stack.callback(self.network.close)
        self._redis = redis.Redis.from_url(settings.REDIS_URL)
        self._redis.flushdb()
        self.stack.callback(self._redis.close)
        RollUp().tend_days(time.time())
        self._ingest = Ingest(self._redis, "laboratory")
        self._ingest.join()
        self._began = time.time()

    def add_node(
        self, name: str, *leaves: str, memory_bytes: int = MEMORY_BYTES, tier2: Path | None = None
    ) -> Node:
        [on] = leaves
        host = self.hosts[name] = self.network.host(name, on)
        number = self.network.number(host)
        data = f"{Network.DATA}.{number}:{DATA_PORT}"
        identity = certified(self.directory / name, Role.NODE, name)
        with host.entered():
            started = agent(
                self.directory / name,
                *("--name", name, "--console", NO_CONSOLE),
                *("--tcp", data, "--plain-tcp", "yes"),
                launch=WITH_US,
                host=f"{Network.BESIDE}.{number}",
                tls=as_console(identity),
            )
            self.agents[name] = made = self.stack.enter_context(started)
        return make_node(
            name,
            on,
            memory_bytes=memory_bytes,
            control_url=str(made.http.base_url),
            control_token=(made.directory / "token").read_text().strip(),
            data_address=f"tcp:{data}",
            public_key=identity.public_key_pem,
            declared=declared_with(tier2),
        )

    def cut_off(self, name: str) -> None:
        """Nobody reaches this node, and its heartbeats do not arrive."""
        self.still.add(name)
        self.network.plug(self.hosts[name], name, "down")

    def join_again(self, name: str) -> None:
        self.network.plug(self.hosts[name], name, "up")
        self.still.discard(name)

    def add_driver(self, name: str) -> Driver:
        host = self.network.host(name, "l1")
        identity = certified(self.directory / name, Role.DRIVER, name)
        with host.entered():
            daemon = Daemon(
                self.directory / name,
                *("--name", name, "--console", NO_CONSOLE, "--telemetry", settings.REDIS_URL),
                launch=WITH_US,
                host=f"{Network.BESIDE}.{self.network.number(host)}",
                tls=as_console(identity),
            )
        self.drivers[name] = daemon
        self.stack.callback(daemon.stop)
        return make_driver(
            name,
            MODEL,
            control_url=str(daemon.http.base_url),
            control_token=CONTROL,
            public_key=identity.public_key_pem,
        )

    def borrow(self, driver: str, org: str, tokens: list[int], sibling: str) -> None:
        """Have this driver borrow a prompt of an org, as a brain asks for it, to its end."""
        told = stored_document(self.directory / driver)
        [secret] = [one.secret for one in told.orgs if one.name == org]
        prompt = Keys(org, secret, told.model.namespace()).prompt(tokens)
        space = prompt.maker.tag + prompt.maker.namespace.digest()[:SPACE_BYTES]
        asked = request(space, prompt.keys, time.time(), sibling)
        before = self.borrowed(driver)
        self._redis.xadd(f"{RECALL_STREAM}driver:{driver}", {FIELD: asked})
        wait_until("it is borrowed", lambda: self.borrowed(driver) > before, 30)

    def borrowed(self, driver: str) -> int:
        """Prompts that this driver has borrowed."""
        bearer = {"authorization": f"Bearer {CONTROL}"}
        told = self.drivers[driver].http.get("/metrics", headers=bearer).text
        found = re.search(r'^swdriver_borrows_total\{what="borrowed"\} (\d+)', told, re.MULTILINE)
        return int(found[1]) if found else 0

    def told_over_spine(self) -> dict[str, float]:
        """The bytes of columns that telemetry says have crossed the spine, by direction."""
        while self._ingest.step():
            pass
        now = time.time()
        wanted = {"tier": "spine"}
        question = Question(
            topic="driver:*",
            metric=PATH_BYTES,
            fold=Fold.SUM,
            start=self._began - 60,
            end=now + 60,
            where=wanted,
            by=("direction",),
        )
        return {
            line.labels["direction"]: sum(
                value for value in line.values if isinstance(value, float | int)
            )
            for line in ask(question, now).lines
        }


def kv(prompt: int) -> bytes:
    return random.Random(prompt).randbytes(COLUMNS * C * 4 * EACH)


def tokens_of(prompt: int) -> list[int]:
    return [prompt * 100_000 + number for number in range(COLUMNS * C)]


@contextlib.contextmanager
def laboratory(directory: Path) -> Iterator[Laboratory]:
    """This thread is the console's host meanwhile: what it asks, it asks in there."""
    with contextlib.ExitStack() as stack:
        made = Laboratory(directory, stack)
        stack.enter_context(made.network.host("console").entered())
        made.add_node("ax1", "l1")
        made.add_node("ax2", "l2")
        for name in LEAVES:
            SpineLink.objects.create(name=f"{name}-up", leaf=leaf(name), spine="spine", gbits=100)
        make_box("cs1", ("l1",) * 4)
        yield made
