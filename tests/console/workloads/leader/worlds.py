"""A cluster, a database and Redis in one thread, around the real decisions. One seed decides everything:
what is lost, who dies, how long things take. What it checks after each step holds at any time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from console.workloads.leader.decisions import decide
from console.workloads.leader.world import (
    SETTLE_SECONDS,
    Action,
    Cache,
    CancelJob,
    Compile,
    CompileSeen,
    CompileState,
    Complete,
    Create,
    Decision,
    DeleteSession,
    EndJob,
    Failure,
    Forget,
    Goal,
    Home,
    HomeSeen,
    Instance,
    Intent,
    Pause,
    Published,
    Remove,
    RemoveHome,
    RemovePlace,
    Revision,
    RollBack,
    Seen,
    SessionSeen,
    SetGoal,
    SetPlace,
    SizeSession,
    StartJob,
    State,
    Traffic,
)
from console.workloads.spec import RolloutSpec

STEP_SECONDS = 0.5
TOLD_SECONDS = 300.0  # that the start of a job waits for its driver
VERDICTS = {
    *("CompileFailed", "InstancesFail", "EngineFails", "DeadlineExceeded"),
    *("ErrorRateWorse", "FirstTokenSlower"),
}


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Of engines of a spec. `ends`: it dies soon after its start; `hangs`: it never answers; `fails`: so
    many of its requests."""

    epoch: int = 1
    starts_in: float = 3.0
    ends: bool = False
    hangs: bool = False
    fails: float = 0.0
    cannot_be_compiled: bool = False


@dataclass
class Process:
    """A manager and its engine, as it really is."""

    instance: Instance
    behaviour: Behaviour
    goal: Goal = Goal.RUN
    state: State = State.PENDING
    cache: Cache = Cache.UNKNOWN
    since: float = 0.0
    drained_at: float = 0.0

    @property
    def home(self) -> Home | None:
        return self.instance.home


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """How likely something is, in each step."""

    loses_apply: float = 0.0
    loses_publish: float = 0.0
    loses_observation: float = 0.0
    leader_dies: float = 0.0
    process_dies: float = 0.0
    engine_dies: float = 0.0

    @property
    def is_healthy(self) -> bool:
        """Nothing that serves breaks by itself."""
        return not self.process_dies and not self.engine_dies


