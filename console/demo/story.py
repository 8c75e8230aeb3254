"""What the demo is about: a fleet, three orgs with different habits, and what they ask. Pure, and the
same from start to start.

- *Lighthouse* runs an assistant: many conversations behind one long prompt of its own, which people come
  back to after seconds or minutes.
- *Foundry* runs coding agents: tasks of many quick steps, each of which repeats all that was before it.
- *Archive* has documents summed up, in waves. No document comes twice, so that it only takes room away.

They ask through a brain. The assistant's workload has two replicas, the other one.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from msgspec.structs import replace

from console.demo.places import BOX_MEMORY, MEMORY, NODES
from swdriver_shim.adapters.wafer import WIO
from swdriver_shim.policy import Policy, Tiers
from workload_manager.emulator.texts import answer_of_numbers
from workload_manager.spec import EmulatorSpec

SEED: Final = 7
VOCABULARY: Final = 32_000
CONTEXT_TOKENS: Final = 16_384
# Streams of two workloads and the one stream of a real engine fit on one node, and so on its rail.
GRANT_PERCENT: Final = 49
WHY_NOT_ALL: Final = "With some room left, every stream finds a node on its rail"
TIER2_CAP: Final = "256M"  # of all nodes, in one directory
LEAVES: Final = ("leaf-1", "leaf-2", "leaf-3", "leaf-4")
BOXES: Final = ("cs-1", "cs-2", "cs-3")
PLACES: Final = (0, 2, 0)  # the first of the two leaves of each box


@dataclass(frozen=True, slots=True)
class Served:
    """A workload. Each of its replicas has a box."""

    name: str
    model: str
    replicas: int
    emulator: EmulatorSpec


# So large a model, on accelerators that are not a wafer, that a cache is worth it.
_ENGINE: Final = EmulatorSpec(domains=len(WIO), parameters=70e9, answer_tokens_below=VOCABULARY)
ASSISTANT: Final = Served("chat", "demo-chat", 2, replace(_ENGINE, bytes_per_token=180))
CODING: Final = Served("code", "demo-code", 1, replace(_ENGINE, bytes_per_token=90, window_tokens=1024))
SERVED: Final = (ASSISTANT, CODING)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, and what the model answers to it. `at`: seconds since the beginning."""

    at: float
    org: str
    served: Served
    tokens: Sequence[int]
    answer: Sequence[int]


Habit = Callable[["Org", Random, float], Iterator[Ask]]


@dataclass(frozen=True, slots=True)
class Org:
    """An org: what it wants of its cache, and what so many of its users do at the same time."""

    slug: str
    name: str
    served: Served
    policy: Policy
    why: str
    habit: Habit
    users: int


def _some(randomness: Random, least: int, most: int) -> list[int]:
    return [randomness.randrange(VOCABULARY) for _ in range(randomness.randint(least, most))]


def answer_to(tokens: Sequence[int], count: int) -> list[int]:
    """What the workload's engine answers, which the next prompt of a conversation has in it."""
    return answer_of_numbers(tokens, count, VOCABULARY)


def _own(org: str, tokens: int) -> list[int]:
    """What all prompts of an org begin with."""
    randomness = Random(f"the prompt of {org}")  # noqa: S311 - a story, no secret
    return [randomness.randrange(VOCABULARY) for _ in range(tokens)]


def _conversations(org: Org, randomness: Random, at: float) -> Iterator[Ask]:
    beginning = _own(org.slug, 640)
    while True:
        said = list(beginning)
        for _ in range(randomness.randint(2, 9)):
            said += _some(randomness, 20, 160)
            answer = answer_to(said, randomness.randint(40, 240))
            yield Ask(at, org.slug, org.served, tuple(said), tuple(answer))
            said += answer
            at += randomness.uniform(8, 60)
        at += randomness.uniform(10, 120)


def _tasks(org: Org, randomness: Random, at: float) -> Iterator[Ask]:
    beginning = _own(org.slug, 1200)
    while True:
        seen = [*beginning, *_some(randomness, 200, 600)]
        for _ in range(randomness.randint(6, 20)):
            answer = answer_to(seen, randomness.randint(20, 80))
            yield Ask(at, org.slug, org.served, tuple(seen), tuple(answer))
            seen += [*answer, *_some(randomness, 60, 200)]
            at += randomness.uniform(2, 6)
        at += randomness.uniform(20, 90)


def _documents(org: Org, randomness: Random, at: float) -> Iterator[Ask]:
    beginning = _own(org.slug, 128)
    wave, pause = 120.0, 180.0
    while True:
        document = [*beginning, *_some(randomness, 800, 2400)]
        answer = answer_to(document, randomness.randint(60, 120))
        yield Ask(at, org.slug, org.served, tuple(document), tuple(answer))
        at += randomness.uniform(3, 8)
        if at % (wave + pause) > wave:
            at += (wave + pause) - at % (wave + pause)


ORGS: Final = (
    Org(
        "lighthouse",
        "Lighthouse",
        ASSISTANT,
        Policy(ttl_last_use_seconds=1800, tiers=Tiers.TIER2, share=200),
        "Conversations are taken up again within half an hour",
        _conversations,
        users=24,
    ),
    Org(
        "foundry",
        "Foundry",
        CODING,
        Policy(ttl_last_use_seconds=600, ttl_first_use_seconds=7200, priority=50, scrub=True),
        "Source code: never on disk, and overwritten when it goes",
        _tasks,
        users=3,
    ),
    Org(
        "archive",
        "Archive",
        ASSISTANT,
        Policy(ttl_last_use_seconds=60, priority=10, share=50),
        "No document comes twice",
        _documents,
        users=2,
    ),
)


def asks(served: Served, orgs: Sequence[Org] = ORGS, seed: int = SEED) -> Iterator[Ask]:
    """What is asked of a model, in order, without end."""
    return heapq.merge(
        *(
            org.habit(org, Random(f"{seed} {org.slug} {user}"), 3.0 * user)  # noqa: S311 - a story
            for org in orgs
            if org.served.model == served.model
            for user in range(org.users)
        ),
        key=lambda ask: ask.at,
    )


def fleet(tier2: Path) -> str:
    """As a description of `manage.py fleet import`: a node on each leaf, all with one directory as their
    tier 2. A box has its ports on the first two leaves, or on the others: so each has nodes that only
    the spine leads to."""
    kept = json.dumps({"kind": "posix", "path": str(tier2), "cap": TIER2_CAP})
    leaves = "".join(
        f"      {leaf}:\n        spine_links:\n          {leaf}-up: {{spine: spine-1, gbits: 400}}\n"
        for leaf in LEAVES
    )
    nodes = "".join(
        f"      {node}:\n        nics: {{eth0: {{leaf: {leaf}, wio: 16, gbits: 100}}}}\n"
        f"        memory: {MEMORY}\n        shards_max: 16\n        tier2: {kept}\n"
        for node, leaf in zip(NODES, LEAVES, strict=True)
    )
    boxes = "".join(
        f"      {box}:\n        memory: {BOX_MEMORY}\n"
        f"        domains:\n{_domains(LEAVES[place : place + 2])}"
        for box, place in zip(BOXES, PLACES, strict=True)
    )
    return f"stamps:\n  demo:\n    leaves:\n{leaves}    nodes:\n{nodes}    boxes:\n{boxes}"


def _domains(leaves: Sequence[str]) -> str:
    """The first half of them is at the first leaf."""
    return "".join(
        f"          - {{wio: {wio}, leaves: [{leaves[place * 2 // len(WIO)]}]}}\n"
        for place, wio in enumerate(WIO)
    )
