"""What goes wrong: replicas that die or stall, clients that leave or do not read, keys that go."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from inference_brain import metrics
from inference_brain.api.generate import Patience
from inference_brain.brain import Brain
from inference_brain.desired import Desired, ReplicaSpec
from inference_brain.upstream import health
from inference_brain.upstream.health import FAILURES_MAX, State
from kvss_agent.http.client import Timeouts
from tests.inference_brain.brains import (
    ANSWER_SECONDS_MAX,
    KEY,
    OPTIONS,
    RunningBrain,
    client_of,
    get,
    model,
    org,
    post,
    told,
)
from tests.inference_brain.engines import Behavior, FakeEngine
from tests.live import wait_until

BODY = {"model": "m", "prompt": "Hi"}


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with ExitStack() as opened:
        yield [opened.enter_context(FakeEngine()) for _ in range(2)]


@pytest.fixture
def brain(engines: list[FakeEngine]) -> Iterator[RunningBrain]:
    with RunningBrain(told([one.url for one in engines])) as made:
        yield made


def ask(brain: RunningBrain, **more: Any) -> httpx.Response:
    return post(f"{brain.url}/v1/completions", headers=brain.headers, json={**BODY, **more})


def ask_until_first(brain: RunningBrain, engines: list[FakeEngine], **more: Any) -> list[httpx.Response]:
    """Requests, until one is sent to the first engine, whatever brains expect of the two: the more the
    other one has, the sooner the first one is chosen."""
    first, other = engines
    behavior = other.behavior = Behavior(is_held=True)
    answers = list[Future[httpx.Response]]()
    with ThreadPoolExecutor(30) as pool:
        try:
            while not first.asked:
                answers.append(pool.submit(ask, brain, prompt=f"Hi {len(answers)}", **more))
                wait_until("it is sent", lambda: bool(first.asked) or len(other.asked) == len(answers))
        finally:
            behavior.is_held = False
    return [one.result() for one in answers]


def last_event(answer: httpx.Response) -> dict[str, Any]:
    data = answer.text.rstrip("\n").rpartition("data: ")[2]
    found: dict[str, Any] = json.loads(data)
    return found


def sent_to(brain: RunningBrain) -> dict[tuple[str, str], float]:
    """How many requests by replica and result."""
    counts = brain.call(lambda: dict(brain.brain.counts._numbers.get(metrics.REPLICA_RESULTS, {})))
    return {(replica, result): number for (_, replica, result), number in counts.items()}


def states(brain: RunningBrain) -> set[State]:
    fleet = brain.brain.fleet
    return brain.call(lambda: {one.state(time.monotonic()) for one in fleet})


@pytest.mark.parametrize("name", ["probes", "engines", "admission"])
async def test_what_a_brain_does_beside_requests_does_not_end_without_a_word(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brain = Brain("b", None)
    of = {"probes": brain._probes, "engines": brain.engines, "admission": brain.router.admission}

    async def run() -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(of[name], "run", run)
    async with brain.running(), asyncio.timeout(30):
        while f"What '{name}' does is not done any more" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "a fault of ours" in caplog.text


# Replicas


@pytest.fixture
def slow_start_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SLOW_START_SECONDS", 3600.0)


@pytest.mark.usefixtures("slow_start_for_long")  # else it may be over before it is seen
@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_replica_costs_no_request(
    brain: RunningBrain,
    engines: list[FakeEngine],
    stream: bool,  # noqa: FBT001
) -> None:
    assert ask(brain).status_code == 200  # no stream: a slow one would keep it from being chosen
    used, other = sorted(engines, key=lambda one: -len(one.asked))
    used.kill()
    other.behavior = Behavior(is_held=True)  # the more it has, the sooner the other one is chosen
    with ThreadPoolExecutor(30) as pool:
        answers = [pool.submit(ask, brain, stream=stream, prompt=f"Hi {one}") for one in range(30)]
        wait_until("the killed one was asked", lambda: State.UNREACHABLE in states(brain))
        other.behavior.is_held = False
    assert [one.result().status_code for one in answers] == [200] * 30
    assert len(other.asked) == 30
    assert State.UNREACHABLE in states(brain)
    used.start()
    wait_until("the replica is used again", lambda: State.UNREACHABLE not in states(brain))
    assert State.SLOW_START in states(brain)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_had_not_begun_to_answer_go_to_another_replica(
    brain: RunningBrain,
    engines: list[FakeEngine],
    stream: bool,  # noqa: FBT001
) -> None:
    engines[0].behavior = Behavior(is_held=True)
    engines[1].behavior = Behavior(first_with=20)

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(headers=brain.headers, timeout=ANSWER_SECONDS_MAX) as client:
            url = f"{brain.url}/v1/completions"
            what = [{**BODY, "prompt": f"Hi {number}", "stream": stream} for number in range(20)]
            tasks = [asyncio.create_task(client.post(url, json=one)) for one in what]
            await asyncio.to_thread(
                wait_until, "all are there", lambda: sum(one.now_running for one in engines) == 20
            )
            assert min(one.now_running for one in engines), "both have some"
            assert engines[1].most_running < 20
            await asyncio.to_thread(engines[0].kill)
            return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert [one.status_code for one in answers] == [200] * 20
    whole = '"tok"' if stream else '"toktoktoktok"'
    assert {one.text.count(whole) for one in answers} == {4 if stream else 1}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_silent_replica_has_not_begun_to_answer_goes_to_another_one(
    brain: RunningBrain,
    engines: list[FakeEngine],
    stream: bool,  # noqa: FBT001
) -> None:
    document = told([one.url for one in engines], 2)
    [served] = document.models
    other = replace_struct(served.replicas[1], draining=True)
    one_left = replace_struct(served, replicas=(served.replicas[0], other))
    brain.set_desired(replace_struct(document, models=(one_left,)))
    with ThreadPoolExecutor(1) as pool, engines[0].frozen():
        answer = pool.submit(ask, brain, stream=stream)
        wait_until("it is sent", lambda: in_progress(brain, "r0") == 1)
        brain.set_desired(replace_struct(document, generation=3))
        assert answer.result(60).status_code == 200, "it was not waited for"
        assert len(engines[1].asked) == 1
        assert State.UNREACHABLE in states(brain)
    wait_until("it is used again when it answers", lambda: State.UNREACHABLE not in states(brain), 60)


def in_progress(brain: RunningBrain, name: str) -> int:
    replica = brain.brain.fleet.replica("m", name)
    assert replica
    return replica.in_progress


def test_whole_answers_are_made_beside_each_other(engines: list[FakeEngine]) -> None:
    """Nobody sees when their prompts are computed. There is room for two of these prompts at once, and
    the engine answers when there are six."""
    engines[0].behavior = Behavior(first_with=6)
    with RunningBrain(told([engines[0].url])) as brain, ThreadPoolExecutor(6) as asking:
        answers = list(asking.map(lambda _: ask(brain, prompt="x" * 4 * 2000), range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6


@pytest.fixture
def ejected_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than any test takes: else who fails returns on a slow machine, and is asked again."""
    for name in ("EJECTED_SECONDS", "EJECTED_SECONDS_MAX"):
        monkeypatch.setattr(health, name, 3600.0)