@dataclass
class World:
    seed: int
    rules: RolloutSpec = field(default_factory=RolloutSpec)
    replicas: int = 3
    chaos: Chaos = field(default_factory=Chaos)
    capacity: int = 64

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.now = 1000.0
        self.behaviours: dict[str, Behaviour] = {}
        self.compiled: dict[str, CompileState] = {}
        self.numbers = 0
        self.names = 0
        first = self.revision(Behaviour())
        self.intent = Intent(
            name="chat",
            replicas=self.replicas,
            revision=first,
            rules=self.rules,
            begun_at=self.now,
            is_rolling=True,
        )
        self.revisions = {first.number: first}
        self.rows: dict[str, Instance] = {}  # of the database
        self.failures: list[Failure] = []
        self.applied: dict[str, Goal] = {}  # the last that the Cluster Server got
        self.processes: dict[str, Process] = {}
        self.observed: dict[str, Process] = {}
        self.homes: dict[Home, HomeSeen] = {}
        self.busy_until: dict[Home, float] = {}
        self.locks: dict[Home, str] = {}
        self.boxes: list[str] = []  # of the session
        self.draining: set[str] = set()
        self.outdated: set[str] = set()  # instances of an earlier address of the console
        self.ends_jobs: set[Home] = set()
        self.session: SessionSeen | None = None
        self.session_until = 0.0
        self.places: dict[int, int | None] = {}
        self.published: dict[int, Published] = {}
        self.urls: dict[int, str] = {}
        self.served_before: dict[int, str] = {}
        self.is_forgotten = False
        self.was_full = False  # all replicas were ready, and none has been added since
        self.counts: Counter[str] = Counter()
        self.rolled_back = 0
        self.log: list[str] = []
        self.decision: Decision | None = None

    # What people do

    def revision(self, behaviour: Behaviour, digest: str = "") -> Revision:
        self.numbers += 1
        digest = digest or f"spec{self.numbers}"
        known = self.compiled.get(digest)
        self.behaviours.setdefault(digest, behaviour)
        is_compiled = known is not None and known is CompileState.NONE
        return Revision(
            number=self.numbers,
            digest=digest,
            epoch=behaviour.epoch if is_compiled else None,
            is_compiled=is_compiled,
        )

    def change(self, behaviour: Behaviour) -> None:
        self._target(self.revision(behaviour))
        self.note(f"change to {self.intent.revision.number} {behaviour}")

    def _target(self, revision: Revision) -> None:
        self.revisions[revision.number] = revision
        self.intent = replace(
            self.intent, revision=revision, begun_at=self.now, paused=False, is_rolling=True
        )

    def restart(self) -> None:
        self.note("restart")
        self.intent = replace(
            self.intent, restarts=self.intent.restarts + 1, begun_at=self.now, is_rolling=True
        )

    def scale(self, replicas: int) -> None:
        self.note(f"scale to {replicas}")
        self.was_full = self.was_full and replicas <= self.intent.replicas
        self.intent = replace(self.intent, replicas=replicas)

    def pause(self) -> None:
        self.note("pause")
        self.intent = replace(self.intent, paused=True)

    def resume(self) -> None:
        self.note("resume")
        self.intent = replace(self.intent, paused=False, begun_at=self.now)

    def drain(self, box: str) -> None:
        self.note(f"drain {box}")
        self.draining.add(box)

    def move_console(self) -> None:
        self.note("the console moves")
        self.outdated = {*self.rows}

    def break_engines(self) -> None:
        self.note("all engines end, and none answers again")
        self.was_full = False
        for one in self.processes.values():
            one.behaviour = replace(one.behaviour, hangs=True)
            one.cache = Cache.UNKNOWN
            self._let_go_of(one)
            self._become(one, State.STARTING)

    def delete(self) -> None:
        self.note("delete")
        self.intent = replace(self.intent, deleting=True)

    # Time

    def step(self) -> None:
        self.now += STEP_SECONDS
        self._cluster_works()
        self._console_works()
        if self._happens(self.chaos.loses_observation):
            self.counts["observation lost"] += 1
        else:
            self.observed = {name: replace(one) for name, one in self.processes.items()}
        self._lead()
        self.check()

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def run_until(self, is_done: Callable[[], bool], seconds: float = 900.0) -> None:
        until = self.now + seconds
        while not is_done():
            assert self.now < until, f"not reached\n{self.told()}"
            self.step()

    def come_to_rest(self) -> None:
        self.chaos = Chaos()
        self.run_until(self.is_at_rest, 3600.0)

    def note(self, what: str) -> None:
        self.log.append(f"{self.now:8.1f} {what}")

    def told(self) -> str:
        lines = [f"seed {self.seed}", *self.log[-60:], repr(self.intent)]
        lines += [repr(one) for one in self.rows.values()]
        lines += [
            f"{one.state} {one.cache} {one.goal} {one.instance.name}" for one in self.processes.values()
        ]
        return "\n".join(
            [*lines, repr(self.session), repr(self.homes), repr(self.published), repr(self.decision)]
        )

    def _happens(self, likelihood: float) -> bool:
        return likelihood > 0 and self.chance.random() < likelihood

    # The cluster

    def _cluster_works(self) -> None:
        for name in list(self.processes):
            one = self.processes[name]
            if name not in self.applied:
                self._let_go_of(one)
                del self.processes[name]
                continue
            if one.state is State.GONE:
                continue
            if one.goal is not Goal.DRAIN:
                one.goal = self.applied[name]
            self._advance(one)

    def _become(self, one: Process, state: State) -> None:
        if one.state is not state:
            one.state, one.since = state, self.now

    def _let_go_of(self, one: Process) -> None:
        if one.home and self.locks.get(one.home) == one.instance.name:
            del self.locks[one.home]

    def _advance(self, one: Process) -> None:
        if one.goal is Goal.DRAIN:
            self._drain(one)
        elif self._happens(self.chaos.process_dies) or (
            one.behaviour.ends and self.now - one.since > 2.0 and one.state is State.STARTING
        ):
            self.note(f"{one.instance.name} dies")
            self.counts["process died"] += 1
            self._let_go_of(one)
            self._become(one, State.GONE)
        elif one.state in (State.READY, State.STANDBY) and self._happens(self.chaos.engine_dies):
            self.note(f"engine of {one.instance.name} dies")
            self.counts["engine died"] += 1
            self._let_go_of(one)
            one.cache = Cache.UNKNOWN
            self._become(one, State.STARTING)
        elif one.state is State.PENDING:
            self._become(one, State.STARTING)
        elif one.state is State.STARTING:
            if not one.behaviour.hangs and self.now - one.since >= one.behaviour.starts_in:
                self._answer(one)
        else:
            self._answer(one)

    def _drain(self, one: Process) -> None:
        if one.state is not State.DRAINING:
            one.drained_at = self.now
            self._become(one, State.DRAINING)
        elif self.now - one.since > self.chance.choice((0.5, 2.0, 5.0)):
            self._let_go_of(one)
            self._become(one, State.GONE)

    def _answer(self, one: Process) -> None:
        home, name = one.home, one.instance.name
        if home is None:
            one.cache = Cache.NONE
            self._become(one, State.READY)
            return
        known = self.homes.get(home)
        if known is None:
            self.homes[home] = known = HomeSeen(home=home, has_joined=True)
        if one.goal is Goal.RELEASE_CACHE:
            if self.locks.get(home) == name:
                del self.locks[home]
            one.cache = Cache.RELEASED
            self._become(one, State.READY)
            return
        holder = self.locks.setdefault(home, name)
        if holder != name:
            one.cache = Cache.WAITING
            if one.state is not State.READY:
                self._become(one, State.STANDBY)
            return
        one.cache = Cache.ATTACHED if known.has_job else Cache.WAITING
        self._become(one, State.READY)

    # The console: compile jobs, sessions, jobs of drivers

    def _console_works(self) -> None:
        for home, until in list(self.busy_until.items()):
            known = self.homes[home]
            is_late = self.now >= until + TOLD_SECONDS  # then the start of a job gives up
            if known.is_starting and home not in self.locks and not is_late:
                continue
            if self.now >= until:
                del self.busy_until[home]
                if known.has_job and home in self.ends_jobs:
                    self.ends_jobs.remove(home)
                    self.homes[home] = replace(known, has_job=False, is_busy=False, boxes=())
                elif known.has_job:
                    del self.homes[home]
                elif known.is_starting and not is_late:
                    self.homes[home] = replace(known, has_job=True, is_busy=False, is_starting=False)
                else:
                    self.homes[home] = replace(known, is_busy=False, is_starting=False, boxes=())
        session = self.session
        if session and session.is_busy and self.now >= self.session_until:
            if session.is_deleting:
                self.session = None
            else:
                self._fit_boxes(session.boxes)
                self.session = replace(session, is_busy=False, granted=session.boxes)
        self._exchange()
        revision = self.intent.revision
        if not revision.is_compiled and self.compiled.get(revision.digest) is CompileState.RUNNING:
            behaviour = self.behaviours[revision.digest]
            if behaviour.cannot_be_compiled:
                self.compiled[revision.digest] = CompileState.FAILED
            else:
                self.compiled[revision.digest] = CompileState.NONE
                made = replace(revision, is_compiled=True, epoch=behaviour.epoch)
                self.revisions[made.number] = made
                self.intent = replace(self.intent, revision=made)

    def _free(self) -> list[str]:
        every = [f"box{number}" for number in range(self.capacity)]
        return [box for box in every if box not in self.draining and box not in self.boxes]

    def _with_jobs(self) -> set[str]:
        return {box for one in self.homes.values() for box in one.boxes}

    def _fit_boxes(self, count: int) -> None:
        """Boxes without a job go, whether somebody is about to have one there or not."""
        busy = self._with_jobs()
        while len(self.boxes) > count:
            self.boxes.remove(self.chance.choice([box for box in self.boxes if box not in busy]))
        self.boxes += self._free()[: count - len(self.boxes)]

    def _exchange(self) -> None:
        """The drain of a box, once no job runs there."""
        for box in sorted(self.draining & {*self.boxes} - self._with_jobs()):
            if self._free():
                self.boxes[self.boxes.index(box)] = self._free()[0]

    def _seen_session(self) -> SessionSeen | None:
        if self.session is None:
            return None
        used = {box for row in self.rows.values() for box in row.boxes} | self._with_jobs()
        return replace(
            self.session,
            to_leave=frozenset(self.draining & {*self.boxes} | (used - {*self.boxes})),
            spare=len({*self.boxes} - self.draining - used),
            free=len(self._free()),
        )

    def _boxes_for(self, home: Home | None) -> tuple[str, ...]:
        """Where the newest instance of the home is, else its job, else where nobody is."""
        session = self._seen_session()
        if home is None or session is None:
            return ()
        its = [self.homes[home].boxes if home in self.homes else ()]
        its += [row.boxes for row in self.rows.values() if row.home == home]
        for boxes in reversed(its):
            if boxes and session.to_leave.isdisjoint(boxes):
                return boxes
        used = Counter([box for row in self.rows.values() for box in row.boxes])
        used.update(self._with_jobs())
        found = sorted(
            (box for box in self.boxes if box not in self.draining), key=lambda box: used[box]
        )
        return tuple(found[:1])

    # The leader

    def _lead(self) -> None:
        if self.is_forgotten:
            return
        seen = self._seen()
        decision = self.decision = decide(self.intent, seen, self.now)
        if self._happens(self.chaos.leader_dies):
            self.counts["leader died"] += 1
            return
        for action in decision.actions:  # one transaction
            self._do(action)
        self._check_complete(decision)
        if self._happens(self.chaos.leader_dies):
            self.counts["leader died"] += 1
            return
        if self._happens(self.chaos.loses_apply):
            self.counts["apply lost"] += 1
        else:
            self._apply()
        if self._happens(self.chaos.leader_dies) or self._happens(self.chaos.loses_publish):
            self.counts["publish lost"] += 1
            return
        self._publish(decision)

    def _seen(self) -> Seen:
        instances = []
        for row in self.rows.values():
            row = replace(row, is_outdated=row.name in self.outdated)
            process = self.observed.get(row.name)
            if process is None:
                instances.append(row)
                continue
            if process.state is State.READY:
                self.rows[row.name] = row = replace(row, was_ready=True)
            instances.append(
                replace(
                    row,
                    state=process.state,
                    cache=process.cache,
                    acknowledged=process.goal,
                    since=process.since,
                    url=f"http://{row.name}" if process.state in (State.STANDBY, State.READY) else "",
                )
            )
        return Seen(
            instances=tuple(instances),
            failures=tuple(self.failures),
            homes=tuple(self.homes.values()),
            session=self._seen_session(),
            compile=CompileSeen(
                state=self.compiled.get(self.intent.revision.digest, CompileState.NONE),
                sentence="no",
            ),
            new=self._traffic(is_new=True),
            old=self._traffic(is_new=False),
            published=dict(self.published),
            places=dict(self.places),
        )

    def _traffic(self, *, is_new: bool) -> Traffic:
        owners = [
            self.rows[one.instance] for one in self.published.values() if one.instance in self.rows
        ]
        of = [one for one in owners if (one.template == self.intent.template) is is_new]
        if not of and is_new:
            return Traffic()
        requests = 100
        fails = self.behaviours[of[0].revision.digest].fails if of else 0.0
        return Traffic(requests=requests, errors=int(requests * fails), ttft_seconds=0.1)

    def _apply(self) -> None:
        self.applied = {row.name: row.goal for row in self.rows.values()}
        for name, goal in self.applied.items():
            if name not in self.processes:
                row = self.rows[name]
                self.processes[name] = Process(
                    row, self.behaviours[row.revision.digest], goal, since=self.now
                )

    def _publish(self, decision: Decision) -> None:
        told = {one.ordinal: one for one in decision.endpoints}
        assert len(told) == len(decision.endpoints), "two endpoints of one replica"
        for ordinal in self.published.keys() - told.keys():
            del self.published[ordinal]
        for ordinal, endpoint in told.items():
            known = self.published.get(ordinal)
            same = (
                known is not None
                and known.instance == endpoint.instance
                and known.is_draining is endpoint.is_draining
            )
            if not same:
                self.note(f"endpoint {ordinal} is {endpoint.instance} {endpoint.is_draining=}")
                self.published[ordinal] = Published(
                    instance=endpoint.instance, is_draining=endpoint.is_draining, at=self.now
                )

    def _do(self, action: Action) -> None:
        if not isinstance(action, SetPlace):
            self.note(str(action)[:150])
        match action:
            case Compile():
                self.compiled[self.intent.revision.digest] = CompileState.RUNNING
            case SizeSession(boxes):
                known = self.session or SessionSeen()
                if boxes > self.capacity:
                    self.session = replace(
                        known, refused="There are too few boxes.", refused_boxes=boxes
                    )
                else:
                    self.session = replace(
                        known, boxes=boxes, is_busy=True, refused="", granted=min(known.granted, boxes)
                    )
                    self.session_until = self.now + self.chance.choice((0.5, 3.0))
            case DeleteSession():
                assert self.session is not None
                assert not self.homes, "a session with jobs is deleted"
                self.session = replace(self.session, is_busy=True, is_deleting=True)
                self.session_until = self.now + 1.0
            case Create(ordinal, revision, restart):
                self.names += 1
                name = f"chat-{ordinal}-r{revision.number}-{self.names}"
                home = Home(revision.epoch, ordinal) if revision.epoch else None
                here = self._boxes_for(home)
                assert len(here) == 1, f"{name} has {here}\n{self.told()}"
                self.rows[name] = Instance(
                    name=name,
                    ordinal=ordinal,
                    revision=revision,
                    restart=restart,
                    created_at=self.now,
                    goal_at=self.now,
                    since=self.now,
                    boxes=here,
                )
            case SetGoal(name, goal):
                row = self.rows[name]
                assert row.goal is not Goal.DRAIN, "who drains is told something else"
                self.rows[name] = replace(row, goal=goal, goal_at=self.now)
            case Remove(name, has_failed, _):
                row = self.rows.pop(name)
                if has_failed:
                    self.failures.append(
                        Failure(ordinal=row.ordinal, template=row.template, at=self.now)
                    )
            case StartJob(home):
                here = self._boxes_for(home)
                assert here, f"a job without boxes\n{self.told()}"
                assert not self._with_jobs() & {*here}, f"two jobs on {here}\n{self.told()}"
                self.homes[home] = replace(self.homes[home], is_busy=True, is_starting=True, boxes=here)
                self.busy_until[home] = self.now + 1.0
            case CancelJob(home):
                its = [one.name for one in self.rows.values() if one.home == home]
                assert not its, f"the job of {its} is cancelled"
                self.counts["cancelled"] += 1
                self.homes[home] = replace(self.homes[home], is_starting=False)
                self.busy_until[home] = self.now + 1.0
            case EndJob(home):
                self.counts["moved"] += 1
                self.ends_jobs.add(home)
                self.homes[home] = replace(self.homes[home], is_busy=True)
                self.busy_until[home] = self.now + 1.0
            case RemoveHome(home):
                users = [one.instance.name for one in self.processes.values() if one.home == home]
                users = [name for name in users if self.processes[name].state is not State.GONE]
                assert not users, f"the driver of {users} is removed"
                if self.homes[home].has_job:
                    self.homes[home] = replace(self.homes[home], is_busy=True)
                    self.busy_until[home] = self.now + 1.0
                else:
                    del self.homes[home]
            case SetPlace(ordinal, epoch):
                self.places[ordinal] = epoch
            case RemovePlace(ordinal):
                del self.places[ordinal]
            case Complete():
                self.intent = replace(self.intent, stable=self.intent.revision, is_rolling=False)
            case RollBack(to, _, _):
                self.rolled_back += 1
                old = self.revisions[to]
                self._target(self.revision(self.behaviours[old.digest], old.digest))
            case Pause(_, _):
                self.intent = replace(self.intent, paused=True)
            case Forget():
                self.is_forgotten = True

    # What holds

    def ready(self) -> int:
        """Replicas whose published endpoint really serves."""
        return sum(
            not one.is_draining
            and one.instance in self.processes
            and self.processes[one.instance].state in (State.READY, State.STANDBY)
            for ordinal, one in self.published.items()
            if ordinal < self.intent.replicas
        )

    def check(self) -> None:
        holders = Counter(home for home in self.locks)
        assert all(count == 1 for count in holders.values())
        live = Counter(
            one.instance.ordinal for one in self.processes.values() if one.state is not State.GONE
        )
        wanted = range(self.intent.replicas)
        surge = sum(max(0, live[ordinal] - 1) for ordinal in wanted)
        assert surge <= self.rules.max_surge, f"max_surge\n{self.told()}"
        for ordinal, one in self.published.items():
            process = self.processes.get(one.instance)
            is_drained = process is not None and process.state is State.DRAINING
            if is_drained and not one.is_draining and self.chaos.is_healthy:
                raise AssertionError(f"{ordinal} is drained while it is published\n{self.told()}")
            was_told_at = one.at + SETTLE_SECONDS
            others = [
                other
                for other in self.processes.values()
                if other.instance.ordinal == ordinal
                and other.instance.name == self.served_before.get(ordinal)
                and other.state is State.DRAINING
            ]
            if others and self.chaos.is_healthy:
                assert others[0].drained_at >= was_told_at or one.instance == others[0].instance.name
            if not one.is_draining and one.instance != self.served_before.get(ordinal):
                self._check_switch(ordinal, one.instance)
        self.served_before |= {ordinal: one.instance for ordinal, one in self.published.items()}
        self.was_full = self.was_full or self.ready() == self.intent.replicas
        if self.was_full and self.chaos.is_healthy and not self.intent.deleting:
            self._check_available()

    def _check_complete(self, decision: Decision) -> None:
        """What is said to be complete can be gone back to, whatever is wanted next."""
        said = {one.type: one.status for one in decision.conditions}["RolloutComplete"]
        if said:
            assert self.intent.stable == self.intent.revision, self.told()
            assert not self.intent.is_rolling, self.told()
            self.counts["said to be complete"] += 1

    def _check_switch(self, ordinal: int, to: str) -> None:
        """What takes over from another one that served has the cache."""
        before = self.processes.get(self.served_before.get(ordinal, ""))
        after = self.processes.get(to)
        if before is None or after is None or not self.chaos.is_healthy:
            return
        if before.state is State.READY and before.goal is not Goal.DRAIN:
            observed = self.observed[to]
            assert observed.cache is Cache.ATTACHED, f"{to} takes over cold\n{self.told()}"
            self.counts["switched"] += 1

    def _check_available(self) -> None:
        needed = self.available_min()
        assert self.ready() >= needed, f"{self.ready()} of {needed} are ready\n{self.told()}"

    def available_min(self) -> int:
        return self.intent.replicas - self.rules.max_unavailable

    # The goal

    def is_at_rest(self) -> bool:
        if self.intent.deleting:
            return self.is_forgotten
        if self.decision is None or any(not isinstance(one, SetPlace) for one in self.decision.actions):
            return False
        return self.is_reached() or self.asks_a_person()

    def asks_a_person(self) -> bool:
        assert self.decision is not None
        told = {one.type: one for one in self.decision.conditions}["RolloutComplete"]
        has_stopped = self.intent.paused or self.intent.stable is None  # it is tried again and again
        return has_stopped and told.status is False and told.reason in VERDICTS

    def is_reached(self) -> bool:
        intent = self.intent
        rows = sorted(self.rows.values(), key=lambda one: one.ordinal)
        return (
            [one.ordinal for one in rows] == list(range(intent.replicas))
            and all(one.template == intent.template for one in rows)
            and self.processes.keys() == self.rows.keys()
            and all(one.state is State.READY for one in self.processes.values())
            and all(one.cache is Cache.ATTACHED for one in self.processes.values())
            and {number: one.instance for number, one in self.published.items()}
            == {one.ordinal: one.name for one in rows}
            and not any(one.is_draining for one in self.published.values())
            and self.homes.keys() == {one.home for one in rows}
            and self.places == {one.ordinal: one.revision.epoch for one in rows}
            and intent.stable == intent.revision
            and not intent.is_rolling
            and self.session is not None
            and not self.session.is_busy
            and self.session.boxes == intent.replicas
            and not self.draining & {*self.boxes}
            and not self.outdated & self.rows.keys()
            and all(self.homes[home].boxes == one.boxes for one in rows if (home := one.home))
        )

    def check_nothing_is_left(self) -> None:
        live = [one for one in self.processes.values() if one.state is not State.GONE]
        assert not live
        assert not self.rows
        assert not self.homes
        assert not self.places
        assert not self.published
        assert self.session is None
