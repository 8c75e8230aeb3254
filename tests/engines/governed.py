"""A real console with nodes, and an engine that joins it."""

from __future__ import annotations

import base64
import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import httpx

from swdriver_shim.adapters.claims import mint
from swdriver_shim.policy import AS_USUAL, Rules
from tests.engines.prompts import prompt
from tests.engines.serving import Server
from tests.hostile.scene import Scene
from tests.live import wait_until
from tests.stack.whole import whole_stack

DRIVER: Final = "vllm-7"
NODES: Final = ("ax-1", "ax-2")
ORGS: Final = ("acme", "globex", "hooli", "initech")
SESSION: Final = "chat"
CLAIM_SECONDS: Final = 3600  # engines take minutes to start on a busy machine
FLEET: Final = """
stamps:
  east:
    leaves: {leaf-1: {}}
    nodes:
      ax-1: {nics: {eth0: {leaf: leaf-1}}, memory: %(memory)s, shards_max: 8, tier2: %(tier2)s}
      ax-2: {nics: {eth0: {leaf: leaf-1}}, memory: %(memory)s, shards_max: 8, tier2: %(tier2)s}
    boxes:
      cs-1: {domains: [{wio: 8, leaves: [leaf-1]}]}
      cs-2: {domains: [{wio: 8, leaves: [leaf-1]}]}
"""


