"""What the supervisor decides, as a pure state machine: it reads no clock and starts nothing.

Feed it what happened (`on_…`, with the time), carry out the effects it returns. Services start when
all that they come after are ready, stop when all that come after them have stopped, and are started
again with growing pauses for as long as it takes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

BACKOFF_FIRST_SECONDS = 0.2
BACKOFF_SECONDS_MAX = 15.0
BACKOFF_DOUBLINGS_MAX = 16  # enough to reach the maximum; 2 ** failures would outgrow a float
STABLE_SECONDS = 30.0  # ready for so long, the next death counts as the first
STALL_SECONDS = 2.0  # ticks further apart than this: it was us who slept


class State(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DONE = "done"
    FAILED = "failed"


UP = (State.READY, State.DONE)
DOWN = (State.WAITING, State.BACKING_OFF, State.STOPPED, State.DONE, State.FAILED)


@dataclass(frozen=True)
class Spec:
    """How one service behaves.

    `once` is a step that has to succeed, not a process that stays.
    `attempts_max` deaths before it was ever ready are a failure of the whole stack; without it, and
    for everything that was ready once, there is always another attempt.
    `keeps_data` says that it is not to be killed just because somebody is in a hurry.
    """

    name: str
    after: tuple[str, ...] = ()
    once: bool = False
    attempts_max: int | None = None
    keeps_data: bool = False
    ready_seconds_max: float = 60.0
    watchdog_seconds: float | None = None
    stop_seconds_max: float = 15.0


class Deed(enum.StrEnum):
    SPAWN = "spawn"
    STOP = "stop"
    KILL = "kill"


@dataclass(frozen=True)
class Effect:
    deed: Deed
    name: str


@dataclass
class Service:
    """One service as it is now. `deadline` is when `on_tick` has something to do about it."""

    spec: Spec
    state: State = State.WAITING
    since: float = 0.0
    deadline: float = math.inf
    was_ready: bool = False
    failures: int = 0  # in a row, since it was last stable
    restarts: int = 0
    reason: str = ""  # of the last death
    killed_because: str = ""  # until that death is seen

    def enter(self, state: State, now: float, deadline: float = math.inf) -> None:
        self.state, self.since, self.deadline = state, now, deadline


class Supervision:
    """All services of one stack. `jitter` returns a factor around 1 for the pauses."""

    def __init__(self, specs: Iterable[Spec], jitter: Callable[[], float]) -> None:
        self.services: dict[str, Service] = {}
        for spec in specs:
            unknown = [name for name in spec.after if name not in self.services]
            if unknown:  # asking for this order also rules out circles
                sentence = f"{spec.name} comes after {unknown}, which must be listed before it"
                raise ValueError(sentence)
            self.services[spec.name] = Service(spec)
        self.stopping = False
        self._jitter = jitter
        self._before = {name: self._all_before(name) for name in self.services}
        self._ticked_at = 0.0

    @property
    def all_up(self) -> bool:
        return all(service.state in UP for service in self.services.values())

    @property
    def all_down(self) -> bool:
        return all(service.state in DOWN for service in self.services.values())

    @property
    def next_deadline(self) -> float:
        """When `on_tick` has something to do, unless something happens before."""
        return min((service.deadline for service in self.services.values()), default=math.inf)

    @property
    def failed(self) -> Service | None:
        """What had to succeed and did not: the stack can't come up."""
        found = (s for s in self.services.values() if s.state is State.FAILED)
        return next(found, None)

    def start(self, now: float) -> list[Effect]:
        """Begin: whatever comes after nothing is spawned."""
        self._ticked_at = now
        return self._spawn_what_may(now)

    def on_ready(self, name: str, now: float) -> list[Effect]:
        """It says that it is ready. Anything but a starting one is not asked."""
        service = self.services[name]
        if service.state is not State.STARTING or service.spec.once or service.killed_because:
            return []
        service.enter(State.READY, now, self._watchdog_deadline(service, now))
        service.was_ready = True
        return self._spawn_what_may(now)

    def on_alive(self, name: str, now: float) -> None:
        """It says that it is alive: the watchdog waits anew."""
        service = self.services[name]
        if service.state is State.READY and not service.killed_because:
            service.deadline = self._watchdog_deadline(service, now)

    def on_exit(self, name: str, how: str, now: float, *, success: bool = False) -> list[Effect]:
        """Its process has ended, by itself or by us; `how` says it in words."""
        service = self.services[name]
        service.reason = service.killed_because or how
        service.killed_because = ""
        if self.stopping:
            service.enter(State.STOPPED, now)
            return self._stop_what_may(now)
        if service.spec.once:
            service.enter(State.DONE if success else State.FAILED, now)
            return self._spawn_what_may(now)
        was_stable = service.state is State.READY and now - service.since >= STABLE_SECONDS
        service.failures = 1 if was_stable else service.failures + 1
        attempts_max = service.spec.attempts_max
        if not service.was_ready and attempts_max is not None and service.failures >= attempts_max:
            service.enter(State.FAILED, now)
            return []
        service.restarts += 1
        service.enter(State.BACKING_OFF, now, now + self._pause(service.failures))
        return []

    def on_tick(self, now: float) -> list[Effect]:
        """Time has passed: whoever is over its deadline is dealt with.

        Called several times a second. When it was not, then this process was what stood still (a
        suspended job, a stopped terminal), and nobody else is to blame: all deadlines move along.
        """
        slept, self._ticked_at = now - self._ticked_at, now
        if slept > STALL_SECONDS:
            for service in self.services.values():
                service.deadline += slept
        effects = []
        for service in self.services.values():
            if now >= service.deadline:
                effects += self._overdue(service, now)
        return effects

    def stop(self, now: float) -> list[Effect]:
        """Stop everything, the last first. Saying it again hurries: what keeps no data is killed."""
        if self.stopping:
            return [
                self._kill(service, "stopped in a hurry")
                for service in self.services.values()
                if service.state not in DOWN and not service.spec.keeps_data
            ]
        self.stopping = True
        for service in self.services.values():
            if service.state in (State.WAITING, State.BACKING_OFF):
                service.enter(State.STOPPED, now)
        return self._stop_what_may(now)

    def check_integrity(self) -> None:
        """What holds between any two events."""
        for service in self.services.values():
            waits = service.state in (State.STARTING, State.BACKING_OFF, State.STOPPING)
            watched = service.state is State.READY and service.spec.watchdog_seconds is not None
            if (waits or watched) and not service.killed_because:
                assert service.deadline < math.inf, service  # noqa: S101 - contracts, not input
            if service.state in DOWN and service.state is not State.BACKING_OFF:
                assert service.deadline == math.inf, service  # noqa: S101
            if service.state is State.WAITING:
                assert not self.stopping, service  # noqa: S101
                assert not self._may_start(service), service  # noqa: S101

    def _overdue(self, service: Service, now: float) -> list[Effect]:
        spec = service.spec
        match service.state:
            case State.BACKING_OFF:
                service.enter(State.WAITING, now)
                return self._spawn_what_may(now)
            case State.STARTING:
                return [self._kill(service, f"not ready within {spec.ready_seconds_max:g} s")]
            case State.READY:
                return [self._kill(service, f"silent for {spec.watchdog_seconds:g} s")]
            case State.STOPPING:
                return [self._kill(service, f"did not stop within {spec.stop_seconds_max:g} s")]
            case _:
                return []

    def _may_start(self, service: Service) -> bool:
        """Whether all that it comes after are up, directly or through others."""
        return all(self.services[name].state in UP for name in self._before[service.spec.name])

    def _spawn_what_may(self, now: float) -> list[Effect]:
        if self.stopping:
            return []
        effects = []
        for service in self.services.values():
            if service.state is State.WAITING and self._may_start(service):
                service.enter(State.STARTING, now, now + service.spec.ready_seconds_max)
                effects.append(Effect(Deed.SPAWN, service.spec.name))
        return effects

    def _stop_what_may(self, now: float) -> list[Effect]:
        effects = []
        for service in self.services.values():
            name = service.spec.name
            dependents = (o for o in self.services.values() if name in self._before[o.spec.name])
            if service.state in (State.STARTING, State.READY) and all(
                other.state in DOWN for other in dependents
            ):
                service.enter(State.STOPPING, now, now + service.spec.stop_seconds_max)
                effects.append(Effect(Deed.STOP, name))
        return effects

    def _kill(self, service: Service, because: str) -> Effect:
        """It stays in its state until its death is seen; a kill needs no repetition."""
        service.killed_because = because
        service.deadline = math.inf
        return Effect(Deed.KILL, service.spec.name)

    def _pause(self, failures: int) -> float:
        doublings = min(failures - 1, BACKOFF_DOUBLINGS_MAX)
        pause: float = min(BACKOFF_SECONDS_MAX, BACKOFF_FIRST_SECONDS * 2**doublings)
        return pause * self._jitter()

    def _all_before(self, name: str) -> frozenset[str]:
        direct = self.services[name].spec.after
        return frozenset(direct).union(*(self._all_before(other) for other in direct))

    @staticmethod
    def _watchdog_deadline(service: Service, now: float) -> float:
        seconds = service.spec.watchdog_seconds
        return now + seconds if seconds is not None else math.inf
