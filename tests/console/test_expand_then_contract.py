"""Migrations leave the release before working: the rule, and all migrations by it."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.postgres import operations as postgres
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ModelState, ProjectState

from tests.console.expand_then_contract import problems
from tests.console.releases import BEFORE, release, since, state_before

NEXT = "0.3.0"
TEXT = models.CharField(max_length=40)


def state() -> ProjectState:
    made = ProjectState()
    fields: list[tuple[str, models.Field[Any, Any]]] = [
        ("id", models.BigAutoField(primary_key=True)),
        ("name", models.CharField(max_length=40)),
        ("note", models.CharField(max_length=40, null=True)),
        ("size", models.IntegerField(db_default=1)),
    ]
    made.add_model(ModelState("shop", "Thing", fields))
    made.add_model(ModelState("shop", "Box", [("id", models.BigAutoField(primary_key=True))]))
    return made


def migration(*operations: Operation, **attributes: Any) -> migrations.Migration:
    made = type("Migration", (migrations.Migration,), {"operations": list(operations), **attributes})
    return made("0002_next", "shop")  # type: ignore[no-any-return]


def said(*operations: Operation, **attributes: Any) -> list[str]:
    return list(problems(migration(*operations, **attributes), state(), NEXT))


def add(field: models.Field[Any, Any]) -> migrations.AddField:
    return migrations.AddField("thing", "added", field)


def alter(name: str, field: models.Field[Any, Any]) -> migrations.AlterField:
    return migrations.AlterField("thing", name, field)


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        (migrations.RemoveField("thing", "name"), "uses it"),
        (migrations.DeleteModel("Thing"), "uses it"),
        (migrations.RenameField("thing", "name", "title"), "former name"),
        (migrations.RenameModel("Thing", "Item"), "former name"),
        (migrations.AlterModelTable("thing", "things"), "former name"),
        (add(models.CharField(max_length=9, default="x")), "`db_default`"),
        (add(models.CharField(max_length=9, null=True, db_index=True)), "index"),
        (add(models.ForeignKey("shop.Box", models.CASCADE, null=True)), "index"),
        (alter("note", TEXT), "may write NULL"),
        (alter("name", models.CharField(max_length=39)), "shorter"),
        (alter("name", models.CharField(max_length=40, unique=True)), "index"),
        (alter("name", models.CharField(max_length=40, db_column="title")), "another name"),
        (alter("size", models.BigIntegerField(db_default=1)), "written anew"),
        (alter("size", models.IntegerField()), "rely on its default"),
        (migrations.AddIndex("thing", models.Index(fields=["name"], name="by_name")), "Concurrently"),
        (
            migrations.AddConstraint("thing", models.UniqueConstraint(fields=["name"], name="one")),
            "may write what it forbids",
        ),
        (
            postgres.AddConstraintNotValid(
                "thing", models.CheckConstraint(condition=models.Q(size__gt=0), name="positive")
            ),
            "may write what it forbids",
        ),
        (migrations.RunSQL("SELECT 1", "SELECT 1"), "cannot be read"),
        (migrations.RunPython(migrations.RunPython.noop), "cannot be read"),
        (
            migrations.SeparateDatabaseAndState(
                [migrations.RunSQL("ALTER TABLE shop_thing DROP COLUMN name", "")],
                [migrations.RemoveField("thing", "name")],
            ),
            "cannot be read",
        ),
    ],
)
def test_what_the_release_before_would_not_survive_is_refused(operation: Operation, why: str) -> None:
    [problem] = said(operation)
    assert why in problem


@pytest.mark.parametrize(
    "operation",
    [
        add(models.CharField(max_length=9, null=True)),
        add(models.CharField(max_length=9, default="x", db_default="x")),
        add(models.ManyToManyField("shop.Box")),
        alter("name", models.CharField(max_length=41)),
        alter("name", models.TextField()),
        alter("name", models.CharField(max_length=40, null=True)),
        alter("name", models.CharField(max_length=40, choices=[("a", "A")])),
        postgres.AddIndexConcurrently("thing", models.Index(fields=["name"], name="by_name")),
        migrations.AlterModelOptions("thing", {"ordering": ["name"]}),
    ],
)
def test_what_it_does_not_notice_is_allowed(operation: Operation) -> None:
    assert said(operation) == []


def test_a_new_table_may_get_anything() -> None:
    create = migrations.CreateModel("Fresh", [("id", models.BigAutoField(primary_key=True))])
    index = migrations.AddIndex("fresh", models.Index(fields=["id"], name="by_id"))
    required = migrations.AddField("fresh", "name", models.CharField(max_length=40, default="x"))
    assert said(create, required, index) == []


def test_what_an_earlier_release_has_stopped_using_may_be_removed() -> None:
    remove = migrations.RemoveField("thing", "name")
    assert said(remove, unused_since="0.2") == []
    [problem] = said(remove, unused_since="0.3")
    assert "remove it later" in problem


def test_a_reason_is_accepted_and_an_empty_one_is_not() -> None:
    sql = migrations.RunSQL("SELECT 1", "SELECT 1")
    assert said(sql, reviewed={"RunSQL": "it only reads"}) == []
    assert said(sql, reviewed={"RunSQL": " "})


def test_all_migrations_since_the_release_before_keep_to_it() -> None:
    loader = MigrationLoader(None)
    found = []
    at = state_before(loader)
    for node in since(loader):
        one = loader.get_migration(*node)
        found += [f"{'.'.join(node)}: {problem}" for problem in problems(one, at, release())]
        at = one.mutate_state(at)
    assert found == []


def test_every_app_is_known_as_the_release_before_has_it() -> None:
    loader = MigrationLoader(None)
    assert set(BEFORE) == {
        app for app, name in loader.graph.leaf_nodes() if _is_ours(loader.get_migration(app, name))
    }


def test_migrations_since_the_release_before_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BEFORE, "audit", "0001_release_0_1")
    assert ("audit", "0002_append_only") in since(MigrationLoader(None))


def _is_ours(one: migrations.Migration) -> bool:
    return type(one).__module__.startswith(("console.", "telemetry."))
