"""The brains: the real router, choice, cache maps and exchange of each, without its sockets and queues.

Requests are divided over brains at random, as behind any balancer. All brains read the same messages at
the same time, so those of one simulation share one set of maps, whose cost counts for each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from benchmarks.scale import traffic
from benchmarks.scale.cache import WALL
from benchmarks.scale.sizes import ORGS
from benchmarks.scale.traffic import Ask
from inference_brain.api.requests import Completion
from inference_brain.asking import Asking, Routed, affinity
from inference_brain.choice import Outcome
from inference_brain.counts import Counts
from inference_brain.desired import Desired, DriverSpec, OrgSpec, ReplicaSpec, ServedModel
from inference_brain.maps import CacheMaps
from inference_brain.router import Router
from inference_brain.upstream.fleet import Fleet
from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.keys import Keys, Named

EXCHANGE_SECONDS: Final = 0.1
NOTHING: Final = b"\x80"  # an empty table


@lru_cache
def spec_of(model: str) -> ModelSpec:
    return ModelSpec(name=model, groups=(GroupSpec("a", (1,)),), revision="1", layout="a")


def desired(replicas: Mapping[str, Sequence[str]], orgs: int = ORGS) -> Desired:
    """`replicas`: names by model."""
    return Desired(
        brain="brain",
        generation=1,
        models=tuple(
            ServedModel(
                model,
                traffic.PROMPT_MAX + 4_096,
                tuple(
                    ReplicaSpec(name, f"http://{name}", driver=DriverSpec(name, spec_of(model)))
                    for name in names
                ),
            )
            for model, names in replicas.items()
        ),
        orgs=tuple(OrgSpec(traffic.org_name(org), traffic.secret_of(org)) for org in range(orgs)),
    )


class _NoPrompts:
    """Prompts come with their keys: nothing is tokenized."""

    def follow(self, models: Sequence[ServedModel]) -> None:
        pass


class Brain:
    def __init__(
        self, number: int, maps: CacheMaps, told: Desired, clock: Callable[[], float], seed: int
    ) -> None:
        self._clock = clock
        self.router = Router(
            Fleet(clock),
            maps,
            cast("Any", _NoPrompts()),
            Counts(),
            clock=clock,
            wall=lambda: clock() + WALL,
            rng=random.Random(f"{seed} {number}"),
            name=f"brain-{number}",
        )
        self.exchange = self.router.admission._exchange  # noqa: SLF001 - what Redis carries
        self._models: dict[str, ServedModel] = {}
        self._orgs: dict[str, OrgSpec] = {}
        self._routed: dict[int, Routed] = {}
        self.follow(told)

    def follow(self, told: Desired) -> None:
        self.router.follow(told)
        self._models = {model.name: model for model in told.models}
        self._orgs = {org.name: org for org in told.orgs}

    def choose(self, one: Ask, model: str, maker: Keys, keys: list[bytes]) -> str:
        """The replica that gets it."""
        now = self._clock()
        found = self._models[model]
        asking = Asking(
            str(one.number),
            self._orgs[maker.org],
            found,
            Completion(model=model, prompt="", max_tokens=one.answer),
            now,
            now + WALL,
            prompt_tokens=one.tokens,
            prompts={spec_of(model): Named(maker, keys)},
        )
        asking.affinity = affinity(asking)
        routed = self.router.choose(asking)
        self.router.flights[model].begin(asking.id, routed.choice, now)
        self.router.note_sent(asking, routed)
        self._routed[one.number] = routed
        return routed.replica.name

    def first_token(self, number: int, model: str, cached: int) -> None:
        now, routed = self._clock(), self._routed.pop(number)
        self.router.flights[model].first_token(str(number), now)
        seconds = now - routed.choice.at
        self.router.rates[model].observe(routed.choice, Outcome(seconds, cached), now)

    def end(self, number: int, model: str) -> None:
        """It is finished, or its replica was lost."""
        self._routed.pop(number, None)
        self.router.flights[model].end(str(number))

    def report(self) -> bytes:
        """What the other brains are told."""
        return self.exchange.question(self._clock())[1]

    def hear(self, reports: Sequence[bytes]) -> None:
        """Of all other brains."""
        self.exchange.answered([len(reports) + 1, NOTHING, NOTHING, *reports], self._clock())
