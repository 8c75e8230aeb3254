"""What would end an alert: found in the case at hand, shown with its plan, and done by who may do it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import pytest
from django.test import Client

from console.accounts.principal import SYSTEM
from console.alerts.rules.catalogue import RULES
from console.alerts.suggested_fixes import services as suggested_fixes
from console.alerts.suggested_fixes.services import ACTIONS
from console.audit.models import AuditEntry
from console.fleet import nodes
from console.fleet.models import Node
from console.operations.models import Operation
from console.placement.topology import State
from console.policies.services import active_policy, set_policy
from swdriver_shim.policy import OrgPolicies, Policy
from telemetry import queries
from telemetry.ingest.folder import Row
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.conftest import People
from tests.console.alerts.things import make_alert
from tests.console.fleet.worlds import make_world

pytestmark = pytest.mark.django_db


def test_rules_name_remedies_that_there_are() -> None:
    assert {name for rule in RULES for name in rule.actions} == set(ACTIONS)


def test_a_node_is_cordoned_by_who_is_on_call_for_the_platform(
    people: People, browser_of: Callable[..., Client]
) -> None:
    make_world()
    alert = make_alert("tier2-faults", "node:ax-1", labels={"outcome": "read failed"})
    page = browser_of(people.platform_viewer).get(f"/alerts/{alert.pk}/").content.decode()
    assert "This needs the role on-call on the platform." in page
    assert "Cordon it now" not in page
    on_call = browser_of(people.platform_on_call)
    assert "Cordon it now" in on_call.get(f"/alerts/{alert.pk}/").content.decode()
    done = on_call.post(f"/alerts/{alert.pk}/fix/", {"action": "cordon"})
    assert done["Location"] == "/fleet/nodes/ax-1/"
    assert nodes.wanted(Node.objects.get(name="ax-1"))[0] is State.CORDONED
    reasons = list(AuditEntry.objects.order_by("id").values_list("action", "reason"))
    said = f"alert {alert.pk}: Tier 2 read or write errors"
    assert reasons[-2:] == [("node.state", said), ("alert.comment", "")]
    page = on_call.get(f"/alerts/{alert.pk}/").content.decode()
    assert "Applied: Cordon ax-1" in page
    assert "Cordon it now" not in page
    assert on_call.post(f"/alerts/{alert.pk}/fix/", {"action": "cordon"}).status_code == 404


def three_on_ax_1(kind: nodes.Kind, names: Collection[str]) -> Mapping[str, int]:
    return {"ax-1": 3} if kind == "node" and "ax-1" in names else {}


def test_a_node_with_streams_is_drained_as_an_operation(
    people: People, browser_of: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_world()
    alert = make_alert("agent-not-reporting", "node:ax-1")
    monkeypatch.setattr(nodes, "_streams", [three_on_ax_1])
    [drain, general] = suggested_fixes.suggest(SYSTEM, alert)
    assert [(one.what, one.before, one.after) for one in drain.plan][1] == ("Streams there", "3", "0")
    done = browser_of(people.platform_on_call).post(f"/alerts/{alert.pk}/fix/", {"action": "drain"})
    operation = Operation.objects.get()
    assert (operation.kind, done["Location"]) == ("node.drain", f"/operations/{operation.pk}/")
    assert (general.action, general.can_apply) == ("", False)
    assert (
        suggested_fixes.suggest(SYSTEM, make_alert("agent-not-reporting", "node:ax-2"))[0].action == ""
    )


def hold(driver: str, org: str, count: int) -> None:
    """What a driver tells of the last seconds."""
    now = time.time()
    held = Shape([Series(Kind.GAUGE, "swdriver_org_bytes", (("org", org),))])
    cells = held.cells({held.series[0]: (count * 10, 10, count)})
    RollUp().tend_days(now)
    at = int(now - 10) // 10 * 10
    copy_in(FRESH, Names().stored([Row(f"driver:{driver}", at, held, cells)], day_of(now)))


def test_a_quota_that_a_driver_has_filled_is_raised_by_an_org_admin(
    people: People, browser_of: Callable[..., Client], api_of: Callable[..., Client]
) -> None:
    alert = make_alert("hit-rate-drop", "org:acme", people.acme)
    assert [fix.action for fix in suggested_fixes.suggest(SYSTEM, alert)] == [""], "it has none"
    limited = OrgPolicies(policy=Policy(dram_bytes_max=1000))
    set_policy(SYSTEM, people.acme, limited, reason="contract")
    hold("job-1", "acme", 100)
    assert [fix.action for fix in suggested_fixes.suggest(SYSTEM, alert)] == [""], "there is room"
    for one in range(queries.GROUPS_MAX):
        hold(f"other-{one}", "acme", 10)
    hold("job-7", "acme", 950)
    told = api_of(people.viewer).get(f"/api/v1/alerts/{alert.pk}/suggested-fixes").json()[0]
    assert "on a driver." in told["text"], "it is of no session of theirs"
    assert told["refusal"] == "This needs the role org admin."
    assert told["call"]["body"]["changes"] == {"dram_bytes_max": 1500}
    asked = {"action": "quota"}
    assert browser_of(people.on_call).post(f"/alerts/{alert.pk}/fix/", asked).status_code == 403
    done = browser_of(people.org_admin).post(f"/alerts/{alert.pk}/fix/", asked)
    assert done["Location"] == "/orgs/acme/policy/"
    assert active_policy(people.acme).policy.dram_bytes_max == 1500
    assert AuditEntry.objects.filter(action="policy.set", actor_name="olga").count() == 1
