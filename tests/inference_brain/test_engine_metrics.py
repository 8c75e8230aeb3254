"""How busy engines say they are, in the forms of several versions."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_brain.choice import Load
from inference_brain.choice.candidates import IDLE
from inference_brain.desired import TOKENS_MAX
from inference_brain.upstream.engine_metrics import (
    FRESH_SECONDS,
    PROMPT_TOKENS,
    REQUESTS_MAX,
    EngineMetrics,
    NotMetrics,
    Reading,
    Target,
    of_others,
    parse,
)

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="some/model"} 5.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="some/model"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="some/model",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="some/model"} 0.25
vllm:request_prompt_tokens_bucket{engine="0",le="1.0",model_name="some/model"} 0.0
vllm:request_prompt_tokens_count{engine="0",model_name="some/model"} 10.0
vllm:request_prompt_tokens_sum{engine="0",model_name="some/model"} 5000.0
process_resident_memory_bytes 6.1e+08
"""
VLLM_BEFORE = b"""\
vllm:num_requests_running{model_name="some/model"} 5.0
vllm:num_requests_swapped{model_name="some/model"} 0.0
vllm:num_requests_waiting{model_name="some/model"} 3.0
vllm:gpu_cache_usage_perc{model_name="some/model"} 0.25
vllm:cpu_cache_usage_perc{model_name="some/model"} 0.0
"""
SGLANG = b"""\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 7.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 7.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 2.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.28
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:num_requests_total{model_name="m"} 7528.0
"""


@pytest.mark.parametrize(
    ("page", "engine", "expected"),
    [
        (VLLM, "vllm", Reading(5, 3, 0.25, 500.0)),
        (VLLM_BEFORE, "vllm", Reading(5, 3, 0.25)),
        (VLLM.replace(b"\n", b"\r\n"), "vllm", Reading(5, 3, 0.25, 500.0)),
        (SGLANG, "sglang", Reading(7, 2, 0.28, 8.128902e6 / 7528)),
    ],
)
def test_what_engines_say(page: bytes, engine: str, expected: Reading) -> None:
    assert parse(page, engine, "some/model") == expected


def test_ranks_of_data_parallelism_are_added_up() -> None:
    second = VLLM.replace(b'engine="0"', b'engine="1"').replace(b" 0.25", b" 0.75")
    assert parse(VLLM + second, "vllm") == Reading(10, 6, 0.75, 500.0)


def test_of_several_models_only_ours_counts() -> None:
    other = VLLM.replace(b"some/model", b"other").replace(b" 5.0", b" 50.0")
    assert parse(VLLM + other, "vllm", "some/model").running == 5
    assert parse(VLLM + other, "vllm", "other").running == 50
    assert parse(VLLM + other, "vllm", "an alias").running == 55


@pytest.mark.parametrize("page", [b"", b"<html>", b"up 1\n", VLLM.replace(b" 5.0", b" NaN")])
def test_a_page_without_these_numbers_is_refused(page: bytes) -> None:
    with pytest.raises(NotMetrics):
        parse(page, "vllm")


@pytest.mark.parametrize(
    ("tokens", "requests", "mean"),
    [
        (b"-5000.0", b"10.0", None),
        (b"5000.0", b"-10.0", None),
        (b"-5000.0", b"-10.0", None),
        (b"5000.0", b"0.0", None),
        (b"1e308", b"10.0", float(TOKENS_MAX)),
        (b"5000.0", b"1e-320", float(TOKENS_MAX)),
        (b"0.0", b"10.0", 0.0),
    ],
)
def test_a_mean_that_cannot_be_is_none(tokens: bytes, requests: bytes, mean: float | None) -> None:
    page = VLLM.replace(b"5000.0", tokens).replace(b" 10.0", b" " + requests)
    reading = parse(page, "vllm", "some/model")
    assert reading == Reading(5, 3, 0.25, mean)
    load = of_others(reading, 0)
    assert 0 <= load.waiting_tokens <= 3 * TOKENS_MAX


