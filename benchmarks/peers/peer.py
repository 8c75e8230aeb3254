"""One peer as the benchmarks see it: started, asked for a round at a time, gone without a trace."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.environment import NEEDS, PROJECT, Environment, Unavailable, prepare

NAMES = tuple(NEEDS)
LOOKUPS = ("vllm", "sglang")
SIZES = (64 << 10, 1 << 20, 16 << 20)
WORKING_SET = 256 << 20  # far more than any cache: what is put or got is never at hand
ROUND_BYTES = 64 << 20
OPERATIONS_MIN, OPERATIONS_MAX = 2, 128
BATCH_BYTES_MAX = 128 << 20
BATCH_MAX = 64
ANSWER_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 15.0
# Without these glibc gives large values back to the system and faults them in again every time.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def columns(size: int) -> int:
    """How many columns of this size a peer holds; take as many for whatever it is compared with."""
    return WORKING_SET // size


def batch_of(size: int) -> int:
    """How many columns at once: 64, fewer where they are large."""
    return min(BATCH_MAX, BATCH_BYTES_MAX // size)


@dataclass(frozen=True)
class Samples:
    """One round: the seconds of each operation."""

    put: list[float]
    get: list[float]


class Peer:
    """A context manager; `start` raises Unavailable with a sentence."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: subprocess.Popen[str] | None = None
        self._scratch: Path | None = None
        self._size = 0
        self._next = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Install it where that is still to be done, start its servers, connect."""
        environment = self._environment()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"tidegate-{self.name}-"))
        atexit.register(self.close)
        environment.home.mkdir(parents=True, exist_ok=True)
        with (environment.home / "log").open("w") as log:
            self._process = subprocess.Popen(
                [environment.python, "-m", f"benchmarks.peers.run_{self.name}", self._scratch],
                cwd=PROJECT,
                env={**os.environ, **ALLOCATOR, **environment.variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def _environment(self) -> Environment:
        return prepare(self.name)

    def measure(self, size: int, batch: int = 1, operations: int = 0) -> Samples:
        """One round: some operations of `batch` columns, all put and then all got.

        The rounds walk through the columns. The first of a size also checks that each comes back.
        """
        count = columns(size)
        if size != self._size:
            self._ask(op="open", size=size, count=count)
            self._size, self._next = size, 0
        if not operations:
            wanted = ROUND_BYTES // (size * batch)
            operations = max(OPERATIONS_MIN, min(wanted, OPERATIONS_MAX))
        n = min(operations, count // batch) * batch
        first = self._next if self._next + n <= count else 0
        self._next = first + n
        what = {"first": first, "n": n, "batch": batch}
        put = self._ask(op="put", **what)["seconds"]
        get = self._ask(op="get", **what)["seconds"]
        return Samples(put, get)

    def close(self) -> None:
        """End everything that it started, however it is."""
        atexit.unregister(self.close)
        process, self._process = self._process, None
        if process:
            assert process.stdin
            assert process.stdout
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS_MAX)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            for left in Path("/dev/shm").glob(f"*tidegate-bench-{process.pid}*"):  # noqa: S108
                left.unlink(missing_ok=True)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _ask(self, **message: Any) -> dict[str, Any]:
        if not self._process:
            raise Unavailable(f"{self.name} is not running")
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # then its last words say why
            print(json.dumps(message), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], ANSWER_SECONDS_MAX)[0]:
            raise Unavailable(f"no answer within {ANSWER_SECONDS_MAX:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable("its runner ended without a word")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer


class Lookup(Peer):
    """A peer that finds prefixes: see `matching`."""

    def fill(self, prompts: int, tokens: int) -> dict[str, str | None]:
        """Have these prompts there. Of each of its variants why it can't be had, or None."""
        variants: dict[str, str | None] = self._ask(op="fill", prompts=prompts, tokens=tokens)[
            "variants"
        ]
        return variants

    def match(self, variant: str, numbers: range, more: int) -> dict[str, list[float]]:
        """Ask for these prompts, and go on with so many tokens: the seconds of each, by kind."""
        return self._ask(op="match", variant=variant, first=numbers.start, n=len(numbers), more=more)
