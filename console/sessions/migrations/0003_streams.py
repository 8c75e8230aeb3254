"""What a session places is a stream, also in the database."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("cache_sessions", "0002_events_without_nodes"),
        ("fleet", "0001_initial"),
        ("operations", "0002_actor_names"),
    ]

    operations = [
        migrations.RenameModel("Shard", "Stream"),
        migrations.RemoveConstraint(
            model_name='stream',
            name='shard_once',
        ),
        migrations.RemoveConstraint(
            model_name='stream',
            name='shard_next_is_whole',
        ),
        migrations.RemoveConstraint(
            model_name='stream',
            name='shard_sizing_is_in_place',
        ),
        migrations.RemoveConstraint(
            model_name='stream',
            name='shard_moving_is_elsewhere',
        ),
        migrations.RemoveConstraint(
            model_name='stream',
            name='shard_slots',
        ),
        migrations.AlterField(
            model_name='stream',
            name='box',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='streams', to='fleet.box'),
        ),
        migrations.AlterField(
            model_name='stream',
            name='job',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='streams', to='cache_sessions.job'),
        ),
        migrations.AlterField(
            model_name='stream',
            name='next_node',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='coming_streams', to='fleet.node'),
        ),
        migrations.AlterField(
            model_name='stream',
            name='node',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='streams', to='fleet.node'),
        ),
        migrations.AlterField(
            model_name='stream',
            name='operation',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='streams', to='operations.operation'),
        ),
        migrations.AddConstraint(
            model_name='stream',
            constraint=models.UniqueConstraint(fields=('job', 'group', 'index'), name='stream_once'),
        ),
        migrations.AddConstraint(
            model_name='stream',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('next_node', None), ('next_slots', None), ('next_tier', None), ('operation', None), ('phase', '')), models.Q(('next_node__isnull', False), ('next_slots__isnull', False), ('next_tier__isnull', False), ('operation__isnull', False)), _connector='OR'), name='stream_next_is_whole'),
        ),
        migrations.AddConstraint(
            model_name='stream',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('phase', 'sizing'), _negated=True), ('next_node', models.F('node')), _connector='OR'), name='stream_sizing_is_in_place'),
        ),
        migrations.AddConstraint(
            model_name='stream',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('phase__in', ['making', 'moving']), _negated=True), models.Q(('next_node', models.F('node')), _negated=True), _connector='OR'), name='stream_moving_is_elsewhere'),
        ),
        migrations.AddConstraint(
            model_name='stream',
            constraint=models.CheckConstraint(condition=models.Q(('slot_bytes__gt', 0), ('slots__gte', 0)), name='stream_slots'),
        ),
    ]
