"""`vllm serve`, twice, each with an agent of its own and one directory that both agents see."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from swdriver_shim.adapters.claims import mint
from swdriver_shim.adapters.vllm.config import AgentSpec, EngineConfig, NameSpec, fresh
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.engines.prompts import prompt
from tests.engines.vllm_process import QUIET, build
from tests.kvss_agent.process import AgentProcess, agent
from tests.live import wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

START_SECONDS = 240.0
KEPT = OrgPolicies(policy=Policy(tiers=Tiers.TIER2))


@dataclass
class Server:
    http: httpx.Client
    setting: EngineConfig

    def ask(self, tokens: list[int], org: str) -> tuple[list[int], int]:
        """What it answers, and how much of the prompt it did not compute."""
        claim = mint(self.setting.claims_key, self.setting.driver, org)
        asked = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
            "kv_transfer_params": {"tidegate": claim},
        }
        answer = self.http.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        cached = (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return told["choices"][0]["token_ids"], cached or 0


@contextlib.contextmanager
def serving(model: Path, setting: EngineConfig, home: Path) -> Iterator[Server]:
    file, log = home / f"{setting.driver}.json", home / f"{setting.driver}.log"
    file.write_bytes(msgspec.json.encode(setting))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "TidegateConnector",
        "kv_connector_module_path": "swdriver_shim.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tidegate": str(file)},
    }
    command = [
        # What `vllm serve` runs; in the CPU build that looks for a package of another name.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "2048", "--block-size", "32", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--skip-tokenizer-init", "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    with log.open("w") as said:
        process = subprocess.Popen(command, env={**os.environ, **QUIET}, stdout=said, stderr=said)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:

            def is_up() -> bool:
                assert process.poll() is None, log.read_text()[-3000:]
                with contextlib.suppress(httpx.TransportError):
                    return http.get("/health").status_code == 200
                return False

            wait_until("it serves", is_up, START_SECONDS)
            yield Server(http, setting)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def home_of(one: AgentProcess, directory: Path) -> AgentSpec:
    return AgentSpec(
        url=str(one.http.base_url).rstrip("/"),
        token=(one.directory / "token").read_text().strip(),
        address=f"unix:{one.directory}/data.sock",
        memory_bytes=32 << 20,
        tier2={"kind": "posix", "path": str(directory), "cap_bytes": 1 << 30},
    )


def test_what_one_server_has_seen_the_other_takes_from_tier_2(tmp_path: Path) -> None:
    model, files = tmp_path / "llama", tmp_path / "files"
    build("llama", model)
    asked = prompt(1)
    with agent(tmp_path / "agent7") as first, agent(tmp_path / "agent8") as second:
        setting = fresh(NameSpec(name="tiny"), "job7", ["acme", "globex"], home_of(first, files))
        orgs = tuple(replace(org, policies=KEPT) for org in setting.orgs)
        setting = replace(setting, orgs=orgs, wait_seconds=20)
        other = replace(setting, driver="job8", agent=home_of(second, files))
        with serving(model, setting, tmp_path) as one:
            answer, cached = one.ask(asked, "acme")
            assert cached == 0
            assert one.ask(asked, "acme") == (answer, 960)
            wait_until(
                "what was used again is copied",
                lambda: sum(path.is_file() for path in files.rglob("*")) >= 15,
                60,
            )
            with serving(model, other, tmp_path) as two:
                assert two.ask(asked, "globex")[1] == 0, "another org's"
                assert two.ask(asked, "acme") == (answer, 960)
