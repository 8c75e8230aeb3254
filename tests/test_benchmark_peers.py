"""The peers of the benchmarks: what they report is checked, and nothing of them stays behind."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import driver, peers
from benchmarks.peers import environment, matching, peer, protocol
from console.stack.binaries import wheel_redis

SIZE = 4096


class Shelf(protocol.Adapter):
    """A peer in a dictionary."""

    def start(self) -> None:
        self.kept: dict[int, bytes] = {}

    def open(self, size: int, count: int) -> memoryview:
        self.size, self.source = size, memoryview(bytearray(size * count))
        return self.source

    def put(self, first: int, n: int) -> None:
        for column in range(first, first + n):
            self.kept[column] = bytes(self.source[column * self.size : (column + 1) * self.size])

    def get(self, first: int, n: int) -> None:
        self.latest = [self.kept[column] for column in range(first, first + n)]

    def got(self, first: int, n: int) -> list[bytes]:  # noqa: ARG002
        return self.latest


class Forgetful(Shelf):
    """Brings back the same column for each."""

    def get(self, first: int, n: int) -> None:  # noqa: ARG002
        self.latest = [self.kept[0]] * n


class Memory(matching.Matcher):
    """A look-up of prompts in a list, a token at a time."""

    def start(self) -> None:
        self.holds = 0

    def fill(self, prompts: int, tokens: int) -> dict[str, str | None]:
        self.kept = [matching.prompt(number, tokens) for number in range(prompts)]
        return {"": None}

    def use(self, variant: str) -> None:
        self.variant = variant

    def cold(self, tokens: list[int]) -> int:
        self.tokens = tokens
        return self.look_up()

    def continued(self, more: list[int]) -> int:
        self.tokens = self.tokens + more
        return self.look_up()

    def look_up(self) -> int:
        self.holds += 1
        return max(len(one) for one in self.kept if one == self.tokens[: len(one)])

    def release(self) -> None:
        self.holds -= 1


class Optimist(Memory):
    def look_up(self) -> int:
        return super().look_up() + 1


@pytest.fixture
def redis_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> peers.Peer:
    """The Redis peer in our own environment, where its packages are anyway, with few columns."""
    server = next(wheel_redis(), None)
    if not server:
        pytest.skip("this environment has no wheel with a redis-server")
    variables = {"PEER_SERVER": str(server.path)}
    ready = environment.Environment("redis", Path(sys.executable), variables)
    monkeypatch.setattr(environment, "HOME", tmp_path)
    ready.home.mkdir()
    monkeypatch.setattr(peer, "prepare", lambda _: ready)
    monkeypatch.setattr(peer, "WORKING_SET", 128 * SIZE)
    return peers.Peer("redis")


def family() -> Iterator[psutil.Process]:
    return (child for child in psutil.Process().children(recursive=True) if child.is_running())


def runner(kind: type[protocol.Adapter]) -> protocol.Runner:
    adapter = kind(Path())
    adapter.start()
    return protocol.Runner(adapter)


def test_each_operation_has_its_seconds() -> None:
    ours = runner(Shelf)
    assert ours.on_open(SIZE, 8) == {"verified": 8}
    assert len(ours.on_put(first=4, n=4, batch=2)["seconds"]) == 2
    assert len(ours.on_get(first=4, n=4, batch=1)["seconds"]) == 4


def test_a_wrong_column_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="column 1 came back as something else"):
        runner(Forgetful).on_open(SIZE, 8)


def test_a_batch_never_wraps() -> None:
    with pytest.raises(ValueError, match="no whole batches"):
        list(protocol.slices(first=6, n=4, batch=2, count=8))


def test_a_batch_of_any_size_fits_the_columns() -> None:
    assert all(peers.columns(size) >= 2 * peers.batch_of(size) for size in peers.SIZES)


def test_every_peer_has_a_runner_and_pinned_packages() -> None:
    for name in (*peers.NAMES, *peers.LOOKUPS):
        assert (environment.REQUIREMENTS / f"run_{name}.py").is_file()
        assert (environment.REQUIREMENTS / f"{name}.txt").is_file()
    for requirements in environment.REQUIREMENTS.glob("*.txt"):
        pins = requirements.read_text().split()
        assert pins
        assert all("==" in pin for pin in pins)


def test_a_peer_that_can_not_be_installed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> environment.Environment:
        raise peers.Unavailable(f"{name} is too far away")

    monkeypatch.setattr(peer, "prepare", refuse)
    with pytest.raises(peers.Unavailable, match="redis is too far away"):
        peers.Peer("redis").start()


def test_a_look_up_has_the_seconds_of_each_kind_and_lets_go() -> None:
    memory = Memory(Path())
    memory.start()
    ours = matching.MatchRunner(memory)
    assert ours.on_fill(prompts=4, tokens=64) == {"variants": {"": None}}
    seconds = ours.on_match(variant="", first=1, n=3, more=8)
    assert {kind: len(each) for kind, each in seconds.items()} == {
        "cold": 3,
        "continued": 3,
        "packed": 0,
    }
    assert not memory.holds


def test_a_look_up_that_finds_something_else_is_noticed() -> None:
    optimist = Optimist(Path())
    optimist.start()
    optimist.fill(prompts=1, tokens=64)
    with pytest.raises(RuntimeError, match="65 tokens were found, 64 are there"):
        matching.match_round(optimist, range(1), 64, 8)


def test_prompts_are_the_same_on_both_sides_and_go_on_as_they_began() -> None:
    assert matching.prompt(7, 100) == matching.prompt(7, 101)[:100]
    assert matching.prompt(7, 100) != matching.prompt(8, 100)


def test_our_own_look_up_is_asked_as_peers_are() -> None:
    ours = driver.Ours()
    ours.fill(prompts=2, tokens=256)
    seconds = matching.match_round(ours, range(2), 256, 128)
    assert {kind: len(each) for kind, each in seconds.items()} == dict.fromkeys(matching.KINDS, 2)


def test_a_row_of_a_look_up_is_theirs_over_ours() -> None:
    def after(seconds: float) -> driver.Asked:
        asked = driver.Asked("vllm", "block16", lambda numbers: {"cold": [seconds] * len(numbers)})
        asked.ask(range(3))
        return asked

    beside, theirs = driver.rows_beside(after(0.001), [after(0.003)])
    assert (beside.id, beside.value) == ("match.32k.cold.beside", 1.0)
    assert (theirs.id, theirs.value) == ("peer.vllm.block16.match.32k.cold", 3.0)
    assert theirs.ratio == pytest.approx(3.0)
    assert theirs.holds


def test_a_look_up_that_is_absent_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> environment.Environment:
        raise peers.Unavailable(f"{name} is too far away")

    monkeypatch.setattr(peer, "prepare", refuse)
    with contextlib.ExitStack() as stack:
        assert not list(driver.variants_of("vllm", stack))
    assert "peer.vllm is left out: vllm is too far away" in capsys.readouterr().out


def test_a_variant_that_is_absent_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = {"": None, "keys": "no compiler"}
    monkeypatch.setattr(peers.Lookup, "start", lambda _: None)
    monkeypatch.setattr(peers.Lookup, "fill", lambda *_: reasons)
    with contextlib.ExitStack() as stack:
        assert [asked.variant for asked in driver.variants_of("sglang", stack)] == [""]
    assert "peer.sglang.keys is left out: no compiler" in capsys.readouterr().out


def test_a_real_peer_measures_and_leaves_nothing(redis_here: peers.Peer) -> None:
    before = {process.pid for process in family()}
    with redis_here as redis:
        one = redis.measure(SIZE, operations=3)
        many = redis.measure(SIZE, batch=64, operations=2)
        started = [process for process in family() if process.pid not in before]
        scratch = redis_here._scratch
    assert (len(one.put), len(one.get)) == (3, 3)
    assert (len(many.put), len(many.get)) == (2, 2)
    assert len(started) >= 2
    assert not psutil.wait_procs(started, timeout=30)[1]
    assert scratch
    assert not scratch.exists()


def test_a_killed_runner_takes_its_server_along(redis_here: peers.Peer) -> None:
    redis_here.start()
    try:
        process = redis_here._process
        assert process
        servers = psutil.Process(process.pid).children()
        assert servers
        os.kill(process.pid, 9)
        assert not psutil.wait_procs(servers, timeout=30)[1]
        with pytest.raises(peers.Unavailable, match="ended without a word"):
            redis_here.measure(SIZE)
    finally:
        redis_here.close()


def test_a_server_that_does_not_start_is_a_reason(
    redis_here: peers.Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = environment.Environment("redis", Path(sys.executable), {"PEER_SERVER": "/bin/false"})
    monkeypatch.setattr(peer, "prepare", lambda _: prepared)
    with pytest.raises(peers.Unavailable, match="false ended at once"):
        redis_here.start()
