"""The manager of an instance with a real vLLM, in a real console's fleet: what a workload is made of.

A rollout is two of them for one replica: the cache goes from the old one to the new one while clients
ask.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.engines.governed import DRIVER, SESSION, Governed, Load, governed_stack
from tests.engines.prompts import prompt
from tests.engines.serving import START_SECONDS, STOP_SECONDS, Server
from tests.engines.vllm_process import QUIET, build, tokenizer
from tests.live import wait_until
from tests.workload_manager.managers import KEY, Running, is_alive, manager

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

CACHED: Final = 960  # tokens of a prompt of `prompts.prompt`, in whole units
ARGUMENTS: Final = (
    *("--dtype", "float32", "--block-size", "32", "--enforce-eager", "--seed", "0"),
    *("--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
)


@pytest.fixture(scope="module")
def governed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Governed]:
    with governed_stack(tmp_path_factory.mktemp("managed")) as made:
        build("llama", made.directory / "llama")
        tokenizer([]).save_pretrained(made.directory / "words")
        yield made


@contextlib.contextmanager
def instance(governed: Governed, name: str, driver: str = DRIVER) -> Iterator[Running]:
    """An instance of the replica that this driver belongs to."""
    made = manager(
        governed.directory,
        name,
        secrets={"api_key": KEY, "join_token": governed.join_token("driver")},
        seconds=START_SECONDS,
        tokens_max=2048,
        grace_seconds=120.0,
        engine={"kind": "vllm", "arguments": ARGUMENTS, "environment": QUIET},
        weights={"source": str(governed.directory / "llama")},
        tokenizer={"folder": str(governed.directory / "words")},
        cache={"console": governed.console, "driver": driver},
    )
    with made as running:
        yield running


@contextlib.contextmanager
def asked(running: Running) -> Iterator[Server]:
    """Clients' way to the engine: through its manager, with the instance's key."""
    with running.client() as http:
        http.timeout = httpx.Timeout(120)
        yield Server(http, None, running.log_file, running.process)


def start_job(governed: Governed, driver: str) -> None:
    """Of this driver, in a session that the first one starts."""
    [group] = governed.driver(driver)["model"]["groups"]
    if not governed.admin.get(f"/sessions/{SESSION}").is_success:
        governed.start_session(sum(group["bytes_per_token"]))
    governed.start_job(driver)


@pytest.fixture(scope="module")
def first(governed: Governed) -> Iterator[Running]:
    """The one that the replica begins with. It has a job."""
    with instance(governed, "chat-0-r1-aaaa") as running:
        status = running.wait_for("ready", "Serving", cache="attached")
        assert status["restarts"] == 0
        start_job(governed, DRIVER)
        yield running


def hits(server: Server, seed: int, claim: str) -> list[int]:
    """The answer, once it comes with a hit. It is the one without a cache."""
    right, cached = server.ask(prompt(seed), None)
    assert cached == 0
    wait_until("it hits", lambda: server.ask(prompt(seed), claim) == (right, CACHED), 60)
    return right


def engine_of(running: Running) -> int:
    """The process that its manager has started."""
    return int(json.loads((running.folder / "engine.json").read_text())["session"])


def core_of(running: Running) -> int:
    """Of this engine, the process that has model and driver: who has reported the driver's state."""
    return int(json.loads((running.folder / "driver" / "state").read_text())["pid"])


def text_of(server: Server, words: str, **more: Any) -> str:
    told = {"model": "tiny", "prompt": words, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json={**told, **more})
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return str(answer.json()["choices"][0]["text"])
    lines = answer.text.split("\n\n")
    assert [line for line in lines if line][-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(pieces) > 1
    return "".join(piece["choices"][0]["text"] for piece in pieces)


def test_an_instance_joins_and_answers_as_without_a_cache(governed: Governed, first: Running) -> None:
    assert governed.driver()["engine"].startswith("vllm 0.")
    acme = governed.claim("acme")
    with asked(first) as server:
        right = hits(server, 1, acme)
        assert server.ask(prompt(1), governed.claim("globex")) == (right, 0), "another org's"
        words = " ".join(f"word{token}" for token in prompt(2, 200))
        assert text_of(server, words, stream=True) == text_of(server, words) != ""
    with first.client(key="") as nobody:
        assert nobody.get("/v1/models").status_code == 401
        assert nobody.get("/health").status_code == 200


def test_its_engine_answers_at_a_socket_of_this_user(first: Running) -> None:
    socket = first.folder / "engine.sock"
    assert stat.S_ISSOCK(socket.stat().st_mode)
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=os.path.relpath(socket)), base_url="http://engine"
    ) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    command = Path(f"/proc/{engine_of(first)}/cmdline").read_bytes().split(b"\0")
    assert b"--uds" in command
    assert b"--port" not in command


