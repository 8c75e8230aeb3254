"""A change of a workload is taken back from the audit trail."""

from __future__ import annotations

import pytest

from console.audit import services as audit
from console.audit.models import AuditEntry
from console.workloads import changes
from console.workloads.models import Workload
from tests.conftest import People
from tests.console.sessions.fleets import make_fleet
from tests.console.workloads.workloads import locked, make_workload, settle, wanted

SECRET = {"environment": {"TOKEN": "hush"}}


def latest() -> AuditEntry:
    return AuditEntry.objects.filter(action="workload.update").latest("pk")


def test_a_change_is_undone_by_another_one(people: People) -> None:
    make_fleet(boxes=4)
    principal = people.principal("platform_admin")
    make_workload(principal, org="acme", engine=SECRET)
    was = Workload.objects.get().spec()
    new = wanted(org="acme", engine={"arguments": ["--x"]}, replicas=2, rollout={"max_surge": 2})
    changes.update(principal, locked(principal), new)
    settle()
    entry = latest()
    assert audit.can_undo(entry)
    made = audit.undo(principal, entry, "It was wrong.")
    workload = Workload.objects.get()
    assert workload.spec() == was
    assert workload.revision is not None
    assert workload.revision.number == 3
    assert (made.action, made.undoes, made.reason) == ("workload.update", entry, "It was wrong.")
    assert not audit.can_undo(AuditEntry.objects.get(pk=entry.pk))
    assert "hush" not in str(made.after)


def test_what_has_been_changed_since_or_is_gone_is_not_undone(people: People) -> None:
    make_fleet(boxes=4)
    principal = people.principal("platform_admin")
    make_workload(principal, org="acme")
    changes.update(principal, locked(principal), wanted(org="acme", tokens_max=3))
    first = latest()
    changes.update(principal, locked(principal), wanted(org="acme", tokens_max=2))
    with pytest.raises(audit.CannotUndo, match="changed again since"):
        audit.undo(principal, first, "")
    changes.delete(principal, locked(principal))
    with pytest.raises(audit.CannotUndo, match="talk is being deleted"):
        audit.undo(principal, latest(), "")
    Workload.objects.all().delete()
    with pytest.raises(audit.CannotUndo, match="no longer exists"):
        audit.undo(principal, latest(), "")
