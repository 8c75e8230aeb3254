"""The daemon over HTTP, on real agents: who may ask what, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from console.environment import PROJECT
from kvss_agent import documents
from swdriver_shim.cache.reuse.preview import Traffic, preview
from swdriver_shim.cache.reuse.sample import Sample
from swdriver_shim.daemon import admission, service, verbs
from swdriver_shim.daemon.metrics import METRICS
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.desired import GroupSpec, ModelSpec, OrgSpec
from swdriver_shim.policy import Policy
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.daemons import ACME, CONTROL, EACH, GLOBEX, C, Daemon, kv, org, told

pytestmark = pytest.mark.slow  # each starts a process

MODEL = ModelSpec("llama", (GroupSpec("full", (EACH,)),))


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent for all tests: a driver that has no notes empties it before anything else."""
    with agent(tmp_path_factory.mktemp("agent") / "one") as one:
        one.tell(document(1, spec("s", 20, EACH * C)))
        yield one


@pytest.fixture
def agents(lasting: AgentProcess) -> list[AgentProcess]:
    if lasting.process.poll() is not None:  # the test before has killed it
        lasting.start()
        wait_until("it has its shard", lambda: lasting.observed()["ready"])
    return [lasting]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent(tmp_path / "two") as two:
        yield two


@pytest.fixture
def daemon(tmp_path: Path, agents: list[AgentProcess]) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "driver")
    assert made.control("desired", told(agents)).status_code == 202
    wait_until("it is ready", made.is_ready)
    yield made
    assert made.stop() == 0


def test_kv_goes_in_and_comes_out_and_only_for_its_org(daemon: Daemon) -> None:
    tokens = list(range(2 * C + 10))
    stored = daemon.store(ACME, tokens, kv(len(tokens))).json()
    assert (stored["columns"], stored["failed"]) == (3, 0)
    assert daemon.load(ACME, tokens) == (len(tokens), kv(len(tokens)))
    assert daemon.load(ACME, [*tokens, 1, 2]) == (len(tokens), kv(len(tokens)))
    assert daemon.load(GLOBEX, tokens) == (0, b"")
    assert daemon.ask(ACME, "query", tokens=tokens, adapter="lora").json()["tokens"] == 0
    assert daemon.ask(ACME, "query", tokens=tokens).json() == {"tokens": 138, "asked": 138}


def test_only_verified_tokens_are_taken(daemon: Daemon) -> None:
    tokens = list(range(2 * C))
    daemon.store(ACME, tokens, kv(C + 5), verified=C + 5)
    assert daemon.load(ACME, tokens) == (C + 5, kv(C + 5))
    assert daemon.store(ACME, tokens, kv(3 * C), verified=3 * C).status_code == 422


def test_kv_may_follow_from_a_later_token_on(daemon: Daemon) -> None:
    tokens = list(range(3 * C))
    daemon.store(ACME, tokens[:C], kv(C))
    rest = kv(3 * C)[(C - 5) * EACH :]
    assert daemon.store(ACME, tokens, rest, first_tokens={"full": C - 5}).json()["columns"] == 2
    assert daemon.load(ACME, tokens) == (3 * C, kv(3 * C))
    assert daemon.store(ACME, tokens, kv(3 * C), first_tokens={"full": C}).status_code == 422
    assert daemon.store(ACME, tokens, b"", first_tokens={"full": 3 * C + 1}).status_code == 422
    answer = daemon.store(ACME, tokens, kv(3 * C), first_tokens={"window": 0})
    assert answer.json()["detail"] == "There is no group window."


def test_who_takes_the_model_for_another_is_told(daemon: Daemon) -> None:
    right = MODEL.namespace().digest().hex()
    assert daemon.ask(ACME, "load", tokens=[1], namespace=right).status_code == 200
    other = msgspec.structs.replace(MODEL, revision="r2").namespace().digest().hex()
    answer = daemon.ask(ACME, "load", tokens=[1], namespace=other)
    assert answer.status_code == 422
    assert "another model, revision, dtype, layout or shape" in answer.json()["detail"]


