"""The load tool: what it sends, when, and what it says of the answers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_brain.replay import command, schedule
from inference_brain.replay.answers import EventReader, Unreadable, complaint, whole
from inference_brain.replay.outcomes import Outcome, Outcomes
from inference_brain.replay.prompts import Form, PromptMaker
from swdriver_shim.replay.traces import Request
from tests.console.ctl.peers import peer
from tests.inference_brain.brains import KEY, RunningBrain, told
from tests.inference_brain.engines import FakeEngine


def request(blocks: tuple[int, ...], tokens: int, at: float = 0.0, out: int = 5) -> Request:
    return Request(at, f"s{blocks[:1]}", blocks, 16, tokens, out, "trace.jsonl")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as made:
        yield made


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": at * 100, "input_length": 600, "output_length": 9, "hash_ids": [0, at]}
        for at in range(1, 7)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def play(engine: FakeEngine, trace: Path, *more: str) -> tuple[int, dict[str, Any]]:
    return play_at(engine.url, trace, *more)


def play_at(address: str, trace: Path, *more: str) -> tuple[int, dict[str, Any]]:
    report = trace.with_suffix(".json")
    given = [
        str(trace),
        "--url",
        f"{address}/v1",
        "--model",
        "m",
        "--json",
        str(report),
        "--flat-out",
        *more,
    ]
    return command.main(given), json.loads(report.read_text())


# Prompts


@pytest.mark.parametrize("form", ["completions", "tokens"])
def test_equal_blocks_are_equal_prompts(form: Form) -> None:
    maker = PromptMaker("m", form)

    def prompt(asked: Request, number: int) -> Any:
        return maker.body(asked, number, 5, {})["prompt"]

    whole, longer = prompt(request((1, 2), 32), 0), prompt(request((1, 2, 3), 40), 1)
    assert longer[: len(whole)] == whole
    assert prompt(request((1, 9), 32), 2) != whole
    assert PromptMaker("m", form).body(request((1, 2), 32), 7, 5, {})["prompt"] == whole
    assert PromptMaker("m", form, "salt").body(request((1, 2), 32), 7, 5, {})["prompt"] != whole


@given(st.integers(1, 60))
def test_prompts_are_as_long_as_the_trace_says(tokens: int) -> None:
    blocks = tuple(range(min(3, -(-tokens // 16))))
    asked = request(blocks, tokens)
    assert len(PromptMaker("m", "tokens").tokens(asked, 0)) == tokens
    assert len(PromptMaker("m", "completions").text(asked, 0).split()) == tokens


def test_tokens_that_no_block_names_are_nobody_else_s() -> None:
    maker = PromptMaker("m", "tokens")
    first, second = (maker.tokens(request((1,), 30), number) for number in (0, 1))
    assert first[:16] == second[:16]
    assert first[16:] != second[16:]


def test_only_blocks_are_kept() -> None:
    """What no block names is nobody else's, and may be of any length."""
    maker = PromptMaker("m", "completions")
    for number in range(10):
        maker.text(request((1, 2), 16 * 2 + 5), number)
    assert [len(words) for words in maker._blocks.values()] == [16, 16]


def test_a_chat_is_one_message() -> None:
    body = PromptMaker("m", "chat").body(request((1,), 16), 0, 5, {"stream": True})
    assert body["messages"][0]["role"] == "user"
    assert body["max_tokens"] == 5
    assert body["stream"] is True


# Times


def test_requests_are_due_as_in_the_trace_but_faster() -> None:
    asked = [request((1,), 16, at) for at in (10.0, 11.0, 14.0)]
    assert [due.at for due in schedule.by_trace(asked, 2.0)] == [0.0, 0.5, 2.0]


def test_requests_are_due_at_a_rate() -> None:
    dues = list(schedule.by_rate([request((1,), 16)] * 2000, 50.0, seed=1))
    assert dues[0].at == 0.0
    assert dues[-1].at == pytest.approx(2000 / 50, rel=0.1)
    assert [due.at for due in dues] == sorted(due.at for due in dues)
    assert dues == list(schedule.by_rate([request((1,), 16)] * 2000, 50.0, seed=1))


