"""Generated traces whose structure is known: scans, loops, drifting Zipf, tenants, agents, phases, and
short ones whose structure is drawn, mixtures.

Each exists in variants: those to choose by, and those to judge by, which have other seeds and other
parameters. The same arguments give the same requests on every machine.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final, NamedTuple, TypeVar

from swdriver_shim.replay.traces import Request

BLOCK_TOKENS: Final = 512
PHASE_S: Final = 900.0
END_S: Final = 1800.0  # of all but phases
N = TypeVar("N", int, float)
MIXTURES: Final = 8  # of each kind: one short trace says little


class Asked(NamedTuple):
    at_s: float
    session: str
    blocks: tuple[int, ...]


class Maker:
    """Makes blocks with ids of their own, and prompts of them."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self._ids = itertools.count(1)

    def blocks(self, least: int, most: int) -> tuple[int, ...]:
        """So many new blocks, drawn evenly."""
        return tuple(itertools.islice(self._ids, self.dice.randint(least, most)))

    def session(self) -> str:
        return f"session {next(self._ids)}"

    def wait(self, mean_s: float) -> float:
        return self.dice.expovariate(1 / mean_s)

    def starts(self, per_s: float, begin: float, end: float) -> Iterator[float]:
        at = begin + self.wait(1 / per_s)
        while at < end:
            yield at
            at += self.wait(1 / per_s)


def chat(
    make: Maker,
    begin: float = 0.0,
    end: float = END_S,
    *,
    per_s: float,
    think_s: float,
    goes_on: float,
    head: int,
) -> Iterator[Asked]:
    """Conversations behind one system prompt. After each turn some go on, after a time to think."""
    system = make.blocks(head, head)
    for at in make.starts(per_s, begin, end):
        session, prompt = make.session(), system + make.blocks(1, 20)
        while at < end:
            yield Asked(at, session, prompt)
            if make.dice.random() >= goes_on:
                break
            at += 5 + make.wait(think_s)
            prompt += make.blocks(1, 4)


def scan(
    make: Maker, begin: float = 0.0, end: float = END_S, *, every_s: float, prompts: int, gap_s: float
) -> Iterator[Asked]:
    """Batches of long documents that are never asked for again."""
    at = begin + every_s / 2
    while at < end:
        yield from (
            Asked(at + number * gap_s, make.session(), make.blocks(20, 60)) for number in range(prompts)
        )
        at += every_s


def loop(
    make: Maker, begin: float = 0.0, end: float = END_S, *, prompts: int, gap_s: float, head: int
) -> Iterator[Asked]:
    """The same prompts again and again, in the same order, each with a question of its own."""
    shared = make.blocks(head, head)
    documents = [shared + make.blocks(5, 25) for _ in range(prompts)]
    at = begin
    while True:
        for document in documents:
            at += gap_s
            if at >= end:
                return
            yield Asked(at, make.session(), document + make.blocks(1, 1))