def test_the_verbs_on_what_is_stored(daemon: Daemon) -> None:
    tokens = list(range(2 * C))
    daemon.store(ACME, tokens, kv(2 * C), rules={"priority": 80})
    [first, _] = daemon.ask(ACME, "explain", tokens=tokens).json()["full"]
    assert (first["state"], first["priority"]) == ("ready", 80)
    assert daemon.ask(ACME, "set_priority", tokens=tokens, priority=7).json() == {"columns": 2}
    assert daemon.ask(ACME, "set_ttl", tokens=tokens, seconds=60).json() == {"columns": 2}
    assert daemon.ask(ACME, "displacement", displacement="slru").status_code == 200
    [first, _] = daemon.ask(ACME, "explain", tokens=tokens).json()["full"]
    assert first["priority"] == 7
    assert first["expires_in_seconds"] <= 60
    receipt = daemon.ask(ACME, "delete", tokens=tokens).json()
    assert (receipt["columns"], receipt["done"]) == (2, True)
    daemon.store(ACME, tokens, kv(2 * C))
    receipt = daemon.ask(ACME, "purge").json()
    assert (receipt["columns"], receipt["done"], list(receipt["confirmed"])) == (2, True, ["full.0"])
    assert daemon.load(ACME, tokens) == (0, b"")