def test_figures_of_several_ranks_that_cannot_be_count_for_nothing() -> None:
    second = VLLM.replace(b'engine="0"', b'engine="1"').replace(b" 3.0", b" -1e9")
    vast = second.replace(b"5000.0", b"1.7e308").replace(b" 0.25", b" -7")
    more = vast.replace(b'engine="1"', b'engine="2"')
    assert parse(VLLM + second + vast + more, "vllm") == Reading(20, 3, 0.25, None)
    usage = VLLM.replace(b" 0.25", b" 1e300").replace(b" 5.0", b" 1e300")
    assert parse(usage, "vllm") == Reading(REQUESTS_MAX, 3, 1.0, 500.0)


@given(st.binary(max_size=200), st.integers(0, 200), st.sampled_from([VLLM, SGLANG]))
def test_any_page_is_read_or_refused(noise: bytes, at: int, page: bytes) -> None:
    for engine in ("vllm", "sglang"):
        try:
            reading = parse(page[:at] + noise + page[at:], engine)
        except NotMetrics:
            continue
        assert reading.running >= 0
        assert reading.waiting >= 0
        assert reading.prompt_tokens is None or 0 <= reading.prompt_tokens <= TOKENS_MAX
        assert reading.kv_usage is None or 0 <= reading.kv_usage <= 1


@given(
    st.builds(
        Reading,
        st.integers(0, 1000),
        st.integers(0, 1000),
        prompt_tokens=st.none() | st.floats(1, 1e5),
    ),
    st.integers(0, 3000),
)
def test_what_we_have_sent_is_not_counted_again(reading: Reading, sent: int) -> None:
    load = of_others(reading, sent)
    assert load.running + load.waiting == max(0, reading.running + reading.waiting - sent)
    assert 0 <= load.waiting <= reading.waiting
    assert load.waiting_tokens == load.waiting * (reading.prompt_tokens or PROMPT_TOKENS)


class World:
    """Engines whose pages a test writes, and a clock that it sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pages: dict[str, bytes] = {}
        self.sent = 0
        self.asked: list[str] = []
        self.metrics = EngineMetrics(
            self.fetch, lambda _: self.sent, clock=lambda: self.now, rng=random.Random(1)
        )

    async def fetch(self, url: str, headers: Mapping[str, str]) -> bytes:
        self.asked.append(url)
        assert headers == {"authorization": "Bearer k"}
        if url not in self.pages:
            raise ConnectionRefusedError("It refuses connections.")
        return self.pages[url]

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            await self.metrics.ask_due()


KEY = ("m", "r1")


@pytest.fixture
def world() -> World:
    made = World()
    made.pages["http://e/metrics"] = VLLM
    key = {"authorization": "Bearer k"}
    made.metrics.follow({KEY: Target("http://e/metrics", "vllm", "some/model", key)})
    return made


async def test_engines_are_asked_again_and_again(world: World) -> None:
    world.sent = 2
    assert world.metrics.age(KEY) is None
    await world.pass_time(10)
    assert 7 <= len(world.asked) <= 11
    assert world.metrics.others(KEY) == Load(2 * 500.0, 4, 2)
    age = world.metrics.age(KEY)
    assert age is not None
    assert age <= 2
    world.metrics.follow({})
    assert world.metrics.others(KEY) == IDLE


async def test_what_was_said_long_ago_does_not_count(world: World) -> None:
    await world.pass_time(4)
    del world.pages["http://e/metrics"]
    await world.pass_time(FRESH_SECONDS + 1.5)
    assert world.metrics.others(KEY) == IDLE
    assert world.metrics.problem(KEY) == "It refuses connections."
    reading = world.metrics.reading(KEY)
    assert reading is not None
    assert reading.running == 5
    asked = len(world.asked)
    await world.pass_time(600)
    assert len(world.asked) - asked < 40, "an engine that does not answer is asked less often"

    world.pages["http://e/metrics"] = VLLM
    await world.pass_time(60)
    assert world.metrics.problem(KEY) == ""
    assert world.metrics.others(KEY) != IDLE


async def test_a_moment_of_ours_is_not_taken_for_others(world: World) -> None:
    world.sent = 8
    await world.pass_time(4)
    assert world.metrics.others(KEY) == IDLE
    world.sent = 0  # they have just ended, and the engine's page is from before
    asked = len(world.asked)
    while len(world.asked) == asked:
        await world.pass_time(0.5)
    assert world.metrics.others(KEY) == IDLE
