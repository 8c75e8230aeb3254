"""A vLLM that has nothing of Tidegate, as a brain sees it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from inference_brain.choice.candidates import IDLE
from inference_brain.upstream.engine_metrics import EngineMetrics, Target, fetching
from kvss_agent.http.client import Client
from tests.engines.prompts import prompt
from tests.engines.serving import Server, serving
from tests.engines.vllm_process import build

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

KEY: Final = ("tiny", "r1")
SECONDS: Final = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plain")
    build("llama", folder / "llama")
    with serving(folder / "llama", None, folder / "vllm.log") as one:
        yield one


@pytest.mark.parametrize("sent", [0, 1])
def test_it_says_how_busy_others_keep_it(server: Server, sent: int) -> None:
    """`sent`: of its one request, how many are ours."""
    stop = threading.Event()
    asking = threading.Thread(target=_keep_busy, args=(server, stop))
    asking.start()
    try:
        asyncio.run(_look(f"{server.http.base_url}", sent))
    finally:
        stop.set()
        asking.join()


async def _look(url: str, sent: int) -> None:
    client = Client()
    metrics = EngineMetrics(fetching(client), lambda _: sent)
    metrics.follow({KEY: Target(f"{url.rstrip('/')}/metrics", "vllm", "tiny")})
    running = asyncio.create_task(metrics.run())

    async def until(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def requests() -> int:
        reading = metrics.reading(KEY)
        return reading.running + reading.waiting if reading else 0

    await until(lambda: requests() == 1)
    if sent:
        await asyncio.sleep(3)  # two further readings
        assert metrics.others(KEY) == IDLE
    else:
        await until(lambda: metrics.others(KEY).running == 1)
    reading = metrics.reading(KEY)
    assert reading is not None
    assert reading.kv_usage is not None
    assert 0 < reading.kv_usage < 1
    assert metrics.problem(KEY) == ""
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await client.close()


def _keep_busy(server: Server, stop: threading.Event) -> None:
    """One long answer after the other, until it is told to stop."""
    asked = {
        "model": "tiny",
        "prompt": prompt(1)[:64],
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": True,
        "detokenize": False,
    }
    while not stop.is_set():
        with server.http.stream("POST", "/v1/completions", json=asked) as answer:
            for _ in answer.iter_bytes():
                if stop.is_set():
                    break