def test_the_controller_is_told_what_became_of_a_request_and_where_it_lies(daemon: Daemon) -> None:
    def explained(**body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {CONTROL}"}
        return daemon.http.post("/v1/explain_org", json=body, headers=headers)

    tokens = list(range(3 * C))
    daemon.store(ACME, tokens[: 2 * C], kv(2 * C))
    assert daemon.ask(ACME, "load", tokens=tokens, request="r-7").status_code == 200
    found = explained(org="acme", request="r-7").json()
    assert found["result"]["columns"] == [
        {"outcome": "dram", "columns": 2},
        {"outcome": "never_stored", "columns": 1},
    ]
    assert (found["result"]["hit_tokens"], found["result"]["missed_tokens"]) == (
        2 * C,
        {"never_stored": C},
    )
    states = [one["state"] for one in found["groups"]["full"]]
    assert states == ["ready", "ready", "never_stored"]
    assert [(one["group"], one["state"], one["tier"]) for one in found["homes"]] == [
        ("full", "here", "unknown")
    ]
    by_tokens = explained(org="acme", tokens=tokens).json()
    assert [one["state"] for one in by_tokens["groups"]["full"]] == states
    assert by_tokens["result"] is None
    assert explained(org="acme", keys=["0" * 32]).json()["groups"]["full"][0]["state"] == "never_stored"
    [newest] = daemon.control("requests?org=acme").json()
    assert (newest["request"], newest["asked_tokens"]) == ("r-7", 3 * C)
    assert daemon.control("requests?org=globex").json() == []
    name = newest["request"]
    assert daemon.control(f"requests?request={name}").json() == [{"org": "acme"}]
    assert daemon.control("requests?request=another").json() == []
    for body, status, sentence in (
        ({"org": "globex", "request": "r-7"}, 404, "knows no request r-7"),
        ({"org": "nobody", "request": "r-7"}, 404, "does not have this org"),
        ({"org": "acme"}, 422, "Give one of"),
        ({"org": "acme", "request": "r-7", "tokens": [1]}, 422, "Give one of"),
        ({"org": "acme", "keys": ["nonsense"]}, 422, "keys"),
    ):
        answer = explained(**body)
        assert (answer.status_code, sentence in answer.json()["detail"]) == (status, True), answer.text
    own = daemon.ask(ACME, "explain_org", org="acme", tokens=[1])
    assert own.status_code == 401, "callers have a verb of their own"
    daemon.ask(ACME, "purge")
    assert explained(org="acme", request="r-7").status_code == 404, "nothing is left behind"


def test_the_controller_gets_what_previews_are_made_of(daemon: Daemon) -> None:
    tokens = list(range(3 * C))
    for _ in range(2):
        daemon.load(ACME, tokens)
        daemon.store(ACME, tokens, kv(3 * C))
    assert {"org": "acme", "requests": 2} in daemon.control("reuse").json()
    sample = msgspec.json.decode(daemon.control("reuse?org=acme").content, type=Sample)
    assert (sample.requests, sample.requested, sample.hit) == (2, 6 * C, 3 * C)
    assert sample.events()[-1].at <= sample.now
    told = preview([Traffic.of(sample)], Policy(), Policy(ttl_last_use_seconds=600))
    assert told.proposed.hit_rate == told.measured_hit_rate == 0.5
    answer = daemon.control("reuse?org=nobody")
    assert answer.status_code == 404
    assert "never heard of" in answer.json()["detail"]
    described = daemon.http.get("/v1/openapi.json").json()
    assert described["paths"]["/v1/reuse"]["get"]["operationId"] == "reuse"
    assert "Sample" in described["components"]["schemas"]


def test_whoever_has_no_token_learns_and_changes_nothing(daemon: Daemon) -> None:
    for token in ("x", "x" * 40, CONTROL):
        assert daemon.ask(token, "query", tokens=[1]).status_code == 401
        assert daemon.store(token, [1], kv(1)).status_code == 401
    for path in ("observed", "stats", "reuse", "reuse?org=acme"):
        assert daemon.http.get(f"/v1/{path}").status_code == 401
        answer = daemon.http.get(f"/v1/{path}", headers={"authorization": f"Bearer {ACME}"})
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/problem+json"
    assert daemon.http.get("/v1/nothing").status_code == 404


NO_SENSE: list[tuple[str, dict[str, Any]]] = [
    ("query", {}),
    ("query", {"tokens": [-1]}),
    ("query", {"tokens": [2**32]}),
    ("query", {"tokens": [1], "org": "globex"}),
    ("set_ttl", {"tokens": [1], "seconds": 0}),
    ("set_priority", {"tokens": [1], "priority": 101}),
    ("displacement", {"displacement": "best"}),
]
NO_KV = [b"", b"\xff\xff\xff\xff{}", b"\x02\0\0\0{}", struct.pack("<I", 14) + b'{"tokens":[1]}x']


def test_what_makes_no_sense_is_refused_with_a_sentence(daemon: Daemon) -> None:
    for path, body in NO_SENSE:
        answer = daemon.ask(ACME, path, **body)
        assert (answer.status_code, bool(answer.json()["detail"])) == (422, True), (path, body)
    headers = {"authorization": f"Bearer {ACME}"}
    for kv_body in NO_KV:
        answer = daemon.http.post("/v1/store", content=kv_body, headers=headers)
        assert (answer.status_code, bool(answer.json()["detail"])) == (422, True), kv_body


def test_a_document_is_taken_whole_in_order_and_only_if_it_makes_sense(
    daemon: Daemon, agents: list[AgentProcess]
) -> None:
    good = told(agents)
    nobody = {"url": "http://127.0.0.1:port", "token": CONTROL}
    assert daemon.control("desired", good).status_code == 202, "the same again"
    for wrong, part in [
        ({**good, "generation": 0}, "generation"),
        ({**good, "generation": 2, "homes": []}, "no home"),
        ({**good, "generation": 2, "homes": good["homes"] * 2}, "one home"),
        ({**good, "generation": 2, "orgs": [*good["orgs"], good["orgs"][0]]}, "two entries"),
        ({**good, "generation": 2, "extra": 1}, "extra"),
        ({**good, "generation": 2, "homes": [{**good["homes"][0], "address": "x"}]}, "address"),
        ({**good, "generation": 2, "homes": [{**good["homes"][0], "control": nobody}]}, "port"),
    ]:
        answer = daemon.control("desired", wrong)
        assert answer.status_code == 422
        assert part in answer.json()["detail"]
    other = {**good, "generation": 2, "model": {**good["model"], "name": "mixtral"}}
    assert daemon.control("desired", other).status_code == 409
    assert daemon.control("desired", {**good, "orgs": []}).status_code == 409
    newer = {**good, "generation": 3, "orgs": [org("acme", ACME, tiers="none"), good["orgs"][1]]}
    daemon.store(ACME, [1] * C, kv(C))
    assert daemon.control("desired", newer).status_code == 202
    assert daemon.control("desired", good).status_code == 409
    assert daemon.load(ACME, [1] * C) == (0, b""), "the policy holds for what is stored"
    assert daemon.control("observed").json()["observed_generation"] == 3


def test_who_is_taken_out_of_the_document_is_purged(daemon: Daemon, agents: list[AgentProcess]) -> None:
    daemon.store(ACME, [1] * C, kv(C))

    def occupied() -> int:
        return int(agents[0].http.get("/v1/shards/s").json()["occupied_slots"])

    assert occupied() == 1
    daemon.control("desired", told(agents, 2, orgs=[org("globex", GLOBEX)]))
    assert daemon.ask(ACME, "query", tokens=[1]).status_code == 401
    wait_until("it is gone", lambda: occupied() == 0)


def test_a_shard_moves_when_the_document_says_so_and_takes_its_bytes_along(
    daemon: Daemon, agents: list[AgentProcess], other: AgentProcess
) -> None:
    tokens = list(range(5 * C))
    daemon.store(ACME, tokens, kv(5 * C))
    other.tell(document(1, spec("s", 20, EACH * C, applied=daemon.shard()["count_from"])))
    assert daemon.control("desired", told(agents, 2, where=other)).status_code == 202
    assert daemon.load(ACME, tokens) == (5 * C, kv(5 * C)), "meanwhile"

    wait_until("it has moved", lambda: daemon.shard()["state"] == "here")
    assert daemon.shard()["address"].endswith("two/data.sock")
    agents[0].kill()
    assert daemon.load(ACME, tokens) == (5 * C, kv(5 * C))


def proven(daemon: Daemon) -> float:
    """Connections whose peer has shown a token."""
    text = daemon.http.get("/metrics", headers={"authorization": f"Bearer {CONTROL}"}).text
    [count] = re.findall(r'swdriver_http_connections{peer="proven"} (\S+)', text)
    return float(count)


def test_a_controller_can_mend_what_all_callers_are_waiting_for(
    daemon: Daemon, agents: list[AgentProcess], other: AgentProcess
) -> None:
    daemon.store(ACME, [1] * C, kv(C))
    other.tell(document(1, spec("s", 20, EACH * C, applied=daemon.shard()["count_from"])))
    agents[0].kill()
    wait_until("it is noticed", lambda: daemon.shard()["slots"] is None)
    removed = [f"unix:{agents[0].directory}/data.sock"]  # or it might come back with everything
    with ThreadPoolExecutor(40) as callers:
        purges: list[Future[httpx.Response]] = []
        for count in (20, 40):  # of one origin only so many are let in before they have shown a token
            purges += [callers.submit(daemon.ask, ACME, "purge") for _ in range(20)]
            wait_until("they wait", lambda: proven(daemon) >= count)  # noqa: B023
        document_2 = told(agents, 2, where=other, agents_removed=removed)
        assert daemon.control("desired", document_2).status_code == 202
        assert {purge.result().status_code for purge in purges} == {200}, "none was too late"


def test_a_shard_of_too_small_slots_is_refused_and_the_right_size_told(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    daemon = Daemon(tmp_path / "driver")
    model = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [2 * EACH]}]}
    assert daemon.control("desired", told(agents, model=model)).status_code == 202
    assert daemon.shard()["reason"] == "its slots have 8192 bytes; the layout wants 12288"
    assert daemon.store(ACME, [1] * C, kv(2 * C)).json() == {"columns": 0, "bytes": 0, "failed": 0}
    daemon.stop()


