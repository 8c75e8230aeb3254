"""A brain's control API without a brain: it keeps the document, and confirms and explains what it is
told to. Known to the console as if it had joined."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
from django.utils import timezone

from console.fleet.models import Brain, Driver
from console.routing.models import Replica, ServedModel
from inference_brain import desired
from inference_brain.decisions import RequestRecord
from kvss_agent.security.confirmations import BrainStatement, MapCover, Question, sign
from kvss_agent.security.identity import ProcessIdentity

MODEL = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [64]}]}


@dataclass
class FakeBrain:
    name: str
    identity: ProcessIdentity
    url: str = ""
    told: desired.Desired | None = None
    generation: int = 0
    problems: list[str] = field(default_factory=list)
    records: dict[str, RequestRecord] = field(default_factory=dict)
    confirms: bool = True
    asked: list[Question] = field(default_factory=list)

    def put(self, body: bytes) -> tuple[int, Any]:
        self.told = desired.parse(body)
        self.generation = json.loads(body)["generation"]
        return 202, self.observed()

    def observed(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "observed_generation": self.generation,
            "problems": self.problems,
        }

    def confirm(self, body: bytes) -> tuple[int, Any]:
        question = msgspec.json.decode(body, type=Question)
        self.asked.append(question)
        if not self.confirms:
            return 202, {"detail": "The document that names the new epoch has not been applied yet."}
        statement = BrainStatement(
            identity=f"brain:{self.name}",
            operation=question.operation,
            challenge=question.challenge,
            epoch=question.epoch,
            scopes=question.scopes,
            at=time.time(),
            org=question.org,
            maps=(MapCover("job7", 12),),
        )
        return 200, sign(self.identity, statement)

    def explain(self, request: str) -> tuple[int, Any]:
        record = self.records.get(request)
        return (200, record) if record else (404, {"detail": "No such request."})

    def org(self, name: str) -> desired.OrgSpec:
        assert self.told is not None
        return next(org for org in self.told.orgs if org.name == name)


@contextmanager
def fake_brain(directory: Path, name: str = "east") -> Iterator[FakeBrain]:
    directory.mkdir(parents=True, exist_ok=True)
    brain = FakeBrain(name, ProcessIdentity.load(directory, f"brain:{name}"))

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._answer(*brain.put(self._body()))

        def do_POST(self) -> None:
            self._answer(*brain.confirm(self._body()))

        def do_GET(self) -> None:
            _, _, request = self.path.partition("/v1/requests/")
            self._answer(*(brain.explain(request) if request else (200, brain.observed())))

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _answer(self, status: int, body: object) -> None:
            raw = msgspec.json.encode(body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            """To nobody."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        brain.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield brain
        finally:
            server.shutdown()
            serving.join()


def joined(brain: FakeBrain) -> Brain:
    now = timezone.now()
    return Brain.objects.create(
        name=brain.name,
        control_url=brain.url,
        control_token="c" * 40,
        public_key=brain.identity.public_key_pem,
        joined_at=now,
        last_heartbeat_at=now,
        heartbeat_sha256=b"x" * 32,
        api_url="http://127.0.0.1:8440",
    )


def a_driver(name: str = "job7", *, engine: str = "vLLM", model: Any = MODEL) -> Driver:
    now = timezone.now()
    return Driver.objects.create(
        name=name,
        control_url="http://127.0.0.1:1",
        control_token="c" * 40,
        joined_at=now,
        last_heartbeat_at=now,
        heartbeat_sha256=b"x" * 32,
        engine=engine,
        model=model,
    )


def a_model(name: str = "chat", **more: Any) -> ServedModel:
    values = {"model": f"acme/{name}", "tokens_max": 32_768, **more}
    return ServedModel.objects.create(name=name, **values)


def a_replica(model: ServedModel, name: str = "chat-1", **more: Any) -> Replica:
    return Replica.objects.create(model=model, name=name, **{"url": "http://10.0.0.21:8000", **more})
