"""The release before this one works with the tables of this one: it reads and writes each of them.

Its code is stood in for by its models, as its migrations leave them: they name the columns that it knows
and no other, in SELECT, INSERT and UPDATE. Every table gets a row. What keeps rows sensible (foreign
keys, checks, triggers) is switched off for this; `test_expand_then_contract.py` looks at what is new.
"""

from __future__ import annotations

import contextlib
import datetime
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final

import pytest
from django.db import DatabaseError, IntegrityError, connection, models, transaction
from django.utils import timezone

from console.shell.sealed import SealedBytes, SealedText
from tests.console.releases import models_before

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

VALUES: Final[dict[str, Callable[[], object]]] = {
    "BigIntegerField": lambda: 1,
    "BinaryField": lambda: b"x",
    "BooleanField": lambda: True,
    "CharField": lambda: "x",
    "DateField": datetime.date.today,
    "DateTimeField": timezone.now,
    "DecimalField": lambda: Decimal(1),
    "DurationField": datetime.timedelta,
    "EmailField": lambda: "x",
    "FloatField": lambda: 1.0,
    "GenericIPAddressField": lambda: "127.0.0.1",
    "IntegerField": lambda: 1,
    "JSONField": dict,
    "PositiveBigIntegerField": lambda: 1,
    "PositiveIntegerField": lambda: 1,
    "PositiveSmallIntegerField": lambda: 1,
    "SlugField": lambda: "x",
    "SmallIntegerField": lambda: 1,
    "TextField": lambda: "x",
    "UUIDField": uuid.uuid4,
    "ArrayField": list,
}


def value_of(field: models.Field[Any, Any]) -> object:
    if isinstance(field, models.ForeignKey):
        return value_of(field.target_field)
    if isinstance(field, SealedBytes):
        return "x" if isinstance(field, SealedText) else b"x"
    kind = field.get_internal_type()
    return VALUES[kind.removesuffix("AutoField") + "IntegerField" if "AutoField" in kind else kind]()


def work_with(model: type[models.Model]) -> None:
    """As the code of the release before does. Raises DatabaseError where it could not."""
    rows = model._base_manager
    values = {field.attname: value_of(field) for field in model._meta.local_concrete_fields}
    made = rows.create(**values)
    found = rows.get(pk=made.pk)
    found.save(force_update=True)
    assert rows.filter(pk=made.pk).delete()[0] == 1


@pytest.fixture
def old_models(db: None) -> Iterator[list[type[models.Model]]]:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL session_replication_role = replica")
        cursor.execute("SELECT conrelid::regclass, conname FROM pg_constraint WHERE contype = 'c'")
        for table, name in cursor.fetchall():
            if table != "-":
                cursor.execute(f'ALTER TABLE {table} DROP CONSTRAINT IF EXISTS "{name}"')
        yield [model for model in models_before().get_models() if model._meta.managed]
        transaction.set_rollback(True)


def test_it_reads_and_writes_every_table(old_models: list[type[models.Model]]) -> None:
    failed = {}
    for model in old_models:
        try:
            with transaction.atomic():
                work_with(model)
        except DatabaseError as error:
            failed[model._meta.db_table] = str(error)
    assert failed == {}
    assert len(old_models) > 50


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("ALTER TABLE control_target ADD COLUMN wanted integer NOT NULL DEFAULT 1", None),
        ("ALTER TABLE control_target ADD COLUMN wanted integer NOT NULL", IntegrityError),
        ("ALTER TABLE control_target RENAME COLUMN name TO title", DatabaseError),
        ("ALTER TABLE control_target DROP COLUMN name", DatabaseError),
        ("ALTER TABLE control_target RENAME TO control_receiver", DatabaseError),
    ],
)
def test_a_change_that_it_would_not_survive_is_noticed(
    old_models: list[type[models.Model]], change: str, expected: type[DatabaseError] | None
) -> None:
    [target] = [model for model in old_models if model._meta.db_table == "control_target"]
    with connection.cursor() as cursor:
        cursor.execute(change)
    with transaction.atomic(), pytest.raises(expected) if expected else contextlib.nullcontext():
        work_with(target)
