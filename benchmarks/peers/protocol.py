"""What a peer's runner speaks: a line of JSON in, a line of JSON out.

A runner is a program of its own, started by the peer's interpreter in the peer's environment, so that
nothing of it ends up in ours. It stores `count` columns of `size` bytes, and times each operation:

    {"op": "open", "size": 65536, "count": 4096}           -> {"verified": 4096}
    {"op": "put", "first": 0, "n": 128, "batch": 64}       -> {"seconds": [0.0005, 0.0004]}
    {"op": "get", "first": 0, "n": 128, "batch": 64}       -> {"seconds": [0.0004, 0.0004]}

`open` also puts and gets every column once and compares it with what was put: that verifies the peer
and touches every page on both sides before anything is timed. `get` wants what the latest `put` of the
same columns in the same batches has stored. It runs until its input ends.
"""

from __future__ import annotations

import abc
import ctypes
import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

PR_SET_PDEATHSIG = 1
WARM_BATCH_BYTES = 8 << 20
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 5.0

_libc = ctypes.CDLL(None)


class Part(abc.ABC):
    """What runs in a peer's environment, and the servers that it starts."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.servers: list[subprocess.Popen[bytes]] = []

    @abc.abstractmethod
    def start(self) -> None:
        """Start the servers and connect."""

    def close(self) -> None:
        """Stop the servers."""
        for server in reversed(self.servers):
            server.terminate()
        for server in self.servers:
            try:
                server.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def serve(
        self, command: Sequence[str | int | Path], variables: Mapping[str, str] | None = None
    ) -> None:
        """Start a server that dies with us. What it says is in the log of this runner."""
        environment = {**os.environ, **(variables or {})}
        server = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            preexec_fn=die_with_parent,  # noqa: PLW1509 # before any thread of ours
        )
        self.servers.append(server)

    def wait_until(self, ready: Any) -> None:
        """Ask `ready` until it is true; raise when a server has ended or it takes too long."""
        ends = time.monotonic() + START_SECONDS_MAX
        while not ready():
            for server in self.servers:
                if server.poll() is not None:
                    raise RuntimeError(f"{Path(str(server.args[0])).name} ended at once")  # type: ignore[index]
            if time.monotonic() > ends:
                raise RuntimeError(f"the server was not ready after {START_SECONDS_MAX:.0f} s")
            time.sleep(0.02)


class Adapter(Part):
    """One peer that stores columns. Only `put` and `get` are timed."""

    @abc.abstractmethod
    def open(self, size: int, count: int) -> memoryview:
        """Make room for columns; return the memory that `put` reads, for the caller to fill."""

    @abc.abstractmethod
    def put(self, first: int, n: int) -> None:
        """Store the columns in one operation, or raise."""

    @abc.abstractmethod
    def get(self, first: int, n: int) -> None:
        """Read the columns back in one operation, or raise."""

    @abc.abstractmethod
    def got(self, first: int, n: int) -> Sequence[Any]:
        """What the latest `get` brought, as one buffer a column."""

    def forget(self, first: int, n: int, batch: int) -> None:  # most can overwrite
        """Before the clock runs: whatever a `put` of these columns needs."""


def die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(n: int) -> list[int]:
    """TCP ports that nobody uses at the moment."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


P = TypeVar("P", bound=Part)


def run(kind: type[Adapter]) -> None:
    """The main program of a runner: `python -m benchmarks.peers.run_NAME SCRATCH`."""
    run_with(kind, Runner)


def run_with(kind: Callable[[Path], P], runner: Callable[[P], object]) -> None:
    """The same for a part whose lines this runner executes: each by its method `on_…`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries write where they like; the answers have a channel of their own.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        adapter = kind(Path(sys.argv[1]))
        try:
            adapter.start()
            say(answers, {"ready": True})
            listen(runner(adapter), answers)
        except Exception as error:  # noqa: BLE001 # whatever it was, it is the answer
            say(answers, {"error": f"{type(error).__name__}: {error}"})
        finally:
            adapter.close()
            shutil.rmtree(adapter.scratch, ignore_errors=True)


def say(answers: IO[str], what: Mapping[str, Any]) -> None:
    try:
        print(json.dumps(what), file=answers, flush=True)
    except BrokenPipeError:
        sys.exit(0)


def listen(runner: object, answers: IO[str]) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        operation = message.pop("op")
        say(answers, getattr(runner, f"on_{operation}")(**message))


class Runner:
    """Executes the lines."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.size = self.count = 0

    def on_open(self, size: int, count: int) -> dict[str, Any]:
        self.size, self.count = size, count
        source = self.adapter.open(size, count)
        noise = random.Random(size)
        pattern = noise.randbytes(size)
        for column in range(count):  # every column differs, in its first bytes
            at = column * size
            source[at : at + size] = pattern
            source[at : at + 8] = noise.randbytes(8)
        batch = max(1, min(count, WARM_BATCH_BYTES // size))
        self.adapter.forget(0, count, batch)
        for first, n in slices(0, count, batch, count):
            self.adapter.put(first, n)
        for first, n in slices(0, count, batch, count):
            self.adapter.get(first, n)
            self.compare(source, first, n)
        return {"verified": count}

    def compare(self, source: memoryview, first: int, n: int) -> None:
        for column, value in enumerate(self.adapter.got(first, n), first):
            at = column * self.size
            if memoryview(value) != source[at : at + self.size]:
                raise RuntimeError(f"column {column} came back as something else")

    def on_put(self, first: int, n: int, batch: int) -> dict[str, Any]:
        self.adapter.forget(first, n, batch)
        return self.timed(self.adapter.put, first, n, batch)

    def on_get(self, first: int, n: int, batch: int) -> dict[str, Any]:
        return self.timed(self.adapter.get, first, n, batch)

    def timed(self, operation: Any, first: int, n: int, batch: int) -> dict[str, Any]:
        seconds = []
        clock = time.perf_counter
        gc.collect()
        gc.disable()
        try:
            for start, some in slices(first, n, batch, self.count):
                began = clock()
                operation(start, some)
                seconds.append(clock() - began)
        finally:
            gc.enable()
        return {"seconds": seconds}


def slices(first: int, n: int, batch: int, count: int) -> Iterator[tuple[int, int]]:
    """Columns `first` to `first + n` in batches; none of them wraps around the end."""
    if n % batch or first + n > count:
        raise ValueError(f"{n} columns from {first} are no whole batches of {batch} in {count}")
    for start in range(first, first + n, batch):
        yield start, batch