@pytest.mark.usefixtures("ejected_for_long")
def test_a_replica_that_keeps_failing_is_ejected(brain: RunningBrain, engines: list[FakeEngine]) -> None:
    engines[0].behavior = Behavior(status=500)
    numbers = itertools.count()

    def is_ejected() -> bool:
        assert ask(brain, prompt=f"Hi {next(numbers)}").status_code == 200
        return State.EJECTED in states(brain)

    wait_until("it is ejected", is_ejected, 60)
    assert {ask(brain, prompt=f"Hi again {one}").status_code for one in range(10)} == {200}
    assert len(engines[0].asked) == FAILURES_MAX
    assert sent_to(brain)["r0", metrics.REFUSED] == FAILURES_MAX, "though no request has failed"


@pytest.mark.parametrize(
    ("status", "headers", "result"),
    [
        (503, {"retry-after": "1"}, metrics.FULL),
        (503, {}, metrics.REFUSED),
        (500, {"retry-after": "1"}, metrics.REFUSED),
    ],
)
def test_what_a_replica_has_no_room_for_is_told_from_what_it_fails(
    brain: RunningBrain, engines: list[FakeEngine], status: int, headers: dict[str, str], result: str
) -> None:
    engines[0].behavior = Behavior(status=status, headers=headers)
    assert {one.status_code for one in ask_until_first(brain, engines)} == {200}
    found = {result: number for (name, result), number in sent_to(brain).items() if name == "r0"}
    assert found == {result: 1}


