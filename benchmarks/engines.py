"""What a prefix that comes from outside saves a real vLLM, on the CPU: `make bench-engines`.

Engines of one small model (see `peers.run_engine`) run side by side, each with another cache behind it,
and are asked the same prompts in turns: when nobody has seen them, and again. None has a cache of its
own but the one that shows what that would be worth. `--quick` has no peers, no tier 2 and no 8k prompts.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from benchmarks import governed
from benchmarks.harness import Row, options, progress, show
from benchmarks.peers.environment import Environment, Unavailable, prepare
from benchmarks.peers.peer import Peer
from benchmarks.peers.servers import lmcache_server, mooncake_master
from kvss_agent import native
from swdriver_shim.adapters.claims import mint
from swdriver_shim.adapters.join_config import NameSpec
from swdriver_shim.adapters.vllm.config import AgentSpec, EngineConfig, fresh
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from swdriver_shim.replay.fleet import Agent
from tests.engines.governed import Governed

LENGTHS: Final = {"1k": 1024, "4k": 4096, "8k": 8192}
QUICK_LENGTHS: Final = ("1k", "4k")
ROUNDS, QUICK_ROUNDS = 5, 2
ORG: Final = "acme"
MEMORY_BYTES: Final = 1 << 30
LITTLE_BYTES: Final = 160 << 20  # room for two long prompts: 8 KiB a token
TIER2_BYTES: Final = 8 << 30
WAIT_SECONDS: Final = 10.0  # for tier 2: what comes from there is to be measured
FILL_TOKENS, FILL_PROMPTS = 1024, 22  # which take all of that room, a little at a time
SAVED_SECONDS: Final = 0.5  # after which what was computed is wherever it goes
NEARLY: Final = 0.9  # of a prompt comes back; who keeps chunks of 256 tokens has a little less
CONVERSATIONS, TURN_TOKENS, MORE_TOKENS, OUTPUT_TOKENS = 8, 2048, 64, 16
OVERHEAD_MAX: Final = 1.02
NONE, OWN, OURS, OUR_TIER2 = "none", "prefix", "tidegate.dram", "tidegate.tier2"
GOVERNED: Final = "tidegate.governed"
QUICK_ENGINES: Final = (NONE, OWN, OURS, GOVERNED)
CLAIM_SECONDS: Final = 6 * 3600


class Engine(Peer):
    """A vLLM with one cache behind it, or none."""

    def __init__(self, name: str) -> None:
        super().__init__("engine")
        self.variant = name
        self.variables: dict[str, str] = {}
        self.params: dict[str, Any] | None = None
        self.fills = False  # has to be filled before it is asked again, so that memory has nothing of it
        self.cold: dict[int, list[float]] = {}
        self.warm: dict[int, list[float]] = {}
        self.came: dict[int, list[float]] = {}  # parts of prompts
        self.rates: list[float] = []
        self.stage: Governed | None = None  # the console that governs it

    def _environment(self) -> Environment:
        # LMCache names chunks by Python's own hashes.
        variables = {"PYTHONHASHSEED": "0", **self.variables}
        return Environment(f"engine-{self.variant}", Path(sys.executable), variables)

    def open(self, connector: Mapping[str, Any] | None, *, prefixes: bool = False) -> None:
        self._ask(op="open", connector=connector, prefixes=prefixes)

    def ask(self, number: int, tokens: int) -> dict[str, Any]:
        return self._ask(op="ask", number=number, tokens=tokens, params=self.params)

    def serve(self, first: int, turn: int) -> dict[str, Any]:
        return self._ask(
            op="serve",
            numbers=list(range(first, first + CONVERSATIONS)),
            tokens=TURN_TOKENS,
            more=MORE_TOKENS,
            output=OUTPUT_TOKENS,
            turn=turn,
            params=self.params,
        )


@dataclass
class Side:
    """Those that run, and why others do not."""

    lengths: Mapping[str, int]
    engines: list[Engine] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def started(stack: contextlib.ExitStack, scratch: Path, *, quick: bool) -> Side:
    side = Side({name: tokens for name, tokens in LENGTHS.items() if not quick or name in QUICK_LENGTHS})
    chosen = {name: begin for name, begin in BEGIN.items() if not quick or name in QUICK_ENGINES}
    for number, (name, begin) in enumerate(chosen.items(), start=1):
        progress(f"starting engine {number} of {len(chosen)}: {name}")
        engine = Engine(name)
        with contextlib.ExitStack() as its:
            try:
                its.callback(engine.close)
                begin(engine, its, scratch)
            except Unavailable as reason:
                side.absent[name] = str(reason).splitlines()[0]
                print(f"{name} is left out: {side.absent[name]}", flush=True)
                continue
            stack.push(its.pop_all())
        side.engines.append(engine)
    return side


def nothing(engine: Engine, _: contextlib.ExitStack, _scratch: Path) -> None:
    engine.start()
    engine.open(None)


def own(engine: Engine, _: contextlib.ExitStack, _scratch: Path) -> None:
    engine.start()
    engine.open(None, prefixes=True)


def example(engine: Engine, _: contextlib.ExitStack, scratch: Path) -> None:
    where = {"shared_storage_path": str(scratch / "example")}
    engine.start()
    engine.open(connector("ExampleConnector", where))


def lmcache(engine: Engine, its: contextlib.ExitStack, scratch: Path) -> None:
    port = its.enter_context(lmcache_server(prepare("lmcache_mp"), scratch))
    where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    engine.start()
    engine.open(connector("LMCacheMPConnector", where))


def mooncake(engine: Engine, its: contextlib.ExitStack, scratch: Path) -> None:
    """Its store in the engine's process, as its documentation sets it up, over TCP."""
    environment = prepare("mooncake")
    port = its.enter_context(mooncake_master(environment, scratch))
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp",
        "global_segment_size": MEMORY_BYTES,
        "local_buffer_size": MEMORY_BYTES,
    }
    (scratch / "mooncake.json").write_text(json.dumps(config))
    links = scratch / "mooncake"
    links.mkdir()
    for package in environment.packages.glob("mooncake*"):
        (links / package.name).symlink_to(package)
    engine.variables = {
        **environment.variables,
        "MOONCAKE_CONFIG_PATH": str(scratch / "mooncake.json"),
        "PYTHONPATH": os.pathsep.join([str(links), os.environ.get("PYTHONPATH", "")]),
        "GLOG_minloglevel": "2",
    }
    engine.start()
    engine.open(connector("MooncakeStoreConnector", {"load_async": True}))


