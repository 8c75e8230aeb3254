from typing import Any

import django.core.validators
from django.db import migrations, models


def let_the_cluster_say_it(apps: Any, _: object) -> None:
    """Rules of orgs add nothing of their own to it."""
    apps.get_model("cache_sessions", "RuleSet").objects.exclude(org=None).update(moves_percent=100)


class Migration(migrations.Migration):
    reviewed = {
        "RunPython": "it fills a column that is new, and that the release before does not read",
        "AddConstraint": "the release before writes the default of that column, and there are few rows",
    }

    dependencies = [
        ("cache_sessions", "0001_release_0_1"),
        ("orgs", "0001_release_0_1"),
    ]

    operations = [
        migrations.AddField(
            model_name="ruleset",
            name="moves_percent",
            field=models.PositiveSmallIntegerField(
                db_default=25,
                default=25,
                help_text="Of a link, for the bytes of streams that move over it.",
                validators=[
                    django.core.validators.MinValueValidator(1),
                    django.core.validators.MaxValueValidator(100),
                ],
            ),
        ),
        migrations.RunPython(let_the_cluster_say_it, migrations.RunPython.noop),
        migrations.AddConstraint(
            model_name="ruleset",
            constraint=models.CheckConstraint(
                condition=models.Q(("moves_percent__gte", 1), ("moves_percent__lte", 100)),
                name="rules_moves",
            ),
        ),
    ]
