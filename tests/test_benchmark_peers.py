"""The peers of the benchmarks: what they report is checked, and nothing of them stays behind."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import peers
from benchmarks.peers import environment, peer, protocol
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


def test_samples_give_the_rate_of_the_median() -> None:
    samples = peers.Samples(put=[1.0, 2.0, 9.0], get=[0.5], bytes=4_000_000_000)
    assert (samples.put_rate, samples.get_rate) == (2.0, 8.0)


def test_a_batch_of_any_size_fits_the_columns() -> None:
    assert all(peers.columns(size) >= 2 * peers.batch_of(size) for size in peers.SIZES)


def test_every_peer_has_a_runner_and_pinned_packages() -> None:
    for name in peers.NAMES:
        assert (environment.REQUIREMENTS / f"run_{name}.py").is_file()
        pins = (environment.REQUIREMENTS / f"{name}.txt").read_text().split()
        assert pins
        assert all("==" in pin for pin in pins)


def test_a_peer_that_can_not_be_installed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> environment.Environment:
        raise peers.Unavailable(f"{name} is too far away")

    monkeypatch.setattr(peer, "prepare", refuse)
    assert peers.available() == {name: f"{name} is too far away" for name in peers.NAMES}
    with pytest.raises(peers.Unavailable, match="redis is too far away"):
        peers.Peer("redis").start()


def test_a_real_peer_measures_and_leaves_nothing(redis_here: peers.Peer) -> None:
    before = {process.pid for process in family()}
    with redis_here as redis:
        one = redis.measure(SIZE, operations=3)
        many = redis.measure(SIZE, batch=64, operations=2)
        started = [process for process in family() if process.pid not in before]
        scratch = redis_here._scratch
    assert (len(one.put), len(one.get), one.bytes) == (3, 3, SIZE)
    assert (len(many.put), len(many.get), many.bytes) == (2, 2, 64 * SIZE)
    assert len(started) >= 2
    assert not psutil.wait_procs(started, timeout=5)[1]
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
        assert not psutil.wait_procs(servers, timeout=5)[1]
        with pytest.raises(peers.Unavailable, match="ended without a word"):
            redis_here.measure(SIZE)
    finally:
        redis_here.close()


def test_a_server_that_does_not_start_is_a_reason(
    redis_here: peers.Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = environment.Environment("redis", Path(sys.executable), {"PEER_SERVER": "/bin/false"})
    monkeypatch.setattr(peer, "prepare", lambda _: prepared)
    began = time.monotonic()
    with pytest.raises(peers.Unavailable, match="false ended at once"):
        redis_here.start()
    assert time.monotonic() - began < 10