# Answers


@given(st.integers(1, 40))
def test_events_are_the_same_however_they_come(size: int) -> None:
    events = [b'data: {"choices":[{"text":"a"}]}\r\n\r\n', b": a comment\n\n", b"event: x\n"]
    events += [b'data:{"choices":[],"usage":{"prompt_tokens":7}}\n\n', b"data: [DONE]\n\n"]
    raw = b"".join(events)
    reader = EventReader()
    parts = [part for at in range(0, len(raw), size) for part in reader.feed(raw[at : at + size])]
    assert [part.has_tokens for part in parts] == [True, False]
    assert parts[1].usage is not None
    assert parts[1].usage.prompt_tokens == 7
    assert reader.is_done


@pytest.mark.parametrize(
    ("choice", "has"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"content": "x"}}, True),
        ({"delta": {"reasoning_content": "x"}}, True),
        ({"delta": {"tool_calls": [{}]}}, True),
        ({"text": ""}, False),
        ({"message": {"content": "x"}}, True),
    ],
)
def test_what_is_a_token(choice: dict[str, Any], has: bool) -> None:  # noqa: FBT001
    assert whole(json.dumps({"choices": [choice]}).encode()).has_tokens is has


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense",
        b'{"choices": 5}',
        b"\xff",
        b"[" * 9999,
        b'{"choices": [], "usage": {"prompt_tokens": -5}}',
        b'{"object": "error", "message": "No."}',
    ],
)
def test_what_is_no_answer(raw: bytes) -> None:
    with pytest.raises(Unreadable):
        whole(raw)


def test_what_servers_complain_of() -> None:
    assert complaint(b'{"error": {"message": "No.", "code": 400}}') == "No."
    assert complaint(b'{"error": "No."}') == "No."
    assert complaint(b"<html>") == "<html>"


# What is said of them


def outcome(replica: str, first: float, cached: int | None, why: str | None = None) -> Outcome:
    made = Outcome(0.0, sent=1.0, replica=replica, prompt_tokens=100, cached_tokens=cached, why=why)
    for at in (first, first + 0.1, first + 0.5):
        made.piece(1.0 + at)
    made.output_tokens = 3
    made.ended = 1.0 + first + 0.5
    return made


def test_the_report_by_replica() -> None:
    outcomes = Outcomes([outcome("a", 0.2, 50), outcome("a", 0.4, 100), outcome("b", 1.0, 0)])
    made = outcomes.report()
    assert made["replicas"]["a"]["hit_rate"] == 0.75
    assert made["replicas"]["b"]["hit_rate"] == 0.0
    assert made["all"]["hit_rate"] == 0.5
    assert made["replicas"]["a"]["first_token_seconds"]["mean"] == pytest.approx(0.3)
    assert made["all"]["first_token_seconds"]["max"] == pytest.approx(1.0)
    assert made["all"]["between_tokens_seconds"]["p50"] == pytest.approx(0.25)
    assert made["all"]["longest_gap_seconds"] == pytest.approx(0.4)
    assert made["seconds"] == pytest.approx(2.5)


def test_what_is_not_known_is_not_made_up() -> None:
    made = Outcomes([outcome("a", 0.2, None), outcome("a", 0.2, 7, why="It broke.")]).report()
    assert made["all"]["hit_rate"] is None
    assert made["all"]["requests"] == 1
    assert made["failures"] == {"It broke.": 1}
    assert Outcomes().report()["all"]["first_token_seconds"] is None


# The command


