"""Workloads, from `POST /workloads` to a token that a client reads, and what clients notice of changes.

A whole stack as `make up` starts it, with two agents and a brain; engines are emulated, everything else
is real. `create.*` is the time from the request to the first token, of a spec that is compiled first and
of the same one again. `rollout.*` is what clients notice of a roll-out while an engine is busy 80 % of
the time: with the cache handed over, and beside it with replicas that start cold. The rows of
200 workloads are those of `many_workloads`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import grpc
import httpx
import psycopg

from benchmarks import many_workloads
from benchmarks.children import running
from benchmarks.harness import Row, limited, options, percentile, progress, show
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.proto import rpc
from tests.console.workloads.whole import UP_SECONDS, Served, served
from tests.live import wait_until

FIRST_TOKEN_SECONDS: Final = 3.0
AGAIN_SECONDS: Final = 1.5
LAG_SECONDS: Final = 1.0
DIP_POINTS: Final = 5.0
ROLLBACK_SECONDS: Final = 15.0
GAP_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 0.02

# A prompt is a conversation that others have begun like, and a question that nobody has asked before:
# it takes a twelfth of a second to compute, and the whole prompt takes almost half a second.
PARAMETERS: Final = 70e9
CONVERSATIONS: Final = 8
STORY: Final = "The whole of the story is told again and again. " * 58  # a byte is a token
QUESTION: Final = "And what has come of it? " * 24
SECONDS_OF_A_QUESTION: Final = len(QUESTION) * 2 * PARAMETERS / 1e15
LOAD: Final = 0.8
BYTES_PER_TOKEN: Final = 16
CLIENTS: Final = 32

_LEADER: Final = """
SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND (classid::bigint << 32 | objid::bigint) = hashtextextended('tidegate orchestrator', 0)
"""


# From nothing to a token


class FirstReady:
    """Since when each instance has answered, as its manager has told the Cluster Server."""

    def __init__(self, target: str) -> None:
        self.since: dict[str, float] = {}
        self._channel = grpc.insecure_channel(target)
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._thread.join()

    def of(self, workload: str) -> float:
        return min(since for name, since in self.since.items() if name.startswith(f"{workload}-"))

    def _watch(self) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):  # it is closed
            for event in rpc.stub("Workloads", self._channel).Watch(pb.WatchRequest()):
                for one in event.workload.instances:
                    if one.url:
                        self.since.setdefault(one.name, one.since)


@dataclass(frozen=True)
class Created:
    """Seconds until its first token, and of these since an engine has answered."""

    token: float
    lag: float


def create(scene: Served, name: str, number: int) -> Created:
    """A workload, until it is gone. `number`: of a spec."""
    model = f"example/{name}"
    with FirstReady(scene.settings["TIDEGATE_CLUSTER_URL"]) as ready, _client(scene) as client:
        began = time.time()
        scene.create(name, model=model, engine=_engine(PARAMETERS + number))
        while not _answers(client, model):
            assert time.time() < began + UP_SECONDS, scene.conditions(name)
            time.sleep(LOOK_SECONDS)
        came = time.time()
        found = Created(came - began, came - ready.of(name))
    scene.wait_until_ready(name)
    scene.delete(name)
    wait_until("nothing runs", lambda: not scene.processes_of(), UP_SECONDS)
    return found


def _answers(client: httpx.Client, model: str) -> bool:
    """Whether there is a first token; at once, where there will be none."""
    told = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json={"model": model, **told}) as answer:
        return answer.is_success and any("content" in line for line in answer.iter_lines())


def create_rows(scene: Served, rounds: int) -> list[Row]:
    fresh, again = [], []
    for number in range(rounds):
        progress(f"create {number + 1} of {rounds}, and the same again")
        fresh.append(create(scene, f"fresh{number}", number))
        again.append(create(scene, f"fresh{number}", number))
    lag = percentile([one.lag for one in fresh + again], 0.99)
    return [
        _seconds("create.first_token.p50", [one.token for one in fresh], FIRST_TOKEN_SECONDS),
        _seconds("create.first_token_again.p50", [one.token for one in again], AGAIN_SECONDS),
        limited("endpoint.lag.p99", lag, "s", LAG_SECONDS, {"times": 2.0 * rounds}),
    ]


# What clients notice


@dataclass(frozen=True)
class Answered:
    at: float
    tokens: int
    cached: int


class Load:
    """Clients that ask at a steady rate, however long answers take."""

    def __init__(self, scene: Served, model: str) -> None:
        self.served: list[Answered] = []
        self.failed: list[str] = []
        self._scene, self._model = scene, model
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def hit_rate(self, since: float, until: float = float("inf")) -> float:
        """Percent of tokens, of requests that were begun in that time."""
        found = [one for one in list(self.served) if since <= one.at < until]
        tokens = sum(one.tokens for one in found)
        assert tokens, f"nothing was served; of all requests {len(self.failed)} failed"
        return 100 * sum(one.cached for one in found) / tokens

    def _run(self) -> None:
        began, number = time.monotonic(), 0
        with _client(self._scene) as client, ThreadPoolExecutor(CLIENTS) as pool:
            while not self._ends.wait(max(0.0, began + number * self._pause - time.monotonic())):
                pool.submit(self._ask, client, number)
                number += 1

    _pause: Final = SECONDS_OF_A_QUESTION / LOAD

    def _ask(self, client: httpx.Client, number: int) -> None:
        text = f"{number % CONVERSATIONS}. {STORY} {number}, {QUESTION}"
        told = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        at = time.monotonic()
        try:
            answer = client.post("/v1/chat/completions", json={"model": self._model, **told})
            usage = answer.raise_for_status().json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            self.served.append(Answered(at, int(usage["prompt_tokens"]), int(cached)))
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            self.failed.append(repr(error))


def rollout_rows(scene: Served, seconds: float) -> Iterator[Row]:
    """`seconds`: of load before a roll-out, and after its end."""
    name, model = "chat", "example/chat-8b"
    progress("roll-outs under load: a first replica")
    scene.create(name, model=model, engine=_engine(PARAMETERS))
    scene.wait_until_ready(name)
    with Load(scene, model) as load:
        time.sleep(seconds)  # what conversations begin with is cached from here on
        progress("a roll-out that hands its cache over")
        warm, _ = _dip(scene, load, name, seconds, {"arguments": ["--start-seconds", "0.1"]})
        progress("a roll-back")
        back = _timed(scene, name, lambda: scene.post(f"{name}/undo", revision=1))
        time.sleep(seconds)
        progress("a roll-out whose replicas start cold")
        other = {"emulator": {"bytes_per_token": BYTES_PER_TOKEN + 1}}
        cold, _ = _dip(scene, load, name, seconds, other)
    for failure in load.failed[:3]:
        sys.stderr.write(f"{failure}\n")
    scene.delete(name)
    more = {"requests": float(len(load.served))}
    yield limited("rollout.failed", len(load.failed), "requests", 0.0, more)
    yield limited("rollout.hit_dip", warm, "points", DIP_POINTS, more)
    yield Row("rollout.hit_dip.cold", cold, "points", "as others do it", more=more)
    yield limited("rollback.seconds", back, "s", ROLLBACK_SECONDS)


def _dip(
    scene: Served, load: Load, name: str, seconds: float, engine: dict[str, Any]
) -> tuple[float, float]:
    """Points of hit rate that the requests lost which were begun from the roll-out's begin to some
    seconds after its end; and how long it took."""
    began = time.monotonic()
    before = load.hit_rate(began - seconds, began)
    took = _timed(scene, name, lambda: scene.patch(name, engine=engine))
    time.sleep(seconds)
    return max(0.0, before - load.hit_rate(began)), took


def _timed(scene: Served, name: str, change: Any) -> float:
    """Seconds until a new revision runs everywhere, and nothing else does."""
    began = time.monotonic()
    revision = change()["revision"]
    wait_until("it is rolled out", lambda: scene.rolled_out(name, revision), 2 * UP_SECONDS)
    return time.monotonic() - began


# Who leads


def leader_row(scene: Served, rounds: int) -> Row:
    """Another orchestrator stands by; whoever leads is killed."""
    command = ["manage.py", "orchestrate"]
    gaps = []
    with psycopg.connect(scene.settings["DATABASE_URL"], autocommit=True) as database:
        for number in range(rounds):
            progress(f"leader killed, {number + 1} of {rounds}")
            with running(command, Path(os.devnull), **scene.whole.environment) as standby:
                shown = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s"
                name = f"tidegate orchestrator {standby.pid}"
                wait_until("it stands by", lambda: database.execute(shown, [name]).fetchone(), 60)  # noqa: B023
                before = _leader(database)
                assert before
                os.kill(before, signal.SIGKILL)
                killed = time.monotonic()
                while _leader(database) in (0, before):
                    assert time.monotonic() < killed + 60
                    time.sleep(LOOK_SECONDS)
                gaps.append(time.monotonic() - killed)
            wait_until("one leads", lambda: _leader(database), 60)
    return limited("leader.gap", max(gaps), "s", GAP_SECONDS, {"times": float(rounds)})


def _leader(database: psycopg.Connection[Any]) -> int:
    """Its process; 0 while there is none."""
    found = database.execute(_LEADER).fetchone()
    return int(found[0].split()[-1]) if found else 0


def _engine(parameters: float) -> dict[str, Any]:
    emulator = {"parameters": parameters, "bytes_per_token": BYTES_PER_TOKEN}
    return {"kind": "emulator", "emulator": emulator}


def _client(scene: Served) -> httpx.Client:
    headers = {"authorization": f"Bearer {scene.key}"}
    return httpx.Client(base_url=scene.brain_url, headers=headers, timeout=60)


def _seconds(name: str, took: list[float], goal: float) -> Row:
    more = {"max ms": 1e3 * max(took), "times": float(len(took))}
    return limited(name, percentile(took, 0.5), "s", goal, more)


def main() -> None:
    given = options(__doc__)
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as directory:
        progress("a whole stack")
        with served(Path(directory)) as scene:
            rows = create_rows(scene, 3 if given.quick else 15)
            rows += rollout_rows(scene, 10.0 if given.quick else 30.0)
            rows.append(leader_row(scene, 2 if given.quick else 8))
    rows += many_workloads.rows(quick=given.quick)
    show("Workloads", rows, given.json)


if __name__ == "__main__":
    main()