@dataclass
class Loads:
    """Clients at both instances of a replica."""

    old: Load
    new: Load

    def is_right(self) -> None:
        assert not self.old.wrong
        assert not self.new.wrong


def test_a_rollout_keeps_the_cache_and_an_undone_one_takes_it_back(
    governed: Governed, first: Running
) -> None:
    """Clients ask both all the while: nothing fails, and every answer is the one without a cache."""
    acme = governed.claim("acme")
    seeds, others = range(20, 26), range(30, 34)
    with instance(governed, "chat-0-r2-bbbb") as second, asked(first) as old:
        status = second.wait_for("standby", "WaitingForCache", cache="waiting")
        assert status["url"], "it answers"
        with asked(second) as new:
            right = {seed: hits(old, seed, acme) for seed in seeds}
            for seed in seeds:
                assert new.ask(prompt(seed), acme) == (right[seed], 0), "the old one has the cache"
            with Load(old, acme, seeds) as at_old, Load(new, acme, seeds) as at_new:
                loads = Loads(at_old, at_new)
                wait_until("the old one hits", lambda: CACHED in at_old.hit_tokens, 60)
                assert not any(at_new.hit_tokens)
                first.set_goal("RELEASE_CACHE")
                second.wait_for("ready", "Serving", cache="attached")
                first.wait_for("ready", cache="released", goal="RELEASE_CACHE")
                before = len(at_new.hit_tokens)
                wait_until("all hit", lambda: len(at_new.hit_tokens) > before + 2 * len(seeds), 120)
                tail = at_new.hit_tokens[before + 1 :]
                assert set(tail) == {CACHED}, "what the old one has stored, and not what the load has"
                served = len(at_old.hit_tokens)
                wait_until("it goes on", lambda: len(at_old.hit_tokens) > served + 3, 60)
                assert not any(at_old.hit_tokens[served + 1 :]), "it has no cache any more"
            loads.is_right()
            for seed in others:
                right[seed] = hits(new, seed, acme)

            with Load(old, acme, range(20, 34)) as at_old, Load(new, acme, seeds) as at_new:
                loads = Loads(at_old, at_new)
                first.set_goal("RUN")
                first.wait_for("ready", cache="waiting", goal="RUN")
                second.set_goal("RELEASE_CACHE")
                first.wait_for("ready", "Serving", cache="attached")
                second.wait_for("ready", cache="released")
            loads.is_right()
            for seed, answer in right.items():
                assert old.ask(prompt(seed), acme) == (answer, CACHED), seed
                assert new.ask(prompt(seed), acme) == (answer, 0)
            second.set_goal("DRAIN")
            assert second.ends(STOP_SECONDS) == 0


@pytest.mark.parametrize("of", [engine_of, core_of])
def test_an_engine_that_is_killed_is_started_again(governed: Governed, first: Running, of: Any) -> None:
    acme = governed.claim("acme")
    with asked(first) as server:
        hits(server, 3, acme)
        restarts = first.status()["restarts"]
        processes = engine_of(first), core_of(first)
        os.kill(of(first), signal.SIGKILL)
        first.wait_for("starting", "EngineEnded")
        with first.client_when_ready() as http:
            assert http.get("/v1/models").status_code == 200
        assert first.status()["restarts"] == restarts + 1
        assert not any(map(is_alive, processes)), "nothing of the old one is left"
        first.wait_for("ready", "Serving", cache="attached")
        hits(server, 3, acme)


def test_it_is_drained_and_its_successor_hits_what_it_has_stored(governed: Governed) -> None:
    """SIGTERM, as from a Cluster Server: the request that runs is finished, and the driver leaves its
    note."""
    replica = "vllm-8"
    with instance(governed, "chat-1-r1-aaaa", replica) as one:
        one.wait_for("ready", "Serving", cache="attached")
        start_job(governed, replica)
        acme = governed.claim("acme", driver=replica)
        processes = engine_of(one), core_of(one)
        with asked(one) as server:
            right = hits(server, 4, acme)
            answers: list[httpx.Response] = []

            def ask() -> None:
                told = {"model": "tiny", "prompt": prompt(5), "max_tokens": 200, "ignore_eos": True}
                answers.append(server.http.post("/v1/completions", json=told))

            asking = threading.Thread(target=ask)
            asking.start()
            one.wait_for("ready", running_requests=1)
            one.process.terminate()
            one.wait_for("draining", "Draining", running_requests=1)
            with one.client() as late:
                refused = late.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            asking.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 200
        assert one.ends(STOP_SECONDS) == 0
        assert not any(map(is_alive, processes))
    with instance(governed, "chat-1-r2-bbbb", replica) as next_one:
        next_one.wait_for("ready", "Serving", cache="attached")
        with asked(next_one) as server:
            assert server.ask(prompt(4), acme) == (right, CACHED)
        governed.end_job(replica)
