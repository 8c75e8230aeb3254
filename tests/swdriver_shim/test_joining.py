"""What an engine is told of a console, and the driver that follows from it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvss_agent.documents import Invalid
from kvss_agent.process import state_dir
from kvss_agent.process.own_address import own_address
from swdriver_shim.adapters.claims import mint
from swdriver_shim.adapters.handover import Goal
from swdriver_shim.adapters.join_config import JoinConfig, NameSpec
from swdriver_shim.adapters.joining import JoinedDriver
from swdriver_shim.adapters.vllm import engine_driver
from swdriver_shim.adapters.vllm.config import GovernedConfig, config_of
from swdriver_shim.adapters.vllm.engine_driver import (
    EngineDriver,
    Governed,
    GroupFacts,
    WorkerFacts,
    media_of,
)
from swdriver_shim.daemon import host
from swdriver_shim.daemon.host import DriverHost, HostThread
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.data_plane.worker.protocol import WorkerAddress
from swdriver_shim.data_plane.worker.server import WorkerServer
from swdriver_shim.desired import GroupSpec, ModelSpec
from tests.kvss_agent.plane import DRIVER
from tests.kvss_agent.process import agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.daemons import C, org, told

EACH = 64
MODEL = ModelSpec(name="llama", groups=(GroupSpec(name="full", bytes_per_token=(EACH,)),))
NOBODY = "http://127.0.0.1:9"  # a console that does not answer


def config(directory: Path, **more: Any) -> JoinConfig:
    return JoinConfig(**{"console": NOBODY, "name": "job7", "state_dir": str(directory), **more})


def test_three_lines_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    token = tmp_path / "join"
    token.write_text("tgj_abc\n")
    found = JoinConfig(console=NOBODY, name="job7", join=str(token)).settings(MODEL, "vllm 0.32.0")
    assert found.console
    assert (found.console.url, found.console.join_token) == (NOBODY, "tgj_abc")
    assert (found.name, found.model, found.engine) == ("job7", MODEL, "vllm 0.32.0")
    assert found.state_dir == tmp_path / "state" / "tidegate" / "job7"
    assert found.control == ("127.0.0.1", 0), "where the console is reached from"
    assert found.serves_tls
    assert found.is_new
    token.unlink()  # it was needed once
    again = JoinConfig(console=NOBODY, name="job7", join=str(token)).settings(MODEL, "vllm 0.32.0")
    assert again.token == found.token
    assert not again.is_new


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"console": "http://console.example.org"}, "`plain_console` true where"),
        ({"console": "https://console.example.org:443443"}, "`console` is"),
        ({"console": "https://[::1"}, "`console` is"),
        ({"name": "no spaces"}, "`name` is 'no spaces'"),
        ({"control": "nowhere"}, "`control` is 'nowhere'"),
        ({"ca": "/nowhere"}, "`ca` is '/nowhere'"),
        ({"telemetry": "nowhere"}, "`telemetry`"),
        ({"telemetry": "redis://127.0.0.1:9?socket_timeout=soon"}, "`telemetry`"),
        ({"telemetry": "redis://127.0.0.1:9?no_such_option=1"}, "`telemetry`"),
        ({"telemetry": "rediss://127.0.0.1:9?ssl_cert_reqs=maybe"}, "`telemetry`"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_the_configuration(
    tmp_path: Path, more: dict[str, str], sentence: str
) -> None:
    with pytest.raises(Invalid) as refusal:
        config(tmp_path, **more).settings(MODEL, "vllm")
    assert sentence in str(refusal.value)
    assert "--" not in str(refusal.value)


@pytest.mark.parametrize("join", [None, "/nowhere/join"])
def test_a_first_start_without_a_join_token_says_where_one_is_missing(
    join: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config(tmp_path, join=join).settings(MODEL, "vllm")
    [said] = caplog.messages
    assert f"has not joined {NOBODY} yet" in said
    assert (join or "set `join`") in said
    caplog.clear()
    config(tmp_path, join=join).settings(MODEL, "vllm")
    assert caplog.messages == [], "it has an identity, with which it may have joined"


def test_options_of_redis_are_taken(tmp_path: Path) -> None:
    url = "rediss://own@127.0.0.1:9/0?ssl_ca_certs=/etc/redis/ca.pem&socket_timeout=2"
    assert config(tmp_path, telemetry=url).settings(MODEL, "vllm").telemetry == url


def test_a_join_token_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="can't be read"):
        config(tmp_path, join=str(tmp_path)).settings(MODEL, "vllm")


def test_engines_beside_each_other_join_under_names_of_their_own(tmp_path: Path) -> None:
    assert config(tmp_path).of_rank(0, 1).name == "job7"
    with pytest.raises(Invalid, match=r"put \{rank\} into `name`"):
        config(tmp_path).of_rank(1, 2)
    with pytest.raises(Invalid, match=r"put \{rank\} into `state_dir`"):
        config(tmp_path, name="job7-{rank}").of_rank(0, 2)
    each = {
        "name": "job7-{rank}",
        "control": "0.0.0.0:842{rank}",
        "control_url": "https://ax-1:842{rank}",
    }
    third = config(tmp_path / "{rank}", **each).of_rank(3, 4)
    assert (third.name, third.state_dir) == ("job7-3", str(tmp_path / "3"))
    assert (third.control, third.control_url) == ("0.0.0.0:8423", "https://ax-1:8423")


def test_vllm_names_a_console_or_a_file() -> None:
    found = config_of({"console": NOBODY, "name": "job7", "wait_seconds": 3}, 0, 1)
    assert isinstance(found, GovernedConfig)
    assert (found.wait_seconds, found.model) == (3, None)
    for wrong, why in [
        (None, "names a console or a file"),
        ("", "names a console or a file"),
        ({"name": "job7"}, "console"),
        ({"console": "console.example.org", "name": "job7"}, r"\$.console"),
        ({"console": NOBODY, "name": "job7", "claims_key": "x"}, "unknown field `claims_key`"),
    ]:
        with pytest.raises(Invalid, match=why):
            config_of(wrong, 0, 1)


def test_the_own_address_is_the_one_that_routes_to_the_console() -> None:
    assert own_address("http://127.0.0.1:9") == "127.0.0.1"
    assert own_address("https://[::1]:9") in ("::1", "127.0.0.1")  # without IPv6
    assert own_address("https://no-such-host.invalid") is None
    assert own_address("https://no..such-host") is None


def test_an_engine_that_starts_while_nobody_knows_its_console_is_reached_when_somebody_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As while names can't be looked up. On loopback the console would never reach it."""
    ask, is_away = socket.getaddrinfo, [True]

    def look_up(host: str, *given: Any, **more: Any) -> Any:
        if host == "console.example.org":
            if is_away[0]:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            host = "127.0.0.1"
        return ask(host, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    told = config(tmp_path, console="https://console.example.org").settings(MODEL, "vllm")
    assert told.control == ("0.0.0.0", 0)  # noqa: S104
    assert "listens at all addresses" in caplog.text
    made = DriverHost(told)
    port = made.listener.getsockname()[1]
    assert made._joining().look_up() == {"control_url": f"https://{socket.gethostname()}:{port}"}
    is_away[0] = False
    assert made._joining().look_up() == {"control_url": f"https://127.0.0.1:{port}"}
    made.close()


def test_before_a_document_nothing_is_cached_and_then_it_is(tmp_path: Path) -> None:
    tokens = list(range(3 * C))
    kept = {at: bytes([at]) * (C * EACH) for at in range(3)}

    def part(group: int, shard: int, depth: int, tokens: int) -> memoryview:
        return memoryview(bytearray(kept[depth]))[: tokens * EACH]

    with agent(tmp_path / "agent") as one:
        one.tell(document(1, spec("s", 20, EACH * C)))
        joined = JoinedDriver(config(tmp_path / "state", name=DRIVER), MODEL, "transformers")
        try:
            acme = joined.prefixes("acme")
            assert acme.query(tokens) == 0
            assert acme.store(tokens, len(tokens), part, states=[C]).columns == 0
            assert acme.load(tokens, part).tokens == 0
            acme.computed(64, 1.0)
            joined.shim.set_desired(json.dumps(told([one])).encode())
            wait_until("it is ready", lambda: joined.shim.is_ready)
            assert acme.store(tokens, len(tokens), part, states=[C]).columns == 3
            assert acme.query(tokens) == len(tokens)
            assert joined.prefixes("globex").query(tokens) == 0
            assert joined.prefixes("initech").query(tokens) == 0, "it is not in the document"
            joined.shim.set_desired(json.dumps(told([one], 2, orgs=[org("globex", "g" * 40)])).encode())
            assert acme.query(tokens) == 0
            status = joined.shim.membership_status
            wait_until("it says that nobody answers", lambda: status.state == "away")
        finally:
            joined.close()


def test_two_processes_do_not_share_an_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dir, "LOCK_SECONDS", 0.05)
    first = JoinedDriver(config(tmp_path), MODEL, "transformers")
    with pytest.raises(OSError, match="another process uses the state directory"):
        JoinedDriver(config(tmp_path), MODEL, "transformers")
    first.close()
    JoinedDriver(config(tmp_path), MODEL, "transformers").close()


