import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):
    dependencies = [
        ("cache_sessions", "0004_redundancy"),
        ("fleet", "0004_told_orgs"),
    ]

    operations = [
        CreateModel(
            name="FragmentHolder",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("namespace", models.CharField(max_length=32)),
                ("group", models.CharField(max_length=200)),
                ("index", models.PositiveSmallIntegerField()),
                ("place", models.PositiveSmallIntegerField()),
                (
                    "code",
                    models.CharField(
                        choices=[
                            ("1+1", "1+1"),
                            ("2+1", "2+1"),
                            ("4+1", "4+1"),
                            ("4+2", "4+2"),
                            ("8+2", "8+2"),
                        ],
                        max_length=8,
                    ),
                ),
                ("since", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "node",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="fragments",
                        to="fleet.node",
                    ),
                ),
            ],
            options={
                "ordering": ("namespace", "group", "index", "place"),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("namespace", "group", "index", "place"), name="fragment_once"
                    ),
                    models.UniqueConstraint(
                        fields=("namespace", "group", "index", "node"),
                        name="fragments_on_different_nodes",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("code__in", ["1+1", "2+1", "4+1", "4+2", "8+2"])),
                        name="fragment_code",
                    ),
                ],
            },
        ),
        CreateModel(
            name="StreamRedundancy",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("state", models.CharField(max_length=16)),
                ("reason", models.CharField(blank=True, max_length=500)),
                ("columns", models.BigIntegerField()),
                ("incomplete", models.BigIntegerField()),
                ("repaired", models.BigIntegerField()),
                ("unreachable", models.JSONField(default=list)),
                ("seen_at", models.DateTimeField()),
                (
                    "stream",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="redundancy",
                        to="cache_sessions.stream",
                    ),
                ),
            ],
            options={"verbose_name_plural": "stream redundancies"},
        ),
    ]