@pytest.mark.usefixtures("ejected_for_long")
def test_what_a_replica_fails_of_one_org_alone_is_told_from_what_it_fails_of_all(
    engines: list[FakeEngine],
) -> None:
    """One org's requests may be such that it fails them by chance, and must not undo a rollout."""
    engines[0].behavior = Behavior(status=500)
    document = told([one.url for one in engines], orgs=(org(), org("globex", "sk-globex")))
    with RunningBrain(document) as brain:
        globex = {"authorization": "Bearer sk-globex"}

        def is_sent(headers: dict[str, str], times: int) -> bool:
            body = {**BODY, "prompt": f"Hi {next(numbers)}"}
            answer = post(f"{brain.url}/v1/completions", headers=headers, json=body)
            assert answer.status_code == 200
            return len(engines[0].asked) == times

        numbers = itertools.count()
        wait_until("there is one org", lambda: is_sent(brain.headers, 1))
        assert ("r0", metrics.REFUSED_AGAIN) not in sent_to(brain)
        engines[0].behavior = Behavior(status=400)  # no fault of the replica
        post(f"{brain.url}/v1/completions", headers=globex, json=BODY)
        engines[0].behavior = Behavior(status=500)
        asked = len(engines[0].asked)
        wait_until("there are others", lambda: is_sent(brain.headers, asked + 1))
        assert sent_to(brain)["r0", metrics.REFUSED_AGAIN] == 1
        wait_until("it fails others", lambda: is_sent(globex, asked + 2))
        assert sent_to(brain)["r0", metrics.REFUSED] == 2
        assert sent_to(brain)["r0", metrics.REFUSED_AGAIN] == 1


def test_a_replica_that_was_ejected_returns(brain: RunningBrain, engines: list[FakeEngine]) -> None:
    engines[0].behavior = Behavior(status=500)
    numbers = itertools.count()

    def is_asked_another_time(times: int) -> bool:
        ask(brain, prompt=f"Hi {next(numbers)}")
        return len(engines[0].asked) > times

    wait_until("it is ejected", lambda: is_asked_another_time(FAILURES_MAX - 1))
    engines[0].behavior = Behavior()
    wait_until("it is asked again", lambda: is_asked_another_time(FAILURES_MAX))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_replica_that_refuses_what_is_the_brains_own_is_ejected(
    brain: RunningBrain, engines: list[FakeEngine], status: int
) -> None:
    """Its key, or the model: to refuse all requests is fast, and it would get most of them."""
    engines[0].behavior = Behavior(status=status)
    found: list[int] = []

    def is_ejected() -> bool:
        found.append(ask(brain, prompt=f"Hi {len(found)}").status_code)
        return State.EJECTED in states(brain)

    wait_until("it is ejected", is_ejected, 60)
    assert set(found) == {200}