def test_a_start_that_fails_leaves_the_state_directory_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dir, "LOCK_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use") as taken:
            JoinedDriver(config(tmp_path, control=f"127.0.0.1:{port}"), MODEL, "transformers")
    assert taken.value.errno == errno.EADDRINUSE
    (tmp_path / "desired.json").mkdir()
    with pytest.raises(IsADirectoryError):
        JoinedDriver(config(tmp_path), MODEL, "transformers")
    (tmp_path / "desired.json").rmdir()
    JoinedDriver(config(tmp_path), MODEL, "transformers").close()


def test_what_is_beside_a_driver_is_there_when_it_starts_or_the_start_fails() -> None:
    @contextlib.asynccontextmanager
    async def fails() -> AsyncIterator[None]:
        socket.inet_aton("nowhere")
        yield

    with pytest.raises(OSError, match="illegal IP address"):
        HostThread(fails)


def test_an_engine_ends_though_a_name_is_still_being_looked_up() -> None:
    """Which takes as long as it takes, in a thread of the loop; vLLM waits for five seconds."""
    found = threading.Event()

    @contextlib.asynccontextmanager
    async def service() -> AsyncIterator[None]:
        asyncio.get_running_loop().run_in_executor(None, found.wait, 60)
        yield

    thread = HostThread(service)
    began = time.monotonic()
    thread.close()
    found.set()
    assert time.monotonic() - began < 30


