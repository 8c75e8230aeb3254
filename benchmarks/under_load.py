"""The driver on real agents, while requests keep coming: a shard moves, memory is far too small, the
driver starts anew. For `benchmarks.driver`.

Requests are served by wafer emulators, which look at every byte that comes back.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Self

from benchmarks.harness import Row, percentile
from swdriver_shim.adapters.wafer import DriverCache, Emulator, Wafer, wafer_layout
from swdriver_shim.cache.reasons import DRAM, TIER2
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS, Keys, encode
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from swdriver_shim.replay import fleet

ORG = "acme"
CONVERSATION_COLUMNS = 8
KIB = 1024


def conversation(number: int, question: int | None = None) -> bytes:
    """Its tokens, and those of a question that follows, of one column."""
    columns = [number * CONVERSATION_COLUMNS + place for place in range(CONVERSATION_COLUMNS)]
    asked = [] if question is None else [(1 << 31) + question]
    return encode([name for name in columns + asked for _ in range(COLUMN_TOKENS)])


def keys(wafer: Wafer) -> Keys:
    return Keys(ORG, hashlib.sha256(ORG.encode()).digest(), wafer.namespace)


@contextlib.contextmanager
def driving(wafer: Wafer, shards: fleet.Shards, tiers: Tiers = Tiers.DRAM) -> Iterator[Driver]:
    with contextlib.closing(Driver(wafer.layout, "bench", shards)) as driver:
        driver.set_policies({ORG: OrgPolicies(policy=Policy(tiers=tiers))})
        yield driver


# A shard moves


@dataclass(frozen=True, slots=True)
class Answer:
    """To one request."""

    due: float
    ended: float
    asked: int  # tokens
    hit: int
    load_seconds: float  # from when it was due
    wrong_bytes: int


@dataclass
class Load:
    """Requests at a steady rate, about one conversation after the other, by engines beside each other.
    Each asks something new, and stores it."""

    driver: Driver
    wafer: Wafer
    conversations: int
    every_seconds: float
    engines: int = 2
    answers: list[Future[Answer]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            engines = [
                (
                    stack.enter_context(ThreadPoolExecutor(1)),
                    Emulator(DriverCache(self.driver, self.wafer)),
                )
                for _ in range(self.engines)
            ]
            maker, began = keys(self.wafer), time.monotonic()
            for number in count():
                due = began + number * self.every_seconds
                if self._stop.wait(due - time.monotonic()):
                    return
                thread, emulator = engines[number % self.engines]
                self.answers.append(thread.submit(self._ask, emulator, maker, number, due))

    def _ask(self, emulator: Emulator, maker: Keys, number: int, due: float) -> Answer:
        tokens, waited = conversation(number % self.conversations, number), time.monotonic() - due
        served = emulator.serve(maker, tokens)
        load = served.load
        ended = time.monotonic()
        return Answer(due, ended, served.asked, served.hit, waited + load.seconds, load.wrong_bytes)


def move_rows(*, quick: bool) -> list[Row]:
    conversations, window_seconds = (96, 2.0) if quick else (512, 15.0)
    wafer = Wafer(wafer_layout(1, 16 * KIB))
    slots = conversations * (CONVERSATION_COLUMNS + 1)  # the last questions have room as well
    with fleet.started(wafer.layout, slots, 2) as agents:
        shards = agents.shards()
        with driving(wafer, shards) as driver:
            load = Load(driver, wafer, conversations, every_seconds=0.0125)
            with load:
                time.sleep(2 * conversations * load.every_seconds)  # all are stored, memory is full
                warm = time.monotonic()
                time.sleep(window_seconds)
                move = agents.move(shards[0][0], to=1)
                time.sleep(window_seconds)
    done = [each for each in load.answers if each.exception() is None]
    answers = [each.result() for each in done]
    failed = len(load.answers) - len(done) + sum(each.wrong_bytes > 0 for each in answers)
    return [
        Row("move.seconds", move.ended - move.began, "s"),
        Row("move.slots", move.slots, "slots"),
        Row("move.failed_requests", failed, "requests", "none", float(failed == 0), 1.0),
        *window_rows([each for each in answers if each.due >= warm], move),
    ]


def window_rows(answers: Sequence[Answer], move: fleet.Move) -> Iterator[Row]:
    """What was hit and how long loads took before, during and after a move."""
    windows = {
        "before": [each for each in answers if each.ended < move.began],
        "during": [each for each in answers if each.ended >= move.began and each.due <= move.ended],
        "after": [each for each in answers if each.due > move.ended],
    }
    rates = {
        name: sum(each.hit for each in of) / sum(each.asked for each in of)
        for name, of in windows.items()
    }
    for name, rate in rates.items():
        goal = None if name == "before" else 0.99
        yield Row(f"move.hit_rate.{name}", 100 * rate, "%", "before", rate / rates["before"], goal)
    waits = {
        name: percentile([each.load_seconds for each in of], 0.99) * 1e3 for name, of in windows.items()
    }
    for name, wait in waits.items():
        yield Row(f"move.load_p99.{name}", wait, "ms", "before", waits["before"] / wait)
    for name, of in windows.items():
        yield Row(f"move.requests.{name}", len(of), "requests")


# Memory is far too small


class Heard(NamedTuple):
    """What came of some requests, one after the other."""

    asked: int  # tokens
    hits: dict[str, int]  # by tier
    seconds: dict[str, list[float]]  # of loads, by the tier that was waited for
    wrong_bytes: int

    @property
    def hit_rate(self) -> float:
        return sum(self.hits.values()) / self.asked


def ask_all(driver: Driver, wafer: Wafer, numbers: Sequence[int], pause_seconds: float = 0.0) -> Heard:
    """About these conversations."""
    emulator, maker = Emulator(DriverCache(driver, wafer, wait_seconds=2.0)), keys(wafer)
    heard = Heard(0, {DRAM: 0, TIER2: 0}, {DRAM: [], TIER2: []}, 0)
    for number in numbers:
        account = driver.ledger.accounts.get(ORG)  # none before the first request
        before = dict(account.tally.hits) if account else {}
        served = emulator.serve(maker, conversation(number))
        hits = driver.ledger.accounts[ORG].tally.hits
        new = {tier: hits[tier] - before.get(tier, 0) for tier in heard.hits}
        for tier, tokens in new.items():
            heard.hits[tier] += tokens
        if served.hit:
            heard.seconds[TIER2 if new[TIER2] else DRAM].append(served.load.seconds)
        heard = heard._replace(
            asked=heard.asked + served.asked, wrong_bytes=heard.wrong_bytes + served.load.wrong_bytes
        )
        time.sleep(pause_seconds)
    return heard


def tier2_rows(*, quick: bool) -> list[Row]:
    requests, pause_seconds = (60, 0.025) if quick else (400, 0.05)
    wafer, conversations = Wafer(wafer_layout(1, 24 * KIB)), 96
    slots = conversations * CONVERSATION_COLUMNS // 3
    disk_bytes = 2 * conversations * CONVERSATION_COLUMNS * wafer.layout.groups[0].column_bytes
    everyone = range(conversations)
    chosen = random.Random(0).choices(everyone, k=requests)
    with fleet.started(wafer.layout, slots, 2) as agents, driving(wafer, agents.shards()) as driver:
        ask_all(driver, wafer, everyone)
        alone = ask_all(driver, wafer, chosen)
    with fleet.started(wafer.layout, slots, 2, disk_bytes) as agents:
        with driving(wafer, agents.shards(), Tiers.TIER2) as driver:
            ask_all(driver, wafer, everyone, pause_seconds)
            both = ask_all(driver, wafer, chosen, pause_seconds)
            spilled = driver.ledger.tier2.spilled
        shards = agents.shards()
        there = kept(wafer, shards, everyone)
        with driving(wafer, shards, Tiers.TIER2) as driver:
            again = ask_all(driver, wafer, everyone)
    waits = {tier: statistics.median(seconds) * 1e3 for tier, seconds in both.seconds.items()}
    copied = spilled.columns / (spilled.columns + spilled.not_spilled + spilled.no_time)
    wrong = alone.wrong_bytes + both.wrong_bytes + again.wrong_bytes
    return [
        Row("replay.dram", 100 * alone.hit_rate, "%"),
        Row("replay.tier2", 100 * both.hit_rate, "%", "dram", both.hit_rate / alone.hit_rate, 2.0),
        *(
            Row(f"replay.tier2.from_{tier}", 100 * hits / both.asked, "%")
            for tier, hits in both.hits.items()
        ),
        Row("replay.tier2.copied_in_time", 100 * copied, "%"),
        Row("replay.tier2.wrong_bytes", wrong, "bytes", "none", float(wrong == 0), 1.0),
        Row("tier2.load_wait_p50", waits[TIER2], "ms", "dram", waits[DRAM] / waits[TIER2]),
        Row("tier2.load_wait_p99", percentile(both.seconds[TIER2], 0.99) * 1e3, "ms"),
        Row("restart.hit_rate", 100 * again.hit_rate, "%", "kept", again.hit_rate / there, 0.99),
    ]


def kept(wafer: Wafer, shards: fleet.Shards, conversations: Sequence[int]) -> float:
    """Which part of these tier 2 has, in all shards and from the start."""
    maker, found = keys(wafer), 0
    for number in conversations:
        prompt = maker.prompt(conversation(number))
        asked = [(key, maker.tag) for key in prompt.keys]
        there = [all(parts) for parts in zip(*(shard.exists(asked) for shard in shards[0]), strict=True)]
        found += (*there, False).index(False)
    return found / (len(conversations) * CONVERSATION_COLUMNS)
