"""What would end an alert: in the case at hand, where that can be found out, and in general."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from django.db import transaction
from django.http import Http404

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.models import Alert
from console.fleet.models import Node
from console.operations.models import Operation
from console.placement.plan import Move
from console.placement.topology import Tier
from console.sessions import moves
from console.sessions.models import Shard
from console.sessions.services import for_change, get_session, get_shard
from console.sessions.world import key_of

PLACEMENT: Final = "spine-placement"
_THERE: Final = {Tier.RAIL: "on its rail", Tier.LEAF: "on a leaf of its box"}


@dataclass(frozen=True)
class Fix:
    text: str
    can_be_done: bool = False  # by `do`
    shard: str = ""
    node: str = ""
    session: str = ""


def of(principal: Principal, alert: Alert) -> list[Fix]:
    """What is known of this case first, then what the rule says of all."""
    rule = alert.definition
    known = _bring_back(principal, alert) if alert.rule == PLACEMENT and alert.is_open else []
    return [*known, *([Fix(rule.remedy)] if rule else [])]


def _bring_back(principal: Principal, alert: Alert) -> list[Fix]:
    """The move that takes a stream off the spine; of streams of sessions that somebody may see."""
    shard = _shard(alert)
    if shard is None:
        return []
    try:
        get_session(principal, shard.job.session.name)
    except Http404:
        return []
    move = _move(shard)
    if move is None:
        return [Fix(f"No move helps now. {shard.why}".strip())]
    there = _THERE[move.tier_after]
    text = f"Move {shard.name} from {move.source} to {move.target}: then it is {there}. Its job goes on."
    return [Fix(text, True, shard.name, move.target, shard.job.session.name)]


def _move(shard: Shard) -> Move | None:
    plan = moves.plan_back_on_rails(shard.job.session)
    return next((one for one in plan.moves if one.stream.key == key_of(shard)), None)


def _shard(alert: Alert) -> Shard | None:
    group, _, index = alert.labels.get("stream", "").rpartition(".")
    if not index.isdecimal():
        return None
    its = Shard.objects.filter(
        job__driver__name=alert.labels.get("driver"), group=group, index=int(index)
    )
    return its.select_related("job__session", "job__driver", "box", "node").first()


@transaction.atomic
def do(principal: Principal, alert: Alert) -> Operation:
    """Begin the move that would end a spine placement, for who is on call for its session.

    Raises Http404 where there is none, CannotPlan where it is not possible any more, operations' Busy.
    """
    shard = _shard(alert) if alert.rule == PLACEMENT and alert.is_open else None
    if shard is None:
        raise Http404("There is no move that would end this alert.")
    session = for_change(principal, shard.job.session.name, Role.ON_CALL)
    move = _move(shard)
    if move is None:
        raise Http404("No move helps any more.")
    node = Node.objects.get(name=move.target)
    reason = f"alert {alert.pk}: {alert.title}"
    return moves.move(principal, session, get_shard(session, shard.name), node, reason=reason)
