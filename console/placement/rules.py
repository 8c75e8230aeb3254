"""What is allowed: sizes of sessions, paths of streams, and how generous grants are.

Rules come from the cluster and, stricter, from an org: `cluster.stricter(org)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from console.placement.topology import Misconfigured, Tier
from telemetry.units import counted


class Cause(Enum):
    """Why something waits or is refused, as the API names it."""

    MISCONFIGURED = "Misconfigured"
    BELOW_MINIMUM_SIZE = "BelowMinimumSize"
    NOT_MULTIPLE_OF_INCREMENT = "NotMultipleOfIncrement"
    EXCEEDS_MAXIMUM = "ExceedsMaximum"
    EXCEEDS_ORG_QUOTA = "ExceedsOrgQuota"
    EXCEEDS_CLUSTER_CAPACITY = "ExceedsClusterCapacity"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    WAITING_FOR_RAIL = "WaitingForRail"
    SPINE_REFUSED_BY_RULE = "SpineRefusedByRule"
    NODE_CORDONED = "NodeCordoned"
    BOX_CORDONED = "BoxCordoned"
    WAITING_FOR_DRAIN = "WaitingForDrain"
    PENDING_EVALUATION = "PendingEvaluation"

    @property
    def is_never(self) -> bool:
        """Waiting doesn't help: the request, the rules or the fleet have to change."""
        return self in _NEVER


_NEVER = frozenset(
    {
        Cause.MISCONFIGURED,
        Cause.BELOW_MINIMUM_SIZE,
        Cause.NOT_MULTIPLE_OF_INCREMENT,
        Cause.EXCEEDS_MAXIMUM,
        Cause.EXCEEDS_ORG_QUOTA,
        Cause.EXCEEDS_CLUSTER_CAPACITY,
    }
)


class _Choice(Enum):
    """One of several, the strictest first."""

    @property
    def strictness(self) -> int:
        return -list(type(self)).index(self)


class Path(_Choice):
    """How much a session wants rails."""

    REQUIRE_RAIL = "require_rail"
    PREFER_RAIL = "prefer_rail"  # waits for them as long as the rules say, then takes the spine
    ANY = "any"  # takes the spine at once where there is no rail

    @property
    def label(self) -> str:
        return self.value.replace("_", " ")


class Borrow(_Choice):
    """How far away columns may be that a driver copies from the memory of siblings; and, but for NO, how
    far away a node is from another."""

    NO = "no"
    NODE = "node"  # the same one
    LEAF = "leaf"  # both have a NIC on it
    SPINE = "spine"  # anything else

    @property
    def label(self) -> str:
        return _FAR[self]


_FAR = {
    Borrow.NO: "not used",
    Borrow.NODE: "on the same node",
    Borrow.LEAF: "on the same node or leaf",
    Borrow.SPINE: "also across the spine",
}


class Redundancy(Enum):
    """Into how many fragments a column of tier 2 is divided: with data, and with parity. As many of them
    as have data make the column."""

    NONE = "none"
    MIRROR = "1+1"  # two copies
    TWO_AND_ONE = "2+1"
    FOUR_AND_ONE = "4+1"
    FOUR_AND_TWO = "4+2"
    EIGHT_AND_TWO = "8+2"

    @property
    def data(self) -> int:
        return 1 if self is Redundancy.NONE else int(self.value.partition("+")[0])

    @property
    def parity(self) -> int:
        """How many agents may be lost without a loss."""
        return 0 if self is Redundancy.NONE else int(self.value.partition("+")[2])

    @property
    def holders(self) -> int:
        """How many agents it takes; 0 for none."""
        return 0 if self is Redundancy.NONE else self.data + self.parity

    @property
    def strictness(self) -> int:
        """What survives more losses is stricter. Of two that survive as many, the one of fewer fragments
        is: it is less likely that too many of those are lost."""
        return 100 * self.parity - self.data

    @property
    def label(self) -> str:
        if self is Redundancy.NONE:
            return "none: what an agent loses is computed again"
        agents = counted(self.parity, "agent")
        more = 100 * self.parity // self.data
        return f"{self.value}: survives the loss of {agents}, {more} % more bytes"


@dataclass(frozen=True, slots=True)
class Limit:
    """The worst path that a stream may get, and what keeps it from a worse one."""

    worst: Tier = Tier.SPINE
    because: Cause | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """One rule that a request breaks."""

    cause: Cause
    sentence: str


