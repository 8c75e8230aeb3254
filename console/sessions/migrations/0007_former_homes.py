"""Nodes that streams have left, and that have to know their drivers for a while."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('cache_sessions', '0006_lost_nodes'),
        ('fleet', '0010_movers'),
    ]

    operations = [
        migrations.CreateModel(
            name='FormerHome',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('driver', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='former_homes', to='fleet.driver')),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='former_homes', to='fleet.node')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('driver', 'node'), name='former_home_once')],
            },
        ),
    ]
