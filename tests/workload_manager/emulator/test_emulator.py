"""The emulator as a process: OpenAI's API, and a real cache of an agent behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from console.demo import tokenizer
from inference_brain.tokens import Chat, load
from inference_brain.upstream.engine_metrics import parse
from swdriver_shim.adapters.claims import mint
from swdriver_shim.adapters.handover import Goal, Handover
from tests.inference_brain.small_tokenizers import WORDS
from tests.kvss_agent.plane import DRIVER
from tests.kvss_agent.process import agent
from tests.live import wait_until
from tests.swdriver_shim.daemons import C
from tests.workload_manager.emulator.emulators import (
    CLAIMS_KEY,
    FAST,
    MODEL,
    EmulatorProcess,
    events,
    joined,
    streaming,
    tell_agent,
)
from workload_manager.emulator.command import main
from workload_manager.spec import EmulatorSpec

SLOW = EmulatorSpec(operations_per_second=1e18, answer_tokens_per_second=100.0)


def test_it_answers_over_openais_api_and_says_how_busy_it_is(tmp_path: Path) -> None:
    with EmulatorProcess(tmp_path, "--listen", f"unix:{tmp_path}/s") as engine:
        [served] = engine.http.get("/v1/models").json()["data"]
        assert (served["id"], served["max_model_len"]) == (MODEL, 8192)
        assert engine.http.get("/health").status_code == 200
        first, again = (engine.complete("Why is the sky blue?").json() for _ in range(2))
        assert first["choices"] == again["choices"], "the same to the same prompt"
        assert first["choices"] != engine.complete("Why is the sky red?").json()["choices"]
        assert first["choices"][0]["finish_reason"] == "length"
        assert first["usage"] == {
            "prompt_tokens": 20,
            "completion_tokens": 8,
            "total_tokens": 28,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        page = engine.http.get("/metrics").content
        assert parse(page, "vllm", MODEL)[:2] == (0, 0)
        assert engine.figure("vllm:request_success_total") == 3
        assert engine.figure("vllm:prompt_tokens_total") == 59
        assert engine.stop() == 0


def test_its_lines_in_the_log_of_its_manager_have_the_same_clock(tmp_path: Path) -> None:
    with EmulatorProcess(tmp_path) as engine:
        lines = engine.log.splitlines()
    assert lines
    assert [line for line in lines if not re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ ", line)] == []


def test_a_stream_says_what_the_whole_answer_says(tmp_path: Path) -> None:
    with EmulatorProcess(tmp_path) as engine:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Go"}], "max_tokens": 100}
        whole = engine.http.post("/v1/chat/completions", json=chat).json()
        more = {"stream": True, "stream_options": {"include_usage": True}}
        got = events(engine.http.post("/v1/chat/completions", json={**chat, **more}).text)
        deltas = [one["choices"][0]["delta"] for one in got[:-1]]
        assert "".join(one["content"] for one in deltas) == whole["choices"][0]["message"]["content"]
        assert [one.get("role") for one in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        assert len(deltas) > 2, "it comes in pieces"
        assert got[-2]["choices"][0]["finish_reason"] == "length"
        assert (got[-1]["choices"], got[-1]["usage"]) == ([], whole["usage"])


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b'{"model": "other", "prompt": "x"}', 404, "“other” does not exist"),
        (b'{"model": "tiny-chat", "prompt": ', 400, "truncated"),
        (b'{"model": "tiny-chat", "prompt": ""}', 400, "this prompt has 0"),
        (b'{"model": "tiny-chat", "prompt": [-1]}', 400, "a list of tokens"),
        (b'{"model": "tiny-chat", "prompt": "x", "n": 2}', 400, "`n` is 1"),
        (b'{"model": "tiny-chat", "prompt": "x", "max_tokens": 9000}', 400, "1 to 8191 tokens"),
    ],
)
def test_what_it_does_not_serve_is_refused_in_a_sentence(
    plain: EmulatorProcess, body: bytes, status: int, sentence: str
) -> None:
    answer = plain.http.post("/v1/completions", content=body)
    assert answer.status_code == status
    assert sentence in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatorProcess]:
    with EmulatorProcess(tmp_path_factory.mktemp("plain")) as engine:
        yield engine


def test_a_prompt_is_cached_for_whose_claim_it_carries_and_outlives_the_engine(tmp_path: Path) -> None:
    prompt = list(range(5 * C + 7))
    with agent(tmp_path / "agent") as one:
        driver = joined(tmp_path / "state", tell_agent(one))
        with EmulatorProcess(tmp_path / "first", driver=driver) as engine:
            engine.wait_for_driver()
            wait_until("it has its memory", lambda: engine.cached(prompt, "acme") > 0)
            hit = engine.cached(prompt, "acme")
            assert hit == 5 * C
            assert engine.cached(prompt) == 0, "no claim"
            assert engine.cached(prompt, "acme", b"another key of thirty-two bytes !") == 0
            assert engine.cached(prompt, "globex") == 0, "another org"
            assert engine.cached(prompt, "globex") == hit, "which has its own by now"
            told = {"cache_salt": "acme", "kv_transfer_params": {"org": "acme"}}
            answer = engine.complete(prompt, **told).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert engine.figure("tidegate_emulator_wrong_bytes_total") == 0
            assert engine.stop() == 0
        with EmulatorProcess(tmp_path / "second", driver=driver) as engine:
            engine.wait_for_driver()
            wait_until("it has its memory", lambda: engine.cached(prompt, "acme") > 0)
            assert engine.cached(prompt, "acme") == hit
            assert engine.figure("tidegate_emulator_wrong_bytes_total") == 0
            assert engine.figure("vllm:external_prefix_cache_hits_total") >= hit


def test_a_second_engine_with_the_same_driver_serves_without_it_until_the_first_has_ended(
    tmp_path: Path,
) -> None:
    prompt = list(range(3 * C))
    with agent(tmp_path / "agent") as one:
        driver = joined(tmp_path / "state", tell_agent(one))
        with EmulatorProcess(tmp_path / "first", driver=driver) as first:
            first.wait_for_driver()
            wait_until("it has its memory", lambda: first.cached(prompt, "acme") > 0)
            with EmulatorProcess(tmp_path / "second", driver=driver) as second:
                assert second.cached(prompt, "acme") == 0
                assert second.http.get("/-/driver").json()["attached"] is False
                assert first.stop() == 0
                second.wait_for_driver()
                assert second.cached(prompt, "acme") == len(prompt), "with what the first has stored"


def test_a_rollout_hands_the_cache_over_while_both_serve(tmp_path: Path) -> None:
    prompt, folders = list(range(3 * C)), [tmp_path / "old", tmp_path / "new"]
    goals = [Handover(folder / "handover") for folder in folders]
    with agent(tmp_path / "agent") as one:
        driver = joined(tmp_path / "state", tell_agent(one))
        drivers = [replace(driver, handover=str(folder / "handover")) for folder in folders]
        with EmulatorProcess(folders[0], driver=drivers[0]) as old:
            old.wait_for_driver()
            wait_until("it has its memory", lambda: old.cached(prompt, "acme") > 0)
            with EmulatorProcess(folders[1], driver=drivers[1]) as new:
                assert new.cached(prompt, "acme") == 0
                wait_until(
                    "it says who has it",
                    lambda: "another engine has it" in new.http.get("/-/driver").json()["problem"],
                )
                goals[0].set_goal(Goal.RELEASE)
                new.wait_for_driver()
                wait_until("it has taken the columns over", lambda: new.cached(prompt, "acme") > 0)
                assert new.cached(prompt, "acme") == len(prompt)
                assert old.cached(prompt, "acme") == 0, "it goes on serving, without a cache"
                goals[1].set_goal(Goal.RELEASE)
                goals[0].set_goal(Goal.ATTACH)
                old.wait_for_driver()
                wait_until("it has them again", lambda: old.cached(prompt, "acme") == len(prompt))
                for engine in (old, new):
                    assert engine.figure("tidegate_emulator_wrong_bytes_total") == 0


def test_concurrent_requests_get_the_same_columns_and_no_byte_is_wrong(tmp_path: Path) -> None:
    prompts = [[*range(4 * C), 7, number % 3] for number in range(24)]
    with agent(tmp_path / "agent") as one:
        driver = joined(tmp_path / "state", tell_agent(one))
        with EmulatorProcess(tmp_path / "engine", driver=driver) as engine:
            engine.wait_for_driver()
            wait_until("it has its memory", lambda: engine.cached(prompts[0], "acme") > 0)
            with ThreadPoolExecutor(8) as asking:
                hits = list(asking.map(lambda prompt: engine.cached(prompt, "acme"), prompts))
            assert min(hits) >= 4 * C
            assert engine.figure("tidegate_emulator_wrong_bytes_total") == 0


def test_a_request_that_runs_is_finished_when_it_is_stopped(tmp_path: Path) -> None:
    with (
        EmulatorProcess(tmp_path, emulator=SLOW) as engine,
        streaming(engine, max_tokens=60) as lines,
    ):
        next(lines)
        engine.process.terminate()
        assert list(lines)[-2] == "data: [DONE]"
        assert engine.process.wait(30) == 0


def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    with EmulatorProcess(tmp_path, emulator=SLOW) as engine:
        with streaming(engine, max_tokens=8000) as lines:
            next(lines)
            assert engine.figure("vllm:num_requests_running") == 1
        wait_until("it has ended", lambda: engine.figure("vllm:num_requests_running") == 0)
        assert engine.figure("vllm:generation_tokens_total") < 8000
        assert engine.figure("vllm:request_success_total") == 0


def test_a_tokenizer_gives_its_tokens_and_a_conversation_continues_from_its_answer(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tokenizer"
    tokenizer.write(folder)
    messages = [{"role": "user", "content": " ".join(WORDS)}]
    with agent(tmp_path / "agent") as one:
        driver = joined(tmp_path / "state", tell_agent(one))
        with EmulatorProcess(tmp_path / "e", tokenizer=str(folder), driver=driver) as engine:
            engine.wait_for_driver()

            def said(messages: list[dict[str, str]]) -> tuple[str, int, int]:
                claim = {"tidegate": mint(CLAIMS_KEY, DRIVER, "acme")}
                body = {"model": MODEL, "messages": messages, "kv_transfer_params": claim}
                answer = engine.http.post("/v1/chat/completions", json=body).json()
                used = answer["usage"]
                hit = used["prompt_tokens_details"]["cached_tokens"]
                return answer["choices"][0]["message"]["content"], used["prompt_tokens"], hit

            wait_until("it has its memory", lambda: said(messages)[2] > 0)
            text, tokens, _ = said(messages)
            assert tokens == len(load(folder).chat(Chat(messages)))
            after = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
            assert said(after)[2] >= tokens // C * C


def test_an_emulator_without_a_document_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "engine.json"
    assert main(["--spec", str(told)]) == 1
    told.write_text('{"model": "m", "tokens_max": 1}')
    assert main(["--spec", str(told)]) == 1
    said = capsys.readouterr().err
    assert "No such file" in said
    assert "tokens_max" in said


def test_faults_are_staged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--spec", "anything", "--fail-start"]) == 1
    assert "--fail-start" in capsys.readouterr().err
    with EmulatorProcess(tmp_path, "--fail-requests", "0.25", emulator=FAST) as engine:
        statuses = [engine.complete("x").status_code for _ in range(8)]
    assert sorted(statuses) == [200] * 6 + [500] * 2