def test_what_is_beside_a_driver_is_started_again_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it nobody could change what the engine caches, or purge it."""
    monkeypatch.setattr(host, "RESTART_SECONDS", 0.01)
    loops: list[asyncio.AbstractEventLoop] = []

    @contextlib.asynccontextmanager
    async def service() -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        yield

    thread = HostThread(service)
    loops[0].call_soon_threadsafe(sys.exit, 3)
    wait_until("it is there again", lambda: len(loops) == 2)
    thread.close()
    assert "the engine goes on as it was told last" in caplog.text
    assert len(loops) == 2


def request(claim: str | None) -> Any:
    return SimpleNamespace(
        mm_features=(),
        prompt_embeds=None,
        pooling_params=None,
        resumable=False,
        lora_request=None,
        kv_transfer_params={"tidegate": claim} if claim else None,
    )


def test_claims_are_signed_with_the_key_of_the_document(tmp_path: Path) -> None:
    half = WorkerServer()
    facts = WorkerFacts(half.address, [GroupFacts("full", 32, None, EACH, C)], "vllm.1:x", "float32")
    governed = GovernedConfig(
        console=NOBODY, name="job7", model=NameSpec(name="tiny"), state_dir=str(tmp_path / "state")
    )
    engine = EngineDriver(governed, [facts])
    try:
        assert engine.who(request(mint(b"k" * 32, "job7", "acme"))) is None
        assert engine.refused == {"no_document": 1}
        assert engine.reset(), "there is nothing"
        model = msgspec.to_builtins(engine.shim._model)
        nobody: Any = FakeAgent(tmp_path)
        for generation, key in enumerate(("a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=", None), 1):
            document = told([nobody], generation, model=model, driver="job7")
            document |= {"claims_key": key} if key else {}
            engine.shim.set_desired(json.dumps(document).encode())
            found = engine.who(request(mint(b"kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk", "job7", "acme")))
            assert (found.keys.org if found else None) == ("acme" if key else None)
        assert engine.refused == {"no_document": 2}
    finally:
        engine.close()
        half.close()


def test_an_engine_notices_that_its_agents_are_over_a_network_from_now_on(tmp_path: Path) -> None:
    half = WorkerServer()
    facts = WorkerFacts(half.address, [GroupFacts("full", 32, None, EACH, C)], "vllm.1:x", "float32")
    governed = GovernedConfig(
        console=NOBODY, name="job7", model=NameSpec(name="tiny"), state_dir=str(tmp_path / "state")
    )
    engine = EngineDriver(governed, [facts])
    try:
        nobody: Any = FakeAgent(tmp_path)
        document = told([nobody], model=msgspec.to_builtins(engine.shim._model), driver="job7")
        document["claims_key"] = "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="
        [home] = document["homes"]
        for generation, address in enumerate((home["address"], "tcp:127.0.0.1:9"), 1):
            document |= {"generation": generation, "homes": [{**home, "address": address}]}
            engine.shim.set_desired(json.dumps(document).encode())
            assert engine.who(request(mint(b"kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk", "job7", "acme")))
            assert engine.scheduling.loads_ahead == (generation == 2)
    finally:
        engine.close()
        half.close()


@pytest.fixture
def holding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineDriver]:
    """An engine that has the driver's identity and a document, and may give it away."""
    monkeypatch.setattr(engine_driver, "RESET_SECONDS", 0.1)  # it waits for an agent that is nowhere
    half = WorkerServer()
    facts = WorkerFacts(half.address, [GroupFacts("full", 32, None, EACH, C)], "vllm.1:x", "float32")
    governed = GovernedConfig(
        console=NOBODY,
        name="job7",
        model=NameSpec(name="tiny"),
        state_dir=str(tmp_path / "state"),
        handover=str(tmp_path / "handover"),
    )
    engine = EngineDriver(governed, [facts])
    try:
        wait_until("it has the identity", lambda: engine._process.is_attached)
        nobody: Any = FakeAgent(tmp_path)
        model = msgspec.to_builtins(engine.shim._model)
        document = told([nobody], 1, model=model, driver="job7")
        document["claims_key"] = "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="
        engine.shim.set_desired(json.dumps(document).encode())
        yield engine
    finally:
        engine.close()
        half.close()


