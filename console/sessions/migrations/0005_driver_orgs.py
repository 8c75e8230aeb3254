"""Which orgs a driver may serve. Drivers that there are go on serving all: so they were told."""

from typing import Any

import django.db.models.deletion
import django.utils.timezone
from django.apps.registry import Apps
from django.db import migrations, models
from django.db.models.functions import Coalesce


def serve_all(apps: Apps, _editor: Any) -> None:
    drivers = apps.get_model("fleet", "Driver").objects.all()
    rows = apps.get_model("cache_sessions", "DriverOrg").objects
    rows.bulk_create([rows.model(driver=driver) for driver in drivers])


class Migration(migrations.Migration):
    dependencies = [
        ("cache_sessions", "0004_running_operations"),
        ("fleet", "0010_movers"),
        ("orgs", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="DriverOrg",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("is_leaving", models.BooleanField(default=False)),
                ("since", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "driver",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="orgs",
                        to="fleet.driver",
                    ),
                ),
                (
                    "org",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="drivers",
                        to="orgs.org",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        models.F("driver"), Coalesce("org", models.Value(0)), name="driver_org_once"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("is_leaving", False), ("org__isnull", False), _connector="OR"),
                        name="driver_org_that_leaves_is_one",
                    ),
                ],
            },
        ),
        migrations.RunPython(serve_all, migrations.RunPython.noop),
    ]
