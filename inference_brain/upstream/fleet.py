"""The replicas of all models: which there are, how they do, and which of them may get a request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from inference_brain.desired import Desired, ReplicaSpec, ServedModel
from inference_brain.upstream.budget import RetryBudget
from inference_brain.upstream.health import FORGOTTEN_SECONDS, Health, LastOrgs, State
from kvss_agent.http.client.client import Sent
from kvss_agent.http.client.failures import UpstreamFailed

log = logging.getLogger(__name__)

SILENT: Final = "The replica has fallen silent."
ROOT: Final = "/v1"
Numbers = npt.NDArray[np.int64]


class Replica:
    """One replica, and what this brain has sent there."""

    __slots__ = (
        "health",
        "heard_at",
        "in_progress",
        "model",
        "silent_probes",
        "spec",
        "unanswered",
    )

    def __init__(self, model: str, spec: ReplicaSpec, health: Health) -> None:
        self.model = model
        self.spec = spec
        self.health = health
        self.in_progress = 0  # requests
        self.heard_at = 0.0  # when it last said anything, or got work after a pause
        self.silent_probes = 0  # in a row
        self.unanswered: set[Sent] = set()  # requests of which nothing has come back

    @property
    def name(self) -> str:
        return self.spec.name

    def state(self, now: float) -> State:
        if not self.spec.url:
            return State.NO_ENDPOINT
        found = self.health.state(now)
        is_alive = found in (State.READY, State.SLOW_START)
        return State.DRAINING if self.spec.draining and is_alive else found

    def url(self, path: str) -> str:
        """Of `/v1/…` or `/health`. The address may end in `/v1`, as those of OpenAI's clients do."""
        base = self.spec.url.rstrip("/")
        if base.endswith(ROOT):
            base = base.removesuffix(ROOT)
        return base + path

    @property
    def served_as(self) -> str:
        return self.spec.served_as or self.model


class Roster:
    """The replicas of a model by number, in the order of their names. It lasts until the next document.

    A replica that is ready stays so until it fails. So only those that may not be ready are looked at
    when one is wanted, however many there are.
    """

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self.replicas = [replicas[name] for name in sorted(replicas)]
        self.names = [one.name for one in self.replicas]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        present = [bool(one.spec.url) and not one.spec.draining for one in self.replicas]
        self._present: Numbers = np.flatnonzero(np.array(present, bool))
        self._is_ready = np.zeros(len(present), bool)
        self._ready: Numbers | None = None  # the numbers of those
        self._doubtful = set(self._present.tolist())

    def __len__(self) -> int:
        return len(self.replicas)

    def doubt(self, replica: Replica) -> None:
        """Its health has changed."""
        number = self.numbers.get(replica.name, -1)
        if number >= 0 and self.replicas[number] is replica and self._is_ready[number]:
            self._is_ready[number], self._ready = False, None
            self._doubtful.add(number)

    def usable(self, now: float, without: Collection[str]) -> Numbers:
        """Those that may get a request now, but for some. If all are ejected, those too: none of them
        can be worse than no answer."""
        self._settle(now)
        slow = [number for number in self._doubtful if self._has_room(number, now)]
        if self._ready is None:
            self._ready = np.flatnonzero(self._is_ready)
        found = self._ready
        if slow:
            found = np.union1d(found, np.array(slow, np.int64))
        left_out = [self.numbers[name] for name in without if name in self.numbers]
        if left_out:
            found = np.setdiff1d(found, left_out)
        if found.size:
            return found
        reachable = [
            number
            for number in np.setdiff1d(self._present, left_out).tolist()
            if self.replicas[number].health.state(now) is not State.UNREACHABLE
        ]
        return np.array(reachable, np.int64)

    def _has_room(self, number: int, now: float) -> bool:
        one = self.replicas[number]
        return one.health.has_room(one.in_progress, now)

    def _settle(self, now: float) -> None:
        """Those that have become ready are not looked at again."""
        ready = [
            number for number in self._doubtful if self.replicas[number].health.state(now) is State.READY
        ]
        if ready:
            self._doubtful.difference_update(ready)
            self._is_ready[ready], self._ready = True, None


