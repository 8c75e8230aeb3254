"""An engine in a process of its own, on an agent of its own, and whoever asks it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from console.environment import PROJECT
from swdriver_shim.adapters.claims import mint
from swdriver_shim.adapters.vllm.config import EngineConfig
from swdriver_shim.policy import AS_USUAL, OrgPolicies, Policy, Rules, Tiers
from tests.engines.vllm_process import STOP_SECONDS
from tests.kvss_agent.process import AgentProcess

Plain: TypeAlias = dict[tuple[str, int], list[int]]  # see the fixture


@dataclass
class Vllm:
    """An engine that runs, and whoever asks it."""

    process: subprocess.Popen[str]
    answers: Any
    setting: EngineConfig | None
    log: Path
    cached: list[int] = field(default_factory=list)

    def ask(self, verb: str, *arguments: object) -> Any:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"verb": verb, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        line = self.answers.readline()
        assert line, self.log.read_text()[-3000:]
        return json.loads(line)["answer"]

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        org: str | None,
        rules: Rules = AS_USUAL,
        tokens: int = 12,
        media: Mapping[str, Sequence[int]] | None = None,
        adapter: str = "",
    ) -> list[list[int]]:
        """What it answers; how much of each prompt was cached is in `cached`."""
        claim = None
        if org and self.setting:
            claim = mint(self.setting.claims_key, self.setting.driver, org, rules)
        found = self.ask("generate", prompts, [claim] * len(prompts), tokens, media, adapter)
        assert {one["reason"] for one in found} == {"length"}, "no request has failed"
        self.cached = [one["cached"] for one in found]
        return [one["tokens"] for one in found]

    def answer(self, prompt: Sequence[int], org: str | None, rules: Rules = AS_USUAL) -> list[int]:
        return self.answer_all([prompt], org, rules)[0]

    def hits(self, prompt: Sequence[int], org: str | None) -> int:
        """How much of it hits, once what was computed before is stored."""
        assert self.ask("settle")
        self.answer(prompt, org)
        return self.cached[0]


@contextlib.contextmanager
def vllm(
    models: Path,
    setting: EngineConfig | None = None,
    file: Path | None = None,
    model: str = "llama",
    environment: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Vllm]:
    if setting and file:
        file.write_bytes(msgspec.json.encode(setting))
        options["setting"] = str(file)
    log = models / f"log-{random.randrange(1 << 32)}"
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "tests.engines.vllm_process", str(models)]
    with (
        log.open("w") as said,
        os.fdopen(ours) as answers,
        subprocess.Popen(
            [*command, json.dumps({"model": model, **options}), str(theirs)],
            cwd=PROJECT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            pass_fds=[theirs],
            text=True,
        ) as process,
    ):
        os.close(theirs)
        try:
            assert answers.readline() == '"ready"\n', log.read_text()[-3000:]
            yield Vllm(process, answers, setting, log)
            assert process.stdin
            process.stdin.close()
            assert process.wait(2 * STOP_SECONDS) == 0, log.read_text()[-3000:]
        finally:
            process.kill()


@dataclass
class Place:
    """An agent of one's own, and the file that names it."""

    agent: AgentProcess
    setting: EngineConfig
    file: Path
    models: Path

    @property
    def files(self) -> list[Path]:
        """In tier 2."""
        return [path for path in (self.agent.directory.parent / "tier2").rglob("*") if path.is_file()]

    def allow_tier2(self, **more: Any) -> None:
        """To all orgs."""
        allowed = OrgPolicies(policy=Policy(tiers=Tiers.TIER2))
        orgs = tuple(replace(org, policies=allowed) for org in self.setting.orgs)
        self.setting = replace(self.setting, orgs=orgs, **more)

    def lose_memory(self) -> None:
        """Kill the agent and start it again, with its files."""
        self.agent.kill()
        self.agent.start()
        home = self.setting.agent
        assert home
        url = str(self.agent.http.base_url).rstrip("/")
        self.setting = replace(self.setting, agent=replace(home, url=url))

    def engine(self, model: str = "llama", **options: Any) -> contextlib.AbstractContextManager[Vllm]:
        return vllm(self.models, self.setting, self.file, model, **options)