def give_away(process: Governed) -> None:
    assert process._handover
    process._handover.set_goal(Goal.RELEASE)
    wait_until("the identity is given away", lambda: not process.is_attached)


class GivesAway:
    """A driver's process whose identity is given away when somebody looks at its shim, at the last of so
    many looks."""

    is_attached = True

    def __init__(self, process: Governed, looks: int) -> None:
        self._process, self._looks, self._claims = process, looks, process.claims()

    @property
    def shim(self) -> Shim:
        self._looks -= 1
        if self._looks == 0:
            give_away(self._process)
        return self._process.shim

    def claims(self) -> Any:
        return self._claims


@pytest.fixture
def acme() -> Any:
    """A request with a claim of now: they run out."""
    return request(mint(b"kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk", "job7", "acme"))


@pytest.mark.parametrize("looks", [1, 2, 3])
@pytest.mark.parametrize("asked", ["who", "is_served", "reset"])
def test_whenever_the_identity_is_given_away_the_scheduler_gets_an_answer(
    holding: EngineDriver, acme: Any, asked: str, looks: int
) -> None:
    """An exception there would end vLLM."""
    process: Any = holding._process
    asker = holding.who(acme)
    assert asker
    others: Any = GivesAway(process, looks)
    holding._process = others
    try:
        if asked == "who":
            holding.who(acme)
        elif asked == "is_served":
            holding.is_served(asker)
        else:
            holding.reset()
    finally:
        holding._process = process
    give_away(process)
    assert holding.who(acme) is None
    assert not holding.is_served(asker)
    assert holding.reset(), "there is nothing"


def test_a_request_that_is_looked_at_while_the_identity_is_given_away_is_not_served(
    holding: EngineDriver,
    acme: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process: Any = holding._process
    (tmp_path / "lora").mkdir()
    name = holding._adapters.name

    def late(lora: Any) -> str | None:
        give_away(process)
        return name(lora)

    monkeypatch.setattr(holding._adapters, "name", late)
    acme.lora_request = SimpleNamespace(lora_name="x", lora_path=str(tmp_path / "lora"))
    asker = holding.who(acme)
    assert asker, "the stopped driver still has its document"
    assert not holding.is_served(asker)


def test_a_reset_that_meets_a_stopped_driver_ends(
    holding: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    process: Any = holding._process
    monkeypatch.setattr(holding.scheduling, "let_go_all", lambda: give_away(process))
    assert not holding.reset(), "nobody can say that the agent has nothing left"


def test_a_name_of_an_image_that_is_no_text_ends_no_engine() -> None:
    """A client may choose it, if no gateway removes it; JSON can say half of a character."""
    at = SimpleNamespace(offset=3, length=2)
    asked = SimpleNamespace(mm_features=[SimpleNamespace(mm_position=at, identifier="\ud800")])
    [media] = media_of(asked)
    assert (media.start, media.end) == (3, 5)


class FakeAgent:
    """Where nobody is: shards stay lost."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "token").write_text("t" * 20)
        self.http = SimpleNamespace(base_url="http://127.0.0.1:9")


def test_weights_without_a_name_are_not_cached() -> None:
    governed = GovernedConfig(console=NOBODY, name="job7")
    facts = WorkerFacts(WorkerAddress("", ""), [GroupFacts("full", 32, None, EACH, C)], "vllm.1:x", "f")
    with pytest.raises(Invalid, match="which weights"):
        EngineDriver(governed, [facts])
