"""`python -m inference_brain serve`, as docs/brain.md has it, with curl and with OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from console.environment import PROJECT
from inference_brain import serve
from inference_brain.settings import Settings, parse
from kvss_agent.process.options import WrongSettings
from swdriver_shim.daemon.stored_document import SealedDocument
from tests.inference_brain.brains import KEY, get, org, post, request, told
from tests.inference_brain.engines import Behavior, FakeEngine
from tests.inference_brain.gateway import held_port
from tests.live import wait_until

TOKEN = "t" * 40
DOC = PROJECT / "docs" / "brain.md"


class Served:
    """A brain as a process of its own."""

    def __init__(self, directory: Path, *options: str, name: str = "b") -> None:
        directory.mkdir(exist_ok=True)
        (directory / "token").write_text(TOKEN)
        self.directory = directory
        self.log = directory / "log"
        where = ("--state-dir", str(directory), "--control", "127.0.0.1:0", "--listen", "127.0.0.1:0")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "inference_brain", "serve", "--name", name, *where, *options],
                cwd=PROJECT,
                stderr=log,
            )
        wait_until("it listens", self._listens)
        found = re.search(r"Listening on (\S+), control API on (\S+)", self.log.read_text())
        assert found, self.log.read_text()
        self.api, self.control = found[1], found[2]

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "Listening on" in self.log.read_text()

    def ask(self, method: str, path: str, body: object = None, token: str = TOKEN) -> httpx.Response:
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {"authorization": f"Bearer {token}"}
        return request(method, f"http://{self.control}{path}", content=content, headers=headers)

    def complete(self, key: str = KEY) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "m", "prompt": "the secret prompt"}
        return post(f"http://{self.api}/v1/completions", json=body, headers=headers)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as made:
        yield made


@pytest.mark.slow
def test_a_brain_by_hand(tmp_path: Path, engine: FakeEngine) -> None:
    served = Served(tmp_path / "b")
    try:
        assert served.complete().status_code == 503
        assert get(f"http://{served.control}/-/health").status_code == 503
        assert served.ask("PUT", "/v1/desired", told([engine.url]), token="wrong").status_code == 401
        assert served.ask("PUT", "/v1/desired", told([engine.url])).status_code == 202
        answer = served.complete()
        assert answer.status_code == 200
        seen = served.ask("GET", "/v1/observed").json()
        assert (seen["generation"], seen["observed_generation"], seen["ready"]) == (1, 1, True)
        assert seen["models"][0]["replicas"][0]["state"] == "ready"
        record = served.ask("GET", f"/v1/requests/{answer.headers['x-request-id']}").json()
        assert record["outcome"]["result"] == "ok"
        assert served.ask("GET", "/v1/requests/none").status_code == 404
        metrics = served.ask("GET", "/metrics").text
        assert 'brain_replica_results_total{model="m",replica="r0",result="ok"} 1' in metrics
        other = told([engine.url], 2)
        assert served.ask("PUT", "/v1/desired", told([engine.url])).status_code == 202, "again"
        changed = told([engine.url], 1, orgs=(org("acme", "sk-other"),))
        assert served.ask("PUT", "/v1/desired", changed).status_code == 409
        wrong = {**msgspec.to_builtins(other), "brain": "another"}
        assert served.ask("PUT", "/v1/desired", wrong).status_code == 409
        assert served.ask("PUT", "/v1/desired", {"generation": 3}).status_code == 422
        assert served.ask("PUT", "/v1/desired", told([engine.url], 3, orgs=())).status_code == 202
        assert served.complete().status_code == 401, "its key is nobody's any more"
        assert served.ask("PUT", "/v1/desired", told([engine.url], 4)).status_code == 202
    finally:
        assert served.stop() == 0
    log = served.log.read_text()
    assert "POST /v1/completions 200" in log
    assert "the secret prompt" not in log
    assert KEY not in log
    again = Served(tmp_path / "b")
    try:
        assert again.complete().status_code == 200, "it goes on with the stored document"
    finally:
        assert again.stop() == 0
    raw = (tmp_path / "b" / "desired.json").read_bytes()
    assert b"acme" not in raw
    from inference_brain.desired import parse as parse_document

    stored = SealedDocument(tmp_path / "b" / "desired.json", TOKEN, parse_document).read()
    assert stored
    assert stored.document.generation == 4


@pytest.mark.slow
def test_what_the_docs_say_a_stranger_should_type(tmp_path: Path, engine: FakeEngine) -> None:
    engine.served_as = "qwen"
    blocks = re.findall(r"```(sh|python)\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python", "sh", "sh", "python", "sh", "sh"]
    first = blocks.pop(0)[1]
    assert first.split()[:4] == ["python", "-m", "inference_brain", "serve"]
    served = Served(tmp_path / ".brain", *first.split()[4:], name="east")
    outputs = []
    try:
        for kind, text in blocks:
            for told_there, here in (
                ("127.0.0.1:8430", served.control),
                ("127.0.0.1:8440", served.api),
                ("http://127.0.0.1:8000", engine.url),
            ):
                text = text.replace(told_there, here)
            command = [sys.executable, "-c", text] if kind == "python" else ["sh", "-ec", text]
            done = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, (text, done.stdout, done.stderr)
            outputs.append(done.stdout)
    finally:
        assert served.stop() == 0
    made, put, curl, client, observed, explained = outputs
    assert made == ""
    assert json.loads(put) == {"generation": 1, "observed_generation": 1}
    assert curl.endswith("data: [DONE]\n\n")
    assert client == "toktoktoktok\n"
    assert json.loads(observed)["ready"] is True
    assert json.loads(explained)["outcome"]["result"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_tls(tmp_path: Path, engine: FakeEngine, version: str) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert"), "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    pem = ("--tls-certificate", str(tmp_path / "cert"), "--tls-key", str(tmp_path / "key"))
    served = Served(tmp_path / "b", *pem)
    try:
        assert served.ask("PUT", "/v1/desired", told([engine.url])).status_code == 202
        done = subprocess.run(
            [
                *("curl", "-sSN", version, "--cacert", str(tmp_path / "cert")),
                *("-H", f"Authorization: Bearer {KEY}", "-w", "%{http_version}"),
                *("-d", '{"model": "m", "prompt": "Hi", "stream": true}'),
                f"https://{served.api}/v1/completions",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.endswith("data: [DONE]\n\n" + version.removeprefix("--http"))
        with pytest.raises((httpx.HTTPError, ssl.SSLError)):
            served.complete()
    finally:
        assert served.stop() == 0


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


@pytest.mark.slow
def test_no_listener_takes_connections_while_another_one_finishes_its_answers(
    tmp_path: Path, engine: FakeEngine, port: int
) -> None:
    engine.behavior = Behavior(tokens=10**6, between_seconds=0.05)
    served = Served(tmp_path / "b", "--trusted", f"acme=127.0.0.1:{port}")
    body = {"model": "m", "prompt": "Hi", "stream": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        assert served.ask("PUT", "/v1/desired", told([engine.url])).status_code == 202
        with httpx.stream("POST", url, json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            served.process.send_signal(signal.SIGTERM)
            assert any(not _is_open(served.api) for _ in lines), "the answer has ended before"
    finally:
        assert served.stop() == 0


async def test_a_listener_that_fails_at_its_end_leaves_the_others_their_time() -> None:
    """What they answer with goes when all are left."""
    has_ended = False

    @contextlib.asynccontextmanager
    async def failing() -> AsyncIterator[None]:
        yield
        raise OSError("it has failed")

    @contextlib.asynccontextmanager
    async def answering() -> AsyncIterator[None]:
        nonlocal has_ended
        yield
        await asyncio.sleep(0.01)
        has_ended = True

    with pytest.raises(OSError, match="it has failed"):
        async with serve._left_at_once(failing(), answering()):
            pass
    assert has_ended


def _is_open(place: str) -> bool:
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_a_trusted_listener_needs_no_key(tmp_path: Path, engine: FakeEngine, port: int) -> None:
    served = Served(tmp_path / "b", "--trusted", f"acme=127.0.0.1:{port}")
    try:
        assert served.ask("PUT", "/v1/desired", told([engine.url])).status_code == 202
        body = {"model": "m", "prompt": "Hi"}
        assert post(f"http://127.0.0.1:{port}/v1/completions", json=body).status_code == 200
        assert post(f"http://{served.api}/v1/completions", json=body).status_code == 401
    finally:
        assert served.stop() == 0


# Settings


def settings(*arguments: str, **environment: str) -> Settings:
    return parse(arguments, environment)


def test_settings(tmp_path: Path) -> None:
    made = settings(
        *("--state-dir", str(tmp_path), "--token-timeout", "90s", "--trusted", "acme=127.0.0.1:9"),
        BRAIN_BODY_MAX="8MiB",
        BRAIN_ACCESS_LOG="no",
    )
    assert made.options.timeouts.between == 90
    assert made.options.bounds.body_bytes_max == 8 << 20
    assert made.options.trusted_org == "acme"
    assert not made.options.logs_access
    assert made.listen == ("127.0.0.1", 8440)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--listen", "0.0.0.0:1"), "keys and prompts could be read"),
        (("--trusted", "acme=0.0.0.0:1"), "keys and prompts could be read"),
        (("--tls-key", __file__), "belong together"),
        (("--token-timeout", "0s"), "--token-timeout is '0s'"),
        (("--connections", "0"), "--connections is '0'"),
        (("--trusted", "127.0.0.1:9"), "ORG=HOST:PORT"),
        (("--body-max", "1KiB"), "64KiB or more"),
        (("--body-max", "64MiB", "--bodies-memory", "100MiB"), "has to be twice --body-max"),
    ],
)
def test_wrong_settings(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    with pytest.raises(WrongSettings, match=why):
        settings("--state-dir", str(tmp_path), *arguments)
    assert not (tmp_path / "token").exists()


def test_the_docs_name_every_setting_that_matters_as_it_is() -> None:
    [table] = re.findall(r"^## Run it\n(.*?)(?=^## |\Z)", DOC.read_text(), re.DOTALL | re.MULTILINE)
    flags = set(re.findall(r"`(--[a-z-]+)", table))
    assert "--listen" in flags
    from inference_brain.settings import KIND

    source = (PROJECT / "inference_brain" / "settings.py").read_text()
    common = {f for action in KIND.parser()._actions for f in action.option_strings}
    known = {*re.findall(r'"(--[a-z-]+)"', source), *common}
    assert flags <= known | {"--enable-metrics"}  # of SGLang


def test_the_event_loop_waits_half_a_millisecond_at_most_for_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[float] = []

    def run(*_: object) -> int:
        found.append(sys.getswitchinterval())
        return 0

    monkeypatch.setattr("inference_brain.serve.daemon.run", run)
    monkeypatch.setattr(serve, "_keep_freed_memory", lambda: None)  # it can't be taken back
    before = sys.getswitchinterval()
    try:
        serve.main([])
    finally:
        sys.setswitchinterval(before)
    assert found[0] <= 0.0005
