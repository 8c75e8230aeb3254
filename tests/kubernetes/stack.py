"""A whole stack whose workloads run on the test bed: the Cluster Server is one of the backend
`kubernetes`, everything else is as `make up` starts it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import httpx

from tests.console.workloads.whole import BRAIN, ORG, Served
from tests.kubernetes.bed import Bed
from tests.kubernetes.resources import resource
from tests.kubernetes.server import READY_SECONDS, server
from tests.live import wait_until
from tests.stack.whole import whole_stack

SPEC: Final[dict[str, Any]] = {
    "boxes_per_replica": 0,
    "cache": {"enabled": False},  # drivers in pods cannot reach agents of this machine's loopback
}


@dataclass
class InKubernetes(Served):
    bed: Bed = field(kw_only=True)
    namespace: str = field(kw_only=True)

    def make(self) -> None:
        self.ask("POST", "/orgs", {"slug": ORG, "name": ORG}, **{"Idempotency-Key": ORG})
        self.key = str(self.ask("POST", f"/orgs/{ORG}/callers", {"name": "client"})["token"])
        self.add_process("brain", BRAIN)

    def create(self, name: str, **more: Any) -> dict[str, Any]:
        return super().create(name, **SPEC, **more)

    def wait_until_served(self) -> None:
        """The first workload: its brain may have joined just then."""
        wait_until("the brain serves it", lambda: self.chat("Hello.").is_success, READY_SECONDS)

    def nodes_of(self, name: str) -> dict[str, str]:
        """The node of each instance."""
        with self.bed.client() as client:
            return {
                one["name"]: client.get(resource("Pod"), one["name"], namespace=self.namespace)["spec"][
                    "nodeName"
                ]
                for one in self.instances(name)
            }


@contextlib.contextmanager
def stack(bed: Bed, directory: Path) -> Iterator[InKubernetes]:
    namespace = f"stack-{secrets.token_hex(4)}"
    bed.namespace(namespace)
    listens = f"unix:{directory / 'c.sock'}"
    try:
        with (
            server(bed, namespace, directory, "--listen", listens),
            whole_stack(directory) as whole,
        ):
            whole.up(TIDEGATE_CLUSTER_URL=listens)
            made = InKubernetes(whole, directory, bed=bed, namespace=namespace)
            try:
                made.make()
                yield made
                for name in [one["name"] for one in made.ask("GET", "/workloads")["items"]]:
                    made.delete(name)
            finally:
                made.stop()
                made.admin.close()
    finally:
        bed.drop_namespace(namespace)


class Clients:
    """Some that ask the brain one request after the other. `failed`: those that had no answer, and why.
    A request that nobody has begun to answer may be answered by another replica; none may fail."""

    def __init__(self, scene: InKubernetes, model: str, count: int = 4) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._told = {"model": model, "prompt": "Hello", "max_tokens": 4}
        self._client = httpx.Client(
            base_url=scene.brain_url, headers={"authorization": f"Bearer {scene.key}"}, timeout=60
        )
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        wait_until("clients are answered", lambda: self.answered > 0, READY_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def go_on(self, count: int = 20) -> None:
        """Until so many more were answered."""
        before = self.answered
        wait_until("they go on", lambda: self.answered >= before + count, READY_SECONDS)

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                answer = self._client.post("/v1/completions", json=self._told)
            except httpx.HTTPError as error:
                self.failed.append(repr(error))
                continue
            if answer.is_success:
                self.answered += 1
            else:
                self.failed.append(f"{answer.status_code} {answer.text}")
            time.sleep(0.02)
