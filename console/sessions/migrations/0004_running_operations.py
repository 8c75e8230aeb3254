"""Operations that are running keep their streams under the name that steps now use."""

from typing import Any

from django.apps.registry import Apps
from django.db import migrations

KINDS = {"session.bring-back": "session.restore-rails"}


def rename(apps: Apps, _editor: Any) -> None:
    operations = apps.get_model("operations", "Operation").objects
    for operation in operations.filter(done=False):
        for kept in (operation.before, operation.notes):
            if "shards" in kept:
                kept["streams"] = kept.pop("shards")
        operation.save(update_fields=["before", "notes"])
    for old, new in KINDS.items():
        operations.filter(kind=old).update(kind=new)


class Migration(migrations.Migration):
    dependencies = [("cache_sessions", "0003_streams"), ("operations", "0002_actor_names")]

    operations = [migrations.RunPython(rename, migrations.RunPython.noop)]
