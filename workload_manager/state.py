"""What an instance does next: pure. Facts and the time go in, orders come out.

    pending → compiling → loading → starting → standby → ready → draining → gone

What has to be prepared is prepared once; then the engine runs, and is started again when it ends. It is
ready once it answers and its cache is where it should be. From then on the state of the cache does not
matter: an engine that has given its cache away still serves. After a crash of the engine, all of that
comes anew. Draining is final.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from swdriver_shim.adapters.handover import CacheState
from telemetry.units import duration

AGAIN_SECONDS: Final = 1.0  # after the first end of the engine; then twice as long each time, up to
AGAIN_SECONDS_MAX: Final = 60.0
HEALTHY_SECONDS: Final = 120.0  # after so long the next end is again the first
SILENT_PROBES: Final = 3  # in a row: it is not ready any more
SILENT_PROBES_MAX: Final = 12  # then it is ended, and started again
WARM_SECONDS: Final = 30.0  # for shards that the driver takes over, at most
# For the end of the engine, which leaves its driver's note. vLLM waits up to 9 s for its workers first.
STOP_SECONDS_MAX: Final = 30.0
STOP_PART_MAX: Final = 0.4  # of the grace period
SENTENCE_CHARACTERS_MAX: Final = 1000


class State(StrEnum):
    PENDING = "pending"
    COMPILING = "compiling"
    LOADING = "loading"
    STARTING = "starting"
    STANDBY = "standby"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class Goal(StrEnum):
    """As the Cluster Server says it."""

    RUN = "RUN"
    RELEASE_CACHE = "RELEASE_CACHE"
    DRAIN = "DRAIN"


# Facts


@dataclass(frozen=True, slots=True)
class GoalSet:
    goal: Goal


@dataclass(frozen=True, slots=True)
class Preparing:
    """A step of what comes before the engine: compiling, loading."""

    state: State
    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """All is there that the engine needs."""


@dataclass(frozen=True, slots=True)
class NotPrepared:
    """It failed, and is tried again."""

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    run: int


@dataclass(frozen=True, slots=True)
class EngineSilent:
    """It did not answer a probe in time. `stranger`: who did in its place, in a sentence."""

    run: int
    stranger: str = ""


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """All of its processes are gone. `sentence`: how, and what it said last."""

    run: int
    sentence: str


@dataclass(frozen=True, slots=True)
class CacheSeen:
    """What the driver in the engine says. `settled`: what it takes over is there."""

    run: int
    cache: CacheState
    settled: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RequestsRunning:
    count: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


Fact: TypeAlias = (
    GoalSet
    | Preparing
    | Prepared
    | NotPrepared
    | EngineAnswers
    | EngineSilent
    | EngineEnded
    | CacheSeen
    | RequestsRunning
    | TimePassed
)


# Orders


@dataclass(frozen=True, slots=True)
class Prepare:
    """Begin to prepare, from the start."""


@dataclass(frozen=True, slots=True)
class StopPreparing:
    pass


@dataclass(frozen=True, slots=True)
class StartEngine:
    """`run` is its number from here on."""

    run: int


@dataclass(frozen=True, slots=True)
class EndEngine:
    """`kill`: at once, all of its processes; else it is asked to end. `EngineEnded` follows."""

    run: int
    kill: bool


@dataclass(frozen=True, slots=True)
class HoldCache:
    """Tell the driver in the engine to be the driver, or to let go."""

    attach: bool


Order: TypeAlias = Prepare | StopPreparing | StartEngine | EndEngine | HoldCache


@dataclass(frozen=True, slots=True)
class Rules:
    """`has_cache`: the engine has a driver, for which readiness waits."""

    has_cache: bool
    start_seconds: float
    grace_seconds: float

    @property
    def stop_seconds(self) -> float:
        """What of the grace period is kept for the engine's own end."""
        return min(STOP_SECONDS_MAX, self.grace_seconds * STOP_PART_MAX)


@dataclass(slots=True)
class Engine:
    """A process of the engine, from its start to its end."""

    run: int
    started_at: float
    answers_since: float | None = None
    silent_probes: int = 0
    stranger: str = ""  # who answers in its place
    was_ready: bool = False
    settled_at: float | None = None  # since when it is the driver
    ends_why: tuple[str, str] | None = None  # it was told to end, and why
    kill_at: float | None = None
    is_killed: bool = False