def test_what_all_replicas_refuse_is_the_clients_to_know(
    brain: RunningBrain, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.behavior = Behavior(status=500, error="CUDA is gone")
    answer = ask(brain)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert sum(len(one.asked) for one in engines) == 2


def test_a_request_that_every_engine_fails_at_ejects_nobody(
    brain: RunningBrain, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.behavior = Behavior(status=500)
    for one in range(10):
        assert ask(brain, prompt=f"Hi {one}").status_code == 500
        assert states(brain) == {State.READY}
    assert sent_to(brain) == {(name, metrics.UNANSWERED): 10 for name in ("r0", "r1")}


def test_what_an_instance_fails_that_was_replaced_does_not_count_for_its_successor(
    brain: RunningBrain, engines: list[FakeEngine]
) -> None:
    document = brain.brain.desired
    assert document
    [served] = document.models
    first, second = served.replicas
    generations = itertools.count(2)

    def tell(*replicas: ReplicaSpec) -> None:
        models = (replace_struct(served, replicas=replicas),)
        brain.set_desired(replace_struct(document, generation=next(generations), models=models))

    engines[0].behavior = Behavior(error_after=0, is_held=True)
    tell(first, replace_struct(second, draining=True))
    with FakeEngine() as successor, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, brain, stream=True)
        wait_until("it is sent", lambda: in_progress(brain, "r0") == 1)
        tell(replace_struct(first, url=successor.url), second)
        engines[0].behavior.is_held = False
        assert answer.result(60).status_code == 200
    assert set(sent_to(brain)) == {("r1", "ok")}
    assert len(engines[0].asked) == 1


def test_what_ends_at_an_instance_that_was_replaced_does_not_count_for_its_successor(
    brain: RunningBrain, engines: list[FakeEngine]
) -> None:
    """As streams do that are cut off where their instance has drained long enough."""
    document = brain.brain.desired
    assert document
    [served] = document.models
    first, second = served.replicas
    engines[0].behavior = engines[1].behavior = Behavior(is_held=True)
    with FakeEngine() as successor, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, brain, stream=True)
        wait_until("it is sent", lambda: in_progress(brain, "r0") + in_progress(brain, "r1") == 1)
        told = [replace_struct(one, url=successor.url) for one in (first, second)]
        models = (replace_struct(served, replicas=tuple(told)),)
        brain.set_desired(replace_struct(document, generation=2, models=models))
        engines[0].behavior.is_held = engines[1].behavior.is_held = False
        assert answer.result(60).status_code == 200
    assert sent_to(brain) == {}


def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has(
    brain: RunningBrain, engines: list[FakeEngine]
) -> None:
    engines[0].behavior = Behavior(between_seconds=0.3)
    engines[1].behavior = Behavior(between_seconds=0.3)
    told_before = brain.brain.desired
    assert told_before is not None
    with httpx.stream(
        *("POST", f"{brain.url}/v1/completions"),
        headers=brain.headers,
        json={**BODY, "stream": True},
        timeout=ANSWER_SECONDS_MAX,
    ) as answer:
        pieces = answer.iter_text()
        next(pieces)
        first = next(index for index, one in enumerate(engines) if one.asked)
        replicas = list(told_before.models[0].replicas)
        replicas[first] = replace_struct(replicas[first], draining=True)
        models = (replace_struct(told_before.models[0], replicas=tuple(replicas)),)
        brain.set_desired(replace_struct(told_before, generation=2, models=models))
        assert "".join(pieces).endswith("data: [DONE]\n\n")
    for _ in range(4):
        assert ask(brain).status_code == 200
    assert len(engines[first].asked) == 1


def replace_struct(value: Any, **changes: Any) -> Any:
    from msgspec import structs

    return structs.replace(value, **changes)


# Streams that break


@pytest.mark.parametrize("how", ["die_after", "error_after"])
def test_a_stream_that_breaks_says_so_and_has_no_end(
    brain: RunningBrain, engines: list[FakeEngine], how: str
) -> None:
    for engine in engines:
        engine.behavior = Behavior(**{how: 2})  # type: ignore[arg-type]
    answer = ask(brain, stream=True)
    assert answer.status_code == 200
    assert answer.text.count("tok") == 2
    assert "[DONE]" not in answer.text
    assert last_event(answer)["error"]["message"]
    wait_until("it is counted", lambda: results(brain) == {"broken"})


def results(brain: RunningBrain) -> set[str]:
    """How requests have ended."""
    numbers = brain.brain.counts._numbers
    return brain.call(lambda: {labels[2] for labels in numbers.get(metrics.REQUESTS, ())})


