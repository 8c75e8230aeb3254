from typing import Any

from django.db import migrations, models


def note_whose_drivers_they_are(apps: Any, _: object) -> None:
    """Until now a driver was a workload's by its name."""
    instances = apps.get_model("workloads", "Instance").objects
    drivers = apps.get_model("fleet", "Driver").objects
    homes = instances.values_list("workload__name", "epoch", "ordinal").distinct()
    for workload, epoch, ordinal in homes:
        drivers.filter(name=f"{workload}-{epoch}-{ordinal}").update(workload=workload)


class Migration(migrations.Migration):
    reviewed = {"RunPython": "it fills a column that is new, and that the release before does not read"}

    dependencies = [
        ("workloads", "0003_buckets"),
        ("fleet", "0003_own_drivers"),
    ]

    operations = [
        migrations.AddField(
            model_name="instance",
            name="failed",
            field=models.BooleanField(db_default=False, default=False, help_text="It ended by itself."),
        ),
        migrations.RunPython(note_whose_drivers_they_are, migrations.RunPython.noop),
    ]
