"""An agent and the file that names it, and what engines answer by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from swdriver_shim.adapters.join_config import NameSpec
from swdriver_shim.adapters.vllm.config import AgentSpec, fresh
from tests.engines.prompts import prompt
from tests.engines.running import Place, Plain, vllm
from tests.kvss_agent.process import agent


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def place(tmp_path: Path, models: Path) -> Iterator[Place]:
    with agent(tmp_path / "agent") as one:
        token = (tmp_path / "agent" / "token").read_text().strip()
        home = AgentSpec(
            url=str(one.http.base_url).rstrip("/"),
            token=token,
            address=f"unix:{tmp_path}/agent/data.sock",
            memory_bytes=32 << 20,
            tier2={"kind": "posix", "path": str(tmp_path / "tier2"), "cap_bytes": 1 << 30},
        )
        # Small models on a busy machine compute as fast as they load.
        setting = replace(
            fresh(NameSpec(name="tiny"), "job7", ["acme", "globex"], home), only_if_faster=False
        )
        yield Place(one, setting, tmp_path / "job7.json", models)


@pytest.fixture(scope="session")
def plain(models: Path) -> Plain:
    """What the engine answers by itself, by model and seed of the prompt."""
    made = {}
    for model in ("llama", "gemma3", "mistral"):
        with vllm(models, model=model) as engine:
            for seed in range(4):
                made[model, seed] = engine.answer(prompt(seed), None)
    return made
