from django.db import migrations, models
from django.db.models import Q


def text(length: int = 200) -> models.CharField:
    return models.CharField(max_length=length)


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0003_events")]
    operations = [
        migrations.CreateModel(
            name="SlowTransfer",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("at", models.DateTimeField(db_index=True)),
                ("driver", text()),
                ("direction", text(3)),
                ("seconds", models.FloatField()),
                ("org", text()),
                ("request", text()),
                ("stream", text()),
                ("slot_first", models.PositiveBigIntegerField()),
                ("slot_last", models.PositiveBigIntegerField()),
                ("columns", models.PositiveBigIntegerField()),
                ("bytes", models.PositiveBigIntegerField()),
                ("session", text()),
                ("node", text()),
                ("tier", text()),
                ("nic_leaf", text()),
                ("link", text()),
            ],
            options={
                "constraints": [
                    models.CheckConstraint(
                        condition=Q(direction__in=("out", "in")), name="slow_transfer_goes_out_or_in"
                    ),
                    models.CheckConstraint(condition=Q(seconds__gte=0), name="slow_transfer_takes_time"),
                ],
            },
        ),
    ]
