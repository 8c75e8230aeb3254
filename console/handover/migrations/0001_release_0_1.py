import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('handover', '0001_initial'),
        ('handover', '0002_actor_names'),
    ]

    dependencies = [
        ('orgs', '0001_release_0_1'),
    ]

    operations = [
        CreateModel(
            name='Note',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('author', models.CharField(max_length=193)),
                ('text', models.CharField(max_length=4000)),
                ('org', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='notes', to='orgs.org')),
            ],
            options={
                'ordering': ('-id',),
                'indexes': [models.Index(fields=['at'], name='note_by_time')],
                'constraints': [models.CheckConstraint(condition=models.Q(('text', ''), _negated=True), name='note_says_something')],
            },
        ),
    ]
