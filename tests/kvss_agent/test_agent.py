"""An agent goes on whatever happens inside it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvss_agent import agent as agents
from kvss_agent.agent import Agent
from kvss_agent.desired import ShardSpec
from kvss_agent.settings import Settings
from tests.kvss_agent.process import document, spec
from tests.live import wait_until


async def test_a_document_that_cannot_be_followed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agents, "RETRY_SECONDS", 0.01)
    provide, failures = Agent._provide, [RuntimeError("can't start new thread")] * 2

    async def fail_at_first(self: Agent, told: ShardSpec) -> None:
        if failures:
            raise failures.pop()
        await provide(self, told)

    monkeypatch.setattr(Agent, "_provide", fail_at_first)
    settings = Settings("a", tmp_path, tmp_path / "data.sock", ("127.0.0.1", 0), "t" * 20)
    agent = Agent(settings, "test")
    await agent.start()
    try:
        await agent.set_desired(json.dumps(document(1, spec())).encode())
        await asyncio.to_thread(wait_until, "it is ready", lambda: agent.is_ready)
        assert agent.observed()["observed_generation"] == 1
    finally:
        await agent.stop(0)
    assert caplog.text.count("cannot be followed") == 2
