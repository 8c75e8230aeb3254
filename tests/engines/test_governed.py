"""A real vLLM under a real console: it joins, is given a job, and follows what people say there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from console.stack import endpoint
from tests.engines.governed import DRIVER, NODES, Governed, Load, governed_stack
from tests.engines.prompts import prompt
from tests.engines.serving import Server, serving
from tests.engines.vllm_process import build
from tests.live import wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

TALKS: Final = {"VLLM_LOGGING_LEVEL": "INFO"}
CACHED: Final = 960  # tokens of a prompt of `prompts.prompt`, in whole units


@pytest.fixture(scope="module")
def governed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Governed]:
    with governed_stack(tmp_path_factory.mktemp("governed")) as made:
        yield made


@pytest.fixture(scope="module")
def vllm(governed: Governed) -> Iterator[Server]:
    model = governed.directory / "llama"
    build("llama", model)
    told = governed.told(wait_seconds=5)
    with serving(model, told, governed.directory / "vllm.log", environment=TALKS) as server:
        yield server


def hits(vllm: Server, seed: int, claim: str) -> None:
    wait_until("it hits", lambda: vllm.ask(prompt(seed), claim)[1] == CACHED, 30)


def test_an_engine_joins_is_given_a_job_and_caches(governed: Governed, vllm: Server) -> None:
    wait_until("it has joined", lambda: governed.admin.get(f"/drivers/{DRIVER}").is_success, 60)
    shown = governed.driver()
    assert shown["engine"].startswith("vllm 0."), shown
    [group] = shown["model"]["groups"]
    answer, cached = vllm.ask(prompt(1), None)
    assert cached == 0, "it serves before it has a job"
    governed.start_job(sum(group["bytes_per_token"]))
    wait_until("it follows its document", lambda: governed.target()["observed_generation"] > 0, 60)
    acme = governed.claim("acme")
    assert vllm.ask(prompt(1), acme) == (answer, 0)
    wait_until("it hits", lambda: vllm.ask(prompt(1), acme) == (answer, CACHED), 30)
    assert vllm.ask(prompt(1), governed.claim("globex")) == (answer, 0), "another org's"
    signed = governed.ask("POST", f"/drivers/{DRIVER}/claims", {"org": "acme"})
    assert vllm.ask(prompt(1), signed["claim"]) == (answer, CACHED)


def test_what_an_admin_lowers_the_next_request_misses(governed: Governed, vllm: Server) -> None:
    acme, globex = governed.claim("acme"), governed.claim("globex")
    for claim in (acme, globex):
        vllm.ask(prompt(2), claim)
        hits(vllm, 2, claim)
    governed.set_policy("acme", ttl_last_use_seconds=1)
    wait_until("the engine has it", lambda: governed.reached("acme") == (1, 1), 30)
    time.sleep(1.5)  # longer than the TTL, and nobody asks meanwhile
    assert vllm.ask(prompt(2), acme, request="late")[1] == 0
    assert governed.why_missed("acme", "cmpl-late") == {"expired": len(prompt(2)) // 64 * 64}
    assert vllm.ask(prompt(2), globex)[1] == CACHED
    governed.set_policy("acme", ttl_last_use_seconds=3600)


def test_a_purge_counts_what_the_engine_held(governed: Governed, vllm: Server) -> None:
    acme = governed.claim("acme")
    vllm.ask(prompt(3), acme)
    hits(vllm, 3, acme)
    governed._run("/orgs/acme/purge", {"reason": "asked for"})
    [receipt, *_] = governed.ask("GET", "/orgs/acme/purges")["items"]
    assert receipt["columns"] >= CACHED // 64, receipt
    assert vllm.ask(prompt(3), acme)[1] == 0


def test_moves_drains_and_resizes_under_load_fail_no_request(governed: Governed, vllm: Server) -> None:
    claim = governed.claim("acme")
    [stream] = governed.ask("GET", "/sessions/chat/streams")["items"]
    here, there = stream["node"], next(name for name in NODES if name != stream["node"])
    with Load(vllm, claim, range(20, 26)) as load:
        wait_until("it hits", lambda: CACHED in load.hit_tokens, 60)
        governed._run("/sessions/chat/move", {"stream": stream["name"], "node": there})
        governed._run(f"/nodes/{there}/drain", {"reason": "for a test"})
        governed.ask("PUT", f"/nodes/{there}/state", {"state": "ready"})
        governed._run("/sessions/chat/resize", {"boxes": 2, "wait_seconds": 60})
        governed._run("/sessions/chat/resize", {"boxes": 1, "wait_seconds": 60})
        before = len(load.hit_tokens)
        wait_until("it still hits", lambda: CACHED in load.hit_tokens[before:], 60)
    assert not load.wrong
    [after] = governed.ask("GET", "/sessions/chat/streams")["items"]
    assert after["node"] == here
    assert sum(map(bool, load.hit_tokens)) > len(load.hit_tokens) / 2, "moves keep what is cached"


def test_a_second_start_needs_neither_console_nor_token(
    governed: Governed, vllm: Server, tmp_path: Path
) -> None:
    """Last: the engine that the others use is replaced."""
    acme = governed.claim("acme")
    answer, _ = vllm.ask(prompt(4), acme)
    vllm.stop()
    told = {**vllm.told, "console": f"http://127.0.0.1:{endpoint.free_port()}", "join": None}
    model = governed.directory / "llama"
    with serving(model, told, tmp_path / "log", environment=TALKS) as alone:
        assert "Following the stored desired document" in alone.log
        assert "away: ConnectError" in alone.log
        assert alone.ask(prompt(4), acme)[0] == answer
        wait_until("it hits", lambda: alone.ask(prompt(4), acme) == (answer, CACHED), 30)
