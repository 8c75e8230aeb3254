"""A daemon asked over HTTP by an engine: the same as a driver in its own process, but for being lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from swdriver_shim.adapters import remote
from swdriver_shim.adapters.remote import Refused, RemotePrefixes
from swdriver_shim.daemon import binary, verbs
from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.policy import Rules
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.answers import headed, saying
from tests.swdriver_shim.daemons import ACME, GLOBEX, Daemon, told

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]  # each starts a process

C = COLUMN_TOKENS
GROUPS = (
    GroupSpec(name="full", bytes_per_token=(48, 16)),
    GroupSpec("window", (32,), window=100),
    GroupSpec("state", bytes_per_state=(500,), tokens_per_state=128),
)
SHAPE = ModelSpec(name="llama", groups=GROUPS).shape()
MODEL = ModelSpec(name="llama", groups=GROUPS, revision="r1", kv_dtype="bf16")


def kv(tokens: Sequence[int], group: int, shard: int, depth: int, count: int) -> bytes:
    size = SHAPE.groups[group].part_bytes(shard, count)
    prefix = repr((tokens[: depth * C + count], group, shard)).encode()
    return hashlib.shake_128(prefix).digest(size)


class Engine:
    """What computes KV from tokens, and looks at every byte that comes back."""

    def __init__(self, remote: RemotePrefixes) -> None:
        self.remote = remote
        self.read: list[tuple[int, int, int, int]] = []

    def store(
        self,
        tokens: list[int],
        verified: int | None = None,
        first: Sequence[int] = (),
        rules: Rules | None = None,
        states: Sequence[int] | None = None,
    ) -> tuple[int, int]:
        """Columns that went out, and that failed. There are states where columns end, if nothing else is
        said."""
        asked, verified = tokens, len(tokens) if verified is None else verified
        if states is None:
            states = [*range(C, verified, C), verified]

        def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            self.read.append((group, shard, depth, tokens))
            return memoryview(kv(asked, group, shard, depth, tokens))

        self.read.clear()
        done = self.remote.store(tokens, verified, read, rules or Rules(), first, states=states)
        return done.columns, done.failed

    def load(self, tokens: list[int]) -> int:
        got: dict[tuple[int, int, int, int], bytearray] = {}

        def into(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            place = bytearray(SHAPE.groups[group].part_bytes(shard, tokens))
            got[group, shard, depth, tokens] = place
            return memoryview(place)

        loaded = self.remote.load(tokens, into)
        assert loaded.asked == len(tokens)
        for part, place in got.items():
            assert place == kv(tokens, *part), "wrong bytes"
        whole, rest = divmod(loaded.tokens, C)
        for group, shape in enumerate(self.remote.layout.groups):
            depths = [depth for one, shard, depth, _ in got if (one, shard) == (group, 0)]
            assert depths == list(range(shape.first_needed(loaded.tokens), whole + (rest > 0)))
        return loaded.tokens


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent for all tests: a driver that has no notes empties it before anything else."""
    with agent(tmp_path_factory.mktemp("agent") / "one") as made:
        sizes = {"full.0": 48 * C, "full.1": 16 * C, "window.0": 32 * C, "state.0": 500}
        made.tell(document(1, *(spec(name, 20, size) for name, size in sizes.items())))
        yield made


@pytest.fixture
def daemon(tmp_path: Path, where: AgentProcess) -> Iterator[Daemon]:
    places = [("full", 0), ("full", 1), ("window", 0), ("state", 0)]
    homes = {(group, index): f"{group}.{index}" for group, index in places}
    made = Daemon(tmp_path / "driver")
    address = f"unix:{where.directory}/data.sock"
    document_of = told(
        [where],
        model=msgspec.to_builtins(MODEL),
        homes=[
            {"group": group, "index": index, "address": address, "shard": name}
            for (group, index), name in homes.items()
        ],
    )
    assert made.control("desired", document_of).status_code == 202
    wait_until("it is ready", made.is_ready)
    yield made
    if made.process.poll() is None:
        assert made.stop() == 0


@contextlib.contextmanager
def asking(daemon: Daemon, token: str = ACME, model: ModelSpec = MODEL) -> Iterator[Engine]:
    remote = RemotePrefixes(str(daemon.http.base_url), token, model)
    yield Engine(remote)
    remote.close()


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    with asking(daemon) as made:
        yield made


def test_kv_goes_out_and_comes_back_and_only_what_is_new_is_sent(engine: Engine) -> None:
    tokens = list(range(3 * C + 10))
    assert engine.remote.query(tokens) == engine.load(tokens) == 0
    assert engine.store(tokens, 2 * C + 5) == (3 + 3 + 3, 0)
    assert engine.remote.query(tokens) == engine.load(tokens) == 2 * C + 5
    assert engine.store(tokens) == (2 + 2 + 2, 0)
    assert min(depth for _, _, depth, _ in engine.read) == 2
    assert engine.load([*tokens, 1, 2]) == len(tokens)
    assert engine.store(tokens) == (0, 0)
    assert engine.read == []


def test_another_org_gets_nothing(engine: Engine, daemon: Daemon) -> None:
    tokens = list(range(2 * C))
    engine.store(tokens)
    with asking(daemon, GLOBEX) as stranger:
        assert stranger.load(tokens) == 0


