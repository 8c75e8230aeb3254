"""What is wanted of a workload, what is seen of it, and what can be done. Values, and no I/O.

replica    a place of a workload, by number (its ordinal): what requests are sent to
instance   one manager and its engine, which serve a replica for a while
home       the driver of a replica, by epoch and ordinal: it has the cache, over rollouts
template   what an instance was made from: the digest of its spec, and the count of restarts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from console.workloads.spec import RolloutSpec

SETTLE_SECONDS: Final = 2.0  # until all brains have heard of a change of endpoints
NEVER: Final = float("inf")


class State(StrEnum):
    """Of an instance, as the Cluster Server has it."""

    PENDING = "pending"
    COMPILING = "compiling"
    LOADING = "loading"
    STARTING = "starting"
    STANDBY = "standby"  # it answers, and waits for the cache of another instance
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class Goal(StrEnum):
    RUN = "run"
    RELEASE_CACHE = "release_cache"
    DRAIN = "drain"


class Cache(StrEnum):
    UNKNOWN = ""
    NONE = "none"
    WAITING = "waiting"
    ATTACHED = "attached"
    RELEASED = "released"


class Template(NamedTuple):
    digest: str
    restart: int


class Home(NamedTuple):
    epoch: int
    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """`digest`: of its spec; equal specs have equal digests, whatever their numbers. `same_as`: the
    number of the one that it restores. `epoch`: of its cache namespace and layout; None until its
    compile job has said what they are."""

    number: int
    digest: str
    same_as: int | None = None
    epoch: int | None = None
    has_cache: bool = True
    is_compiled: bool = True  # or needs no artifact

    @property
    def can_run(self) -> bool:
        return self.is_compiled and (self.epoch is not None or not self.has_cache)

    def home(self, ordinal: int) -> Home | None:
        """Where an instance of it for this replica has its cache."""
        return Home(self.epoch, ordinal) if self.has_cache and self.epoch is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What people want. `stable`: the last revision that was rolled out as a whole. `restarts` counts
    how often somebody wanted new instances of the same revision. `is_rolling`: a roll-out is not noted
    as complete yet. `begun_at`: when what is being rolled out was asked for, or resumed."""

    name: str
    replicas: int
    revision: Revision
    stable: Revision | None = None
    rules: RolloutSpec = field(default_factory=RolloutSpec)
    boxes_per_replica: int = 1
    restarts: int = 0
    paused: bool = False
    deleting: bool = False
    is_rolling: bool = False
    begun_at: float = 0.0

    @property
    def template(self) -> Template:
        return Template(self.revision.digest, self.restarts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What was decided of it, then what the Cluster Server says of it.

    `since`: in this state. `room_at`: since when it has a place to run; `NEVER` if it has none yet.
    `is_outdated`: it was made with an address of the console that is another one by now. `was_ready`: at
    any time.
    """

    name: str
    ordinal: int
    revision: Revision
    restart: int = 0
    goal: Goal = Goal.RUN
    goal_at: float = 0.0
    created_at: float = 0.0
    state: State = State.PENDING
    acknowledged: Goal = Goal.RUN
    cache: Cache = Cache.UNKNOWN
    url: str = ""
    since: float = 0.0
    room_at: float = 0.0
    restarts: int = 0  # of its engine
    reason: str = ""
    sentence: str = ""
    boxes: tuple[str, ...] = ()
    is_outdated: bool = False
    was_ready: bool = False

    @property
    def template(self) -> Template:
        return Template(self.revision.digest, self.restart)

    @property
    def home(self) -> Home | None:
        """None of a revision without a cache."""
        return self.revision.home(self.ordinal)

    @property
    def is_live(self) -> bool:
        """It takes room, whether it serves or not."""
        return self.state is not State.GONE

    @property
    def answers(self) -> bool:
        """It can serve requests, with a cache or without, and is not told to end."""
        return (
            self.goal is not Goal.DRAIN and self.state in (State.STANDBY, State.READY) and bool(self.url)
        )

    @property
    def is_warm(self) -> bool:
        """It serves, with all that it is to have."""
        has_all = self.home is None or self.cache is Cache.ATTACHED
        return self.answers and self.state is State.READY and has_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An instance that ended without being told to."""

    ordinal: int
    template: Template
    at: float
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeSeen:
    """`has_joined`: its driver is known to the fleet, and has said what it stores. `is_busy`: its job is
    being started or ended. `is_starting`: started, and nobody has cancelled that. `boxes`: of its
    job. `refused`: why its job could not be started, in a sentence."""

    home: Home
    has_joined: bool = False
    has_job: bool = False
    is_busy: bool = False
    is_starting: bool = False
    boxes: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSeen:
    """`boxes`: asked for; `granted`: there are, for its jobs. `cause`: why it has not got what was asked
    for, as a word and a sentence. `refused`: likewise, where waiting does not help, and how much that
    was.

    `to_leave`: boxes on which nothing of it may stay, since they are drained or not its own any more;
    while there are some, also `spare`: how many of its boxes take a job, and have neither job nor
    instance; and `free`: how many boxes it could get."""

    boxes: int = 0
    granted: int = 0
    is_busy: bool = False
    is_deleting: bool = False
    cause: str = ""
    cause_sentence: str = ""
    refused: str = ""
    refused_boxes: int = 0
    to_leave: frozenset[str] = frozenset()
    spare: int = 0
    free: int = 0


class CompileState(StrEnum):
    NONE = "none"
    RUNNING = "running"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSeen:
    """The compile job of the target revision, while it has no artifact. `sentence`: why it has failed,
    or why the one before it has, which nobody takes for a fault of the revision."""

    state: CompileState = CompileState.NONE
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Of some replicas. `refused`: those of `errors` that another replica then served.
    `ttft_seconds`: the median; `ttft_range`: between what it may be, as far as so
    many requests can say; None: it is known. `per_second`: requests of one that had any."""

    requests: int = 0
    errors: int = 0
    refused: int = 0
    ttft_seconds: float | None = None
    ttft_range: tuple[float, float] | None = None
    per_second: float = 0.0

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    @property
    def ttft_least(self) -> float:
        return self.ttft_range[0] if self.ttft_range else self.ttft_seconds or 0.0

    @property
    def ttft_most(self) -> float:
        return self.ttft_range[1] if self.ttft_range else self.ttft_seconds or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What brains were told of a replica: which instance, in which state, since when."""

    instance: str
    is_draining: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that is known. `instances`: all that have not been left out yet. `places`: replicas
    that brains know, with the epoch of their driver. `is_stale`: nobody has heard of the cluster lately.
    `can_publish`: Redis takes endpoints; if it refuses them to us, `refusal` says so in a sentence."""

    instances: tuple[Instance, ...] = ()
    failures: tuple[Failure, ...] = ()
    homes: tuple[HomeSeen, ...] = ()
    session: SessionSeen | None = None
    compile: CompileSeen = field(default_factory=CompileSeen)
    new: Traffic = field(default_factory=Traffic)
    old: Traffic = field(default_factory=Traffic)
    published: Mapping[int, Published] = field(default_factory=dict)
    places: Mapping[int, int | None] = field(default_factory=dict)
    is_stale: bool = False
    can_publish: bool = True
    refusal: str = ""

    def leaves(self, one: Instance) -> bool:
        """Whether it is on boxes that are to be left."""
        return self.session is not None and not self.session.to_leave.isdisjoint(one.boxes)

    def is_to_be_replaced(self, one: Instance) -> bool:
        """Whether another one of the same template has to take its place."""
        return one.is_outdated or self.leaves(one)


# What can be done. Doing any of it twice is doing it once.


@dataclass(frozen=True, slots=True)
class Compile:
    """Have an artifact made of the target revision."""


@dataclass(frozen=True, slots=True)
class SizeSession:
    """Make the session, or give it this size."""

    boxes: int


@dataclass(frozen=True, slots=True)
class DeleteSession:
    pass


@dataclass(frozen=True, slots=True)
class Create:
    """A new instance of this replica. `restart`: as its template has it."""

    ordinal: int
    revision: Revision
    restart: int


@dataclass(frozen=True, slots=True)
class SetGoal:
    instance: str
    goal: Goal


@dataclass(frozen=True, slots=True)
class Remove:
    """It is gone: leave it out from now on. `has_failed`: by itself, and nobody else is to blame.
    `sentence`: why it ended."""

    instance: str
    has_failed: bool
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class StartJob:
    home: Home


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Its start waits for a driver that has ended with the last instance, and no other one comes."""

    home: Home


@dataclass(frozen=True, slots=True)
class EndJob:
    """It runs on other boxes than who serves: it is started on those next."""

    home: Home


@dataclass(frozen=True, slots=True)
class RemoveHome:
    """End the job and take the driver out of the fleet: no instance of it is left, nor will be."""

    home: Home


@dataclass(frozen=True, slots=True)
class SetPlace:
    """Brains are to know this replica, and the driver of this epoch as the one whose cache it has."""

    ordinal: int
    epoch: int | None


@dataclass(frozen=True, slots=True)
class RemovePlace:
    ordinal: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The target revision is rolled out as a whole."""


@dataclass(frozen=True, slots=True)
class RollBack:
    to: int
    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Pause:
    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing is left of a workload that was to be deleted."""


Action = (
    Compile
    | SizeSession
    | DeleteSession
    | Create
    | SetGoal
    | Remove
    | StartJob
    | CancelJob
    | EndJob
    | RemoveHome
    | SetPlace
    | RemovePlace
    | Complete
    | RollBack
    | Pause
    | Forget
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a replica is served. Draining: it gets no new requests."""

    ordinal: int
    instance: str
    url: str
    is_draining: bool
    since: float


@dataclass(frozen=True, slots=True)
class Condition:
    """`status`: None where it is not known."""

    type: str
    status: bool | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now. Without any news it would be another one at `look_at`."""

    actions: tuple[Action, ...]
    endpoints: tuple[Endpoint, ...]
    conditions: tuple[Condition, ...]
    look_at: float = NEVER
