"""Emulators as processes, with and without a driver that is told what to do as if a console had."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec

from console.environment import PROJECT
from swdriver_shim.adapters.claims import mint
from swdriver_shim.adapters.join_config import JoinConfig
from tests.kvss_agent.plane import DRIVER, SECRET
from tests.kvss_agent.process import AgentProcess, document, spec
from tests.live import START_SECONDS_MAX, wait_until
from tests.swdriver_shim.daemons import C, org
from workload_manager import kv_layout
from workload_manager.emulator.document import EngineDocument
from workload_manager.spec import EmulatorSpec

MODEL = "tiny-chat"
NOBODY = "http://127.0.0.1:9"  # a console that does not answer: what it told before holds
CLAIMS_KEY = b"a key for claims that a brain shares with it"
# As slow as it has to be for a load to be worth its time: drivers compare.
FAST = EmulatorSpec(domains=2, bytes_per_token=64, operations_per_second=2e13)
SLOTS = 64


class EmulatorProcess:
    """One that answers. `spec`: of its speed and KV."""

    def __init__(
        self, folder: Path, *options: str, driver: JoinConfig | None = None, **more: Any
    ) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        self._folder = folder
        told = EngineDocument(
            **{"model": MODEL, "tokens_max": 8192, "emulator": FAST, "driver": driver, **more}
        )
        (folder / "engine.json").write_bytes(msgspec.json.encode(told))
        address = folder / "address"
        address.unlink(missing_ok=True)
        command = ("workload_manager.emulator", "--spec", str(folder / "engine.json"))
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, "--address-file", str(address), *options],
                cwd=PROJECT,
                stderr=log,
            )
        wait_until(
            "it answers", lambda: address.exists() or self.process.poll() is not None, START_SECONDS_MAX
        )
        assert self.process.poll() is None, self.log
        url = address.read_text()
        transport = httpx.HTTPTransport(uds=url.removeprefix("unix:")) if "unix:" in url else None
        base = "http://engine" if transport else url
        self.http = httpx.Client(base_url=base, transport=transport, timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.http.close()

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(30)

    def complete(self, prompt: str | list[int], **more: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, **more}
        return self.http.post("/v1/completions", json=body)

    def cached(self, prompt: str | list[int], org: str | None = None, key: bytes = CLAIMS_KEY) -> int:
        """How many tokens of a prompt were cached, asked for an org."""
        more = {"kv_transfer_params": {"tidegate": mint(key, DRIVER, org)}} if org else {}
        answer = self.complete(prompt, **more)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def figure(self, name: str) -> float:
        page = self.http.get("/metrics").text
        [line] = [one for one in page.splitlines() if one.startswith(f"{name}{{")]
        return float(line.rpartition(" ")[2])

    def wait_for_driver(self) -> None:
        def attached() -> bool:
            return bool(self.http.get("/-/driver").json()["attached"])

        wait_until("its driver has started", attached)


def events(text: str) -> list[dict[str, Any]]:
    """Of a stream that has ended as it should."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def tell_agent(one: AgentProcess, model: EmulatorSpec = FAST) -> dict[str, Any]:
    """Give a driver its memory at an agent. What comes back: its desired document."""
    said = kv_layout.emulated(MODEL, "", model)
    shards = [
        (f"{group.name}-{index}", size * C, group.name, index)
        for group in said.groups
        for index, size in enumerate(group.bytes_per_token)
    ]
    one.tell(document(1, *(spec(name, SLOTS, size) for name, size, _, _ in shards)))
    homes = [
        {
            "group": group,
            "index": index,
            "address": f"unix:{one.directory}/data.sock",
            "shard": name,
        }
        for name, _, group, index in shards
    ]
    return {
        "generation": 1,
        "driver": DRIVER,
        "secret": base64.b64encode(SECRET).decode(),
        "model": msgspec.to_builtins(said),
        "claims_key": base64.b64encode(CLAIMS_KEY).decode(),
        "homes": homes,
        "orgs": [org("acme", "a" * 40), org("globex", "g" * 40)],
    }


def joined(state: Path, told: dict[str, Any]) -> JoinConfig:
    """As one that has joined a console, which has told it this, and is away."""
    state.mkdir(parents=True)
    (state / "desired.json").write_text(json.dumps(told))  # drivers read it in the open as well
    return JoinConfig(console=NOBODY, name=DRIVER, plain_console=True, state_dir=str(state))


@contextlib.contextmanager
def streaming(engine: EmulatorProcess, **more: Any) -> Iterator[Iterator[str]]:
    body = {"model": MODEL, "prompt": "Go on", "stream": True, **more}
    with engine.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        yield answer.iter_lines()
