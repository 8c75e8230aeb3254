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
# What a database of the version before has recorded of apps whose migrations one has replaced since.
RECORDED: Final = {
    "alerts": (
        "0001_initial 0002_flip_by_time 0003_actor_names 0004_plain_names 0005_rule_slugs "
        "0002_wanted_ends 0001_release_0_1"
    ),
    "cache_sessions": (
        "0001_initial 0002_events_without_nodes 0003_streams 0004_running_operations "
        "0005_driver_orgs 0006_lost_nodes 0007_former_homes 0008_jobs_on_their_boxes "
        "0009_remove_ruleset_rules_quota_is_of_an_org_and_more 0002_moves_percent 0003_borrow "
        "0004_redundancy 0005_fragments 0006_lacks 0007_code_of_streams "
        "0008_address_of_former_homes 0001_release_0_1"
    ),
    "control": (
        "0001_initial 0002_topic 0003_isolation 0004_claims_keys 0005_brains 0002_idle 0001_release_0_1"
    ),
    "fleet": (
        "0001_initial 0002_driver_without_node 0003_public_keys 0004_actor_names "
        "0005_retiring_stores 0006_trusts 0007_removed_nodes 0008_removed 0009_removed_stores "
        "0010_movers 0011_engines 0012_cpu_guard 0013_brains 0014_box_states 0002_box_memory "
        "0003_own_drivers 0004_told_orgs 0005_models_of_removed 0001_release_0_1"
    ),
    "policies": (
        "0001_initial 0003_data_key_destroyed 0004_actor_names 0005_epochs 0006_displacement "
        "0007_receipts_of_drivers 0002_protected 0003_data_key_at 0004_put_back 0001_release_0_1"
    ),
    "telemetry": (
        "0001_initial 0003_events 0004_slow_transfers 0005_dead_letters 0006_watermarks "
        "0002_roll_ups 0003_ended_sources 0004_former_topics 0001_release_0_1"
    ),
    "workloads": (
        "0001_initial 0003_tokenizers 0002_immutable 0003_buckets 0004_instance_failed "
        "0005_rollout_traffic 0006_room_at 0001_release_0_1"
    ),
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
