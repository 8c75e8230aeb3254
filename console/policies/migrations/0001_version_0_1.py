import console.policies.models
import console.shell.sealed
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('policies', '0001_initial'),
        ('policies', '0003_data_key_destroyed'),
        ('policies', '0004_actor_names'),
        ('policies', '0005_epochs'),
        ('policies', '0006_displacement'),
        ('policies', '0007_receipts_of_drivers'),
        ('policies', '0001_release_0_1'),
        ('policies', '0003_data_key_at'),
        ('policies', '0004_put_back'),
    ]

    dependencies = [
        ('control', '0001_version_0_1'),
        ('orgs', '0001_release_0_1'),
    ]

    operations = [
        CreateModel(
            name='OrgKeys',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('secret', console.shell.sealed.SealedBytes(default=console.policies.models.new_secret)),
                ('data_key', console.shell.sealed.SealedBytes(default=console.policies.models.new_data_key)),
                ('epoch', models.PositiveIntegerField(default=1)),
                ('model_secrets', console.shell.sealed.SealedText(default='{}')),
                ('retired', models.JSONField(default=list)),
                ('made_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('org', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='cache_keys', to='orgs.org')),
                ('data_key_at', models.DateTimeField(null=True)),
            ],
            options={
                'verbose_name_plural': 'org keys',
            },
        ),
        CreateModel(
            name='PolicyVersion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('document', models.TextField()),
                ('author_id', models.BigIntegerField(null=True)),
                ('author_name', models.CharField(max_length=193)),
                ('reason', models.CharField(max_length=500)),
                ('made_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('same_as', models.PositiveIntegerField(null=True)),
                ('change', models.ForeignKey(db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='control.change')),
                ('org', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='policy_versions', to='orgs.org')),
            ],
            options={
                'ordering': ('-number',),
                'constraints': [models.UniqueConstraint(fields=('org', 'number'), name='policy_version_of_org'), models.UniqueConstraint(condition=models.Q(('org', None)), fields=('number',), name='policy_version_of_cluster'), models.CheckConstraint(condition=models.Q(('number__gt', 0)), name='policy_version_number'), models.CheckConstraint(condition=models.Q(('same_as', None), ('same_as__lt', models.F('number')), _connector='OR'), name='policy_version_same_as_earlier'), models.CheckConstraint(condition=models.Q(('reason', ''), _negated=True), name='policy_version_reason')],
            },
        ),
        CreateModel(
            name='PolicyInForce',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('org', models.OneToOneField(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='policy_in_force', to='orgs.org')),
                ('version', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='policies.policyversion')),
            ],
            options={
                'constraints': [models.UniqueConstraint(models.Value(1), condition=models.Q(('org', None)), name='policy_in_force_of_cluster')],
            },
        ),
        CreateModel(
            name='PurgeConfirmation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('operation_id', models.UUIDField()),
                ('identity', models.CharField(max_length=80)),
                ('payload', models.BinaryField()),
                ('signature', models.BinaryField()),
                ('public_key', models.TextField()),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
            ],
            options={
                'ordering': ('identity',),
                'constraints': [models.UniqueConstraint(fields=('operation_id', 'identity'), name='purge_confirmed_once')],
            },
        ),
        CreateModel(
            name='PurgeReceipt',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('org_slug', models.CharField(max_length=48)),
                ('model', models.CharField(blank=True, max_length=200)),
                ('driver', models.CharField(blank=True, max_length=63)),
                ('operation_id', models.UUIDField(unique=True)),
                ('asked_by', models.CharField(max_length=193)),
                ('reason', models.CharField(max_length=500)),
                ('asked_at', models.DateTimeField()),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('data_key_destroyed_at', models.DateTimeField(null=True)),
                ('columns', models.BigIntegerField()),
                ('bytes', models.BigIntegerField()),
                ('files', models.BigIntegerField()),
                ('file_bytes', models.BigIntegerField()),
                ('epoch', models.PositiveIntegerField(null=True)),
                ('places', models.JSONField(default=dict)),
            ],
            options={
                'ordering': ('-at',),
                'indexes': [models.Index(fields=['org_slug', '-at'], name='purge_receipt_of_org')],
            },
        ),
        CreateModel(
            name='ScheduledPolicy',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('document', models.TextField()),
                ('starts_at', models.DateTimeField()),
                ('ends_at', models.DateTimeField(null=True)),
                ('reason', models.CharField(max_length=500)),
                ('author_id', models.BigIntegerField(null=True)),
                ('author_name', models.CharField(max_length=193)),
                ('made_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('state', models.CharField(choices=[('waiting', 'Waiting'), ('in force', 'In Force'), ('done', 'Done'), ('cancelled', 'Cancelled'), ('overtaken', 'Overtaken'), ('refused', 'Refused')], default='waiting', max_length=12)),
                ('note', models.CharField(blank=True, max_length=500)),
                ('number', models.PositiveIntegerField(null=True)),
                ('back_to', models.PositiveIntegerField(null=True)),
                ('org', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='scheduled_policies', to='orgs.org')),
            ],
            options={
                'ordering': ('starts_at', 'id'),
                'indexes': [models.Index(condition=models.Q(('state__in', ['waiting', 'in force'])), fields=['starts_at'], name='scheduled_open')],
                'constraints': [models.CheckConstraint(condition=models.Q(('ends_at', None), ('ends_at__gt', models.F('starts_at')), _connector='OR'), name='scheduled_ends_after_it_starts'), models.CheckConstraint(condition=models.Q(('reason', ''), _negated=True), name='scheduled_reason')],
            },
        ),
        CreateModel(
            name='Caller',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=120)),
                ('public_id', models.CharField(max_length=12, unique=True)),
                ('token_sha256', models.CharField(max_length=64, unique=True)),
                ('created_by', models.CharField(max_length=193)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('org', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='callers', to='orgs.org')),
            ],
            options={
                'ordering': ('name', 'id'),
                'constraints': [models.UniqueConstraint(fields=('org', 'name'), name='caller_once')],
            },
        ),
    ]
