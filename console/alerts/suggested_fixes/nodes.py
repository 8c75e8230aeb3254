"""Actions that take a node out of service."""

from __future__ import annotations

from django.urls import reverse

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.models import Alert
from console.alerts.suggested_fixes.definition import Call, Change, SuggestedFix
from console.fleet import nodes
from console.fleet import services as fleet
from console.fleet.models import Node
from console.placement.topology import State
from console.sessions.changes import drains


class Cordon:
    """Places nothing new on the node. What runs there keeps running."""

    def suggest(self, principal: Principal, alert: Alert) -> SuggestedFix | None:
        node = _node(principal, alert)
        if node is None or nodes.wanted(node)[0] is not State.READY:
            return None
        return SuggestedFix(
            f"Cordon {node.name}: nothing new is placed there. What runs there keeps running.",
            "cordon",
            "Cordon it now",
            (Change("State", State.READY.value, State.CORDONED.value),),
            Call("PUT", f"/nodes/{node.name}/state", {"state": State.CORDONED.value}),
            _refusal(principal),
        )

    def apply(self, principal: Principal, alert: Alert, reason: str) -> str:
        name = alert.all_labels["node"]
        node = fleet.for_change(principal, fleet.visible_nodes, name, Role.ON_CALL)
        nodes.set_state(principal, node, State.CORDONED, reason=reason)
        return reverse("fleet-node", args=[node.name])


class Drain:
    """Moves everything on the node to other nodes."""

    def suggest(self, principal: Principal, alert: Alert) -> SuggestedFix | None:
        node = _node(principal, alert)
        if node is None or nodes.wanted(node)[0] is State.DRAINING:
            return None
        count = nodes.streams_on("node", [node.name]).get(node.name, 0)
        if not count:
            return None
        return SuggestedFix(
            f"Drain {node.name}: its streams move to other nodes. Jobs keep running.",
            "drain",
            "Drain it now",
            (
                Change("State", nodes.wanted(node)[0].value, State.DRAINING.value),
                Change("Streams there", str(count), "0"),
            ),
            Call("POST", f"/nodes/{node.name}/drain", {}, {"Idempotency-Key": "$(date +%s%N)"}),
            _refusal(principal),
        )

    def apply(self, principal: Principal, alert: Alert, reason: str) -> str:
        operation = drains.drain(principal, alert.all_labels["node"], reason=reason)
        return reverse("operation", args=[operation.pk])


def _node(principal: Principal, alert: Alert) -> Node | None:
    if not principal.on_platform(Role.VIEWER):
        return None
    return fleet.visible_nodes(principal).filter(name=alert.all_labels.get("node", "")).first()


def _refusal(principal: Principal) -> str:
    may = principal.on_platform(Role.ON_CALL) and not principal.read_only
    return "" if may else "This needs the role on-call on the platform."
