from typing import Any

from django.db import migrations, models


def let_the_cluster_say_it(apps: Any, _: object) -> None:
    """Rules of orgs add nothing of their own to it."""
    apps.get_model("cache_sessions", "RuleSet").objects.exclude(org=None).update(borrow="spine")


class Migration(migrations.Migration):
    reviewed = {
        "RunPython": "it fills a column that is new, and that the release before does not read",
        "AddConstraint": "the release before writes the default of that column, and there are few rows",
    }

    dependencies = [
        ("cache_sessions", "0002_moves_percent"),
        ("orgs", "0001_release_0_1"),
    ]

    operations = [
        migrations.AddField(
            model_name="ruleset",
            name="borrow",
            field=models.CharField(
                choices=[
                    ("no", "not used"),
                    ("node", "on the same node"),
                    ("leaf", "on the same node or leaf"),
                    ("spine", "also across the spine"),
                ],
                db_default="leaf",
                default="leaf",
                help_text="How far drivers may copy columns from the memory of siblings.",
                max_length=8,
            ),
        ),
        migrations.RunPython(let_the_cluster_say_it, migrations.RunPython.noop),
        migrations.AddConstraint(
            model_name="ruleset",
            constraint=models.CheckConstraint(
                condition=models.Q(("borrow__in", ["no", "node", "leaf", "spine"])),
                name="rules_borrow",
            ),
        ),
    ]
