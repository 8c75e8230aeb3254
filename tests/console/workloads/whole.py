"""A whole stack with a fleet and a brain, where workloads run as people make them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx
import msgspec
import psutil
import redis

from console.workloads.leader.endpoints import Document, Written
from telemetry.records import ENDPOINTS
from tests.hostile.engine import UNVERIFIED
from tests.hostile.scene import Scene
from tests.live import wait_until
from tests.stack.whole import prepared_stack

NODES: Final = ("ax-1", "ax-2")
ORG: Final = "acme"
MODEL: Final = "example/chat-8b"
BRAIN: Final = "brain-1"
UP_SECONDS: Final = 240.0
DOMAINS: Final = ", ".join(["{wio: 2, leaves: [leaf-1]}"] * 4)  # a shard for each
FLEET: Final = f"""
stamps:
  east:
    leaves: {{leaf-1: {{}}}}
    nodes:
      ax-1: {{nics: {{eth0: {{leaf: leaf-1}}}}, memory: 64M, shards_max: 32}}
      ax-2: {{nics: {{eth0: {{leaf: leaf-1}}}}, memory: 64M, shards_max: 32}}
    boxes:
      cs-1: {{domains: [{DOMAINS}]}}
      cs-2: {{domains: [{DOMAINS}]}}
      cs-3: {{domains: [{DOMAINS}]}}
      cs-4: {{domains: [{DOMAINS}]}}