def test_long_prompts_go_in_pieces(engine: Engine) -> None:
    tokens = list(range(5 * C + 10))
    before, engine.remote._bytes_max = engine.remote._bytes_max, 2 * (96 * C + 500)
    bodies, call = list[Any](), engine.remote._call

    def record(verb: Any, body: Any, *more: Any) -> Any:
        bodies.append(body)
        return call(verb, body, *more)

    with mock.patch.object(engine.remote, "_call", record):
        assert engine.store(tokens) == (6 + 6 + 6, 0)
    pieces = [one for one in bodies if isinstance(one, verbs.StoreBody)]
    assert [one.verified for one in pieces] == [2 * C, 4 * C, len(tokens)]
    assert all(one.tokens == tokens for one in pieces), "of one prompt, which is one turn"
    assert engine.load(tokens) == 2 * C, "as much as goes at once"
    engine.remote._bytes_max = before
    assert engine.load(tokens) == len(tokens)
    engine.remote._bytes_max = 96 * C + 499
    with pytest.raises(Refused, match="A column and its state"):
        engine.load(tokens)


def test_a_load_ends_where_there_is_a_state(engine: Engine, daemon: Daemon) -> None:
    tokens = list(range(4 * C))
    assert engine.store(tokens, states=[2 * C]) == (4 + 4 + 1, 0)
    assert engine.load(tokens) == engine.remote.query(tokens) == 2 * C
    assert engine.store(tokens, states=[3 * C]) == (1, 0)
    assert [depth for group, _, depth, _ in engine.read if group == 2] == [2]
    assert engine.load(tokens) == 3 * C
    assert engine.load(tokens[: 3 * C - 1]) == 2 * C
    explained = daemon.ask(ACME, "explain", tokens=tokens).json()["state"]
    assert [column["state"] for column in explained] == ["no_state", "ready", "ready", "no_state"]


def test_states_that_make_no_sense_are_refused(daemon: Daemon) -> None:
    for states in ([2 * C + 1], [C, C], [2 * C, C]):
        answer = daemon.store(ACME, list(range(2 * C)), bytes(96 * 2 * C + 1000), states=states)
        assert answer.status_code == 422
        assert "`states` are numbers from 1 to 128" in answer.json()["detail"]
    answer = daemon.store(ACME, list(range(2 * C)), bytes(96 * 2 * C + 999), states=[C, 2 * C])
    assert "has 13288 bytes, not 13287" in answer.json()["detail"]


def test_what_the_engine_has_not_got_is_not_read(engine: Engine) -> None:
    tokens = list(range(4 * C))
    assert engine.store(tokens, first=[0, 2 * C + 1, 4 * C]) == (4 + 1 + 4, 0)
    assert min(depth for group, _, depth, _ in engine.read if group == 1) == 3
    assert engine.load(tokens) == 0
    assert engine.store(tokens, rules=Rules(no_store=True)) == (0, 0)
    assert engine.read == []
    assert engine.store(tokens, rules=Rules(store_tokens_max=C)) == (1, 0), "of the window"
    assert engine.store(tokens) == (2, 0)
    assert engine.load(tokens) == 4 * C


def test_a_daemon_that_is_gone_is_a_miss_and_it_is_said_why(engine: Engine, daemon: Daemon) -> None:
    tokens = list(range(C + 1))
    engine.store(tokens)
    daemon.process.kill()
    daemon.process.wait()
    daemon.http.close()
    assert engine.load(tokens) == engine.remote.query(tokens) == 0
    assert engine.store(tokens) == (0, 2 + 2 + 2)
    assert engine.remote.lost_because
    assert "It does not answer" in engine.remote.lost_because


def test_a_token_that_is_not_known_yet_is_a_miss_and_it_is_said_why(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first document no token is, and none of an org that waits for its new secret."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.0)
    with asking(daemon, "x" * 40) as stranger:
        assert stranger.load(list(range(C))) == 0
        assert stranger.store(list(range(C))) == (0, 1 + 1 + 1)
        assert "It answered 401. A bearer token is required" in (stranger.remote.lost_because or "")


@pytest.mark.parametrize("count", [-C, 5, C, 3 * C, 1 << 40])
def test_an_answer_that_is_not_what_was_asked_for_is_a_miss(count: int) -> None:
    """With its parts left out, and with those of so many tokens."""
    some = [msgspec.to_builtins(one) for one in binary.run_heads(SHAPE, count)]
    for parts in ([], some):
        head = json.dumps({"tokens": count, "parts": parts}).encode()
        with saying(headed(head, b"")) as url:
            mine = RemotePrefixes(url, ACME, MODEL)
            assert Engine(mine).load(list(range(2 * C))) == 0
            assert "what was asked for" in (mine.lost_because or "")
            mine.close()


def test_what_it_refuses_is_raised_with_its_sentence(engine: Engine, daemon: Daemon) -> None:
    tokens = list(range(C))
    engine.store(tokens)
    other = ModelSpec(name="llama", groups=GROUPS, revision="r2", kv_dtype="bf16")
    with (
        asking(daemon, model=other) as mistaken,
        pytest.raises(Refused, match="another model, revision, dtype, layout or shape"),
    ):
        mistaken.store(tokens)
    same_name = ModelSpec(name="llama", groups=GROUPS[:1], revision="r1", kv_dtype="bf16")
    with (
        asking(daemon, model=same_name) as mistaken,
        pytest.raises(Refused, match="another model, revision, dtype, layout or shape"),
    ):
        mistaken.load(tokens)
