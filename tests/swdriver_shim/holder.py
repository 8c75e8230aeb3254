"""An engine in a process of its own whose driver has joined, or waits for its identity.

    python -m tests.swdriver_shim.holder STATE_DIR HANDOVER

It writes a line when it has started, and then answers each line of JSON with one:
`{"store": tokens}`, `{"load": tokens}`, `{"tell": document}`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from console.environment import PROJECT
from swdriver_shim.adapters.handover import CacheState, Goal, Handover, HandoverState
from swdriver_shim.adapters.join_config import JoinConfig
from swdriver_shim.adapters.joining import JoinedDriver
from swdriver_shim.desired import GroupSpec, ModelSpec
from tests.kvss_agent.plane import DRIVER
from tests.live import wait_until

EACH: Final = 64  # bytes per token
MODEL: Final = ModelSpec(name="llama", groups=(GroupSpec(name="full", bytes_per_token=(EACH,)),))
NOBODY: Final = "http://127.0.0.1:9"  # a console that does not answer


def config(state_dir: Path, handover: Path) -> JoinConfig:
    return JoinConfig(console=NOBODY, name=DRIVER, state_dir=str(state_dir), handover=str(handover))


def kv(tokens: list[int], depth: int, count: int) -> bytes:
    """What an engine computes: it depends on all tokens before."""
    prefix = repr(tokens[: depth * 64 + count]).encode()
    return hashlib.shake_128(prefix).digest(count * EACH)


def store(joined: JoinedDriver, tokens: list[int]) -> int:
    asked = tokens

    def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
        return memoryview(kv(asked, depth, tokens))

    return joined.prefixes("acme").store(asked, len(asked), read).columns


def load(joined: JoinedDriver, tokens: list[int]) -> int:
    """How many tokens are hits. Every byte of them is compared."""
    got: dict[tuple[int, int], bytearray] = {}

    asked = tokens

    def into(group: int, shard: int, depth: int, tokens: int) -> memoryview:
        got[depth, tokens] = bytearray(tokens * EACH)
        return memoryview(got[depth, tokens])

    loaded = joined.prefixes("acme").load(asked, into)
    for (depth, count), bytes_of in got.items():
        if depth * 64 + count <= loaded.tokens:
            assert bytes_of == kv(asked, depth, count), "wrong bytes"
    return loaded.tokens


@dataclass
class Holder:
    """Such a process, from outside."""

    process: subprocess.Popen[str]
    handover: Handover
    has_begun: bool = False

    def _begin(self) -> None:
        """To start takes as long as the machine is busy, and is not what tests wait for."""
        if not self.has_begun:
            assert self.process.stdout
            assert self.process.stdout.readline(), f"it has ended with {self.process.poll()}"
            self.has_begun = True

    def ask(self, **what: Any) -> Any:
        self._begin()
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"it has ended with {self.process.poll()}"
        return json.loads(answer)

    def state(self) -> HandoverState | None:
        self._begin()
        return self.handover.state()

    def wait_for(self, cache: CacheState, *, ready: bool = False) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, "it has ended"
            state = self.state()
            return bool(state and state.cache is cache and (state.ready or not ready))

        wait_until(f"it is {cache}", holds)

    def release(self) -> None:
        self.handover.set_goal(Goal.RELEASE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """In order."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)


@contextlib.contextmanager
def holder(state_dir: Path, folder: Path) -> Iterator[Holder]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.swdriver_shim.holder", str(state_dir), str(folder)],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    made = Holder(process, Handover(folder))
    try:
        yield made
    finally:
        if process.poll() is None:
            made.kill()
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()


def main() -> None:
    sys.stdout.write("started\n")
    sys.stdout.flush()
    joined = JoinedDriver(config(*map(Path, sys.argv[1:3])), MODEL, "a test")
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if "tell" in asked:
                found: Any = joined.shim.set_desired(json.dumps(asked["tell"]).encode()).generation
            elif "store" in asked:
                found = store(joined, asked["store"])
            else:
                found = load(joined, asked["load"])
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    finally:
        joined.close()
    assert threading.active_count() < 50, "its threads have ended"


if __name__ == "__main__":
    main()
