"""What the release before this one knows of the database.

When a release is made, `BEFORE` gets the last migration of each app in it (`python manage.py
showmigrations`), and what came before needs no looking at any more.
"""

from __future__ import annotations

import tomllib
from typing import Any, Final

from django.apps.registry import Apps
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ProjectState

from console.environment import PROJECT

OURS: Final = ("console.", "telemetry.")
BEFORE: Final = {
    "accounts": "0002_release_0_1",
    "alerts": "0001_version_0_1",
    "api": "0001_release_0_1",
    "audit": "0002_append_only",
    "authority": "0001_release_0_1",
    "cache_sessions": "0001_version_0_1",
    "control": "0001_version_0_1",
    "fleet": "0001_version_0_1",
    "handover": "0001_release_0_1",
    "operations": "0001_release_0_1",
    "orgs": "0001_release_0_1",
    "policies": "0002_protected",
    "routing": "0001_release_0_1",
    "saved": "0001_release_0_1",
    "telemetry": "0002_roll_ups",
    "workloads": "0002_immutable",
}


def release() -> str:
    """That which is being made."""
    version: str = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    return version


def since(loader: MigrationLoader) -> list[tuple[str, str]]:
    """The migrations of our apps that the release before does not have, in their order."""
    old = {node for one in BEFORE.items() for node in loader.graph.forwards_plan(one)}
    order: dict[tuple[str, str], None] = {}
    for leaf in loader.graph.leaf_nodes():
        order |= dict.fromkeys(loader.graph.forwards_plan(leaf))
    return [
        node
        for node in order
        if node not in old and loader.get_migration(*node).__module__.startswith(OURS)
    ]


def state_before(loader: MigrationLoader) -> ProjectState:
    """The models of the release before."""
    state: ProjectState = loader.project_state(list(BEFORE.items()))
    return state


def models_before() -> Apps:
    """The same as classes, which read and write the columns that it knows, and no other."""
    loader = MigrationExecutor(connection).loader
    apps: Any = state_before(loader).apps
    return apps  # type: ignore[no-any-return]
