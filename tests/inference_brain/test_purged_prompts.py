"""A brain that confirms a purge keeps nothing of the org's prompts."""

from __future__ import annotations

from pathlib import Path

import httpx

from kvss_agent.security.confirmations import Question, Scope
from tests.inference_brain.brains import RunningBrain, told
from tests.inference_brain.chat_shapes import conversation, write_folder
from tests.inference_brain.engines import FakeEngine


def test_a_purge_forgets_prompts(tmp_path: Path) -> None:
    folder = write_folder("qwen2", tmp_path / "model")
    with FakeEngine() as engine, RunningBrain(told([engine.url], tokenizer=str(folder))) as brain:
        body = {"model": "m", "messages": conversation(5, 300)}
        url = f"{brain.url}/v1/chat/completions"
        assert httpx.post(url, json=body, headers=brain.headers, timeout=20).status_code == 200
        turns = brain.brain.prompts.service.turns
        assert turns.size_of("acme") > 0
        gone = Question("0" * 32, "1" * 32, 1, (Scope("a" * 32),), org="acme")
        brain.call(lambda: brain.brain.purge(gone))
        assert turns.bytes == 0
