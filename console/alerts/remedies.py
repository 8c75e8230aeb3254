"""The remedies: each finds whether and how it helps in one case, and does it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from django.http import Http404
from django.urls import reverse

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.fixes import Call, Change, Fix, Remedy
from console.alerts.models import Alert
from console.fleet import nodes
from console.fleet import services as fleet
from console.fleet.models import Node
from console.metrics.catalog import METRICS
from console.operations.models import Operation
from console.operations.services import running_on
from console.orgs.models import Org
from console.placement.plan import Move as PlannedMove
from console.placement.topology import State, Tier
from console.policies import bulk
from console.policies.services import active_policy
from console.sessions import services as sessions
from console.sessions.changes import drains, moves
from console.sessions.models import Session, Stream
from console.sessions.plans.snapshot import key_of
from console.visibility import Sight
from telemetry.queries import TOPIC, Fold, Question, ask
from telemetry.topics import kind_of, of_session
from telemetry.units import exact_size, size

ONCE: Final = {"Idempotency-Key": "$(uuidgen)"}
OF_ANY_VERSION: Final = {"If-Match": "*", **ONCE}
MOVES_SHOWN: Final = 20
FULL_SHARE: Final = 0.9  # of a quota: less does not press
RAISE_BY: Final = 1.5
MEMORY: Final = "swdriver_org_bytes"
_PATHS: Final = {
    Tier.RAIL: "on its rail",
    Tier.LEAF: "on a leaf of its box",
    Tier.SPINE: "over the spine",
}


class Move:
    """Take one stream off the spine."""

    def find(self, principal: Principal, alert: Alert) -> Fix | None:
        shard = _shard(principal, alert)
        if shard is None:
            return None
        if running := running_on(of_session(shard.job.session.name)):
            return _under_way(running)
        move = self._move(shard)
        if move is None:
            return Fix(f"No move helps now. {Sight(principal).why(shard.why)}".strip())
        there = _PATHS[move.tier_after]
        return Fix(
            f"Move {shard.name} from {move.source} to {move.target}: then it is {there}. "
            "Its job goes on.",
            "move",
            "Move it now",
            (
                Change("Node", move.source, move.target),
                Change("Path", _PATHS[move.tier_before], there),
                Change("To copy, at most", "", size(shard.memory_bytes)),
            ),
            Call(
                "POST",
                f"/api/v1/sessions/{shard.job.session.name}/move",
                {"stream": shard.name, "node": move.target},
                OF_ANY_VERSION,
            ),
            _needs_on_call(principal, shard.job.session),
        )

    def do(self, principal: Principal, alert: Alert, reason: str) -> str:
        shard = _shard(principal, alert)
        if shard is None:
            raise Http404("There is no such stream any more.")
        session = sessions.for_change(principal, shard.job.session.name, Role.ON_CALL)
        move = self._move(shard)
        if move is None:
            raise Http404("No move helps any more.")
        node = Node.objects.get(name=move.target)
        shard = sessions.get_stream(session, shard.name)
        return _followed(moves.move(principal, session, shard, node, reason=reason).pk)

    @staticmethod
    def _move(shard: Stream) -> PlannedMove | None:
        plan = moves.plan_rails(shard.job.session)
        return next((one for one in plan.moves if one.stream.key == key_of(shard)), None)


class RestoreRails:
    """Take all streams of a session off the spine: of that with the most bytes there, of several."""

    def find(self, principal: Principal, alert: Alert) -> Fix | None:
        session = self._session(principal, alert)
        if session is None:
            return None
        if running := running_on(of_session(session.name)):
            return _under_way(running)
        plan = moves.plan_rails(session)
        if not plan.moves:
            return Fix(f"No move takes a stream of {session.name} off the spine now.")
        names = {key_of(shard): shard.name for shard in sessions.streams_of(session)}
        count = len(plan.moves)
        return Fix(
            f"Bring {count} stream{'' if count == 1 else 's'} of {session.name} back on rails. "
            "Jobs go on.",
            "restore-rails",
            "Bring them back now",
            (
                *(
                    Change(names[one.stream.key], one.source, f"{one.target}, {_PATHS[one.tier_after]}")
                    for one in plan.moves[:MOVES_SHOWN]
                ),
                Change("To copy, at most", "", size(plan.bytes)),
            ),
            Call("POST", f"/api/v1/sessions/{session.name}/restore-rails", {}, OF_ANY_VERSION),
            _needs_on_call(principal, session),
        )

    def do(self, principal: Principal, alert: Alert, reason: str) -> str:
        session = self._session(principal, alert)
        if session is None:
            raise Http404("There is no such session any more.")
        session = sessions.for_change(principal, session.name, Role.ON_CALL)
        return _followed(moves.restore_rails(principal, session, reason=reason).pk)

    @staticmethod
    def _session(principal: Principal, alert: Alert) -> Session | None:
        carried = alert.evidence.get("bytes_by_session", {})
        most = max(carried, key=lambda name: float(carried[name]), default="")
        return _visible_session(principal, alert.all_labels.get("session") or most)


class Cordon:
    """Place nothing new on the node; what runs there goes on."""

    def find(self, principal: Principal, alert: Alert) -> Fix | None:
        node = _node(principal, alert)
        if node is None or nodes.wanted(node)[0] is not State.READY:
            return None
        return Fix(
            f"Cordon {node.name}: nothing new is placed there. What runs there goes on.",
            "cordon",
            "Cordon it now",
            (Change("State", State.READY.value, State.CORDONED.value),),
            Call("PUT", f"/api/v1/nodes/{node.name}/state", {"state": State.CORDONED.value}),
            _needs_platform_on_call(principal),
        )

    def do(self, principal: Principal, alert: Alert, reason: str) -> str:
        visible = fleet.visible_nodes(principal)
        node = fleet.for_change(principal, visible, alert.all_labels["node"], Role.ON_CALL)
        nodes.set_state(principal, node, State.CORDONED, reason=reason)
        return reverse("fleet-node", args=[node.name])


class Drain:
    """Give all that runs on the node other homes."""

    def find(self, principal: Principal, alert: Alert) -> Fix | None:
        node = _node(principal, alert)
        if node is None or nodes.wanted(node)[0] is State.DRAINING:
            return None
        count = nodes.streams_on("node", [node.name]).get(node.name, 0)
        if not count:
            return None
        return Fix(
            f"Drain {node.name}: its streams move to other nodes, and jobs go on.",
            "drain",
            "Drain it now",
            (
                Change("State", nodes.wanted(node)[0].value, State.DRAINING.value),
                Change("Streams there", str(count), "0"),
            ),
            Call("POST", f"/api/v1/nodes/{node.name}/drain", {}, ONCE),
            _needs_platform_on_call(principal),
        )

    def do(self, principal: Principal, alert: Alert, reason: str) -> str:
        return _followed(drains.drain(principal, alert.all_labels["node"], reason=reason).pk)


class RaiseQuota:
    """Let an org have half as much memory again, where a driver has filled what it may have."""

    def find(self, principal: Principal, alert: Alert) -> Fix | None:
        org, found = alert.org, self._quota(alert.org) if alert.org else None
        if org is None or found is None:
            return None
        driver, held, most, wanted = found
        return Fix(
            f"Raise what {org.name} may have in memory: {size(held)} on "
            f"{driver if Sight(principal).knows_driver(driver) else 'a driver'} fill it.",
            "quota",
            "Raise it now",
            (
                Change(
                    "Memory at most, of each driver",
                    exact_size(most),
                    exact_size(wanted),
                ),
            ),
            Call(
                "POST",
                "/api/v1/policies/bulk",
                {"orgs": [org.slug], "changes": {"dram_bytes_max": wanted}, "reason": str(alert)},
                ONCE,
            ),
            self._refusal(principal, org, wanted),
        )

    def do(self, principal: Principal, alert: Alert, reason: str) -> str:
        org, found = alert.org, self._quota(alert.org) if alert.org else None
        if org is None or found is None:
            raise Http404("Its memory is not full any more.")
        bulk.save(principal, [org.slug], {"dram_bytes_max": found[3]}, reason=reason)
        return reverse("policy", args=[org.slug])

    @staticmethod
    def _quota(org: Org) -> tuple[str, int, int, int] | None:
        """The fullest driver, what it holds, what it may, and what it would."""
        most = active_policy(org).policy.dram_bytes_max
        fullest = _most_held(org) if most else None
        if not most or fullest is None or fullest[1] < most * FULL_SHARE:
            return None
        return *fullest, most, int(most * RAISE_BY)

    @staticmethod
    def _refusal(principal: Principal, org: Org, wanted: int) -> str:
        role = principal.role_in(org.pk)
        if role is None or role < Role.ORG_ADMIN or principal.read_only:
            return "An org admin can do it."
        [planned] = bulk.plan(principal, [org.slug], {"dram_bytes_max": wanted})
        return " ".join(planned.refused)


REMEDIES: Final[Mapping[str, Remedy]] = {
    "move": Move(),
    "restore-rails": RestoreRails(),
    "cordon": Cordon(),
    "drain": Drain(),
    "quota": RaiseQuota(),
}


def _followed(operation_id: object) -> str:
    return reverse("operation", args=[operation_id])


def _under_way(operation: Operation) -> Fix:
    """Nothing else is begun meanwhile; what is left to do is found out when it has ended."""
    return Fix(f"Under way: {operation.sentence}.", followed_at=_followed(operation.pk))


def _visible_session(principal: Principal, name: str) -> Session | None:
    try:
        return sessions.get_session(principal, name) if name else None
    except Http404:
        return None


def _shard(principal: Principal, alert: Alert) -> Stream | None:
    """The stream that it is about, of a session that they may see."""
    group, _, index = alert.labels.get("stream", "").rpartition(".")
    if not index.isdecimal():
        return None
    driver = alert.labels.get("driver")
    its = Stream.objects.filter(job__driver__name=driver, group=group, index=int(index))
    shard = its.select_related("job__session", "job__driver", "box", "node").first()
    return shard if shard and _visible_session(principal, shard.job.session.name) else None


def _node(principal: Principal, alert: Alert) -> Node | None:
    if not principal.on_platform(Role.VIEWER):
        return None
    return fleet.visible_nodes(principal).filter(name=alert.all_labels.get("node", "")).first()


def _needs_on_call(principal: Principal, session: Session) -> str:
    role = sessions.role_on(principal, session)
    may = role is not None and role >= Role.ON_CALL and not principal.read_only
    return "" if may else "Who is on call for the session can do it."


def _needs_platform_on_call(principal: Principal) -> str:
    may = principal.on_platform(Role.ON_CALL) and not principal.read_only
    return "" if may else "Who is on call for the platform can do it."


def _most_held(org: Org) -> tuple[str, int] | None:
    """The driver that holds most of an org, and how much, as of the last minute."""
    now = time.time()
    question = Question(
        topic="driver:*",
        metric=METRICS[MEMORY],
        fold=Fold.MAX,
        start=now - 60,
        end=now,
        step=60,
        where={"org": org.slug},
        by=(TOPIC,),
    )
    held = {line.labels[TOPIC]: _highest(line.values) for line in ask(question, now).lines}
    driver = max(held, key=lambda topic: held[topic], default="")
    return (driver.removeprefix(f"{kind_of(driver)}:"), int(held[driver])) if driver else None


def _highest(values: Sequence[object]) -> float:
    return max((value for value in values if isinstance(value, int | float)), default=0.0)