class Governed(Scene):
    """A stack with two nodes that listen on TCP and share a tier 2, and a session of all orgs. `memory`:
    of each node."""

    memory = "256M"
    username = "admin"

    @property
    def password(self) -> str:
        return self.whole.password

    @property
    def tier2(self) -> Path:
        return self.directory / "tier2"

    def files(self) -> set[Path]:
        """Of columns, in tier 2. Whose they are is in no name."""
        return {path for path in self.tier2.rglob("*.full.*") if not path.name.startswith(".")}

    def make(self) -> None:
        self.tier2.mkdir()
        tier2 = f"{{kind: posix, path: {self.tier2}, cap: 256M}}"
        described = {"yaml": FLEET % {"memory": self.memory, "tier2": tier2}}
        self.ask("PUT", "/fleet/description", described, **{"If-Match": "*"})
        for name in NODES:
            self.add_process("node", name, TCP="127.0.0.1:0", MEMORY=self.memory)
        for org in ORGS:
            self.ask("POST", "/orgs", {"slug": org, "name": org}, **{"Idempotency-Key": org})
        for name in NODES:
            wait_until(f"{name} has joined", partial(self._is_ready, f"/nodes/{name}"), 120)

    def start_session(self, bytes_per_token: int) -> None:
        told = {"name": SESSION, "boxes": 1, "bytes_per_token": bytes_per_token, "wait_seconds": 60}
        self._run("/sessions", told)

    def start_job(self, driver: str = DRIVER, orgs: Sequence[str] = ORGS) -> None:
        """A job of the session, with the name of its driver. A purge of one of these orgs waits for the
        driver from then on, also once its engine has ended."""
        job = {"name": driver, "driver": driver, "orgs": list(orgs), "wait_seconds": 60}
        self._run(f"/sessions/{SESSION}/jobs", job)
        wait_until("it follows its document", lambda: self.target(driver)["observed_generation"] > 0, 60)

    def end_job(self, driver: str) -> None:
        headers = {"Idempotency-Key": secrets.token_hex(8), "If-Match": "*"}
        begun = self.ask("DELETE", f"/sessions/{SESSION}/jobs/{driver}", **headers)

        def is_done() -> bool:
            now = self.ask("GET", f"/operations/{begun['id']}")
            assert not now.get("error"), now
            return bool(now["done"])

        wait_until("the job has ended", is_done, 180)

    def driver(self, name: str = DRIVER) -> dict[str, Any]:
        """As soon as it has joined."""
        wait_until("it has joined", lambda: self.admin.get(f"/drivers/{name}").is_success, 60)
        found: dict[str, Any] = self.ask("GET", f"/drivers/{name}")
        return found

    def claim(self, org: str, rules: Rules = AS_USUAL, driver: str = DRIVER) -> str:
        told = self.ask("GET", f"/drivers/{driver}/claims-key")
        key = base64.b64decode(told["claims_key"])
        return mint(key, driver, org, rules, seconds=CLAIM_SECONDS)

    def set_policy(self, org: str, **more: Any) -> None:
        held = self.admin.get(f"/orgs/{org}/policy")
        told = {"policy": {**(held.json()["policy"] or {}), **more}, "reason": "for a test"}
        headers = {"If-Match": held.headers["ETag"], "Idempotency-Key": secrets.token_hex(8)}
        self.ask("PUT", f"/orgs/{org}/policy", told, **headers)

    def apply_policy(self, org: str, **more: Any) -> None:
        """Set it, and wait until the driver that most tests ask follows it."""
        self.set_policy(org, **more)
        self.wait_until_followed(org)

    def wait_until_followed(self, org: str) -> None:
        """Drivers of other tests that have no job any more hear nothing, and are not waited for."""

        def is_followed() -> bool:
            applied = self.ask("GET", f"/orgs/{org}/policy")["applied"]
            return DRIVER not in [one["driver"] for one in applied["lagging"]]

        wait_until("its driver follows it", is_followed, 60)

    def reached(self, org: str) -> tuple[int, int]:
        """How many drivers follow the org's policy, and how many there are."""
        found = self.ask("GET", f"/orgs/{org}/policy")["applied"]
        return found["has_it"], found["drivers"]

    def explain(self, org: str, request: str) -> dict[str, Any]:
        """What Explain says of a request: the answer of the driver that has served it."""
        found = self.ask("POST", f"/orgs/{org}/explain", {"request": request})
        [answer] = [one for one in found["answers"] if one["result"]]
        return dict(answer)

    def why_missed(self, org: str, request: str) -> dict[str, int]:
        """Tokens by reason, as Explain says of a request."""
        missed: dict[str, int] = self.explain(org, request)["result"]["missed_tokens"]
        return missed

    def target(self, driver: str = DRIVER) -> dict[str, Any]:
        found = self.ask("GET", "/targets")
        return next(one for one in found["items"] if (one["kind"], one["name"]) == ("driver", driver))

    def told(self, name: str = DRIVER, **more: Any) -> dict[str, Any]:
        """What an engine is told: the console, a token, a name."""
        join = self.directory / f"{name}.join"
        join.write_text(self.join_token("driver"))
        where = {"join": str(join), "state_dir": str(self.directory / name)}
        return {"console": self.console, "name": name, **where, **more}


class Load:
    """Requests without a pause, in a thread: answers are compared with those without a cache."""

    def __init__(self, vllm: Server, claim: str, seeds: range) -> None:
        self._vllm = vllm
        self._claim = claim
        self._right = {seed: vllm.ask(prompt(seed), None)[0] for seed in seeds}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.hit_tokens: list[int] = []
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        usual = self._vllm.http
        with httpx.Client(base_url=usual.base_url, headers=usual.headers, timeout=120) as http:
            beside = replace(self._vllm, http=http)
            for seed in itertools.cycle(self._right):
                if self._ends.is_set():
                    return
                try:
                    answer, cached = beside.ask(prompt(seed), self._claim)
                except (AssertionError, httpx.HTTPError) as error:
                    self.wrong.append(f"{seed} failed: {error}")
                    continue
                self.hit_tokens.append(cached)
                if answer != self._right[seed]:
                    self.wrong.append(f"{seed} is answered {answer}, with {cached} cached")


@contextlib.contextmanager
def governed_stack(directory: Path, memory: str = "256M") -> Iterator[Governed]:
    with whole_stack(directory) as whole:
        whole.up()
        made = Governed(whole, directory)
        made.memory = memory
        try:
            made.make()
            yield made
        finally:
            made.stop()
            made.admin.close()