def test_a_replay_of_a_server(
    engine: FakeEngine, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.behavior.cached_tokens = 3
    code, made = play(engine, trace, "--form", "tokens", "--output-tokens", "4")
    assert code == 0
    assert made["requests"] == 6
    assert made["failed"] == 0
    assert made["all"]["prompt_tokens"] == 6 * 600
    assert made["all"]["hit_rate"] == 3 / 600
    assert made["all"]["first_token_seconds"]["p50"] > 0
    assert {asked.path for asked in engine.asked} == {"/v1/completions"}
    assert {asked.body["max_tokens"] for asked in engine.asked} == {4}
    assert len({str(asked.body["prompt"][:512]) for asked in engine.asked}) == 1
    assert "6 requests in" in capsys.readouterr().out


def test_whole_answers_and_chats(engine: FakeEngine, trace: Path) -> None:
    _, made = play(engine, trace, "--form", "chat", "--no-stream", "--ignore-eos", "--requests", "2")
    assert made["all"]["requests"] == 2
    assert made["all"]["prompt_tokens"] == 2 * 7
    assert all(asked.body["ignore_eos"] and "stream" not in asked.body for asked in engine.asked)


def test_replicas_are_told_apart_by_a_header_and_one_alone_is_named(
    engine: FakeEngine, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, made = play(engine, trace, "--replica-header", "content-length", "--no-stream")
    [name] = made["replicas"]
    assert f"│ {name} " in capsys.readouterr().out
    _, made = play(engine, trace)
    assert list(made["replicas"]) == ["unknown"]
    assert "unknown" not in capsys.readouterr().out


def test_sessions_are_dealt_out_to_keys(engine: FakeEngine, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    _, made = play(engine, trace, "--keys-file", str(tmp_path / "keys"))
    seen = {asked.headers["authorization"] for asked in engine.asked}
    assert seen == {"Bearer one", "Bearer two"}
    assert sum(org["requests"] for org in made["orgs"].values()) == 6


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a/v1", "http://[::1", "http://a:b/v1", "http://ü/v1"]
)
def test_what_is_no_address_is_refused(
    trace: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([str(trace), "--url", url, "--model", "m"])
    assert "is no address" in capsys.readouterr().err


def test_keys_that_no_header_can_have_are_refused(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    assert command.main([str(trace), "--url", "http://127.0.0.1:1/v1", "--model", "m"]) == 1
    assert "A key in OPENAI_API_KEY" in capsys.readouterr().err


def test_the_key_of_the_environment(
    engine: FakeEngine, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    play(engine, trace)
    assert {asked.headers["authorization"] for asked in engine.asked} == {"Bearer mine"}


def test_only_what_was_due_at_a_time_is_late(
    engine: FakeEngine, trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LATE_SECONDS", 0.0)  # who waits for another is later than that
    given = [str(trace), "--url", f"{engine.url}/v1", "--model", "m", "--at-once", "1"]
    assert command.main([*given, "--speed", "1e6"]) == 0
    assert "Requests were sent late" in capsys.readouterr().out
    _, report = play(engine, trace, "--at-once", "1")
    assert report["late_seconds"] is None
    assert "Requests were sent late" not in capsys.readouterr().out


def test_no_more_at_once_than_allowed(engine: FakeEngine, trace: Path) -> None:
    engine.behavior.first_seconds = 0.02
    play(engine, trace, "--at-once", "2")
    assert engine.most_running == 2


def test_what_fails_is_counted_with_its_reason(
    engine: FakeEngine, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.behavior.status = 429
    code, made = play(engine, trace)
    assert code == 1
    assert made["failures"] == {"status 429: The engine says no.": 6}
    assert "Failed 6 times: status 429: The engine says no." in capsys.readouterr().out
    engine.behavior.status = 200
    engine.behavior.die_after = 2
    _, made = play(engine, trace)
    assert made["failed"] == 6
    engine.behavior.die_after, engine.behavior.error_after = None, 1
    _, made = play(engine, trace)
    assert made["failures"] == {"the server failed: The engine broke.": 6}
    engine.kill()
    _, made = play(engine, trace)
    [why] = made["failures"]
    assert why.startswith(f"{engine.url}/v1: No connection to the replica")


def test_a_replay_that_is_interrupted_says_what_there_is(engine: FakeEngine, trace: Path) -> None:
    engine.behavior.first_seconds = 60.0

    def interrupt() -> None:
        while engine.now_running < 6:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    code, made = play(engine, trace)
    interrupting.join()
    assert code == 1
    assert made["failures"] == {"not answered when the replay was ended": 6}


TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":null,"usage":{"prompt_tokens":7,"completion_tokens":4}}\n\n'
DONE = b"data: [DONE]\n\n"


def play_before(pieces: Callable[[], Iterable[bytes]], trace: Path, *more: str) -> dict[str, Any]:
    """A replay of two requests before a server that answers with these pieces."""
    with peer(lambda *_: (200, {}, pieces())) as address:
        return play_at(address, trace, "--requests", "2", *more)[1]


def test_an_answer_that_never_comes_to_a_token_fails(trace: Path) -> None:
    def pings() -> Iterator[bytes]:
        while not over.wait(0.02):
            yield b": ping\n\n"

    over = threading.Event()
    made = play_before(pings, trace, "--timeout", "0.2")
    over.set()
    assert made["failures"] == {"no answer within 0.2 s": 2}


def test_the_end_of_a_stream_is_what_it_says(trace: Path) -> None:
    def held() -> Iterator[bytes]:
        yield from (TOKEN, TOKEN, USAGE, DONE)
        over.wait(60)

    over = threading.Event()
    made = play_before(held, trace)
    over.set()
    assert made["failed"] == 0
    assert made["all"]["total_seconds"]["max"] < 30
    assert made["all"]["prompt_tokens"] == 14


@pytest.mark.parametrize(
    ("events", "because"),
    [
        (b'data: {"object":"error","message":"boom","code":500}\n\n' + DONE, "the server failed: boom"),
        (b'event: error\ndata: {"message":"boom"}\n\n' + DONE, "the server failed: boom"),
        (DONE, "there is nothing in the stream"),
    ],
)
def test_errors_in_streams_are_failures(trace: Path, events: bytes, because: str) -> None:
    assert play_before(lambda: [events], trace)["failures"] == {because: 2}


def test_times_of_what_did_not_come_token_by_token_are_not_known(trace: Path) -> None:
    made = play_before(lambda: [TOKEN + USAGE + DONE], trace)["all"]
    assert made["first_token_seconds"]["max"] > 0
    assert made["between_tokens_seconds"] is None
    body = b'{"choices": [{"text": "a b"}], "usage": {"completion_tokens": 2}}'
    made = play_before(lambda: [body], trace, "--no-stream")["all"]
    assert made["first_token_seconds"] is made["between_tokens_seconds"] is None
    assert made["total_seconds"]["max"] > 0


def test_names_of_replicas_are_shown_as_they_are(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = iter(["[/b]", "[red]a"])
    with peer(lambda *_: (200, {"x-tidegate-replica": next(names)}, TOKEN + DONE)) as address:
        given = [str(trace), "--url", f"{address}/v1", "--model", "m", "--requests", "2"]
        assert command.main(given) == 0
    told = capsys.readouterr().out
    assert "[/b]" in told
    assert "[red]a" in told


def test_a_report_that_can_not_be_written_is_told_before_anything_is_sent(
    engine: FakeEngine, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(trace), "--url", f"{engine.url}/v1", "--model", "m", "--json", "/nowhere/report"]
    assert command.main(given) == 1
    assert "/nowhere/report can't be written: No such file" in capsys.readouterr().err
    assert not engine.asked


@pytest.mark.parametrize(
    ("content", "because"),
    [("", "There are no requests"), ("{}\n", "timestamp is None"), (None, "can't be read")],
)
def test_traces_that_are_none(
    tmp_path: Path, content: str | None, because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    assert command.main([str(path), "--url", "http://127.0.0.1:1/v1", "--model", "m"]) == 1
    assert because in capsys.readouterr().err


def test_a_brain_says_which_replica_answered(
    engine: FakeEngine, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeEngine() as other, RunningBrain(told([engine.url, other.url])) as brain:
        report = trace.with_suffix(".json")
        url = f"{brain.url}/v1"
        given = [str(trace), "--url", url, "--model", "m", "--json", str(report), "--flat-out"]
        assert command.main([*given, "--form", "tokens"]) == 0
        made = json.loads(report.read_text())
    assert made["failed"] == 0
    assert made["replicas"].keys() <= {"r0", "r1"}
    assert made["all"]["prompt_tokens"] == 6 * 600