def tidegate(engine: Engine, its: contextlib.ExitStack, scratch: Path) -> None:
    with_agent(engine, its, scratch / "dram", MEMORY_BYTES, Policy())


def tidegate_tier2(engine: Engine, its: contextlib.ExitStack, scratch: Path) -> None:
    policy = Policy(tiers=Tiers.TIER2, displacement="lru")
    with_agent(engine, its, scratch / "tier2", LITTLE_BYTES, policy)
    engine.fills = True


def with_agent(
    engine: Engine, its: contextlib.ExitStack, home: Path, memory_bytes: int, policy: Policy
) -> None:
    home.mkdir()
    agent = its.enter_context(Agent(home / "agent", None))
    tier2 = None
    if policy.tiers is Tiers.TIER2:
        tier2 = {"kind": "posix", "path": str(home / "files"), "cap_bytes": TIER2_BYTES}
    told = AgentSpec(
        url=agent.control.url,
        token=agent.control.token,
        address=agent.address,
        memory_bytes=memory_bytes,
        tier2=tier2,
    )
    setting = fresh(NameSpec("bench"), "bench", [ORG], told)
    [org] = setting.orgs
    policies = OrgPolicies(policy=policy)
    setting = replace(setting, orgs=(replace(org, policies=policies),), wait_seconds=WAIT_SECONDS)
    (home / "tidegate.json").write_bytes(msgspec.json.encode(setting))
    engine.start()
    engine.open(
        connector(
            "TidegateConnector",
            {"tidegate": str(home / "tidegate.json")},
            kv_connector_module_path="swdriver_shim.adapters.vllm",
            kv_load_failure_policy="recompute",
        )
    )
    engine.params = {"tidegate": claim(setting)}


