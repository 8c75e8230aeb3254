"""Where the objects of engines under test are: an agent, and a daemon or a driver of their own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from swdriver_shim.objects import object_model
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.daemons import ACME, GLOBEX, Daemon, told


class Store:
    """An agent with slots for values of one size. At a daemon, or in this process: one or the other."""

    def __init__(self, directory: Path, agents: list[AgentProcess], value_bytes: int) -> None:
        self._directory = directory
        self._model = object_model("llama", value_bytes)
        self._agents = agents
        self.daemon: Daemon | None = None

    def document(self, **more: Any) -> dict[str, Any]:
        made = told(self._agents, model=msgspec.to_builtins(self._model), **more)
        made["homes"][0]["group"] = self._model.groups[0].name
        return made

    def at_daemon(self, org: str = "acme", *options: str) -> dict[str, Any]:
        """What an operator writes to have the engine ask a daemon in the name of this org."""
        if self.daemon is None:
            self.daemon = Daemon(self._directory / "driver", *options)
            assert self.daemon.control("desired", self.document()).status_code == 202
            wait_until("it is ready", self.daemon.is_ready)
        token = self._directory / f"{org}.token"
        token.write_text({"acme": ACME, "globex": GLOBEX}[org])
        return {"url": str(self.daemon.http.base_url), "token_file": str(token)}

    def in_process(self, org: str = "acme") -> dict[str, Any]:
        """The same for a driver in the engine's process."""
        state_dir = self._directory / "state-0"
        state_dir.mkdir(exist_ok=True)
        (state_dir / "desired.json").write_text(json.dumps(self.document()))
        return {"state_dir": str(self._directory / "state-{rank}"), "org": org}

    def told(self, where: str) -> dict[str, Any]:
        return self.at_daemon() if where == "daemon" else self.in_process()


@contextlib.contextmanager
def store(directory: Path, value_bytes: int, slots: int = 40) -> Iterator[Store]:
    with agent(directory / "agent") as made:
        made.tell(document(1, spec("s", slots, -(-value_bytes // 64) * 64)))
        kept = Store(directory, [made], value_bytes)
        try:
            yield kept
        finally:
            if kept.daemon:
                assert kept.daemon.stop() == 0