@pytest.mark.usefixtures("ejected_for_long")
def test_a_stream_that_begins_with_an_error_is_one_that_another_replica_answers(
    brain: RunningBrain, engines: list[FakeEngine]
) -> None:
    """Else the one that fails at once is the fastest of all, and gets all requests."""
    engines[0].behavior = Behavior(error_after=0)
    answers = ask_until_first(brain, engines, stream=True)
    answers += [ask(brain, stream=True, prompt=f"Hi again {number}") for number in range(20)]
    assert not any('"error"' in one.text for one in answers)
    assert all(one.text.count("tok") == 4 and "[DONE]" in one.text for one in answers)
    assert len(engines[0].asked) <= FAILURES_MAX
    assert results(brain) == {"ok"}
    engines[1].behavior = Behavior(error_after=0)
    answer = ask(brain, stream=True)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "The engine broke."
    assert results(brain) == {"ok", "failed"}


def test_a_stream_that_begins_with_an_error_of_the_clients_is_refused(
    brain: RunningBrain, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.behavior = Behavior(error_after=0, error_code=400)
    answer = ask(brain, stream=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The engine broke."
    assert sum(len(one.asked) for one in engines) == 1
    assert results(brain) == {"invalid"}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_running_is_finished_though_its_model_is_removed(
    brain: RunningBrain,
    engines: list[FakeEngine],
    stream: bool,  # noqa: FBT001
) -> None:
    behavior = engines[0].behavior = engines[1].behavior = Behavior(is_held=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, brain, stream=stream)
        wait_until("it is there", lambda: sum(one.now_running for one in engines) == 1)
        urls = [one.url for one in engines]
        brain.set_desired(told(urls, 2, models=(model(urls, name="other"),)))
        behavior.is_held = False
        answer = running.result()
    assert answer.status_code == 200
    whole = '"tok"' if stream else '"toktoktoktok"'
    assert answer.text.count(whole) == (4 if stream else 1)


def test_a_stream_that_stalls_is_ended_in_time() -> None:
    options = replace(OPTIONS, timeouts=Timeouts(20.0, 20.0, 0.3))
    with (
        FakeEngine(Behavior(stall_after=1)) as engine,  # the first token may take its time
        RunningBrain(told([engine.url]), options) as brain,
    ):
        answer = ask(brain, stream=True)  # which waits for less than the engine does
        assert answer.text.count("tok") == 1
        assert last_event(answer)["error"]["code"] == "stream_timeout"
        wait_until("the engine is left alone", lambda: engine.asked[0].has_left)


def test_a_replica_that_never_begins_is_given_up() -> None:
    options = replace(OPTIONS, timeouts=Timeouts(20.0, 0.3, 20.0), patience=Patience(whole=0.3))
    with (
        FakeEngine(Behavior(first_seconds=3600)) as engine,
        RunningBrain(told([engine.url]), options) as brain,
    ):
        for stream in (False, True):
            answer = ask(brain, stream=stream)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "replica_timeout"
        wait_until("it is left alone", lambda: all(one.has_left for one in engine.asked))


# Clients


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("protocol", ["--http1.1", "--http2-prior-knowledge"])
async def test_a_client_that_leaves_is_computed_for_no_longer(protocol: str, begun: bool) -> None:  # noqa: FBT001
    behavior = Behavior(tokens=10**6, between_seconds=0.01) if begun else Behavior(first_seconds=3600)
    with FakeEngine(behavior) as engine, RunningBrain(told([engine.url])) as brain:
        client = await asyncio.create_subprocess_exec(
            *("curl", "-sN", protocol, "-H", f"Authorization: Bearer {KEY}"),
            *("-d", json.dumps({**BODY, "stream": True}), f"{brain.url}/v1/completions"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdout
        if begun:
            assert await client.stdout.readline()
        else:
            await asyncio.to_thread(wait_until, "it has come", lambda: engine.now_running == 1)
        client.kill()
        await client.wait()
        await asyncio.to_thread(wait_until, "it has left", lambda: engine.now_running == 0)
        assert engine.asked[0].has_left
        await asyncio.to_thread(wait_until, "its place is free", lambda: not brain.brain.counts.streams)


def test_a_slow_client_costs_a_bounded_amount_of_memory() -> None:
    options = replace(OPTIONS, patience=Patience(client=1.0))
    behavior = Behavior(tokens=10_000, text="x" * 20_000)
    with FakeEngine(behavior) as engine, RunningBrain(told([engine.url]), options) as brain:
        raw = json.dumps({**BODY, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", brain.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n"
                b"content-length: %d\r\n\r\n%s" % (KEY.encode(), len(raw), raw)
            )
            wait_until("it is cut off", lambda: bool(engine.asked and engine.asked[0].has_left))
        assert engine.asked[0].tokens_sent * 20_000 < 64 << 20, "the engine was held back"
        wait_until("all is given back", lambda: not brain.brain.counts.streams)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [1000])
def test_a_thousand_streams_at_once(streams: int) -> None:
    with FakeEngine(Behavior(tokens=5, first_with=streams, between_seconds=0.2)) as engine:
        document = told([engine.url])
        limits = replace_struct(document.orgs[0].limits, queued=10_000)
        orgs = (replace_struct(document.orgs[0], limits=limits),)
        # The first one waits for the last, on a machine that is busy, too.
        options = replace(OPTIONS, timeouts=Timeouts(300.0, 300.0, 300.0))
        with RunningBrain(replace_struct(document, orgs=orgs), options) as brain:
            brain.brain.router.room = _much_room  # type: ignore[assignment, method-assign]

            raw = json.dumps({**BODY, "stream": True}).encode()
            head = (
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n" % (KEY.encode(), len(raw))
            )

            async def asked() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection("127.0.0.1", brain.port)
                writer.write(head + raw)
                return reader, writer

            async def run() -> list[bytes]:
                some: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
                while len(some) < streams:  # whose key has not been read has one of few places
                    some += await asyncio.gather(*(asked() for _ in range(50)))
                    while engine.now_running < len(some):  # noqa: ASYNC110 - of another thread
                        await asyncio.sleep(0.01)
                texts = await asyncio.gather(*(reader.read() for reader, _ in some))
                for _, writer in some:
                    writer.close()
                return texts

            texts = asyncio.run(run())
            assert all(b"data: [DONE]" in text for text in texts)
            assert all(text.count(b'"tok"') == 5 for text in texts)
            assert engine.most_running == streams


def _much_room(_model: str) -> Any:
    from inference_brain.admission import Room

    return Room(100_000, 1 << 40)


def test_one_orgs_connections_leave_places_to_others() -> None:
    orgs = (org(), org("globex", "sk-globex"))
    with (
        FakeEngine() as engine,
        RunningBrain(told([engine.url], orgs=orgs), connections=40) as brain,
        ExitStack() as opened,
    ):
        statuses = []
        for _ in range(45):
            client = opened.enter_context(client_of(brain))
            statuses.append(client.get(f"{brain.url}/v1/models").status_code)
        assert statuses.count(200) == 24, "all but those that are reserved"
        assert set(statuses) == {200, 429}
        other = {"authorization": "Bearer sk-globex"}
        assert get(f"{brain.url}/v1/models", headers=other).status_code == 200


# Documents


def test_a_revoked_key_and_a_new_one_count_at_once(
    brain: RunningBrain, engines: list[FakeEngine]
) -> None:
    def document(generation: int, key: str) -> Desired:
        return told([one.url for one in engines], generation, orgs=(org("acme", key),))

    assert ask(brain).status_code == 200
    brain.set_desired(document(2, "sk-new"))
    assert ask(brain).status_code == 401
    brain.headers = {"authorization": "Bearer sk-new"}
    assert ask(brain).status_code == 200


def test_a_replica_that_is_new_is_used_and_one_that_is_gone_is_not(
    brain: RunningBrain, engines: list[FakeEngine]
) -> None:
    ask(brain)
    brain.set_desired(told([engines[1].url], 2))
    for engine in engines:
        engine.asked.clear()
    for _ in range(4):
        assert ask(brain).status_code == 200
    assert [len(one.asked) for one in engines] == [0, 4]
