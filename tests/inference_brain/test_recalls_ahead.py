"""A request that has to wait asks for what tier 2 has of its prompt."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from inference_brain.desired import DriverSpec, ReplicaSpec, ServedModel
from swdriver_shim.cache_map.codec import (
    IN_TIER2,
    NAME_BYTES,
    SPACE_BYTES,
    Message,
    Section,
    entry,
    pack_values,
)
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from tests.inference_brain.brains import SECRET, RunningBrain, post, told
from tests.inference_brain.engines import FakeEngine
from tests.inference_brain.map_worlds import model_of
from tests.live import wait_until
from tests.swdriver_shim.prompts import FULL

MODEL = model_of(FULL)
COLUMNS = 40


@dataclass
class Recorded:
    asked: list[tuple[str, Prompt, int, int]] = field(default_factory=list)

    def ask(self, *what: Any) -> None:
        self.asked.append(what)

    async def close(self) -> None:
        pass


def test_who_waits_asks_and_who_does_not_wait_does_not() -> None:
    tokens = list(range(COLUMNS * COLUMN_TOKENS))
    maker = Keys("acme", SECRET, MODEL.namespace())
    prompt = maker.prompt(tokens)
    now, recorded = time.time(), Recorded()
    keys = prompt.keys[7::8]
    values = [entry(now + 600, 0), *([entry(now + 600, IN_TIER2)] * (len(keys) - 1))]
    section = Section(
        maker.tag + MODEL.namespace().digest()[:SPACE_BYTES],
        0,
        b"".join(key[:NAME_BYTES] for key in keys),
        pack_values(values, int(now)),
    )
    report = Message(1, b"l" * 8, 1, now, int(now), True, 0, 1, sections=(section,)).encode()
    with FakeEngine() as engine:
        replica = ReplicaSpec("r0", engine.url, driver=DriverSpec("job", MODEL))
        with RunningBrain(told([], models=(ServedModel("m", 100_000, (replica,)),))) as running:
            brain = running.brain

            def prepare() -> None:
                mirror = brain.maps.mirror("job")
                assert mirror
                assert mirror.read(report, time.monotonic())
                brain.router.recalls = recorded  # type: ignore[assignment]

            def ask(prompt: list[int], *, stream: bool = False) -> int:
                body = {"model": "m", "prompt": prompt, "max_tokens": 3, "stream": stream}
                url = f"{running.url}/v1/completions"
                return post(url, headers=running.headers, json=body).status_code

            running.call(prepare)
            assert ask([7]) == 200
            assert recorded.asked == []  # it did not wait
            engine.behavior.is_held = True
            with ThreadPoolExecutor(2) as asking:
                # A stream: of others it is guessed when their prompts are computed.
                busy = asking.submit(ask, list(range(50_000, 99_000)), stream=True)
                wait_until("the replica is busy", lambda: len(engine.asked) == 2)
                waiting = asking.submit(ask, tokens)
                wait_until("it asks", lambda: recorded.asked)
                assert len(engine.asked) == 2
                engine.behavior.is_held = False
            assert (busy.result(), waiting.result()) == (200, 200)
    [(driver, asked, hit, tier2)] = recorded.asked
    assert (driver, asked.keys) == ("job", prompt.keys)
    assert (hit, tier2) == (8 * COLUMN_TOKENS, 32 * COLUMN_TOKENS)
