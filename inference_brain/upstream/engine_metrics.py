"""How busy an engine is that others use as well: what it says itself, on its Prometheus page.

Of a replica with a Tidegate driver a brain knows what all brains have sent there. Plain vLLM and SGLang
servers may have clients of their own, so they are asked: `GET /metrics`, every second. Names differ by
engine and version; those that are known are in `_NAMES`. What we have sent there is subtracted, so that
nothing counts twice.

    metrics = EngineMetrics(fetch, sent)
    metrics.follow({("m", "r1"): Target("http://10.0.0.1:8000/metrics", "vllm", served_as="m")})
    asking = asyncio.create_task(metrics.run())
    metrics.others(("m", "r1"))             # a Load
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, NamedTuple

from inference_brain.choice import Load
from inference_brain.choice.candidates import IDLE
from inference_brain.desired import TOKENS_MAX
from inference_brain.upstream.fleet import Replica
from kvss_agent.http.client.client import Client
from kvss_agent.http.client.failures import UpstreamFailed

log = logging.getLogger(__name__)

SECONDS: Final = 1.0  # between two readings of an engine
SECONDS_MAX: Final = 30.0  # of one that does not answer
ANSWER_SECONDS: Final = 2.0
FRESH_SECONDS: Final = 5.0  # after which a reading says nothing any more
AT_ONCE: Final = 32
PAGE_BYTES_MAX: Final = 4 << 20
REQUESTS_MAX: Final = 1_000_000  # more is no number of requests
PROMPT_TOKENS: Final = 1000.0  # of a waiting request, of which nothing is known

Key = tuple[str, str]  # model and replica
Fetch = Callable[[str, Mapping[str, str]], Awaitable[bytes]]  # raises OSError


class NotMetrics(ValueError):
    """A page that does not say how busy an engine is. A sentence."""


class Reading(NamedTuple):
    """What an engine says of itself. `kv_usage`: the share of its memory for caches that is in use;
    `prompt_tokens`: the mean of all its requests until now. None: it does not say, or says nonsense."""

    running: int
    waiting: int
    kv_usage: float | None = None
    prompt_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class _Names:
    """The first that is there counts: later ones are of other versions."""

    running: tuple[bytes, ...]
    waiting: tuple[bytes, ...]
    kv_usage: tuple[bytes, ...]
    tokens: tuple[bytes, ...]  # of all prompts
    requests: tuple[bytes, ...]


_NAMES: Final[Mapping[str, _Names]] = {
    "vllm": _Names(
        running=(b"vllm:num_requests_running",),
        waiting=(b"vllm:num_requests_waiting",),
        kv_usage=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        tokens=(b"vllm:request_prompt_tokens_sum",),
        requests=(b"vllm:request_prompt_tokens_count",),
    ),
    "sglang": _Names(
        running=(b"sglang:num_running_reqs",),
        waiting=(b"sglang:num_queue_reqs", b"sglang:num_waiting_reqs"),
        kv_usage=(b"sglang:token_usage",),
        tokens=(b"sglang:prompt_tokens_total",),
        requests=(b"sglang:num_requests_total",),
    ),
}
ENGINES: Final = frozenset(_NAMES)
_SAMPLE: Final = re.compile(
    rb"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?[ \t]+([^ \t]+)(?:[ \t]+-?\d+)?\s*$"
)
_LABEL: Final = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_RANKS: Final = (b"tp_rank", b"pp_rank")  # each repeats what the first has said


class _Sample(NamedTuple):
    model: str
    value: float


def parse(page: bytes, engine: str, served_as: str = "") -> Reading:
    """A page of Prometheus' text format. Where it names several models, only `served_as` counts; ranks
    of data parallelism are added up. Raises NotMetrics."""
    names = _NAMES[engine]
    found = _samples(page, {one for group in _groups(names) for one in group})

    def take(group: Iterable[bytes]) -> list[float] | None:
        samples = next((found[name] for name in group if name in found), None)
        if samples is None:
            return None
        ours = [one.value for one in samples if one.model == served_as]
        return ours or [one.value for one in samples]

    running, waiting = take(names.running), take(names.waiting)
    if running is None or waiting is None:
        raise NotMetrics(f"The page has no {names.running[0].decode()}.")
    usage, tokens, requests = take(names.kv_usage), take(names.tokens), take(names.requests)
    mean = _mean(tokens, requests) if tokens and requests else None
    return Reading(_count(running), _count(waiting), min(1.0, max(0.0, *usage)) if usage else None, mean)


def _groups(names: _Names) -> Iterable[tuple[bytes, ...]]:
    return names.running, names.waiting, names.kv_usage, names.tokens, names.requests


def _samples(page: bytes, wanted: set[bytes]) -> Mapping[bytes, list[_Sample]]:
    found: dict[bytes, list[_Sample]] = {}
    prefixes = tuple(wanted)
    for line in page.split(b"\n"):
        if not line.startswith(prefixes):
            continue
        matched = _SAMPLE.match(line)
        if matched is None or matched[1] not in wanted:
            continue
        labels = dict(_LABEL.findall(matched[2] or b""))
        if any(labels.get(rank, b"0") != b"0" for rank in _RANKS):
            continue
        try:
            value = float(matched[3])
        except ValueError:
            continue
        if math.isfinite(value):
            model = labels.get(b"model_name", b"").decode(errors="replace")
            found.setdefault(matched[1], []).append(_Sample(model, value))
    return found


def _count(values: Iterable[float]) -> int:
    return int(min(REQUESTS_MAX, sum(max(0.0, value) for value in values)))


def _mean(tokens: Sequence[float], requests: Sequence[float]) -> float | None:
    """Of each request. An engine may say anything, and one that says nonsense must not decide where
    requests to all others go."""
    of_all, count = sum(tokens), sum(requests)
    if min(*tokens, *requests) < 0.0 or not count or not math.isfinite(of_all + count):
        return None
    return min(of_all / count, float(TOKENS_MAX))


def of_others(reading: Reading, sent: int) -> Load:
    """The share of others, where `sent` of its requests are ours."""
    total = reading.running + reading.waiting
    theirs = max(0, total - sent)
    if not theirs:
        return IDLE
    waiting = round(reading.waiting * theirs / total)
    tokens = reading.prompt_tokens or PROMPT_TOKENS
    return Load(waiting * tokens, theirs - waiting, waiting)


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that is asked."""

    url: str
    engine: str
    served_as: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def targets(replicas: Iterable[Replica]) -> Mapping[Key, Target]:
    """Those that have no driver, of which brains would know, and that say something."""
    return {
        (one.model, one.name): Target(
            one.url("/metrics"),
            one.spec.engine,
            one.served_as,
            {"authorization": f"Bearer {one.spec.api_key}"} if one.spec.api_key else {},
        )
        for one in replicas
        if one.spec.driver is None and one.spec.engine in ENGINES and one.spec.url
    }