def test_a_move_to_nowhere_can_be_taken_back_and_has_changed_nothing(
    daemon: Daemon, agents: list[AgentProcess], other: AgentProcess
) -> None:
    daemon.store(ACME, [1] * C, kv(C))
    assert daemon.control("desired", told(agents, 2, where=other)).status_code == 202
    assert daemon.shard()["state"] == "moving", "there is no such shard there, so it is tried again"
    assert daemon.shard()["address"].endswith("one/data.sock")
    assert daemon.control("desired", told(agents, 3)).status_code == 202
    assert daemon.load(ACME, [1] * C) == (C, kv(C))
    wait_until("it stays", lambda: daemon.shard()["state"] == "here")
    assert daemon.load(ACME, [1] * C) == (C, kv(C))


def test_after_a_restart_it_is_again_what_it_was_told(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    first = Daemon(tmp_path / "driver")
    first.control("desired", told(agents))
    assert first.stop() == 0
    assert (tmp_path / "driver" / "desired.json").stat().st_mode & 0o777 == 0o600
    second = Daemon(tmp_path / "driver")
    wait_until("it is ready", second.is_ready)
    assert second.store(ACME, [1] * C, kv(C)).json()["columns"] == 1
    second.http.close()
    second.process.kill()
    second.process.wait()
    third = Daemon(tmp_path / "driver")
    wait_until("it is ready", third.is_ready)
    assert third.load(ACME, [1] * C) == (0, b""), (
        "it has forgotten what it knew, and serves nothing else"
    )
    third.stop()


def test_before_it_is_told_anything_it_says_so(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    assert daemon.http.get("/-/health").status_code == 503
    assert daemon.control("stats").status_code == 409
    assert daemon.ask(ACME, "query", tokens=[1]).status_code == 401
    daemon.stop()


def test_numbers_and_the_description_of_the_api(daemon: Daemon) -> None:
    daemon.store(ACME, [1] * C, kv(C))
    daemon.load(ACME, [1] * C + [2] * C)
    [acme] = [one for one in daemon.control("stats").json() if one["org"] == "acme"]
    assert (acme["requested_tokens"], acme["hit_tokens"], acme["hit_rate"]) == (2 * C, {"dram": C}, 0.5)
    assert acme["missed_tokens"] == {"never_stored": C}
    text = daemon.http.get("/metrics", headers={"authorization": f"Bearer {CONTROL}"}).text
    assert 'swdriver_hit_tokens_total{org="acme",tier="dram"} 64' in text
    assert 'swdriver_refill_seconds_count{org="acme"} 1' in text
    told = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert sorted(told) == sorted(metric.name for metric in METRICS)
    described = daemon.http.get("/v1/openapi.json").json()
    assert {"/v1/load", "/v1/store", "/v1/query", "/v1/purge"} <= set(described["paths"])
    assert "PromptBody" in described["components"]["schemas"]


def test_help_tells_everything() -> None:
    command = [sys.executable, "-m", "swdriver_shim", "serve", "--help"]
    told = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert "--state-dir" in told
    assert "SWDRIVER_STATE_DIR" in told


def test_a_setting_that_is_wrong_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swdriver_shim", "serve", "--state-dir", str(tmp_path)]
    run = subprocess.run(
        [*command, "--control", "x"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 78
    assert "--control is 'x': it should be HOST:PORT." in run.stderr


def test_a_wrong_choice_of_the_mover_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swdriver_shim", "serve", "--state-dir", str(tmp_path)]
    run = subprocess.run(
        [*command, "--control", "127.0.0.1:0"],
        cwd=PROJECT,
        env=os.environ | {"KVSS_NATIVE": "perhaps"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr == (
        "The driver cannot start: KVSS_NATIVE is one of auto, off, require, not perhaps\n"
    )


LOOKS_FOR_A_MOVER = """
import swdriver_shim.cache.prefix_map
from kvss_agent import native
from kvss_agent.process.daemon import set_up_logs

set_up_logs()
native.current()
"""


def test_a_driver_logs_why_its_mover_is_not_compiled_though_imports_looked_for_it() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOOKS_FOR_A_MOVER],
        cwd=PROJECT,
        env=os.environ | {"KVSS_NATIVE": "off"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Bytes are moved by the Python mover: KVSS_NATIVE is off" in run.stderr


def test_a_driver_does_not_start_without_what_it_has_written_down(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "places").touch()
    command = [sys.executable, "-m", "swdriver_shim", "serve", "--state-dir", str(tmp_path)]
    run = subprocess.run(
        [*command, "--control", "127.0.0.1:0"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "The driver cannot start: The homes that shards of this driver have left" in run.stderr
    assert "Restore the file" in run.stderr


def test_the_controller_sees_what_expired(daemon: Daemon) -> None:
    tokens = list(range(2 * C))
    daemon.store(GLOBEX, tokens, kv(len(tokens)))
    daemon.ask(GLOBEX, "set_ttl", tokens=tokens, seconds=1)

    def expired() -> int:
        stats = {one["org"]: one for one in daemon.control("stats").json()}
        return int(stats["globex"]["expired"]["dram"])

    wait_until("they are over, and counted", lambda: expired() == 2)


async def test_long_bodies_of_one_org_are_read_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the event loop, on which all others are answered."""
    shim, begun, go_on = Shim("job", None), Queue[int](), threading.Event()
    orgs = {name: OrgSpec(name=name, secret=name.encode() * 32) for name in ("acme", "globex")}
    monkeypatch.setattr(shim, "caller", orgs.get)

    def reading(raw: bytes, decoder: Any) -> Any:
        if len(raw) > admission.BODY_BYTES_LEAST:
            begun.put(len(raw))
            assert go_on.wait(60)
        return documents.decode(raw, decoder)

    monkeypatch.setattr(verbs, "decode", reading)
    transport = httpx.ASGITransport(service.Service(shim, "t" * 32).application())
    async with httpx.AsyncClient(transport=transport, base_url="http://driver") as client:

        async def ask(org: str, tokens: int) -> int:
            told = {"tokens": [1] * tokens}
            headers = {"authorization": f"Bearer {org}"}
            return (await client.post("/v1/query", json=told, headers=headers)).status_code

        asked = [asyncio.create_task(ask("acme", 100_000 + number)) for number in range(3)]
        first = await asyncio.to_thread(begun.get, timeout=60)
        assert await ask("globex", 10) == 409  # it has not been told what to be; and says so at once
        asked.append(asyncio.create_task(ask("globex", 200_000)))
        assert await asyncio.to_thread(begun.get, timeout=60) > 2 * 200_000 > first
        assert begun.empty()
        go_on.set()
        assert set(await asyncio.gather(*asked)) == {409}


def test_half_sent_bodies_of_one_org_cost_another_nothing(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    """They count with what they announce, so the org waits for itself; nothing more is taken of it."""
    announced = 30 << 20
    made = Daemon(tmp_path / "driver", "--transfer-memory", "64M")
    process = psutil.Process(made.process.pid)
    try:
        assert made.control("desired", told(agents)).status_code == 202
        wait_until("it is ready", made.is_ready)
        before = process.memory_info().rss
        url = made.http.base_url
        head = b"POST /v1/store HTTP/1.1\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"
        with contextlib.ExitStack() as stack:

            def send_half(sock: socket.socket) -> None:
                sock.sendall(head % (ACME.encode(), announced))
                sock.settimeout(2)
                with contextlib.suppress(TimeoutError):  # it is not read any more
                    sock.sendall(b"x" * (announced - 1))

            address = url.host, url.port or 80
            socks = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(8)]
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(send_half, socks))
            tokens = list(range(C))
            stored = made.store(GLOBEX, tokens, kv(C))
            assert stored.status_code == 200, stored.text
            assert made.load(GLOBEX, tokens) == (C, kv(C))
            assert process.memory_info().rss - before < 64 << 20
        refused = made.ask(ACME, "load", tokens=tokens)
        assert refused.status_code in (200, 429), "what was cut off counts no more, soon"
        too_large = made.store(ACME, tokens, bytes(33 << 20))
        assert too_large.status_code == 413
        assert "at most 33554432 bytes" in too_large.text
        # By another connection: that one is closed if the rest of the body takes longer than 5 s.
        asked = {"authorization": f"Bearer {CONTROL}"}
        page = httpx.get(f"{url}/metrics", headers=asked, timeout=60).text
        assert 'swdriver_transfer_bytes{which="most"} 67108864' in page
    finally:
        made.kill()
