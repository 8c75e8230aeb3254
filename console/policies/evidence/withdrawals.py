"""Taking an org off a driver: the driver removes what it stored of it, and signs that it has.

The org keeps its secret, since other drivers serve it: what this driver was told it has to be trusted to
have dropped. Where it is not, the org is purged, which begins a new epoch. What agents store of the org
under the driver's model goes as well, unless other drivers of the org serve that model, too.
"""

from __future__ import annotations

from typing import Final

import msgspec

from console.fleet.models import Driver
from console.operations.core import Done, Outcome
from console.operations.machines import Step, machine
from console.operations.models import Operation
from console.policies import org_keys
from console.policies.evidence.confirmations import PATIENCE, ask, of_agents, of_drivers
from console.policies.evidence.receipts import Removal, summary, write
from console.policies.rollout import own_drivers
from console.sessions.driver_orgs import WITHDRAW, drivers_told
from console.sessions.models import DriverOrg
from kvss_agent.security.confirmations import Scope
from swdriver_shim.desired import ModelSpec

VOID: Final = "The driver serves the org again, or one of them is gone: nobody has to remove anything."


def _leaving(operation: Operation) -> DriverOrg | None:
    rows = DriverOrg.objects.select_related("driver", "org").filter(is_leaving=True)
    plan = operation.plan
    return rows.filter(driver__name=plan["driver"], org__slug=plan["org"]).first()


def _is_there(operation: Operation) -> bool:
    return Driver.objects.filter(name=operation.plan["driver"]).exists()


def _driver(operation: Operation) -> Outcome:
    """It answers once it has applied a document that does not name the org."""
    row = _leaving(operation)
    if row is None or row.org is None:
        if "scopes" in operation.notes and not _is_there(operation):
            return ask(operation, "drivers", [])  # it was asked, and was removed before it confirmed
        operation.notes["scopes"] = []
        return Done(VOID)
    if "scopes" not in operation.notes:
        keys = org_keys.keys_of([row.org])[row.org.pk]
        operation.notes["scopes"] = [[tag, None] for tag in org_keys.tags_of(row.org, keys)]
        operation.notes["epoch"] = keys.epoch
    return ask(operation, "drivers", of_drivers([row.driver], own_drivers(row.org.slug)))


def _nodes(operation: Operation) -> Outcome:
    row = _leaving(operation)
    if row is None or row.org is None:
        return Done(VOID)
    namespace = _namespace(row.driver)
    others = drivers_told(row.org).exclude(pk=row.driver.pk)
    shared = sum(_namespace(other) == namespace for other in others)
    if shared or not namespace:
        return Done("What agents store is in use by other drivers of the org.")
    scopes = [Scope(*one) for one in operation.notes["scopes"]]
    operation.notes["scopes"] = [[scope.tag, namespace] for scope in scopes]
    return ask(operation, "nodes", of_agents())


def _namespace(driver: Driver) -> str:
    """In which files of its model lie; empty for one that serves none."""
    try:
        return msgspec.convert(driver.model, ModelSpec).namespace().digest().hex()
    except msgspec.ValidationError:
        return ""


def _receipt(operation: Operation) -> Outcome:
    if not operation.notes["scopes"]:
        return Done(VOID)
    receipt = write(operation)
    if row := _leaving(operation):
        row.delete()
    return Done(summary(receipt))


@machine(WITHDRAW)
class Withdrawal(Removal):
    steps = (
        Step("driver", "The driver removes it, and confirms", _driver, patience=PATIENCE, final=True),
        Step("nodes", "Nodes remove what is left, and confirm", _nodes, patience=PATIENCE, final=True),
        Step("receipt", "Write the receipt", _receipt, final=True),
    )