@dataclass(frozen=True, slots=True)
class Rules:
    path: Path = Path.PREFER_RAIL
    refuse_spine: bool = False  # the cluster's switch
    wait_for_rail_seconds: float = 0
    boxes_min: int = 1
    boxes_increment: int = 1
    boxes_max: int | None = None
    moves_percent: int = 100  # of a link, for the bytes of streams that move over it
    borrow: Borrow = Borrow.SPINE  # how far drivers may copy columns from siblings' memory
    redundancy: Redundancy = Redundancy.NONE  # of columns in tier 2
    grant_percent: int = 100  # of the fair share. Less leaves room, and so more streams find a rail
    replace_lost: bool = True  # place the streams of a lost node anew
    replace_lost_after_seconds: float = 0  # the grace period of that

    def __post_init__(self) -> None:
        are_percents = all(1 <= one <= 100 for one in (self.grant_percent, self.moves_percent))
        if self.boxes_min < 1 or self.boxes_increment < 1 or not are_percents:
            raise Misconfigured(
                "The smallest session and the increment are at least one box; a grant, and what moves "
                "take of a link, are 1 to 100 %."
            )
        if self.boxes_max is not None and self.boxes_max < self.boxes_min:
            raise Misconfigured(
                f"The largest session ({self.boxes_max}) is below the smallest ({self.boxes_min})."
            )

    def stricter(self, other: Rules) -> Rules:
        """What both allow. Of two increments the larger holds, and the smaller has to divide it. Of two
        redundancies the one holds that survives more losses: what one of them promises, the other does
        not take back."""
        low, high = sorted((self.boxes_increment, other.boxes_increment))
        if high % low:
            raise Misconfigured(f"An increment of {low} boxes and one of {high} don't go together.")
        largest = [one.boxes_max for one in (self, other) if one.boxes_max is not None]
        return Rules(
            path=max(self.path, other.path, key=lambda path: path.strictness),
            refuse_spine=self.refuse_spine or other.refuse_spine,
            wait_for_rail_seconds=max(self.wait_for_rail_seconds, other.wait_for_rail_seconds),
            boxes_min=max(self.boxes_min, other.boxes_min),
            boxes_increment=high,
            boxes_max=min(largest) if largest else None,
            moves_percent=min(self.moves_percent, other.moves_percent),
            borrow=max(self.borrow, other.borrow, key=lambda borrow: borrow.strictness),
            redundancy=max(self.redundancy, other.redundancy, key=lambda one: one.strictness),
            grant_percent=min(self.grant_percent, other.grant_percent),
            replace_lost=self.replace_lost and other.replace_lost,
            replace_lost_after_seconds=max(
                self.replace_lost_after_seconds, other.replace_lost_after_seconds
            ),
        )

    def limit(self, waited_seconds: float = 0) -> Limit:
        """What a stream may get that has waited for so long."""
        if self.path is Path.REQUIRE_RAIL:
            return Limit(Tier.RAIL, Cause.WAITING_FOR_RAIL)
        if self.refuse_spine:
            return Limit(Tier.LEAF, Cause.SPINE_REFUSED_BY_RULE)
        if self.path is Path.PREFER_RAIL and waited_seconds < self.wait_for_rail_seconds:
            return Limit(Tier.LEAF, Cause.WAITING_FOR_RAIL)
        return Limit()

    def refusals(self, boxes: int) -> Iterator[Refused]:
        """Every rule that a session of so many boxes breaks."""
        advice = self._what_to_ask_for(boxes)
        if boxes < self.boxes_min:
            yield Refused(
                Cause.BELOW_MINIMUM_SIZE,
                f"A session has at least {counted(self.boxes_min, 'box')}: {advice}.",
            )
        if boxes % self.boxes_increment:
            yield Refused(
                Cause.NOT_MULTIPLE_OF_INCREMENT,
                f"A session grows by {counted(self.boxes_increment, 'box')} at a time: {advice}.",
            )
        if self.boxes_max is not None and boxes > self.boxes_max:
            yield Refused(
                Cause.EXCEEDS_MAXIMUM,
                f"A session has at most {counted(self.boxes_max, 'box')}: {advice}.",
            )

    def _what_to_ask_for(self, boxes: int) -> str:
        """The sizes nearest to this one that break no rule."""
        by = self.boxes_increment
        least = -(-self.boxes_min // by) * by
        most = self.boxes_max // by * by if self.boxes_max is not None else max(least, boxes + by)
        if most < least:
            return "no size suits these rules, so have them changed"
        around = {min(max(size, least), most) for size in (boxes // by * by, -(-boxes // by) * by)}
        return f"ask for {' or '.join(map(str, sorted(around)))}"
