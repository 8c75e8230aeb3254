"""Machines of tests: what they do is named in audit rows, so that doing it twice would be seen."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from console.accounts.principal import SYSTEM
from console.audit.models import AuditEntry
from console.audit.services import Subject, record
from console.operations.core import Done, Failed, Outcome, Waiting
from console.operations.machines import Machine, Step, machine
from console.operations.models import Operation


def effect(operation: Operation, name: str) -> None:
    record(SYSTEM, "tests.effect", Subject("tests", operation.pk, name))


def effects(operation: Operation | None = None) -> list[str]:
    """In the order in which they happened; of one operation, or of all."""
    found = AuditEntry.objects.filter(action="tests.effect").order_by("id")
    found = found.filter(object_id=str(operation.pk)) if operation else found
    return list(found.values_list("object_name", flat=True))


def doing(name: str) -> Any:
    def do(operation: Operation) -> Outcome:
        effect(operation, name)
        operation.notes[name] = True
        return Done(f"{name} is done")

    return do


def fails(operation: Operation) -> Outcome:
    effect(operation, "of a step that failed")
    return Failed("NoRoom", "There is no room.")


def waits(operation: Operation) -> Outcome:
    return Done() if operation.plan.get("go on") else Waiting("It waits.", 0.5)


@machine("tests.steps")
class Steps(Machine):
    steps = (
        Step("a", "First", doing("a"), doing("not a")),
        Step("b", "Then", doing("b"), doing("not b")),
        Step("c", "Last", doing("c"), doing("not c")),
    )

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        return {"did": sorted(operation.notes)}


@machine("tests.fails")
class Fails(Machine):
    steps = (Step("a", "First", doing("a"), doing("not a")), Step("b", "Then", fails, doing("not b")))


@machine("tests.waits")
class Waits(Machine):
    steps = (
        Step("a", "First", doing("a"), doing("not a")),
        Step("b", "Then", waits, patience=timedelta(minutes=1)),
        Step("c", "Last", doing("c"), final=True),
        Step("d", "After it", waits, patience=timedelta(minutes=1)),
    )


@machine("tests.no-way-back")
class NoWayBack(Machine):
    steps = (Step("a", "First", doing("a"), fails), Step("b", "Then", fails))
