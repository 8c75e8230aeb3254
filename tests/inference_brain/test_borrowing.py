"""A prompt that another replica's driver has in memory: the request goes there, or the bytes come."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from inference_brain import metrics
from inference_brain.choice import Asked, Candidate, Rates, Regret, choose
from inference_brain.decisions import CandidateEstimate, RequestRecord
from inference_brain.desired import DriverSpec, ReplicaSpec, ServedModel
from inference_brain.outbound import Claims
from inference_brain.recalls import AGAIN_SECONDS, PENDING_MAX, TOKENS_MIN, Recalls, Result
from swdriver_shim.adapters.claims import Claim, ClaimVerifier
from swdriver_shim.cache_map.codec import (
    IN_TIER2,
    NAME_BYTES,
    SPACE_BYTES,
    Message,
    Section,
    entry,
    pack_values,
)
from swdriver_shim.cache_map.recalls import RecallRequest, decode
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.policy import AS_USUAL
from tests.inference_brain.brains import SECRET, RunningBrain, post, told
from tests.inference_brain.engines import FakeEngine
from tests.inference_brain.map_worlds import model_of
from tests.live import wait_until
from tests.swdriver_shim.prompts import FULL, HYBRID

MODEL = model_of(FULL)
COLUMNS = 320  # whose prompt takes seconds to compute
TOKENS = list(range(COLUMNS * COLUMN_TOKENS))
PROMPT = Keys("acme", SECRET, MODEL.namespace()).prompt(TOKENS)


@dataclass
class Recorded:
    """What drivers are asked for."""

    borrowed: list[tuple[str, Prompt, int, int, str]] = field(default_factory=list)
    recalled: list[tuple[str, Prompt, int, int]] = field(default_factory=list)

    def borrow(self, *what: Any) -> None:
        self.borrowed.append(what)

    def ask(self, *what: Any) -> None:
        self.recalled.append(what)

    async def close(self) -> None:
        pass


def report(columns: int, *, serves: bool = True, flags: int = 0) -> bytes:
    """The map of a driver that has so many columns of the prompt."""
    now, keys = time.time(), PROMPT.keys[7:columns:8]
    space = PROMPT.maker.tag + MODEL.namespace().digest()[:SPACE_BYTES]
    values = pack_values([entry(now + 600, flags)] * len(keys), int(now))
    section = Section(space, 0, b"".join(key[:NAME_BYTES] for key in keys), values)
    sections = (section,) if keys else ()
    return Message(1, b"l" * 8, 1, now, int(now), serves, 0, 1, sections=sections).encode()


@dataclass
class Two:
    """Two replicas, r0 and r1, with drivers d0 and d1. `asked`: what brains ask drivers for."""

    running: RunningBrain
    engines: Sequence[FakeEngine]
    asked: Recorded = field(default_factory=Recorded)

    def set_maps(self, *reports: bytes) -> None:
        def read() -> None:
            self.running.brain.router.recalls = self.asked  # type: ignore[assignment]
            for number, raw in enumerate(reports):
                mirror = self.running.brain.maps.mirror(f"d{number}")
                assert mirror
                assert mirror.read(raw, time.monotonic())

        self.running.call(read)

    def set_busy(self, replica: str, tokens: int = 200_000) -> None:
        """By a request with so many tokens, that has no answer yet."""
        router = self.running.brain.router
        choice = choose(Asked(tokens), [Candidate(replica, Rates())], 0.0, random.Random(1))

        def begin() -> None:
            router.flights["m"].begin(f"busy {replica}", choice, time.monotonic())

        self.running.call(begin)

    def ask(self, tokens: Sequence[int] = TOKENS) -> RequestRecord:
        running = self.running
        answer = post(
            f"{running.url}/v1/completions",
            headers=running.headers,
            json={"model": "m", "prompt": tokens, "max_tokens": 3},
        )
        assert answer.status_code == 200
        record = running.call(lambda: running.brain.find(answer.headers["x-request-id"]))
        assert record
        return record


@contextmanager
def two(
    siblings: Sequence[str] = ("d0", "d1"),
    models: Sequence[ModelSpec] = (MODEL, MODEL),
    claims_key: bytes | None = None,
) -> Iterator[Two]:
    with FakeEngine() as one, FakeEngine() as other:
        replicas = tuple(
            ReplicaSpec(
                f"r{number}",
                engine.url,
                driver=DriverSpec(f"d{number}", model, claims_key, tuple(siblings)),
            )
            for number, (engine, model) in enumerate(zip((one, other), models, strict=True))
        )
        with RunningBrain(told([], models=(ServedModel("m", 100_000, replicas),))) as running:
            yield Two(running, (one, other))


def of(record: RequestRecord, replica: str) -> CandidateEstimate:
    return next(one for one in record.candidates if one.replica == replica)


def test_the_request_goes_to_an_idle_sibling_and_nothing_is_borrowed() -> None:
    with two() as pair:
        pair.set_maps(report(COLUMNS), report(0))
        record = pair.ask()
    assert record.chosen == "r0"
    assert pair.asked == Recorded()
    there, elsewhere = of(record, "r0"), of(record, "r1")
    assert (there.hit_tokens, there.sibling_tokens, there.sibling) == (len(TOKENS), 0, "")
    assert (elsewhere.hit_tokens, elsewhere.sibling_tokens) == (len(TOKENS), len(TOKENS))
    assert elsewhere.sibling == "d0"
    assert elsewhere.fetching_seconds > there.fetching_seconds


def test_from_a_busy_sibling_the_bytes_come_before_the_request_is_sent() -> None:
    with two() as pair:
        pair.set_maps(report(COLUMNS), report(64))
        pair.set_busy("r0")
        pair.engines[1].behavior.cached_tokens = len(TOKENS)
        record = pair.ask()
        counts = pair.running.brain.counts
        predicted = pair.running.call(lambda: counts.total(metrics.PREDICTED_HIT))
    assert record.chosen == "r1"
    [(driver, prompt, hit, lent, sibling)] = pair.asked.borrowed
    assert (driver, prompt.keys, sibling) == ("d1", PROMPT.keys, "d0")
    assert (hit, lent) == (64 * COLUMN_TOKENS, (COLUMNS - 64) * COLUMN_TOKENS)
    assert pair.asked.recalled == []
    estimate = of(record, "r1")
    assert (estimate.hit_tokens, estimate.sibling_tokens) == (len(TOKENS), lent)
    assert record.why.endswith("It borrows 16,384 tokens of the prompt from d0.")
    assert predicted == len(TOKENS)
    assert record.regret == {}


@pytest.mark.parametrize("sibling", ["d0", ""], ids=["another one is busy", "both are idle"])
def test_a_claim_names_the_sibling_so_that_nobody_else_need_be_sooner(sibling: str) -> None:
    key = b"a key that brains and drivers share"
    with two(claims_key=key) as pair:
        pair.set_maps(report(COLUMNS), report(64))
        if sibling:
            pair.set_busy("r0")
        record = pair.ask()
        number = int(record.chosen.removeprefix("r"))
        [sent] = pair.engines[number].asked
        counts = pair.running.brain.counts
        asked = pair.running.call(lambda: counts.total(metrics.BORROWS))
    claim = ClaimVerifier(key, f"d{number}").verify(sent.body["kv_transfer_params"]["tidegate"])
    assert claim == Claim("acme", sibling=sibling)
    assert asked == bool(sibling)
    assert pair.asked == Recorded()


def test_the_claim_of_another_attempt_names_the_sibling_of_its_own_replica() -> None:
    key = b"a key that brains and drivers share"
    with two(claims_key=key) as pair:
        pair.set_maps(report(COLUMNS), report(64))
        pair.engines[0].behavior.status = 503
        assert pair.ask().chosen == "r1"
        sent = [engine.asked[0].body["kv_transfer_params"]["tidegate"] for engine in pair.engines]
    assert ClaimVerifier(key, "d0").verify(sent[0]) == Claim("acme")
    assert ClaimVerifier(key, "d1").verify(sent[1]) == Claim("acme", sibling="d0")


def test_a_claim_is_used_again_for_the_same_sibling_only() -> None:
    key = b"a key that brains and drivers share"
    claims, driver = Claims(), DriverSpec("d1", MODEL, key)
    named = ["", "d0", "d2", "", "d0", "d2"]
    made = [claims.mint(driver, "acme", AS_USUAL, time.time(), sibling) for sibling in named]
    assert made[:3] == made[3:]
    verifier = ClaimVerifier(key, "d1")
    assert [verifier.verify(one) for one in made] == [Claim("acme", sibling=one) for one in named]


def test_what_a_sibling_did_not_lend_in_time_is_told_apart() -> None:
    with two() as pair:
        pair.set_maps(report(COLUMNS), report(64))
        pair.set_busy("r0")
        pair.engines[1].behavior.cached_tokens = 64 * COLUMN_TOKENS
        record = pair.ask()
    assert record.regret == {Regret.NOT_LENT: (COLUMNS - 64) * COLUMN_TOKENS}


def test_while_it_waits_its_driver_is_asked_as_well() -> None:
    """And again when it is sent, which `Recalls` does not repeat."""
    with two() as pair:
        pair.set_maps(report(COLUMNS), report(0))
        pair.set_busy("r0")
        engine = pair.engines[1]
        engine.behavior.is_held = True
        with ThreadPoolExecutor(3) as asking:
            others = [asking.submit(pair.ask, [each] * 90_000) for each in range(2)]
            wait_until("the replica is busy", lambda: engine.now_running == len(others))
            waiting = asking.submit(pair.ask)
            wait_until("its driver is asked", lambda: pair.asked.borrowed)
            assert engine.now_running == len(others), "it is not sent yet"
            engine.behavior.is_held = False
        record = waiting.result()
    assert record.chosen == "r1"
    ahead, sent = pair.asked.borrowed
    assert ahead == sent
    assert ahead[0] == "d1"
    assert pair.asked.recalled == []


@pytest.mark.parametrize(
    ("siblings", "models", "reports"),
    [
        ((), (MODEL, MODEL), (report(COLUMNS), report(0))),
        (("d0", "d1"), (MODEL, model_of(HYBRID)), (report(COLUMNS), report(0))),
        (("d0", "d1"), (MODEL, MODEL), (report(COLUMNS, flags=IN_TIER2), report(0))),
        (("d0", "d1"), (MODEL, MODEL), (report(COLUMNS, serves=False), report(0))),
        (("d0", "d1"), (MODEL, MODEL), (report(COLUMNS), report(0, serves=False))),
        (("d0", "d1"), (MODEL, MODEL), (report(COLUMNS),)),
        (("d0", "d1"), (MODEL, MODEL), (report(8), report(0))),
    ],
    ids=["not permitted", "layout", "tier 2", "lender", "borrower", "no map", "too few"],
)
def test_nothing_is_borrowed_where_it_can_not_be_or_is_not_worth_it(
    siblings: Sequence[str], models: Sequence[ModelSpec], reports: Sequence[bytes]
) -> None:
    with two(siblings, models) as pair:
        pair.set_maps(*reports)
        pair.set_busy("r0")
        record = pair.ask()
    assert record.chosen == "r1"
    assert not any(one.sibling or one.sibling_tokens for one in record.candidates)
    assert pair.asked.borrowed == []


# What drivers are sent


class Stream:
    """Takes what is added in place of Redis."""

    def __init__(self) -> None:
        self.requests: list[RecallRequest] = []

    async def xadd(self, _stream: str, fields: dict[Any, bytes], **_options: object) -> None:
        self.requests += map(decode, fields.values())

    async def aclose(self) -> None:
        pass


class Asker:
    def __init__(self) -> None:
        self.stream = Stream()
        self.counted = Counter[str]()
        self.now = 0.0
        self.recalls = Recalls(
            "redis://nowhere",
            lambda result: self.counted.update([f"recall {result}"]),
            lambda result: self.counted.update([f"borrow {result}"]),
            clock=lambda: self.now,
        )
        self.recalls._redis = self.stream  # type: ignore[assignment]


@pytest.fixture
async def asker() -> AsyncIterator[Asker]:
    made = Asker()
    yield made
    await made.recalls.close()


async def test_a_request_to_borrow_names_the_sibling_and_the_columns(asker: Asker) -> None:
    asker.recalls.borrow("job", PROMPT, 64, TOKENS_MIN - 64, "other")  # too few
    asker.recalls.borrow("job", PROMPT, 640, TOKENS_MIN, "other")
    asker.recalls.ask("job", PROMPT, 640, TOKENS_MIN)
    await asyncio.sleep(0)
    borrow, recall = asker.stream.requests
    assert (borrow.sibling, recall.sibling) == ("other", "")
    assert borrow.keys == recall.keys == b"".join(PROMPT.keys[:26])
    assert borrow.space == PROMPT.maker.tag + MODEL.namespace().digest()[:SPACE_BYTES]
    await asyncio.sleep(0)
    assert asker.counted == {f"borrow {Result.ASKED}": 1, f"recall {Result.ASKED}": 1}


async def test_a_prompt_is_borrowed_once_in_a_while_by_a_driver(asker: Asker) -> None:
    for driver in ("job", "job", "other"):
        asker.recalls.borrow(driver, PROMPT, 0, len(TOKENS), "third")
    asker.now = AGAIN_SECONDS
    asker.recalls.borrow("job", PROMPT, 0, len(TOKENS), "third")
    await asyncio.sleep(0)
    assert len(asker.stream.requests) == 3
    assert asker.counted[f"borrow {Result.REPEATED}"] == 1


async def test_recalls_and_borrows_are_bounded_together(asker: Asker) -> None:
    for number in range(PENDING_MAX):
        asker.recalls.ask(f"job{number}", PROMPT, 0, len(TOKENS))
    asker.recalls.borrow("job", PROMPT, 0, len(TOKENS), "other")
    assert asker.counted == {f"borrow {Result.TOO_MANY}": 1}
