"""A pretended machine for the supervisor's core: processes that are only state, a clock that obeys.

Whatever a supervisor may never do is asserted here, so that every test that runs in this world holds
it: no second process of a service, none before what it comes after, none told to stop before what
comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from console.stack.core import Deed, Effect, Spec, State, Supervision

SPECS = (
    Spec("database", keeps_data=True, watchdog_seconds=10, stop_seconds_max=30),
    Spec("cache", keeps_data=True, watchdog_seconds=10, stop_seconds_max=30),
    Spec("prepare", after=("database", "cache"), once=True),
    Spec("web", after=("prepare",), watchdog_seconds=10, ready_seconds_max=20),
    Spec("worker", after=("prepare",), watchdog_seconds=10),
    Spec("agent", after=("web",)),
)
TICK_SECONDS = 0.5


@dataclass
class Process:
    """A pretended process. One that hangs neither tells nor obeys; only a kill ends it."""

    hangs: bool = False
    told_to_stop: bool = False
    killed: bool = False


class World:
    def __init__(self, jitter: float = 1.0) -> None:
        self.now = 0.0
        self.running: dict[str, Process] = {}
        self.prepared = 0
        self.core = Supervision(SPECS, lambda: jitter)
        self._after = {spec.name: spec.after for spec in SPECS}
        self.carry_out(self.core.start(self.now))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            name = effect.name
            match effect.deed:
                case Deed.SPAWN:
                    assert name not in self.running, f"a second {name}"
                    assert not self.core.stopping, f"{name} started while stopping"
                    before = [self.core.services[other].state for other in self._after[name]]
                    assert all(s in (State.READY, State.DONE) for s in before), f"{name} too early"
                    self.running[name] = Process()
                case Deed.STOP:
                    later = {other for other in self.running if name in self._after[other]}
                    assert not later, f"{name} stopped before {later}"
                    assert not self.running[name].told_to_stop, f"{name} told twice"
                    self.running[name].told_to_stop = True
                case Deed.KILL:
                    self.running[name].killed = True
        self.core.check_integrity()
        assert {
            name
            for name, service in self.core.services.items()
            if service.state in (State.STARTING, State.READY, State.STOPPING)
        } == self.running.keys()

    def tick(self, seconds: float = TICK_SECONDS) -> None:
        self.now += seconds
        self.carry_out(self.core.on_tick(self.now))

    def becomes_ready(self, name: str) -> None:
        self.carry_out(self.core.on_ready(name, self.now))

    def is_alive(self, name: str) -> None:
        self.core.on_alive(name, self.now)
        self.carry_out([])

    def ends(self, name: str, *, success: bool = False) -> None:
        del self.running[name]
        self.prepared += name == "prepare" and success
        self.carry_out(self.core.on_exit(name, "ended", self.now, success=success))

    def stop(self) -> None:
        self.carry_out(self.core.stop(self.now))

    def behave(self) -> None:
        """Every process does what a good one does: obeys, gets ready, tells that it lives."""
        for name, process in list(self.running.items()):
            if process.killed or (process.told_to_stop and not process.hangs):
                self.ends(name)
            elif process.hangs:
                continue
            elif self._is_step(name):
                self.ends(name, success=True)
            elif self.core.services[name].state is State.STARTING:
                self.becomes_ready(name)
            else:
                self.is_alive(name)

    def _is_step(self, name: str) -> bool:
        return self.core.services[name].spec.once