@dataclass(slots=True)
class Instance:
    """One instance, from its manager's start to its end. All times are of one clock."""

    rules: Rules
    now: float
    state: State = State.PENDING
    reason: str = "Created"
    sentence: str = "It has not begun yet."
    since: float = 0.0
    goal: Goal = Goal.RUN
    cache: CacheState | None = None  # None: it has none, or nothing is known of it
    restarts: int = 0
    running: int = 0
    engine: Engine | None = None
    again_at: float | None = None  # when to prepare, or to start the engine, again
    _is_prepared: bool = False
    _failures: int = 0  # in a row
    _runs: int = 0
    _drain_until: float = 0.0  # then what runs is cut off
    _gone_until: float = 0.0  # then all is killed
    _cache_settled: bool = False
    _cache_problem: str = ""
    _orders: list[Order] = field(default_factory=list)

    def begin(self) -> list[Order]:
        self.since = self.now
        self._orders.append(Prepare())
        return self._take()

    @property
    def answers(self) -> bool:
        """Whether requests can be passed on to the engine."""
        return self.engine is not None and self.engine.answers_since is not None

    @property
    def takes_requests(self) -> bool:
        is_to_end = self.engine is not None and self.engine.ends_why is not None
        return self.answers and not is_to_end and self.state is not State.DRAINING

    def next_look(self) -> float | None:
        """When `TimePassed` is due."""
        times = [self.again_at]
        engine = self.engine
        if engine and engine.ends_why is not None:
            times.append(engine.kill_at)
        elif engine and self.state is State.DRAINING:
            times.append(self._drain_until)
        elif engine and engine.answers_since is None:
            times.append(engine.started_at + self.rules.start_seconds)
        elif engine and engine.settled_at is not None and not engine.was_ready:
            times.append(engine.settled_at + WARM_SECONDS)
        return min((at for at in times if at is not None), default=None)

    def take(self, fact: Fact, now: float) -> list[Order]:
        """Learn this fact. Returns what is to be done, in this order."""
        self.now = max(self.now, now)
        if self.state is State.GONE:
            return []
        match fact:
            case GoalSet(goal):
                self._set_goal(goal)
            case Preparing(state, reason, sentence):
                if not self._is_prepared and self.state is not State.DRAINING:
                    self._now(state, reason, sentence)
            case Prepared():
                self._prepared()
            case NotPrepared(reason, sentence):
                self._not_prepared(reason, sentence)
            case RequestsRunning(count):
                self.running = count
            case TimePassed():
                pass
            case _ if self.engine is None or fact.run != self.engine.run:
                return []  # of an engine that is gone
            case EngineAnswers():
                self._answered(self.engine)
            case EngineSilent():
                self._silent(self.engine, fact.stranger)
            case EngineEnded(_, sentence):
                self._ended(self.engine, sentence)
            case CacheSeen():
                self.cache, self._cache_problem = fact.cache, fact.problem
                self._cache_settled = fact.settled
        self._go_on()
        return self._take()

    # Facts

    def _set_goal(self, goal: Goal) -> None:
        if goal is self.goal or self.goal is Goal.DRAIN:
            return
        self.goal = goal
        if goal is Goal.DRAIN:
            self._gone_until = self.now + self.rules.grace_seconds
            self._drain_until = self._gone_until - self.rules.stop_seconds
            self.again_at = None
            self._orders.append(StopPreparing())
            self._now(
                State.DRAINING, "Draining", "It finishes the requests that run, and takes no new ones."
            )
        elif self.rules.has_cache:
            self._orders.append(HoldCache(attach=goal is Goal.RUN))

    def _prepared(self) -> None:
        if not self._is_prepared and self.state is not State.DRAINING:
            self._is_prepared, self._failures = True, 0
            self._start()

    def _not_prepared(self, reason: str, sentence: str) -> None:
        if self._is_prepared or self.state is State.DRAINING:
            return
        seconds = self._back_off()
        self._now(State.PENDING, reason, f"{sentence} It is tried again in {duration(seconds)}.")

    def _answered(self, engine: Engine) -> None:
        engine.silent_probes = 0
        if engine.answers_since is None:
            engine.answers_since = self.now

    def _silent(self, engine: Engine, stranger: str) -> None:
        if engine.answers_since is None:
            engine.stranger = stranger
            return  # it is still starting, for which it has its own time
        engine.silent_probes += 1
        if engine.silent_probes >= SILENT_PROBES_MAX and engine.ends_why is None:
            self._end(engine, "EngineSilent", "The engine has stopped answering.", kill=True)

    def _ended(self, engine: Engine, sentence: str) -> None:
        self.engine, self.cache = None, None
        self._cache_settled, self._cache_problem = False, ""
        if self.state is State.DRAINING:
            return
        if engine.answers_since is not None and self.now - engine.answers_since >= HEALTHY_SECONDS:
            self._failures = 0
        reason, why = engine.ends_why or ("EngineEnded", sentence)
        self.restarts += 1
        seconds = self._back_off()
        self._now(State.STARTING, reason, f"{why} It is started again in {duration(seconds)}.")

    # What follows

    def _go_on(self) -> None:
        if self.state is State.DRAINING:
            self._drain()
            return
        if self.again_at is not None and self.now >= self.again_at:
            self.again_at = None
            if self._is_prepared:
                self._start()
            else:
                self._orders.append(Prepare())
        if self.engine:
            self._follow(self.engine)

    def _follow(self, engine: Engine) -> None:
        self._kill_if_late(engine)
        if engine.ends_why is not None:
            return
        if engine.answers_since is None:
            if self.now >= engine.started_at + self.rules.start_seconds:
                seconds = duration(self.rules.start_seconds)
                why = f"The engine did not answer within {seconds} of its start. {engine.stranger}"
                self._end(engine, "StartTooSlow", why.rstrip(), kill=True)
            elif engine.stranger:
                self._now(State.STARTING, "PortTaken", engine.stranger)
            elif self.reason == "PortTaken":
                self._now_starting()
            return
        if engine.silent_probes >= SILENT_PROBES:
            self._now(State.STARTING, "EngineSilent", "The engine does not answer.")
        elif engine.was_ready or not self.rules.has_cache:
            self._ready(engine, "Serving", "It serves.")
        else:
            self._wait_for_cache(engine)

    def _wait_for_cache(self, engine: Engine) -> None:
        if self.cache is CacheState.RELEASED and self.goal is Goal.RELEASE_CACHE:
            self._ready(engine, "CacheReleased", "It serves without a cache, as it was told to.")
        elif self.cache is not CacheState.ATTACHED:
            engine.settled_at = None
            problem = self._cache_problem
            self._now(
                State.STANDBY,
                "DriverFailed" if problem else "WaitingForCache",
                f"The driver can't start: {problem}"
                if problem
                else "The engine answers, and waits for its cache: its driver is being started, or "
                "another instance still has the cache.",
            )
        elif self._cache_settled:
            self._ready(engine, "Serving", "It serves, with its cache.")
        else:
            engine.settled_at = self.now if engine.settled_at is None else engine.settled_at
            if self.now >= engine.settled_at + WARM_SECONDS:
                seconds = duration(WARM_SECONDS)
                why = f"It serves, though its shards could not be opened within {seconds}."
                self._ready(engine, "CacheNotReady", why)
            else:
                self._now(State.STANDBY, "OpeningShards", "The driver takes over its shards.")

    def _ready(self, engine: Engine, reason: str, sentence: str) -> None:
        if self.state is not State.READY:
            self._now(State.READY, reason, sentence)
        engine.was_ready = True

    def _drain(self) -> None:
        engine = self.engine
        if engine is None:
            self._now(State.GONE, "Drained", "It has ended.")
            return
        is_late = self.now >= self._drain_until
        if engine.ends_why is None and (not self.running or not self.answers or is_late):
            if self.running:
                cut = f"{self.running} requests are cut off after {duration(self.rules.grace_seconds)}."
                self._now(State.DRAINING, "CutOff", cut)
            self._end(engine, "Drained", "It was drained.", kill=False)
        self._kill_if_late(engine)

    # Orders

    def _start(self) -> None:
        self._runs += 1
        self.engine = Engine(self._runs, self.now)
        if self.rules.has_cache:
            self._orders.append(HoldCache(attach=self.goal is Goal.RUN))
        self._orders.append(StartEngine(self._runs))
        self._now_starting()

    def _now_starting(self) -> None:
        self._now(State.STARTING, "EngineStarting", "The engine is starting.")

    def _end(self, engine: Engine, reason: str, sentence: str, *, kill: bool) -> None:
        engine.ends_why = reason, sentence
        if kill:
            engine.is_killed = True
        else:
            engine.kill_at = min(self.now + self.rules.stop_seconds, self._gone_until)
        self._orders.append(EndEngine(engine.run, kill=kill))

    def _kill_if_late(self, engine: Engine) -> None:
        if engine.kill_at is not None and self.now >= engine.kill_at and not engine.is_killed:
            engine.is_killed, engine.kill_at = True, None
            self._orders.append(EndEngine(engine.run, kill=True))

    def _back_off(self) -> float:
        """How long to wait before the next try, which is due then."""
        seconds: float = min(AGAIN_SECONDS * 2 ** min(self._failures, 16), AGAIN_SECONDS_MAX)
        self._failures += 1
        self.again_at = self.now + seconds
        return seconds

    def _now(self, state: State, reason: str, sentence: str) -> None:
        sentence = sentence[:SENTENCE_CHARACTERS_MAX]
        if (state, reason) != (self.state, self.reason):
            self.since = self.now
        self.state, self.reason, self.sentence = state, reason, sentence

    def _take(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders
