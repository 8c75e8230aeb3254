"""What is stored of metrics of tests."""

from __future__ import annotations

from django.db import connection

from telemetry.store.storage import Shapes, cells_of


def sums(*tables: str) -> dict[str, dict[str, float]]:
    """By topic and series, all that was counted, wherever it lies."""
    shapes, found = Shapes(), dict[str, dict[str, float]]()
    with connection.cursor() as cursor:
        for table in tables:
            cursor.execute(
                f"SELECT name, shape, cells FROM telemetry_{table} JOIN telemetry_topic ON id = topic"  # noqa: S608
            )
            for topic, shape, cells in cursor.fetchall():
                for one, cell in shapes.of([shape])[shape].pairs(cells_of(cells)):
                    number = cell if isinstance(cell, int | float) else sum(cell[2:]) if cell else 0
                    name = one.name + "".join(f",{key}={value}" for key, value in one.labels)
                    if one.name.startswith("test_") and one.name != "test_slots":
                        of = found.setdefault(topic, {})
                        of[name] = of.get(name, 0) + number
    return found
