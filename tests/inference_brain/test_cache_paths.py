"""How a cache's bytes reach its engine: its driver reports it, and decisions take account of it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from inference_brain import metrics
from inference_brain.choice import Regret
from inference_brain.choice.rates import SPINE, Rates
from inference_brain.desired import DriverSpec, ReplicaSpec, ServedModel
from swdriver_shim.cache_map.codec import (
    NAME_BYTES,
    SPACE_BYTES,
    CachePath,
    Message,
    Section,
    entry,
    pack_values,
)
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.desired import parse
from swdriver_shim.keys import COLUMN_TOKENS, Keys
from swdriver_shim.policy import Policy
from tests.inference_brain.brains import SECRET, RunningBrain, post, told
from tests.inference_brain.engines import FakeEngine
from tests.inference_brain.map_worlds import model_of
from tests.swdriver_shim.prompts import FULL
from tests.swdriver_shim.shims import document

COLUMNS = 40
MODEL = model_of(FULL)


def report(columns: int, tokens: list[int], path: CachePath) -> bytes:
    """The whole map of a driver that has so many columns of these tokens."""
    maker = Keys("acme", SECRET, MODEL.namespace())
    keys = maker.prompt(tokens).keys[7:columns:8]
    now = time.time()
    values = pack_values([entry(now + 600, 0)] * len(keys), int(now))
    space = maker.tag + MODEL.namespace().digest()[:SPACE_BYTES]
    names = b"".join(key[:NAME_BYTES] for key in keys)
    section = Section(space, 0, names, values)
    return Message(1, b"l" * 8, 1, now, int(now), True, 0, 1, sections=(section,), path=path).encode()


def test_what_is_too_far_away_is_computed_elsewhere_and_explained() -> None:
    tokens = list(range(COLUMNS * COLUMN_TOKENS))
    with FakeEngine() as far, FakeEngine() as near:
        replicas = tuple(
            ReplicaSpec(name, engine.url, driver=DriverSpec(name, MODEL))
            for name, engine in (("far", far), ("near", near))
        )
        with RunningBrain(told([], models=(ServedModel("m", 100_000, replicas),))) as running:
            brain = running.brain

            def prepare() -> None:
                for name, path in (("far", "spine"), ("near", "local")):
                    mirror = brain.maps.mirror(name)
                    assert mirror
                    columns = COLUMNS if name == "far" else 0
                    assert mirror.read(report(columns, tokens, path), time.monotonic())  # type: ignore[arg-type]
                slow = Rates()
                slow.seconds = tuple(
                    1e-3 if index == SPINE else rate for index, rate in enumerate(slow.seconds)
                )
                brain.router.rates["m"].of("far").seconds = slow.seconds

            running.call(prepare)
            answer = post(
                f"{running.url}/v1/completions",
                headers=running.headers,
                json={"model": "m", "prompt": tokens, "max_tokens": 3},
            )
            assert answer.status_code == 200
            record = running.call(lambda: brain.find(answer.headers["x-request-id"]))
            counted = running.call(lambda: brain.counts.total(metrics.REGRET))
    assert record
    assert record.chosen == "near"
    assert {one.replica: one.path for one in record.candidates} == {"far": "spine", "near": "local"}
    assert record.regret == {Regret.SPINE: len(tokens)}
    assert counted == len(tokens)


@pytest.mark.parametrize(("tier", "path"), [("spine", "spine"), (None, "local")])
def test_a_driver_says_which_path_most_of_its_bytes_take(
    tmp_path: Path, tier: str | None, path: CachePath
) -> None:
    shim = Shim("job", None)
    spec = parse(document(tmp_path / "nobody.sock", {"acme": Policy()}))
    at = {"session": "s", "tier": tier, "box": "b", "domain": 0, "port_leaf": "l", "nic_leaf": "l"}
    try:
        shim.set_desired(_with_path(spec, {**at, "node": "n"} if tier else None))
        follower = shim.follow_cache()
        assert follower
        follower.follow(0.0, time.time())
        assert follower.path == path == shim.shards.cache_path()
    finally:
        shim.stop()


def _with_path(spec: object, path: object) -> bytes:
    made = msgspec.to_builtins(spec)
    for home in made["homes"]:
        home["path"] = path
    return msgspec.json.encode(made)
