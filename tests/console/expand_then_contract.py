"""Which migrations may run beside the release before: expand, then contract.

While a console is updated, processes of the release before go on with the tables of this one. So a
migration may add what they need not know, and may take away only what they have stopped using. It also
must not hold a lock for as long as a large table takes.

A migration says what only its author can know, in two attributes of its class:

    unused_since = "0.2"      # the release that reads and writes no more of what is removed here
    reviewed = {"RunSQL": "a trigger that refuses what no release has ever done"}

`reviewed` names operations whose effect cannot be read from them, or that are allowed here against the
rule, each with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from django.contrib.postgres import operations as postgres
from django.db import migrations, models
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import NOT_PROVIDED

REMOVES: Final = (migrations.RemoveField, migrations.DeleteModel)
RENAMES: Final = (
    migrations.RenameField,
    migrations.RenameModel,
    migrations.AlterModelTable,
    migrations.AlterUniqueTogether,
    migrations.AlterIndexTogether,
)
# Nothing that other processes could notice: new tables, what Django alone knows, what loosens.
HARMLESS: Final = (
    migrations.CreateModel,
    migrations.AlterModelOptions,
    migrations.AlterModelManagers,
    migrations.AlterModelTableComment,
    migrations.RemoveConstraint,
    migrations.RemoveIndex,
    migrations.RenameIndex,
    postgres.AddIndexConcurrently,
    postgres.RemoveIndexConcurrently,
    postgres.ValidateConstraint,
)
OPAQUE: Final = (migrations.RunSQL, migrations.RunPython)
RELEASE: Final = re.compile(r"(\d{1,4})\.(\d{1,4})")


def problems(migration: migrations.Migration, before: ProjectState, release: str) -> Iterator[str]:
    """A sentence for each operation that the release before would not survive, or that blocks it.

    `before`: the state of the project as the migration finds it. `release`: that which it belongs to.
    """
    unused_since: str = getattr(migration, "unused_since", "")
    reviewed: Mapping[str, str] = getattr(migration, "reviewed", {})
    created: set[str] = set()
    state = before.clone()
    for operation in _operations(migration.operations):
        name = type(operation).__name__
        found = list(_of_operation(operation, state, migration, created))
        if isinstance(operation, REMOVES) and found:
            if unused_since and _minor(unused_since) < _minor(release):
                found = []
            elif unused_since:
                found = [
                    f"it is unused since {unused_since}, which is not before {release}: remove it later"
                ]
        if found and not reviewed.get(name, "").strip():
            yield from (f"{operation.describe()}: {problem}." for problem in found)
        operation.state_forwards(migration.app_label, state)


def _operations(operations: Sequence[Operation]) -> Iterator[Operation]:
    """What is done in the database, one by one."""
    for operation in operations:
        if isinstance(operation, migrations.SeparateDatabaseAndState):
            yield from _operations(operation.database_operations)
        else:
            yield operation


def _of_operation(
    operation: Operation, state: ProjectState, migration: migrations.Migration, created: set[str]
) -> Iterator[str]:
    if isinstance(operation, migrations.CreateModel):
        created.add(operation.name_lower)
        return
    if isinstance(operation, postgres.AddConstraintNotValid):
        yield "the release before may write what it forbids: say in `reviewed` why it does not"
        return
    if isinstance(operation, HARMLESS):
        return
    if isinstance(operation, OPAQUE):
        yield "what it does cannot be read from it: say in `reviewed` why it is safe"
    elif isinstance(operation, REMOVES):
        yield "the release before uses it: say in `unused_since` which release has stopped to"
    elif isinstance(operation, RENAMES):
        yield "the release before knows the former name: add another, copy, and remove the first later"
    elif getattr(operation, "model_name_lower", "") in created:
        return  # a table that nobody has used
    elif isinstance(operation, migrations.AddField):
        yield from _added(operation.field)
    elif isinstance(operation, migrations.AlterField):
        former = state.models[migration.app_label, operation.model_name_lower].fields[operation.name]
        yield from _altered(former, operation.field)
    elif isinstance(operation, migrations.AddIndex):
        yield "writing waits until it is built: AddIndexConcurrently and `atomic = False`"
    elif isinstance(operation, migrations.AddConstraint):
        yield "the release before may write what it forbids, and writing waits while rows are checked"
    else:
        yield "nobody has thought about this kind of operation yet"


def _added(field: models.Field[Any, Any]) -> Iterator[str]:
    """An INSERT of the release before does not name it."""
    if field.many_to_many or field.generated:
        return
    if not field.null and field.db_default is NOT_PROVIDED:
        yield "the release before inserts rows without it: give it a `db_default`, or null=True"
    if any(_indexed(field)) or isinstance(field, models.ForeignKey):
        yield (
            "its index is built while writing waits: db_index=False, and AddIndexConcurrently in a "
            "migration of its own"
        )


def _altered(former: models.Field[Any, Any], field: models.Field[Any, Any]) -> Iterator[str]:
    if former.null and not field.null:
        yield "the release before may write NULL, and all rows are read while others wait"
    if former.db_default is not NOT_PROVIDED and field.db_default is NOT_PROVIDED and not field.null:
        yield "the release before may rely on its default in the database"
    if _type(former) != _type(field):
        yield f"its type changes from {_type(former)} to {_type(field)}, and the table is written anew"
    elif _length(field) < _length(former):
        yield "it gets shorter, and the release before may write as much as now"
    if _indexed(field) != _indexed(former) and any(_indexed(field)):
        yield "its index is built while writing waits: AddIndexConcurrently"
    if former.db_column != field.db_column:
        yield "its column gets another name"


def _type(field: models.Field[Any, Any]) -> str:
    """Texts of any length are one type to PostgreSQL: a limit can be raised or lifted at no cost."""
    if isinstance(field, models.CharField | models.TextField):
        return "text"
    remote = field.target_field.get_internal_type() if isinstance(field, models.ForeignKey) else ""
    return f"{field.get_internal_type()} {remote}".strip()


def _indexed(field: models.Field[Any, Any]) -> tuple[bool, bool]:
    """By a constraint, and by itself; of what a relation has by its nature, both say nothing."""
    _, _, _, given = field.deconstruct()
    return field.unique, bool(given.get("db_index", False))


def _length(field: models.Field[Any, Any]) -> float:
    return float(field.max_length) if field.max_length is not None else float("inf")


def _minor(release: str) -> tuple[int, int]:
    found = RELEASE.match(release)
    assert found, f"{release!r} is no release"
    return int(found[1]), int(found[2])
