import django.contrib.postgres.fields
import django.contrib.postgres.indexes
import django.core.serializers.json
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('telemetry', '0001_initial'),
        ('telemetry', '0003_events'),
        ('telemetry', '0004_slow_transfers'),
        ('telemetry', '0005_dead_letters'),
        ('telemetry', '0006_watermarks'),
        ('telemetry', '0001_release_0_1'),
        ('telemetry', '0003_ended_sources'),
        ('telemetry', '0004_former_topics'),
    ]

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='DeadLetter',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(db_index=True)),
                ('cause', models.CharField(max_length=32)),
                ('source', models.CharField(db_index=True, max_length=240)),
                ('reason', models.CharField(max_length=300)),
                ('size', models.PositiveIntegerField()),
                ('excerpt', models.CharField(max_length=1000)),
            ],
            options={
                'ordering': ('-id',),
            },
        ),
        migrations.CreateModel(
            name='Source',
            fields=[
                ('name', models.CharField(max_length=120, primary_key=True, serialize=False)),
                ('kind', models.CharField(max_length=32)),
                ('topic', models.CharField(max_length=240)),
                ('version', models.CharField(max_length=40)),
                ('host', models.CharField(max_length=120)),
                ('process_id', models.PositiveIntegerField()),
                ('started_at', models.DateTimeField()),
                ('sequence', models.PositiveBigIntegerField()),
                ('missing', models.PositiveBigIntegerField(default=0)),
                ('seen_at', models.DateTimeField()),
                ('ended_at', models.DateTimeField(null=True)),
            ],
            options={
                'ordering': ('kind', 'name'),
            },
        ),
        migrations.CreateModel(
            name='StoredShape',
            fields=[
                ('id', models.AutoField(primary_key=True, serialize=False)),
                ('digest', models.BinaryField(max_length=16, unique=True)),
                ('encoded', models.BinaryField()),
                ('seen_on', models.DateField(db_index=True)),
            ],
        ),
        migrations.CreateModel(
            name='Topic',
            fields=[
                ('id', models.AutoField(primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=240, unique=True)),
                ('seen_on', models.DateField()),
            ],
            options={
                'ordering': ('name',),
            },
        ),
        migrations.CreateModel(
            name='DeadLetterCount',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('day', models.DateField()),
                ('cause', models.CharField(max_length=32)),
                ('source', models.CharField(max_length=240)),
                ('count', models.PositiveBigIntegerField()),
                ('last_at', models.DateTimeField()),
            ],
            options={
                'ordering': ('-day', 'cause', 'source'),
                'constraints': [models.UniqueConstraint(fields=('day', 'cause', 'source'), name='dead_letters_counted_once')],
            },
        ),
        migrations.CreateModel(
            name='Event',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(db_index=True)),
                ('kind', models.CharField(max_length=48)),
                ('topics', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=240), size=None)),
                ('sentence', models.CharField(max_length=300)),
                ('data', models.JSONField(default=dict, encoder=django.core.serializers.json.DjangoJSONEncoder)),
            ],
            options={
                'ordering': ('-id',),
                'indexes': [django.contrib.postgres.indexes.GinIndex(fields=['topics'], name='event_of_topics'), models.Index(fields=['kind', '-id'], name='event_of_kind')],
            },
        ),
        migrations.CreateModel(
            name='SlowTransfer',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(db_index=True)),
                ('driver', models.CharField(max_length=200)),
                ('direction', models.CharField(max_length=3)),
                ('seconds', models.FloatField()),
                ('org', models.CharField(max_length=200)),
                ('request', models.CharField(max_length=200)),
                ('stream', models.CharField(max_length=200)),
                ('slot_first', models.PositiveBigIntegerField()),
                ('slot_last', models.PositiveBigIntegerField()),
                ('columns', models.PositiveBigIntegerField()),
                ('bytes', models.PositiveBigIntegerField()),
                ('session', models.CharField(max_length=200)),
                ('node', models.CharField(max_length=200)),
                ('tier', models.CharField(max_length=200)),
                ('nic_leaf', models.CharField(max_length=200)),
                ('link', models.CharField(max_length=200)),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('direction__in', ('out', 'in'))), name='slow_transfer_goes_out_or_in'), models.CheckConstraint(condition=models.Q(('seconds__gte', 0)), name='slow_transfer_takes_time')],
            },
        ),
        migrations.CreateModel(
            name='FormerTopic',
            fields=[
                ('name', models.CharField(max_length=240, primary_key=True, serialize=False)),
                ('ended_at', models.DateTimeField()),
            ],
            options={
                'ordering': ('name',),
            },
        ),
    ]
