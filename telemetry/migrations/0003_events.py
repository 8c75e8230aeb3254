import django.contrib.postgres.fields
import django.contrib.postgres.indexes
import django.core.serializers.json
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0002_roll_ups")]
    operations = [
        migrations.CreateModel(
            name="Event",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("at", models.DateTimeField(db_index=True)),
                ("kind", models.CharField(max_length=48)),
                (
                    "topics",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=240), size=None
                    ),
                ),
                ("sentence", models.CharField(max_length=300)),
                (
                    "data",
                    models.JSONField(default=dict, encoder=django.core.serializers.json.DjangoJSONEncoder),
                ),
            ],
            options={
                "ordering": ("-id",),
                "indexes": [
                    django.contrib.postgres.indexes.GinIndex(fields=["topics"], name="event_of_topics"),
                    models.Index(fields=["kind", "-id"], name="event_of_kind"),
                ],
            },
        ),
    ]
