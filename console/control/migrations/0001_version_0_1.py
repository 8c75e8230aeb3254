import console.control.models
import console.shell.sealed
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('control', '0001_initial'),
        ('control', '0002_topic'),
        ('control', '0003_isolation'),
        ('control', '0004_claims_keys'),
        ('control', '0005_brains'),
        ('control', '0001_release_0_1'),
        ('control', '0002_idle'),
    ]

    dependencies = [
    ]

    operations = [
        CreateModel(
            name='BadAnswers',
            fields=[
                ('fault', models.CharField(max_length=16, primary_key=True, serialize=False)),
                ('count', models.PositiveBigIntegerField(default=0)),
            ],
        ),
        CreateModel(
            name='Change',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('why', models.CharField(max_length=200)),
                ('targets', models.JSONField(default=list)),
                ('topic', models.CharField(blank=True, max_length=80)),
                ('applied_at', models.DateTimeField(null=True)),
            ],
            options={
                'ordering': ('-id',),
                'indexes': [models.Index(condition=models.Q(('applied_at', None)), fields=['-id'], name='change_open')],
            },
        ),
        CreateModel(
            name='Target',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('node', 'Node'), ('driver', 'Driver'), ('brain', 'Brain')], max_length=8)),
                ('name', models.CharField(max_length=63)),
                ('secret', console.shell.sealed.SealedBytes(default=console.control.models.new_secret)),
                ('claims_key', console.shell.sealed.SealedBytes(default=console.control.models.new_secret)),
                ('generation', models.PositiveBigIntegerField(default=0)),
                ('digest', models.BinaryField(default=b'', max_length=32)),
                ('compiled_at', models.DateTimeField(null=True)),
                ('change', models.PositiveBigIntegerField(default=0)),
                ('told_at', models.DateTimeField(null=True)),
                ('observed_generation', models.PositiveBigIntegerField(default=0)),
                ('observed_change', models.PositiveBigIntegerField(default=0)),
                ('observed_at', models.DateTimeField(null=True)),
                ('problem', models.CharField(blank=True, max_length=500)),
                ('failures', models.PositiveIntegerField(default=0)),
                ('retry_at', models.DateTimeField(null=True)),
                ('fault', models.CharField(blank=True, max_length=16)),
                ('bad_since', models.DateTimeField(null=True)),
                ('asked_until', models.DateTimeField(null=True)),
                ('is_idle', models.BooleanField(db_default=False, default=False)),
            ],
            options={
                'ordering': ('kind', 'name'),
                'constraints': [models.UniqueConstraint(fields=('kind', 'name'), name='target_once'), models.CheckConstraint(condition=models.Q(('kind__in', ['node', 'driver', 'brain'])), name='target_kind'), models.CheckConstraint(condition=models.Q(('observed_change__lte', models.F('change'))), name='target_change_in_order')],
            },
        ),
    ]
