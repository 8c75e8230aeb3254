"""A manager as a process, with a real engine process: started, kept running, drained, never twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from cluster_server.processes.manager_status import ask
from console.environment import PROJECT
from swdriver_shim.adapters.handover import CacheState, Handover, HandoverState
from tests.live import wait_until
from tests.workload_manager.managers import is_alive, manager
from tests.workload_manager.tiny_engine import Tiny
from workload_manager import preparation
from workload_manager import status as status_module
from workload_manager.manager import Manager
from workload_manager.settings import parse
from workload_manager.spec import Secrets
from workload_manager.spec import parse as parse_spec
from workload_manager.status import Board, Status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_an_instance_serves_and_is_drained(tmp_path: Path) -> None:
    with manager(tmp_path) as one:
        status = one.wait_for("ready", "Serving")
        assert (status["name"], status["replica"], status["cache"]) == (
            "chat-0-r1-aaaa",
            "chat-0",
            "none",
        )
        assert status["url"].startswith("http://127.0.0.1:")
        assert one.ask("/livez")[0] == 200
        code, said = one.ask("/readyz")
        assert (code, json.loads(said)["reason"]) == (200, "Serving")
        assert "manager_ready 1\n" in one.ask("/metrics")[1]
        with one.client() as http:
            told = http.post(
                "/v1/completions?n=1", json={"prompt": "x"}, headers={"x-request-id": "r7"}
            ).json()
            assert told["asked"] == {"prompt": "x"}
            assert told["path"] == "/v1/completions?n=1"
            headers = {name.lower(): value for name, value in told["headers"].items()}
            assert headers["x-request-id"] == "r7"
            assert "authorization" not in headers, "the engine need not know the key"
            assert http.get("/health").status_code == 200
        [engine] = one.engines
        one.set_goal("DRAIN")
        assert one.ends() == 0
        assert one.seen[-1] == "ended", "it was asked to end"
        assert not is_alive(engine)
        assert not (one.folder / "manager.sock").exists()


def test_who_waits_for_news_of_an_instance_is_answered_until_it_is_gone(tmp_path: Path) -> None:
    with manager(tmp_path) as one:
        found = one.wait_for("ready")
        one.set_goal("DRAIN")
        # Nobody answers any more, and until then nobody is answered with an error.
        with pytest.raises((FileNotFoundError, ConnectionError)):  # noqa: PT012
            while True:
                found = one.status(found["version"], 30.0)
        assert found["state"] == "gone"
        assert one.ends() == 0


def test_requests_need_the_key(tmp_path: Path) -> None:
    with manager(tmp_path) as one:
        one.wait_for("ready")
        for key in ("", "wrong"):
            with one.client(key) as http:
                refused = http.get("/v1/models")
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert http.get("/metrics").status_code == 401
                assert http.get("/health").status_code == 200
        with one.client() as http:
            assert http.get("/v1/models").status_code == 200
            assert http.get("/admin").status_code == 404


def test_health_without_the_key_takes_nothing_and_passes_nothing_on(tmp_path: Path) -> None:
    with manager(tmp_path) as one:
        one.wait_for("ready")
        url = httpx.URL(one.status()["url"])
        for head, code in (
            (b"POST /health HTTP/1.1\r\ncontent-length: 67108864", 405),
            (b"GET /health HTTP/1.1\r\ncontent-length: 67108864", 413),
            (b"GET /health HTTP/1.1\r\ntransfer-encoding: chunked", 413),
        ):
            with socket.create_connection((url.host, url.port), 60) as plain:
                plain.sendall(head + b"\r\nhost: x\r\n\r\n")  # and not a byte of the body
                assert plain.recv(12) == b"HTTP/1.1 %d" % code
        with one.client("") as http:
            assert http.head("/health").status_code == 200
            told = http.get("/health?n=1", headers={"x-tenant": "acme"}).json()
            assert told["path"] == "/health"
            assert "x-tenant" not in {name.lower() for name in told["headers"]}


def test_a_stream_comes_piece_by_piece_and_leaving_cancels_it(tmp_path: Path) -> None:
    with manager(tmp_path) as one:
        one.wait_for("ready")
        asked = {"stream": True, "pieces": 10_000, "until": "go"}
        with one.client() as http:
            with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
                pieces = answer.iter_bytes()
                assert next(pieces) == b"data: 0\n\n"
                one.wait_for("ready", running_requests=1)
            one.wait_for("ready", running_requests=0)
            (one.folder / "go").touch()
            wait_until("the engine knows", lambda: "left" in one.seen)
            with http.stream("POST", "/v1/chat/completions", json={**asked, "pieces": 3}) as answer:
                assert answer.headers["content-type"] == "text/event-stream"
                assert b"".join(answer.iter_bytes()) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_an_answer_that_breaks_off_is_not_whole(tmp_path: Path) -> None:
    with manager(tmp_path) as one, one.client_when_ready() as http:
        asked = {"stream": True, "pieces": 3, "breaks": True}
        with (
            pytest.raises(httpx.RemoteProtocolError),
            http.stream("POST", "/v1/completions", json=asked) as answer,
        ):
            answer.read()


def test_requests_that_run_are_finished_and_new_ones_refused(tmp_path: Path) -> None:
    with manager(tmp_path) as one, one.client_when_ready() as http:
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(http.post("/v1/completions", json={"until": "go"}).status_code)
        )
        asking.start()
        wait_until("it runs", lambda: "waits" in one.seen)
        one.process.terminate()
        one.wait_for("draining", "Draining", running_requests=1)
        with one.client() as other:
            refused = other.post("/v1/completions", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        (one.folder / "go").touch()
        asking.join()
        assert answers == [200]
        assert one.ends() == 0


def test_requests_that_take_too_long_are_cut_off(tmp_path: Path) -> None:
    """Before the engine has to end, so that it need not wait for them either."""
    with manager(tmp_path, grace_seconds=2.0) as one, one.client_when_ready() as http:
        answers: list[httpx.Response] = []
        waiting = {"until": "never"}
        asking = threading.Thread(
            target=lambda: answers.append(http.post("/v1/completions", json=waiting))
        )
        asking.start()
        streamed = {"stream": True, "pieces": 3, **waiting}
        with http.stream("POST", "/v1/completions", json=streamed) as begun:
            wait_until("both run", lambda: one.seen.count("waits") == 2)
            one.set_goal("DRAIN")
            with pytest.raises(httpx.RemoteProtocolError):
                begun.read()
        asking.join()
        [refused] = answers
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert one.ends() == 0
        assert "2 requests are cut off" in one.log


def test_an_engine_that_crashes_is_started_again_and_says_why(tmp_path: Path) -> None:
    with manager(tmp_path) as one, one.client_when_ready() as http:
        [first] = one.engines
        crashed = http.post("/v1/crash")
        assert (crashed.status_code, crashed.json()["error"]["code"]) == (502, "engine_lost")
        status = one.wait_for("starting", "EngineEnded")
        assert "The engine ended with status 3: ValueError: out of cheese." in status["sentence"]
        assert "It is started again in 1 s." in status["sentence"]
        assert not status["url"]
        status = one.wait_for("ready")
        assert status["restarts"] == 1
        assert [is_alive(pid) for pid in one.engines] == [False, True]
        assert first in one.engines


def test_clients_do_not_read_what_an_engine_has_logged(tmp_path: Path) -> None:
    """It may be a prompt of somebody else. The console is told."""
    with manager(tmp_path) as one, one.client_when_ready() as http:
        (one.folder / "broken").touch()
        http.post("/v1/crash")
        assert "cheese" in one.wait_for("starting", "EngineEnded")["sentence"]
        for refused in (http.post("/v1/completions", json={}), http.get("/health")):
            assert refused.status_code == 503
            said = refused.json()["error"]["message"]
            assert said.startswith("The engine takes no requests now (starting: ")
            assert "cheese" not in said


def test_an_engine_that_never_starts_says_why_and_is_drained_at_once(tmp_path: Path) -> None:
    with manager(tmp_path, begins=False) as one:
        (one.folder / "broken").touch()
        one.start()
        try:
            status = one.wait_for("starting", "EngineEnded")
            assert "OSError: no cheese at all" in status["sentence"]
            one.wait_for("starting", "EngineEnded", restarts=3)
            one.set_goal("DRAIN")
            assert one.ends() == 0
        finally:
            one.process.kill()
            one.process.wait()


def test_an_engine_that_is_too_slow_is_killed(tmp_path: Path) -> None:
    with manager(tmp_path, "slow", begins=False) as one:
        spec = (one.folder / "spec.json").read_text()
        (one.folder / "spec.json").write_text(
            spec.replace('"kind": "command"', '"start_seconds": 1.0, "kind": "command"')
        )
        (one.folder / "slow").touch()
        one.start()
        try:
            status = one.wait_for("starting", "StartTooSlow")
            assert "did not answer within 1 s of its start" in status["sentence"]
            (one.folder / "slow").unlink()
        finally:
            one.process.terminate()
            one.ends()
        assert not any(map(is_alive, one.engines))


def test_a_stranger_who_has_got_the_port_of_an_engine_is_not_taken_for_it(tmp_path: Path) -> None:
    class Stranger(Tiny):
        folder = tmp_path

    port = tmp_path / "port"
    command = ["/bin/sh", "-c", f"echo {{port}} > {port}; exec sleep 600"]
    with manager(tmp_path, engine={"kind": "command", "command": command}) as one:
        wait_until("it has a port", lambda: port.exists() and port.read_text().strip())
        with ThreadingHTTPServer(("127.0.0.1", int(port.read_text())), Stranger) as server:
            server.daemon_threads = True  # connections are kept
            answers = threading.Thread(target=server.serve_forever, args=(0.05,))
            answers.start()
            try:
                status = one.wait_for("starting", "PortTaken")
            finally:
                server.shutdown()
                answers.join()
        assert f"is answered by process {os.getpid()} (" in status["sentence"]
        assert one.log.count("PortTaken") == 1


def test_a_goal_that_can_not_be_read_once_is_read_again(tmp_path: Path) -> None:
    with manager(tmp_path) as one:
        one.wait_for("ready")
        goal = one.folder / "goal"
        goal.mkdir()
        wait_until("it is tried", lambda: "The goal can't be read" in one.log)
        goal.rmdir()
        one.set_goal("DRAIN")
        assert one.ends() == 0


def test_what_a_driver_says_that_can_not_be_read_once_is_read_again(tmp_path: Path) -> None:
    cache = {"console": "http://127.0.0.1:9", "driver": "chat-0", "plain_console": True}
    with manager(tmp_path, cache=cache) as one:
        one.wait_for("ready", cache="attached")
        said = one.folder / "driver" / "state"
        said.unlink()
        said.mkdir()
        wait_until("it is tried", lambda: "What the driver says can't be read" in one.log)
        said.rmdir()
        driver = HandoverState(CacheState.RELEASED, one.process.pid, time.time())
        Handover(one.folder / "driver").set_state(driver)
        one.wait_for("ready", cache="released")


def test_what_nobody_has_foreseen_ends_a_manager_and_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that has started it starts another one. It had waited for ever, as `loading`."""

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(preparation, "prepare", fail)
    monkeypatch.chdir(tmp_path)
    with manager(tmp_path, begins=False) as one:
        settings = parse(["--folder", str(one.folder), "--state-dir", str(tmp_path)], {}, "run")
        spec = parse_spec((one.folder / "spec.json").read_bytes())
        managing = Manager(settings, spec, Secrets()).run()
        with pytest.raises(RuntimeError, match="new thread"):
            asyncio.run(asyncio.wait_for(managing, 60))


