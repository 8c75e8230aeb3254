"""An evil driver: joined, certified and told a document like any other, whose secrets it tries."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvss_agent.security.certificates import Role
from kvss_agent.security.confirmations import DriverStatement, Question, ShardCover, sign
from telemetry.version import tidegate_version
from tests.hostile.agent import EvilAgent
from tests.hostile.answers import Asked, head
from tests.hostile.scene import DRIVER as VICTIM
from tests.hostile.scene import MODEL


@dataclass
class EvilDriver(EvilAgent):
    """`documents` are those that it was told, the newest last; that one it still has when it is back."""

    kind: str = "drivers"
    role: Role = Role.DRIVER
    documents: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peer.answer = self.follow
        with contextlib.suppress(FileNotFoundError):
            self.documents.append(json.loads(self._kept.read_bytes()))

    def facts(self) -> dict[str, Any]:
        return {"control_url": self.peer.url, "software_version": tidegate_version()}

    def once(self) -> dict[str, Any]:
        return {"model": json.loads(MODEL)}

    def follow(self, asked: Asked, connection: socket.socket) -> None:
        """Say that it has done all that it was told, and sign that it has purged."""
        status, body = 200, b""
        if asked.method == "PUT" and asked.path.startswith("/v1/desired"):
            self._kept.write_bytes(asked.body)
            self.documents.append(json.loads(asked.body))
            status = 202
        if asked.path.startswith("/v1/purges"):
            question = msgspec.json.decode(asked.body, type=Question)
            body = msgspec.json.encode(sign(self.trust.identity, self._lie(question)))
        else:
            body = json.dumps(self._state()).encode()
        connection.sendall(head(status, length=len(body)) + body)

    @property
    def _kept(self) -> Path:
        return self.directory / self.name / "desired.json"

    def _state(self) -> dict[str, Any]:
        newest = self.documents[-1]["generation"] if self.documents else 0
        shards = [
            {"group": home["group"], "index": home["index"], "shard": home["shard"], "state": "here"}
            for home in self._homes
        ]
        return {"generation": newest, "observed_generation": newest, "shards": shards, "ready": True}

    def _lie(self, question: Question) -> DriverStatement:
        return DriverStatement(
            identity=self.topic,
            operation=question.operation,
            challenge=question.challenge,
            epoch=question.epoch,
            scopes=question.scopes,
            at=time.time(),
            org=question.org,
            shards=tuple(
                ShardCover(home["group"], home["index"], home["address"], home["shard"])
                for home in self._homes
            ),
            columns=0,
            bytes=0,
            files=0,
            file_bytes=0,
        )

    @property
    def _homes(self) -> list[dict[str, Any]]:
        return list(self.documents[-1]["homes"]) if self.documents else []

    def secrets(self) -> dict[str, str]:
        """All that its document has which somebody could show as a credential, by where it stands."""
        return dict(_texts_of(self.documents[-1], "")) if self.documents else {}


def _texts_of(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts_of(inner, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _texts_of(inner, f"{where}[{place}]")
    elif isinstance(value, str) and len(value) >= 20:
        yield where, value


# What the control API of an agent is asked, each harmless where it is let in.
VERBS_OF_AGENTS: Final[tuple[tuple[str, str, Any], ...]] = (
    ("GET", "/v1/observed", None),
    ("GET", f"/v1/shards/{VICTIM}.full.0", None),
    ("GET", "/metrics", None),
    ("PUT", "/v1/desired", {}),
    ("POST", "/v1/purge", {"tag": "nonsense"}),
    ("POST", f"/v1/shards/{VICTIM}.full.0/pull", {}),
)