def fetching(client: Client) -> Fetch:
    """Over the connections that a brain has to its replicas anyway."""

    async def fetch(url: str, headers: Mapping[str, str]) -> bytes:
        try:
            async with client.open("GET", url, headers, seconds=ANSWER_SECONDS) as answer:
                page = await asyncio.wait_for(answer.whole(PAGE_BYTES_MAX), ANSWER_SECONDS)
        except (UpstreamFailed, TimeoutError) as error:
            raise OSError(str(error) or "It does not answer in time.") from None
        if answer.status != HTTPStatus.OK:
            raise OSError(f"Its page of metrics answers with status {answer.status}.")
        return page

    return fetch


@dataclass(slots=True)
class _Engine:
    target: Target
    due: float
    reading: Reading | None = None
    theirs: Load = IDLE  # by the last reading, and the one before: the smaller one counts
    before: Load = IDLE
    at: float = -math.inf
    failures: int = 0
    problem: str = ""
    is_asked: bool = False


class EngineMetrics:
    """Asks engines how busy they are, for as long as `run` runs. Used from one event loop."""

    def __init__(
        self,
        fetch: Fetch,
        sent: Callable[[Key], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`sent`: how many of an engine's requests are of our brains, now."""
        self._fetch = fetch
        self._sent = sent
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - when somebody is asked is no secret
        self._engines: dict[Key, _Engine] = {}

    def follow(self, targets: Mapping[Key, Target]) -> None:
        """Ask these, and no others. What is known of those that stay is kept."""
        now, before = self._clock(), self._engines
        self._engines = {
            key: known
            if (known := before.get(key)) and known.target == target
            else _Engine(target, due=now + self._rng.random() * SECONDS)
            for key, target in targets.items()
        }

    def others(self, key: Key) -> Load:
        """What others have sent there. Nothing, where that is not known or too old."""
        engine = self._engines.get(key)
        if engine is None or self._clock() - engine.at > FRESH_SECONDS:
            return IDLE
        return engine.theirs

    def reading(self, key: Key) -> Reading | None:
        """The last one, whatever its age."""
        engine = self._engines.get(key)
        return engine.reading if engine else None

    def age(self, key: Key) -> float | None:
        """Seconds since it has last said something; None if it never did."""
        engine = self._engines.get(key)
        return None if engine is None or engine.reading is None else self._clock() - engine.at

    def problem(self, key: Key) -> str:
        """Why it says nothing, in a sentence; empty while it does."""
        engine = self._engines.get(key)
        return engine.problem if engine else ""

    async def run(self) -> None:
        """Until it is cancelled. An engine that is slow keeps no other waiting."""
        async with asyncio.TaskGroup() as asking:
            while True:
                for key, engine in self._due():
                    asking.create_task(self._ask(key, engine))
                await asyncio.sleep(SECONDS / 10)

    async def ask_due(self) -> None:
        """Those whose time has come, once."""
        await asyncio.gather(*(self._ask(key, engine) for key, engine in self._due()))

    def _due(self) -> list[tuple[Key, _Engine]]:
        """From now on they are being asked."""
        now = self._clock()
        free = AT_ONCE - sum(one.is_asked for one in self._engines.values())
        due = [one for one in self._engines.items() if not one[1].is_asked and one[1].due <= now]
        chosen = sorted(due, key=lambda one: one[1].due)[:free]
        for _, engine in chosen:
            engine.is_asked = True
        return chosen

    async def _ask(self, key: Key, engine: _Engine) -> None:
        target = engine.target
        try:
            page = await self._fetch(target.url, target.headers)
            reading = parse(page, target.engine, target.served_as)
        except (OSError, NotMetrics) as error:
            engine.failures += 1
            wait = min(SECONDS_MAX, SECONDS * 2**engine.failures)
            if not engine.problem:
                log.warning("Replica %s of %s does not say how busy it is: %s", key[1], key[0], error)
            engine.problem = str(error) or "It does not answer."
        else:
            theirs = of_others(reading, self._sent(key))
            engine.theirs, engine.before = _smaller(theirs, engine.before), theirs
            engine.reading, engine.at = reading, self._clock()
            engine.failures, engine.problem, wait = 0, "", SECONDS
        finally:
            engine.is_asked = False
        engine.due = self._clock() + wait * (0.75 + self._rng.random() / 2)


def _smaller(one: Load, other: Load) -> Load:
    """Requests of ours that have just come or gone look like others' for the length of a reading."""
    return min(one, other, key=lambda load: load.running + load.waiting)