"""


class Served(Scene):
    """`key`: of a client of the org."""

    username = "admin"
    key = ""

    fleet = FLEET
    nodes: ClassVar[tuple[str, ...]] = NODES

    def make(self) -> None:
        self.make_fleet()
        self.add_process("brain", BRAIN)
        self.wait_for_fleet()

    def make_fleet(self) -> None:
        self.ask("PUT", "/fleet/description", {"yaml": self.fleet}, **{"If-Match": "*"})
        for name in self.nodes:
            self.add_process("node", name)
        self.ask("POST", "/orgs", {"slug": ORG, "name": ORG}, **{"Idempotency-Key": ORG})
        self.key = str(self.ask("POST", f"/orgs/{ORG}/callers", {"name": "client"})["token"])

    def wait_for_fleet(self) -> None:
        for name in self.nodes:
            wait_until(f"{name} has joined", partial(self._is_ready, f"/nodes/{name}"), UP_SECONDS)

    # People

    @property
    def password(self) -> str:
        return self.whole.password

    def create(self, name: str, **more: Any) -> dict[str, Any]:
        spec = {
            "name": name,
            "model": MODEL,
            "org": ORG,
            "tokens_max": 8192,
            # So large that it is worth it to load what is cached.
            "engine": {"kind": "emulator", "emulator": {"parameters": 70e9}},
            # Times say nothing on a machine that does much else.
            "rollout": {"ready_seconds": 1, "ttft_ratio_max": 100},
            **more,
        }
        return self._change("POST", "/workloads", {"spec": spec})

    def patch(self, name: str, **patch: Any) -> dict[str, Any]:
        return self._change("PATCH", f"/workloads/{name}", {"patch": patch})

    def post(self, path: str, **told: Any) -> dict[str, Any]:
        return self._change("POST", f"/workloads/{path}", told)

    def delete(self, name: str) -> None:
        self.begin_to_delete(name)
        self.wait_until_gone(name)

    def begin_to_delete(self, name: str) -> None:
        self._change("DELETE", f"/workloads/{name}", None)

    def wait_until_gone(self, name: str) -> None:
        wait_until(f"{name} is gone", lambda: self.is_gone(name), UP_SECONDS)

    def is_gone(self, name: str) -> bool:
        return self.admin.get(f"/workloads/{name}").status_code == httpx.codes.NOT_FOUND

    def _change(self, method: str, path: str, told: Any) -> dict[str, Any]:
        headers = {"Idempotency-Key": secrets.token_hex(8), "If-Match": "*"}
        made: dict[str, Any] = self.ask(method, path, told, **headers)
        return made

    # What is so

    def workload(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/workloads/{name}")
        return found

    def conditions(self, name: str) -> Mapping[str, tuple[str, str, str]]:
        return {
            one["type"]: (one["status"], one["reason"], one["message"])
            for one in self.workload(name)["conditions"]
        }

    def is_ready(self, name: str) -> bool:
        found = self.workload(name)
        ready = [one for one in found["conditions"] if one["type"] == "Ready"]
        is_seen = found["observed_generation"] == found["generation"]
        return is_seen and [one["status"] for one in ready] == ["True"]

    def wait_until_ready(self, name: str, seconds_max: float = UP_SECONDS) -> None:
        try:
            wait_until(f"{name} is ready", lambda: self.is_ready(name), seconds_max)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.conditions(name)}") from None

    def instances(self, name: str, *, with_ended: bool = False) -> list[dict[str, Any]]:
        some = "" if with_ended else "?ended=false"
        return list(self.ask("GET", f"/workloads/{name}/instances{some}")["items"])

    def endpoints(self, model: str) -> list[Written]:
        """What brains are told, read as the leader itself reads it."""
        url = psutil.Process(self.whole.pid("orchestrator")).environ()["TIDEGATE_ENDPOINTS_URL"]
        with contextlib.closing(redis.Redis.from_url(url, driver_info=None)) as client:
            raw: Any = client.get(ENDPOINTS + model)
        return list(msgspec.json.decode(raw, type=Document).endpoints) if raw else []

    def rolled_out(self, name: str, revision: int) -> bool:
        """Whether all replicas run it, and nothing else is there."""
        found = self.workload(name)
        there = self.instances(name)
        is_whole = len(there) == found["replicas"]["desired"]
        return is_whole and found["stable_revision"] == revision and self.is_ready(name)

    # Clients

    @property
    def brain_url(self) -> str:
        return f"http://{self.processes[BRAIN].api_address}"

    def chat(self, text: str, *, brain_url: str = "", **more: Any) -> httpx.Response:
        """What the brain, or the one at this address, answers a client."""
        told = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            **more,
        }
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(
            f"{brain_url or self.brain_url}/v1/chat/completions",
            json=told,
            headers=headers,
            timeout=60,
            verify=UNVERIFIED,  # to make another takes longer than the request
        )

    @contextlib.contextmanager
    def streaming(self, model: str) -> Iterator[None]:
        """Somebody reads an answer of this model that does not end meanwhile."""
        told = {
            "model": model,
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": 4000,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {self.key}"}
        url = f"{self.brain_url}/v1/chat/completions"
        with httpx.stream("POST", url, json=told, headers=headers, timeout=60) as answer:
            assert answer.status_code == httpx.codes.OK, answer.read()
            next(answer.iter_raw())
            yield

    def cached(self, text: str) -> int:
        """Tokens of the prompt that were not computed."""
        answer = self.chat(text)
        assert answer.status_code == httpx.codes.OK, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    # Processes

    @property
    def cluster_folder(self) -> Path:
        return self.whole.state / "cluster"

    def processes_of(self, instance: str = "") -> list[psutil.Process]:
        """Of an instance, or of all of them and of jobs."""
        mark = f"{self.cluster_folder}/"
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                folder = process.environ().get("TIDEGATE_FOLDER", "") or process.cwd()
                if folder.startswith(mark) and instance in ("", Path(folder).name):
                    found.append(process)
        return found

    def managers(self, instance: str) -> list[psutil.Process]:
        """Started for it, or before it was known what for."""
        return [one for one in self.processes_of(instance) if {"run", "spare"} & words_of(one)]

    def engines(self, instance: str) -> list[psutil.Process]:
        return [
            one for one in self.processes_of(instance) if "workload_manager.emulator" in words_of(one)
        ]


def words_of(process: psutil.Process) -> set[str]:
    """Of its command line; none of one that has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {*process.cmdline()}
    return set()


@contextlib.contextmanager
def served(directory: Path) -> Iterator[Served]:
    with prepared_stack(directory) as whole:
        whole.up()
        made = Served(whole, directory)
        try:
            made.make()
            yield made
        finally:
            made.stop()
            made.admin.close()