def test_who_waits_for_news_of_a_manager_that_ends_without_any_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, is_asked = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        has_begun.set()
        is_asked.wait()
        raise RuntimeError("can't start new thread")

    class Watched(Board):
        async def next(self, after: int, seconds: float) -> Status:
            if after == self.status.version:
                is_asked.set()
            return await super().next(after, seconds)

    async def asked(folder: Path) -> str:
        settings = parse(["--folder", str(folder), "--state-dir", str(tmp_path)], {}, "run")
        running = Manager(settings, parse_spec((folder / "spec.json").read_bytes()), Secrets())
        managing = asyncio.create_task(running.run())
        await asyncio.to_thread(has_begun.wait)
        try:
            said = await ask(folder, running.board.status.version)
        finally:
            is_asked.set()
            with pytest.raises(RuntimeError, match="new thread"):
                await managing
        return said.state

    monkeypatch.setattr(preparation, "prepare", fail)
    monkeypatch.setattr(status_module, "Board", Watched)
    monkeypatch.chdir(tmp_path)
    with manager(tmp_path, begins=False) as one:
        assert asyncio.run(asked(one.folder)) == "pending"


def test_what_is_missing_is_said_and_found_later(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    with manager(tmp_path, weights={"source": str(weights)}) as one:
        status = one.wait_for("pending", "WeightsNotFound")
        assert str(weights) in status["sentence"]
        weights.mkdir()
        (weights / "model.safetensors").write_bytes(b"x")
        one.wait_for("ready")


def test_a_killed_manager_leaves_no_engine_and_its_successor_begins_anew(tmp_path: Path) -> None:
    with manager(tmp_path) as one:
        one.wait_for("ready")
        [first] = one.engines
        one.kill()
        one.start()
        one.wait_for("ready")
        assert len(one.engines) == 2
        assert not is_alive(first)
        second = one.engines[-1]
        one.kill()
        wait_until("the kernel has told the engine", lambda: not is_alive(second))
        one.start()
        one.wait_for("ready")


def test_an_engine_that_does_not_end_with_its_manager_is_killed_before_the_next(tmp_path: Path) -> None:
    with manager(tmp_path) as one:
        one.wait_for("ready")
        [first] = one.engines
        os.kill(first, signal.SIGSTOP)  # so that no signal but one reaches it
        one.kill()
        assert is_alive(first)
        one.start()
        one.wait_for("ready")
        assert not is_alive(first)


def test_two_managers_do_not_share_a_folder(tmp_path: Path) -> None:
    with manager(tmp_path) as one:
        one.wait_for("ready")
        done = subprocess.run(
            [sys.executable, "-m", "workload_manager", "run", "--folder", str(one.folder)],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1
        assert "another process uses" in done.stderr
        assert one.status()["state"] == "ready"
        assert len(one.engines) == 1


def test_a_wrong_specification_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with manager(tmp_path, begins=False, engine={"kind": "vllm"}) as one:
        one.start()
        assert one.ends() == 78
        assert "vllm needs weights." in one.log


def test_without_a_key_it_listens_for_nobody_else(tmp_path: Path) -> None:
    options = ("--listen", "0.0.0.0:0")
    with manager(tmp_path, begins=False, secrets={}, options=options) as one:
        one.start()
        assert one.ends() == 78
        assert "has no key" in one.log
