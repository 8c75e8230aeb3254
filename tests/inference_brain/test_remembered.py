"""What is kept of requests that are over."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

from inference_brain.api import requests
from inference_brain.api.events import Usage
from inference_brain.asking import Asking
from inference_brain.brain import Brain
from inference_brain.desired import Desired, OrgSpec, ReplicaSpec, ServedModel
from inference_brain.journey import Journey, Records, Timer
from inference_brain.outbound import Claims

REPLICAS = 24
REQUESTS = 500
RAW = b'{"model": "m", "prompt": "Tell me.", "stream": true}'


def brain_of_many() -> Brain:
    replicas = tuple(ReplicaSpec(f"r{number}", f"http://r{number}") for number in range(REPLICAS))
    brain = Brain("east", None)
    brain.set_desired(
        Desired(
            generation=1,
            brain="east",
            models=(ServedModel("m", 8192, replicas),),
            orgs=(OrgSpec("acme", b"s" * 32),),
        )
    )
    return brain


async def carry(brain: Brain, name: str) -> None:
    """A request to its end."""
    assert brain.desired is not None
    org, model = brain.desired.orgs[0], brain.desired.models[0]
    asking = Asking(name, org, model, requests.completion(RAW), time.monotonic(), time.time())
    await brain.router.prepare(asking)
    place = await brain.router.enter(asking)
    journey = Journey(asking, place, brain.router, Claims(), {}, unused)
    brain.records.begin(journey)
    journey.attempt()
    journey.first_token()
    journey.usage = Usage(10, 20)
    journey.end("ok")
    brain.records.end(journey)


def unused(seconds: float, do: Callable[[], object]) -> Timer:
    raise AssertionError("the first token of a stream is seen, not expected")


async def test_python_has_nothing_to_look_for_among_requests_that_are_over() -> None:
    brain = brain_of_many()
    for number in range(100):  # what is made once for each replica
        await carry(brain, f"first-{number}")
    gc.collect()
    before = len(gc.get_objects())
    for number in range(REQUESTS):
        await carry(brain, f"req-{number}")
    gc.collect()
    assert len(gc.get_objects()) - before < REQUESTS
    record = brain.find("req-50")
    assert record is not None
    assert len(record.candidates) == REPLICAS
    assert record.chosen in {one.replica for one in record.candidates}


async def test_requests_that_are_remembered_no_more_take_no_memory() -> None:
    """Python would not find a circle among them: what were in one would be kept until the brain ends."""
    brain = brain_of_many()
    brain.records = Records(most=100)
    for number in range(200):
        await carry(brain, f"first-{number}")
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(REQUESTS):
        await carry(brain, f"req-{number}")
    gc.collect()
    assert sys.getallocatedblocks() - before < REQUESTS  # each has fifty objects for its replicas
