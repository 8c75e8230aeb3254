"""`make up ENGINE=vllm`: a real vLLM beside the demo, at the next start too."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from console.environment import PROJECT
from tests.engines.serving import START_SECONDS
from tests.live import wait_until
from tests.stack.whole import Whole, whole_stack

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

WITH_DEMO: Final = {"TIDEGATE_DEMO": "1"}
STORY: Final = "Once upon a time there was a very small model. " * 30


@pytest.fixture
def stack() -> Iterator[Whole]:
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name, whole_stack(Path(name)) as made:
        yield made


def answered(command: str, text: str) -> dict[str, Any]:
    """What the command that the start has printed gets, for this text."""
    *before, body = shlex.split(command.replace("$(cat ", "").replace(")", ""))
    del before
    told = json.dumps({**json.loads(body), "messages": [{"role": "user", "content": text}]})
    asked = command[: command.index(" -d ")] + f" -d {shlex.quote(told)} --silent --max-time 120"
    done = subprocess.run(
        ["/bin/sh", "-c", asked], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    with contextlib.suppress(ValueError):
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    return {}


def hits(command: str, text: str) -> bool:
    usage = answered(command, text).get("usage") or {}
    return bool((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))


def test_its_model_answers_and_hits_and_so_it_does_after_a_start_without_it(stack: Whole) -> None:
    stack.up("--engine", "vllm", **WITH_DEMO)
    wait_until("it says how to ask", lambda: "curl http://" in stack.said, 60)
    found = re.search(r"^curl http://.*$", stack.said, re.MULTILINE)
    assert found
    command = found[0]
    wait_until("it answers", lambda: "choices" in answered(command, "Hello!"), 2 * START_SECONDS)
    wait_until("it hits", lambda: hits(command, STORY), 2 * START_SECONDS)
    stack.signal(signal.SIGTERM)
    assert stack.end() == 0
    stack.up(**WITH_DEMO)
    wait_until("it answers again", lambda: "choices" in answered(command, "Hello!"), 2 * START_SECONDS)