def tidegate_governed(engine: Engine, its: contextlib.ExitStack, scratch: Path) -> None:
    """A console tells it all; its agent is reached over TLS."""
    engine.stage = governed.stage_of(its, scratch)
    engine.start()
    engine.open(
        connector(
            "TidegateConnector",
            {"tidegate": engine.stage.told(wait_seconds=WAIT_SECONDS)},
            kv_connector_module_path="swdriver_shim.adapters.vllm",
            kv_load_failure_policy="recompute",
        )
    )
    engine.params = governed.give_job(engine.stage)


def claim(setting: EngineConfig) -> str:
    return mint(setting.claims_key, setting.driver, ORG, seconds=CLAIM_SECONDS)


BEGIN: Final[Mapping[str, Callable[[Engine, contextlib.ExitStack, Path], None]]] = {
    NONE: nothing,
    OWN: own,
    "example": example,
    "lmcache": lmcache,
    "mooncake": mooncake,
    OURS: tidegate,
    OUR_TIER2: tidegate_tier2,
    GOVERNED: tidegate_governed,
}


def connector(name: str, extra: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra),
        **more,
    }


# Questions


def measure(side: Side, rounds: int) -> None:
    """All of them, one after the other, another one first each time."""
    number = 0
    for turn in range(-1, rounds):  # the first is not counted: it is when pages are touched
        for name, tokens in side.lengths.items():
            progress(f"round {turn + 1} of {rounds}, {name}" if turn >= 0 else f"warm-up, {name}")
            number += 1
            order = side.engines[turn % len(side.engines) :] + side.engines[: turn % len(side.engines)]
            tokens_made = set()
            for engine in order:
                made = engine.ask(number, tokens)
                time.sleep(SAVED_SECONDS)  # what it still saves must not hold up the next one
                tokens_made.add(made["token"])
                if turn >= 0:
                    engine.cold.setdefault(tokens, []).append(made["seconds"])
            for engine in order:
                if engine.fills:
                    for more in range(FILL_PROMPTS):
                        engine.ask(1_000_000 + FILL_PROMPTS * number + more, FILL_TOKENS)
                        time.sleep(SAVED_SECONDS / 5)
                again = engine.ask(number, tokens)
                tokens_made.add(again["token"])
                # What takes longer to bring from tier 2, or over TLS, than to compute is computed.
                may_compute = engine.variant in (NONE, OUR_TIER2, GOVERNED)
                if not may_compute and again["cached"] < NEARLY * tokens:
                    raise RuntimeError(
                        f"{engine.variant} has {again['cached']} of {tokens} tokens, a moment later"
                    )
                if turn >= 0:
                    engine.warm.setdefault(tokens, []).append(again["seconds"])
                    engine.came.setdefault(tokens, []).append(again["cached"] / tokens)
            if len(tokens_made) > 1:
                print(f"prompt {number}: answers differ, {tokens_made}")


def serve(side: Side, rounds: int) -> None:
    """Conversations that go on, some at once."""
    each = TURN_TOKENS + MORE_TOKENS + OUTPUT_TOKENS
    for turn in range(rounds):
        progress(f"conversations, round {turn + 1} of {rounds}")
        first = 2_000_000 + 100 * turn
        for engine in side.engines:
            engine.serve(first, 1)
            time.sleep(SAVED_SECONDS)
            served = engine.serve(first, 2)
            engine.rates.append(CONVERSATIONS * each / served["seconds"])