class Fleet:
    """All replicas, by model. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, dict[str, Replica]] = {}
        self._rosters: dict[str, Roster] = {}
        self._budgets: dict[str, RetryBudget] = {}
        self._asking: dict[str, LastOrgs] = {}  # whose requests there are, by model
        self._changed: Callable[[], None] = _nothing

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call this whenever a replica comes, goes or returns."""
        self._changed = changed

    def follow(self, told: Desired) -> None:
        """Take over the replicas of a document. Those that stay keep what is known of them; requests on
        replicas that go are finished there."""
        now = self._clock()
        self._replicas = {model.name: self._of(model, now) for model in told.models}
        self._rosters = {model: Roster(replicas) for model, replicas in self._replicas.items()}
        self._budgets = {name: self._budgets.get(name) or RetryBudget(now) for name in self._replicas}
        self._asking = {name: self._asking.get(name) or LastOrgs() for name in self._replicas}
        self._changed()

    def _of(self, model: ServedModel, now: float) -> dict[str, Replica]:
        before = self._replicas.get(model.name, {})
        has_others = any(one.spec.url for one in before.values())  # not so when a brain has just started
        made = {}
        for spec in model.replicas:
            known = before.get(spec.name)
            if known is None or known.spec.url != spec.url:
                is_new = has_others and not _is_warm(known, spec)
                known = Replica(model.name, spec, Health(now, is_new=is_new))
            known.spec = spec
            made[spec.name] = known
        return made

    def __iter__(self) -> Iterator[Replica]:
        return (one for replicas in self._replicas.values() for one in replicas.values())

    def replica(self, model: str, name: str) -> Replica | None:
        return self._replicas.get(model, {}).get(name)

    def of(self, model: str) -> Collection[Replica]:
        return self._replicas.get(model, {}).values()

    def budget(self, model: str) -> RetryBudget:
        return self._budgets.get(model) or RetryBudget(self._clock())  # it may have been removed

    def roster(self, model: str) -> Roster:
        return self._rosters.get(model) or Roster({})

    def usable(self, model: str, without: Collection[str] = ()) -> Numbers:
        """The numbers in the model's roster of those that may get a request now, but for some."""
        return self.roster(model).usable(self._clock(), without)

    def serving(self, model: str, without: Collection[str] = ()) -> int:
        """How many replicas of a model take new requests, but for some."""
        return self.usable(model, without).size

    # What became of requests

    def begun(self, model: str, org: str) -> None:
        """A request of this org for a model."""
        self.budget(model).request()
        if model in self._asking:
            self._asking[model].note(org, self._clock())

    def refused(self, replica: Replica, org: str) -> bool:
        """A request of this org failed there, and another replica served it. Returns whether that speaks
        against the replica whoever asks: it fails others' requests, too, or no others ask."""
        now = self._clock()
        others_too, asking = replica.health.refused(org, now), self._asking.get(replica.model)
        return others_too or not (asking and asking.have_other(org, now - FORGOTTEN_SECONDS))

    def succeeded(self, replica: Replica, org: str) -> None:
        replica.health.succeeded(org, self._clock())

    def failed(
        self, replica: Replica, error: UpstreamFailed | None, org: str, *, is_proven: bool
    ) -> None:
        """A request failed there: by an error, or by an answer that says so. `is_proven`: it can't lie
        with the request."""
        now = self._clock()
        self.roster(replica.model).doubt(replica)
        if error is not None and error.reason == "unreachable":
            if replica.health.lost(str(error)):
                log.warning("Replica %s of %s can't be reached: %s", replica.name, replica.model, error)
                self._changed()
        elif replica.health.failed(org, now, is_proven=is_proven):
            log.warning("Replica %s of %s is ejected: it keeps failing", replica.name, replica.model)
            self._changed()

    def answered(self, replica: Replica) -> None:
        """It answers a probe."""
        replica.heard_at = self._clock()
        replica.silent_probes = 0
        if replica.health.unreachable:
            replica.health.probed(self._clock())
            log.info("Replica %s of %s answers again", replica.name, replica.model)
            self._changed()

    def fell_silent(self, replica: Replica) -> None:
        """It takes connections, and answers neither requests nor probes: what it has not begun to answer
        goes to others."""
        self.roster(replica.model).doubt(replica)
        if replica.health.lost(SILENT):
            log.warning("Replica %s of %s has fallen silent", replica.name, replica.model)
            self._changed()
        for one in list(replica.unanswered):
            one.give_up(SILENT)


def _is_warm(known: Replica | None, spec: ReplicaSpec) -> bool:
    """Whether an instance takes over from another one, which is done when it has that one's cache: a
    slow start would send its conversations to replicas that do not have them."""
    return known is not None and bool(known.spec.url) and spec.endpoint == "redis"


def _nothing() -> None:
    """Nobody has to know."""
