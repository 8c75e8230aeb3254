"""Lost nodes: whether and when they are replaced, and which there are."""

from typing import Any

import django.core.validators
import django.db.models.deletion
from django.apps.registry import Apps
from django.db import migrations, models


def orgs_add_nothing(apps: Apps, _editor: Any) -> None:
    """The rules of orgs that exist wait as long as those of the cluster."""
    rules = apps.get_model("cache_sessions", "RuleSet").objects
    rules.exclude(org=None).update(replace_lost_after_seconds=0)


class Migration(migrations.Migration):

    dependencies = [
        ('cache_sessions', '0005_driver_orgs'),
        ('fleet', '0010_movers'),
        ('operations', '0002_actor_names'),
    ]

    operations = [
        migrations.AddField(
            model_name='ruleset',
            name='replace_lost',
            field=models.BooleanField(default=True),
        ),
        migrations.AddField(
            model_name='ruleset',
            name='replace_lost_after_seconds',
            field=models.PositiveIntegerField(default=20, validators=[django.core.validators.MaxValueValidator(86400)]),
        ),
        migrations.RunPython(orgs_add_nothing, migrations.RunPython.noop),
        migrations.CreateModel(
            name='Loss',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('since', models.DateTimeField()),
                ('verdict', models.CharField(choices=[('waiting', 'waiting'), ('replacing', 'replacing'), ('blocked', 'blocked'), ('replaced', 'replaced')], max_length=16)),
                ('sentence', models.CharField(max_length=500)),
                ('planned_at', models.DateTimeField(null=True)),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='losses', to='fleet.node')),
                ('operation', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='losses', to='operations.operation')),
                ('session', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='losses', to='cache_sessions.session')),
            ],
            options={
                'verbose_name_plural': 'losses',
                'ordering': ('session', 'node'),
                'constraints': [models.UniqueConstraint(fields=('session', 'node'), name='loss_once')],
            },
        ),
    ]