def ms(values: list[float]) -> float:
    return statistics.median(values) * 1e3


def rows_of(side: Side) -> Iterator[Row]:
    by_name = {engine.variant: engine for engine in side.engines}
    none = by_name[NONE]
    peers = [
        engine for engine in side.engines if engine.variant not in (NONE, OWN, OURS, OUR_TIER2, GOVERNED)
    ]
    for name, tokens in side.lengths.items():
        ids = f"engine.vllm.ttft.{name}"
        without = ms(none.cold[tokens])
        yield Row(f"{ids}.{NONE}", without, "ms")
        for engine in side.engines[1:]:
            took = ms(engine.warm[tokens])
            came = {"% that came": 100 * statistics.mean(engine.came[tokens])}
            yield Row(f"{ids}.{engine.variant}", took, "ms", "no cache", without / took, more=came)
        if peers:
            best = min(peers, key=lambda engine: ms(engine.warm[tokens]))
            took, ours = ms(best.warm[tokens]), ms(by_name[OURS].warm[tokens])
            yield Row(f"{ids}.fastest", ours, "ms", f"{best.variant} {took:.1f} ms", took / ours, 1.0)
        if tier2 := by_name.get(OUR_TIER2):
            ours = ms(tier2.warm[tokens])
            ratio = OVERHEAD_MAX * without / ours
            yield Row(f"{ids}.tier2.never_slower", ours, "ms", "1.02 of no cache", ratio, 1.0)
    pairs: dict[str, list[float]] = {}
    for name, tokens in side.lengths.items():
        for engine in side.engines[1:]:
            # Asked in turns: what slows the machine down slows both.
            over = [
                one / other for one, other in zip(engine.cold[tokens], none.cold[tokens], strict=True)
            ]
            pairs.setdefault(engine.variant, []).extend(over)
            ratio = statistics.median(over)
            if engine.variant == OURS:
                yield Row(
                    f"engine.vllm.overhead.miss.{name}",
                    ratio, "times", "no cache, at most 1.02", OVERHEAD_MAX / ratio, 1.0,
                )  # fmt: skip
    for variant, over in pairs.items():
        ratio = statistics.median(over)
        goal = 1.0 if variant == OURS else None
        ids = "engine.vllm.overhead.miss" + ("" if variant == OURS else f".{variant}")
        yield Row(ids, ratio, "times", "no cache, at most 1.02", OVERHEAD_MAX / ratio, goal)
    if attached := by_name.get(GOVERNED):
        over = [
            one / other
            for tokens in side.lengths.values()
            for one, other in zip(attached.cold[tokens], by_name[OURS].cold[tokens], strict=True)
        ]
        ratio = statistics.median(over)
        ids = "governed.overhead.miss"
        yield Row(ids, ratio, "times", "without a console, at most 1.02", OVERHEAD_MAX / ratio, 1.0)
    without = statistics.median(none.rates)
    for engine in side.engines:
        rate = statistics.median(engine.rates)
        yield Row(
            f"engine.vllm.throughput.{engine.variant}", rate, "tokens/s", "no cache", rate / without
        )


def main() -> None:
    told = options(__doc__)
    rounds = QUICK_ROUNDS if told.quick else ROUNDS
    with contextlib.suppress(native.Unavailable):
        native.require(build=True)  # used from here on, by engines and agents
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-engines-")))
        side = started(stack, scratch, quick=told.quick)
        measure(side, rounds)
        serve(side, max(1, rounds // 2))
        made = list(rows_of(side))
        for engine in side.engines:
            if engine.stage:
                made += governed.rows(engine.stage, engine.ask, quick=told.quick)
        show("Engines", made, told.json)
    for name, reason in side.absent.items():
        print(f"{name} was left out: {reason}")


if __name__ == "__main__":
    main()