def zipf(
    make: Maker,
    begin: float = 0.0,
    end: float = END_S,
    *,
    per_s: float,
    documents: int,
    exponent: float,
    drift_s: float,
) -> Iterator[Asked]:
    """Questions about documents, few of which make most of them. Every `drift_s` the least popular one
    becomes one of the most popular quarter, which moves others down, and a new one is the last."""
    popular = [make.blocks(4, 30) for _ in range(documents)]
    weights = list(itertools.accumulate(1 / (rank + 1) ** exponent for rank in range(documents)))
    order = list(range(documents))
    make.dice.shuffle(order)
    drifted = begin + drift_s
    for at in make.starts(per_s, begin, end):
        while at >= drifted:
            drifted += drift_s
            order.insert(make.dice.randrange(documents // 4), order.pop())
            popular[order[-1]] = make.blocks(4, 30)
        rank = bisect(weights, make.dice.random() * weights[-1])
        yield Asked(at, make.session(), popular[order[rank]] + make.blocks(1, 2))


def agents(
    make: Maker,
    begin: float = 0.0,
    end: float = END_S,
    *,
    per_s: float,
    steps: int,
    tool_s: float,
    think_s: float,
    asks_human: float,
) -> Iterator[Asked]:
    """Sessions that grow with each call of a tool, seconds apart, and now and then wait for a human."""
    tools = [make.blocks(12, 12) for _ in range(3)]
    for at in make.starts(per_s, begin, end):
        session, prompt = make.session(), make.dice.choice(tools) + make.blocks(2, 10)
        for _ in range(make.dice.randint(1, 2 * steps)):
            if at >= end:
                break
            yield Asked(at, session, prompt)
            waits = make.dice.random() < asks_human
            at += 1 + make.wait(think_s if waits else tool_s)
            prompt += make.blocks(1, 3)


def _added(weights: Iterable[float]) -> list[float]:
    return list(itertools.accumulate(weights))


def _zipf_weights(count: int, exponent: float) -> list[float]:
    return _added(1 / (rank + 1) ** exponent for rank in range(count))


def mixture(make: Maker) -> Iterator[Asked]:
    """1,000 to 4,000 requests: prompts that are asked once, questions about documents, conversations and
    agents, some of them behind shared heads. Drawn is how many of each there are, how long they are, how
    popular, and how soon they go on."""
    dice = make.dice
    end = dice.choice([600.0, 1200.0, 2400.0])
    per_s = dice.uniform(1000, 4000) / end
    heads = [make.blocks(1, 12) for _ in range(dice.choice([1, 3, 10, 40]))]
    documents = [make.blocks(2, 40) for _ in range(dice.choice([50, 300, 1500]))]
    of_heads = _zipf_weights(len(heads), 1.0)
    of_documents = _zipf_weights(len(documents), dice.uniform(0.6, 1.2))
    shares = [dice.expovariate(1) for _ in range(4)]
    has_head, goes_on = dice.random(), dice.uniform(0.3, 0.85)
    think_s, steps = dice.choice([10, 40, 120, 300]), dice.randint(4, 20)
    tool_s, longest = dice.choice([2, 6, 15]), dice.choice([8, 25, 80])

    def turns(kind: str) -> int:
        if kind == "agent":
            return dice.randint(1, 2 * steps)
        count = 1
        while kind == "conversation" and dice.random() < goes_on:
            count += 1
        return count

    kinds = {"once": 1.0, "document": 1.0, "conversation": 1 / (1 - goes_on), "agent": float(steps)}
    starts = [share / length for share, length in zip(shares, kinds.values(), strict=True)]
    of_kinds = _added(starts)
    for start in make.starts(per_s * sum(starts) / sum(shares), 0, end):
        kind = list(kinds)[bisect(of_kinds, dice.random() * of_kinds[-1])]
        head = heads[bisect(of_heads, dice.random() * of_heads[-1])] if dice.random() < has_head else ()
        session, at = make.session(), start
        if kind == "document":
            document = documents[bisect(of_documents, dice.random() * of_documents[-1])]
            yield Asked(at, session, document + make.blocks(1, 2))
            continue
        prompt = head + make.blocks(1, longest)
        for _ in range(turns(kind)):
            if at >= end:
                break
            yield Asked(at, session, prompt)
            at += 1 + make.wait(tool_s if kind == "agent" and dice.random() > 0.1 else think_s)
            prompt += make.blocks(1, 4)


@dataclass(frozen=True, slots=True)
class Variant:
    """One trace. `judges`: nothing was chosen by it."""

    name: str
    judges: bool
    seed: int
    parts: Sequence[Callable[[Maker], Iterator[Asked]]]

    def requests(self) -> list[Request]:
        make = Maker(self.seed)
        asked = heapq.merge(*(sorted(part(make)) for part in self.parts))
        return [
            Request(
                at_s,
                session,
                blocks,
                BLOCK_TOKENS,
                BLOCK_TOKENS * len(blocks) - make.dice.randrange(BLOCK_TOKENS),
                BLOCK_TOKENS,
                self.name,
            )
            for at_s, session, blocks in asked
        ]


def variants() -> list[Variant]:
    """All of them, in order."""
    return [variant for judges in (False, True) for variant in _variants(judges=judges)]


def _variants(*, judges: bool) -> Iterator[Variant]:
    """Judges have other parameters too: nothing that was chosen fits them by having seen them."""

    def of(chosen_by: N, judged_by: N) -> N:
        return judged_by if judges else chosen_by

    seed = of(1, 1001)
    a_chat = partial(
        chat, per_s=of(1.2, 0.8), think_s=of(60.0, 110.0), goes_on=of(0.6, 0.72), head=of(4, 9)
    )
    a_scan = partial(scan, every_s=of(300.0, 220.0), prompts=of(150, 90), gap_s=of(0.2, 0.3))
    a_loop = partial(loop, prompts=of(400, 270), gap_s=of(0.4, 0.5), head=of(3, 6))
    a_zipf = partial(
        zipf, per_s=of(3.0, 2.4), documents=of(1500, 900), exponent=of(0.9, 0.75), drift_s=of(4.0, 9.0)
    )
    some_agents = partial(
        agents,
        per_s=of(0.12, 0.08),
        steps=of(15, 25),
        tool_s=of(5.0, 9.0),
        think_s=of(240.0, 150.0),
        asks_human=of(0.08, 0.12),
    )
    yield Variant("scans", judges, seed, [a_chat, a_scan])
    yield Variant("loops", judges, seed + 1, [a_loop])
    yield Variant("drift", judges, seed + 2, [a_zipf])
    yield Variant("tenants", judges, seed + 3, [a_chat, a_scan, a_zipf, some_agents])
    yield Variant("agents", judges, seed + 4, [some_agents])
    kinds = [a_chat, a_loop, a_zipf, some_agents]
    if judges:
        kinds.reverse()

    def phases(make: Maker) -> Iterator[Asked]:
        for place, kind in enumerate(kinds):
            yield from kind(make, PHASE_S * place, PHASE_S * (place + 1))

    yield Variant("phases", judges, seed + 5, [phases])
    for number in range(1, MIXTURES + 1):
        yield Variant(f"mixture-{number}", judges, of(0, 1000) + number, [mixture])
