"""What the supervisor decides, as a pure state machine: it reads no clock and starts nothing.

Feed it what happened (`on_…`, with the time), carry out the effects it returns. Services start when
all that they come after are ready, stop when all that come after them have stopped, and are started
again with growing pauses for as long as it takes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

BACKOFF_FIRST_SECONDS = 0.2
BACKOFF_SECONDS_MAX = 15.0
STABLE_SECONDS = 30.0  # ready for so long, the next death counts as the first


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
    """How one service behaves. `once` is a step that has to succeed, not a process that stays."""

    name: str
    after: tuple[str, ...] = ()
    once: bool = False
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
    spec: Spec
    state: State = State.WAITING
    since: float = 0.0
    ready_at: float | None = None
    heard_at: float = 0.0
    failures: int = 0  # in a row, since it was last stable
    restarts: int = 0
    deadline: float | None = None
    reason: str = ""  # of the last death
    killed_because: str = field(default="", repr=False)

    def enter(self, state: State, now: float, deadline: float | None = None) -> None:
        self.state, self.since, self.deadline = state, now, deadline


class Supervision:
    """All services of one stack. `jitter` returns a factor around 1 for the pauses."""

    def __init__(self, specs: Iterable[Spec], jitter: Callable[[], float]) -> None:
        self.services = {spec.name: Service(spec) for spec in specs}
        self._jitter = jitter
        self.stopping = False
        for service in self.services.values():
            unknown = set(service.spec.after) - self.services.keys()
            if unknown:
                raise ValueError(f"{service.spec.name} comes after unknown {sorted(unknown)}")

    @property
    def all_up(self) -> bool:
        return all(service.state in UP for service in self.services.values())

    @property
    def all_down(self) -> bool:
        return all(service.state in DOWN for service in self.services.values())

    @property
    def failed(self) -> Service | None:
        """A step that has to succeed and did not: the stack can't come up."""
        found = (s for s in self.services.values() if s.state is State.FAILED)
        return next(found, None)

    def start(self, now: float) -> list[Effect]:
        """Begin: whatever comes after nothing is spawned."""
        return self._spawn_what_may(now)

    def on_ready(self, name: str, now: float) -> list[Effect]:
        """It says that it is ready. Anything but a starting one is not asked."""
        service = self.services[name]
        service.heard_at = now
        if service.state is not State.STARTING or service.spec.once:
            return []
        service.enter(State.READY, now, self._watchdog_deadline(service, now))
        service.ready_at = now
        return self._spawn_what_may(now)

    def on_alive(self, name: str, now: float) -> None:
        """It says that it is alive: the watchdog waits anew."""
        service = self.services[name]
        service.heard_at = now
        if service.state is State.READY:
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
        service.restarts += 1
        pause = min(BACKOFF_SECONDS_MAX, BACKOFF_FIRST_SECONDS * 2 ** (service.failures - 1))
        service.enter(State.BACKING_OFF, now, now + pause * self._jitter())
        return []

    def on_tick(self, now: float) -> list[Effect]:
        """Time has passed: whoever is over its deadline is dealt with."""
        effects = []
        for service in self.services.values():
            if service.deadline is not None and now >= service.deadline:
                effects += self._overdue(service, now)
        return effects

    def stop(self, now: float) -> list[Effect]:
        """Stop everything, the last first. Saying it again hurries: what still runs is killed."""
        if self.stopping:
            running = [s for s in self.services.values() if s.state not in DOWN]
            return [self._kill(service, "stopped in a hurry") for service in running]
        self.stopping = True
        for service in self.services.values():
            if service.state in (State.WAITING, State.BACKING_OFF):
                service.enter(State.STOPPED, now)
        return self._stop_what_may(now)

    def next_deadline(self) -> float | None:
        deadlines = (service.deadline for service in self.services.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def check_integrity(self) -> None:
        """What holds between any two events."""
        for service in self.services.values():
            waits = service.state in (State.STARTING, State.BACKING_OFF, State.STOPPING)
            assert not waits or service.deadline is not None, service  # noqa: S101
            if service.state is State.WAITING and not self.stopping:
                comes_after = (self.services[name] for name in service.spec.after)
                assert not all(other.state in UP for other in comes_after), service  # noqa: S101

    def _overdue(self, service: Service, now: float) -> list[Effect]:
        match service.state:
            case State.BACKING_OFF:
                return [self._spawn(service, now)]
            case State.STARTING:
                allowed = service.spec.ready_seconds_max
                return [self._kill(service, f"not ready within {allowed:g} s")]
            case State.READY:
                return [self._kill(service, f"silent for {service.spec.watchdog_seconds:g} s")]
            case State.STOPPING:
                allowed = service.spec.stop_seconds_max
                return [self._kill(service, f"did not stop within {allowed:g} s")]
            case _:
                return []

    def _spawn_what_may(self, now: float) -> list[Effect]:
        if self.stopping:
            return []
        return [
            self._spawn(service, now)
            for service in self.services.values()
            if service.state is State.WAITING
            and all(self.services[name].state in UP for name in service.spec.after)
        ]

    def _spawn(self, service: Service, now: float) -> Effect:
        service.enter(State.STARTING, now, now + service.spec.ready_seconds_max)
        service.heard_at = now
        return Effect(Deed.SPAWN, service.spec.name)

    def _kill(self, service: Service, because: str) -> Effect:
        """It stays in its state until its exit is seen; a kill is not repeated."""
        service.killed_because = because
        if service.state is State.READY:
            service.deadline = None
        else:
            service.deadline = float("inf")
        return Effect(Deed.KILL, service.spec.name)

    def _stop_what_may(self, now: float) -> list[Effect]:
        effects = []
        for service in self.services.values():
            if service.state not in (State.STARTING, State.READY):
                continue
            dependents = [
                other
                for other in self.services.values()
                if service.spec.name in self._all_after(other.spec)
            ]
            if all(other.state in DOWN for other in dependents):
                service.enter(State.STOPPING, now, now + service.spec.stop_seconds_max)
                effects.append(Effect(Deed.STOP, service.spec.name))
        return effects

    def _all_after(self, spec: Spec) -> set[str]:
        """All that `spec` comes after, directly or through others."""
        names = set(spec.after)
        for name in spec.after:
            names |= self._all_after(self.services[name].spec)
        return names

    @staticmethod
    def _watchdog_deadline(service: Service, now: float) -> float | None:
        seconds = service.spec.watchdog_seconds
        return now + seconds if seconds is not None else None
