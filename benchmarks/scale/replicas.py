"""Emulated replicas: engines with a timing, and a cache each whose map is reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.routing.timing import Engine, Work
from benchmarks.scale.cache import WALL, Cache, Chunks, log_of
from benchmarks.scale.sizes import CHUNK_TOKENS, Model
from benchmarks.scale.traffic import Ask
from swdriver_shim.cache_map.codec import CHUNK
from swdriver_shim.keys import Keys


@dataclass(slots=True, eq=False)
class Job:
    """A request at a replica. `cached`: tokens of its prompt that are in memory; `new`: chunks that are
    being evicted."""

    ask: Ask
    sent: float
    brain: int = 0
    chunks: Chunks = field(default_factory=list)
    new: Chunks = field(default_factory=list)
    cached: int = 0


class Replica:
    """`cut`: its agents can't be reached, so it neither hits nor stores."""

    def __init__(
        self, number: int, name: str, model: Model, columns: int, makers: list[Keys], told: Told
    ) -> None:
        self.number, self.name, self.model = number, name, model
        self.cache = Cache(columns // CHUNK)
        self.follower, self.log = log_of(self.cache, makers)
        self.engine = Engine(model.timing, _cached, self._first, self._last)
        self.jobs: dict[int, Job] = {}  # without a last token
        self.cut = False
        self.is_lost = False
        self._told = told

    def fill(self, org: int, chunks: Chunks) -> None:
        """It is stored at once, before anything is measured."""
        self.cache.match(org, chunks)
        self.cache.finish_store(org, chunks, self.cache.begin_store(org, chunks))

    def accept(self, job: Job) -> int:
        """Returns the tokens to refill before the engine gets it."""
        self.jobs[job.ask.number] = job
        if not self.cut:
            hit = self.cache.match(job.ask.org, job.chunks) * CHUNK_TOKENS
            job.cached = min(hit, job.ask.tokens - 1)
        return job.cached

    def refilled(self, job: Job, now: float) -> None:
        """All that is cached is there."""
        self.engine.arrive(Work(job.ask.tokens, job.ask.answer, now, tag=job), now)

    def begin_store(self, job: Job) -> int:
        """Returns the tokens to evict."""
        if not self.cut:
            job.new = self.cache.begin_store(job.ask.org, job.chunks)
        return len(job.new) * CHUNK_TOKENS

    def stored(self, job: Job, *, failed: bool = False) -> None:
        self.cache.finish_store(job.ask.org, job.chunks, job.new, failed=failed)
        job.new = []

    def messages(self, now: float) -> list[bytes]:
        self.follower.serves = not self.cut
        return self.log.write(now, now + WALL).messages

    def _first(self, work: Work, now: float) -> None:
        self._told.first.append((self.number, job_of(work), now))

    def _last(self, work: Work, now: float) -> None:  # noqa: ARG002
        self._told.last.append((self.number, job_of(work)))


class Told:
    """First and last tokens of a step, with the number of their replica."""

    def __init__(self) -> None:
        self.first: list[tuple[int, Job, float]] = []
        self.last: list[tuple[int, Job]] = []


def job_of(work: Work) -> Job:
    assert isinstance(work.tag, Job)
    return work.tag


def _cached(work: Work, now: float) -> int:  # noqa: ARG001 - it was found out on arrival
    return job_of(work).cached
