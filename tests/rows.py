"""The rows that migrations make, remembered once, and restored after a test that commits transactions.

Django truncates every table instead, and makes content types and permissions again: half a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from django.db import connection, transaction
from psycopg.sql import SQL, Composable, Identifier

# A partition's rows are those of its table.
TABLES = SQL(
    "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace "
    "AND relkind IN ('r', 'p') AND NOT relispartition"
)
FILLED = SQL("SELECT {} WHERE EXISTS (SELECT FROM {})")
ROWS = SQL("SELECT json_agg(t ORDER BY t::text)::text FROM {} t")
INSERT = SQL("INSERT INTO {} SELECT * FROM json_populate_recordset(NULL::{}, {})")


@dataclass(frozen=True)
class Rows:
    """`kept` has the rows of each table as JSON, None for an empty one."""

    kept: dict[str, str | None]

    @classmethod
    def of_now(cls) -> Self:
        tables = [name for (name,) in _ask(TABLES)]
        return cls({table: _rows(table) for table in tables})

    def restore(self) -> None:
        """Let every table have these rows and no others. Triggers do not fire: those of the audit trail
        refuse deletions."""
        with transaction.atomic():
            _tell(SQL("SET LOCAL session_replication_role = replica"))
            for table in self._changed():
                _tell(SQL("DELETE FROM {}").format(Identifier(table)))
                if (rows := self.kept[table]) is not None:
                    _tell(INSERT.format(Identifier(table), Identifier(table), rows))

    def _changed(self) -> list[str]:
        filled = SQL(" UNION ALL ").join(FILLED.format(table, Identifier(table)) for table in self.kept)
        suspects = {name for (name,) in _ask(filled)} | {name for name in self.kept if self.kept[name]}
        return [name for name in suspects if self.kept[name] is None or self.kept[name] != _rows(name)]


def _rows(table: str) -> str | None:
    found: str | None = _ask(ROWS.format(Identifier(table)))[0][0]
    return found


def _ask(query: Composable) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


def _tell(statement: Composable) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)
