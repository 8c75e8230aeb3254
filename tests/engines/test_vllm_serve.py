"""`vllm serve`, twice, each with an agent of its own and one directory that both agents see."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from swdriver_shim.adapters.claims import mint
from swdriver_shim.adapters.join_config import NameSpec
from swdriver_shim.adapters.vllm.config import AgentSpec, EngineConfig, fresh
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.engines.prompts import prompt
from tests.engines.serving import Server, serving
from tests.engines.vllm_process import build
from tests.kvss_agent.process import AgentProcess, agent
from tests.live import wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

KEPT = OrgPolicies(policy=Policy(tiers=Tiers.TIER2))


def server(model: Path, setting: EngineConfig, home: Path) -> contextlib.AbstractContextManager[Server]:
    file = home / f"{setting.driver}.json"
    file.write_bytes(msgspec.json.encode(setting))
    return serving(model, str(file), file.with_suffix(".log"))


def claim(setting: EngineConfig, org: str) -> str:
    return mint(setting.claims_key, setting.driver, org)


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
        with server(model, setting, tmp_path) as one:
            answer, cached = one.ask(asked, claim(setting, "acme"))
            assert cached == 0
            assert one.ask(asked, claim(setting, "acme")) == (answer, 960)
            wait_until(
                "what was used again is copied",
                lambda: sum(path.is_file() for path in files.rglob("*")) >= 15,
                60,
            )
            with server(model, other, tmp_path) as two:
                assert two.ask(asked, claim(other, "globex"))[1] == 0, "another org's"
                assert two.ask(asked, claim(other, "acme")) == (answer, 960)
