import console.shell.sealed
import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('fleet', '0001_initial'),
        ('fleet', '0002_driver_without_node'),
        ('fleet', '0003_public_keys'),
        ('fleet', '0004_actor_names'),
        ('fleet', '0005_retiring_stores'),
        ('fleet', '0006_trusts'),
        ('fleet', '0007_removed_nodes'),
        ('fleet', '0008_removed'),
        ('fleet', '0009_removed_stores'),
        ('fleet', '0010_movers'),
        ('fleet', '0011_engines'),
        ('fleet', '0012_cpu_guard'),
        ('fleet', '0013_brains'),
        ('fleet', '0014_box_states'),
        ('fleet', '0001_release_0_1'),
        ('fleet', '0002_box_memory'),
        ('fleet', '0003_own_drivers'),
        ('fleet', '0004_told_orgs'),
        ('fleet', '0005_models_of_removed'),
    ]

    dependencies = [
    ]

    operations = [
        CreateModel(
            name='Box',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('state', models.CharField(choices=[('ready', 'ready'), ('cordoned', 'cordoned'), ('draining', 'draining')], default='ready', max_length=16)),
                ('state_reason', models.CharField(blank=True, max_length=500)),
                ('memory_bytes', models.BigIntegerField(blank=True, help_text='For weights and KV; null if nobody has said.', null=True)),
            ],
            options={
                'verbose_name_plural': 'boxes',
                'ordering': ('name',),
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='box_name'), models.CheckConstraint(condition=models.Q(('state__in', ['ready', 'cordoned', 'draining'])), name='box_state'), models.CheckConstraint(condition=models.Q(('memory_bytes__gt', 0)), name='box_memory')],
            },
        ),
        CreateModel(
            name='Leaf',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
            ],
            options={
                'ordering': ('name',),
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='leaf_name')],
            },
        ),
        CreateModel(
            name='Node',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('control_url', models.CharField(blank=True, max_length=500)),
                ('control_token', console.shell.sealed.SealedText(blank=True, default='', help_text='Sealed at rest.')),
                ('heartbeat_sha256', models.BinaryField(max_length=32, null=True)),
                ('public_key', models.TextField(blank=True, default='', help_text='PEM. Bound when it joins; empty for one of an older version.')),
                ('trusts', models.CharField(blank=True, default='', help_text='Digest of the authorities that it believes.', max_length=64)),
                ('software_version', models.CharField(blank=True, max_length=60)),
                ('mover', models.CharField(blank=True, choices=[('compiled', 'compiled'), ('python', 'Python')], default='', help_text='What moves bytes in it. Compiled code is faster; empty: it has not reported it.', max_length=16)),
                ('joined_at', models.DateTimeField(blank=True, null=True)),
                ('last_heartbeat_at', models.DateTimeField(blank=True, null=True)),
                ('state', models.CharField(choices=[('ready', 'ready'), ('cordoned', 'cordoned'), ('draining', 'draining'), ('maintenance', 'maintenance'), ('lost', 'lost')], default='lost', max_length=16)),
                ('state_reason', models.CharField(blank=True, default='It has not joined yet.', max_length=500)),
                ('state_since', models.DateTimeField(default=django.utils.timezone.now)),
                ('held_state', models.CharField(blank=True, default='ready', max_length=16)),
                ('held_reason', models.CharField(blank=True, max_length=500)),
                ('memory_bytes', models.BigIntegerField(default=0, validators=[django.core.validators.MinValueValidator(0)])),
                ('cpus', models.PositiveIntegerField(default=0)),
                ('shards_max', models.PositiveIntegerField(default=0, help_text='More shards would cost others cores.')),
                ('cores_used', models.FloatField(blank=True, null=True)),
                ('shards_measured', models.PositiveIntegerField(blank=True, null=True)),
                ('measured_at', models.DateTimeField(blank=True, null=True)),
                ('declared', models.JSONField(blank=True, default=dict)),
                ('reported', models.JSONField(blank=True, default=dict)),
                ('labels', models.JSONField(blank=True, default=dict)),
                ('protocol_min', models.PositiveSmallIntegerField(default=0)),
                ('protocol_max', models.PositiveSmallIntegerField(default=0)),
                ('data_address', models.CharField(blank=True, help_text='What drivers connect to.', max_length=500)),
            ],
            options={
                'ordering': ('name',),
                'abstract': False,
                'indexes': [models.Index(fields=['state', 'name'], name='node_of_state')],
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='node_name'), models.CheckConstraint(condition=models.Q(models.Q(('control_url', ''), ('heartbeat_sha256', None), ('joined_at', None)), models.Q(('heartbeat_sha256__isnull', False), ('joined_at__isnull', False), models.Q(('control_url', ''), _negated=True)), _connector='OR'), name='node_joined'), models.CheckConstraint(condition=models.Q(('state__in', ['ready', 'cordoned', 'draining', 'maintenance', 'lost'])), name='node_state'), models.CheckConstraint(condition=models.Q(models.Q(('held_state__in', ['ready', 'cordoned', 'draining', 'maintenance']), ('state', 'lost')), models.Q(models.Q(('state', 'lost'), _negated=True), ('held_state', '')), _connector='OR'), name='node_held_state_while_lost'), models.CheckConstraint(condition=models.Q(('joined_at__isnull', False), ('state', 'lost'), _connector='OR'), name='node_not_joined_is_lost'), models.CheckConstraint(condition=models.Q(('memory_bytes__gte', 0)), name='node_memory'), models.CheckConstraint(condition=models.Q(('protocol_min__lte', models.F('protocol_max'))), name='node_protocol')],
            },
        ),
        CreateModel(
            name='Brain',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('control_url', models.CharField(blank=True, max_length=500)),
                ('control_token', console.shell.sealed.SealedText(blank=True, default='', help_text='Sealed at rest.')),
                ('heartbeat_sha256', models.BinaryField(max_length=32, null=True)),
                ('public_key', models.TextField(blank=True, default='', help_text='PEM. Bound when it joins; empty for one of an older version.')),
                ('trusts', models.CharField(blank=True, default='', help_text='Digest of the authorities that it believes.', max_length=64)),
                ('software_version', models.CharField(blank=True, max_length=60)),
                ('mover', models.CharField(blank=True, choices=[('compiled', 'compiled'), ('python', 'Python')], default='', help_text='What moves bytes in it. Compiled code is faster; empty: it has not reported it.', max_length=16)),
                ('joined_at', models.DateTimeField(blank=True, null=True)),
                ('last_heartbeat_at', models.DateTimeField(blank=True, null=True)),
                ('api_url', models.CharField(blank=True, default='', help_text='Where clients send requests, as it reports.', max_length=500)),
                ('lost_at', models.DateTimeField(blank=True, null=True)),
            ],
            options={
                'ordering': ('name',),
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='brain_name'), models.CheckConstraint(condition=models.Q(models.Q(('control_url', ''), ('heartbeat_sha256', None), ('joined_at', None)), models.Q(('heartbeat_sha256__isnull', False), ('joined_at__isnull', False), models.Q(('control_url', ''), _negated=True)), _connector='OR'), name='brain_joined')],
            },
        ),
        CreateModel(
            name='Domain',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('index', models.PositiveSmallIntegerField(validators=[django.core.validators.MaxValueValidator(3)])),
                ('wio', models.PositiveSmallIntegerField(validators=[django.core.validators.MinValueValidator(1)])),
                ('box', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='domains', to='fleet.box')),
            ],
            options={
                'ordering': ('index',),
                'constraints': [models.UniqueConstraint(fields=('box', 'index'), name='domain_once'), models.CheckConstraint(condition=models.Q(('index__lt', 4)), name='domain_index'), models.CheckConstraint(condition=models.Q(('wio__gt', 0)), name='domain_wio')],
            },
        ),
        CreateModel(
            name='Driver',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('control_url', models.CharField(blank=True, max_length=500)),
                ('control_token', console.shell.sealed.SealedText(blank=True, default='', help_text='Sealed at rest.')),
                ('heartbeat_sha256', models.BinaryField(max_length=32, null=True)),
                ('public_key', models.TextField(blank=True, default='', help_text='PEM. Bound when it joins; empty for one of an older version.')),
                ('trusts', models.CharField(blank=True, default='', help_text='Digest of the authorities that it believes.', max_length=64)),
                ('software_version', models.CharField(blank=True, max_length=60)),
                ('mover', models.CharField(blank=True, choices=[('compiled', 'compiled'), ('python', 'Python')], default='', help_text='What moves bytes in it. Compiled code is faster; empty: it has not reported it.', max_length=16)),
                ('joined_at', models.DateTimeField(blank=True, null=True)),
                ('last_heartbeat_at', models.DateTimeField(blank=True, null=True)),
                ('model', models.JSONField(blank=True, help_text='swdriver_shim.desired.ModelSpec', null=True)),
                ('engine', models.CharField(blank=True, default='', help_text='The engine that it is part of; empty for a daemon.', max_length=60)),
                ('lost_at', models.DateTimeField(blank=True, null=True)),
                ('workload', models.CharField(blank=True, db_default='', default='', help_text="Whose instances it is the driver of; empty: nobody's, and anybody's jobs.", max_length=63)),
            ],
            options={
                'ordering': ('name',),
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='driver_name'), models.CheckConstraint(condition=models.Q(models.Q(('control_url', ''), ('heartbeat_sha256', None), ('joined_at', None)), models.Q(('heartbeat_sha256__isnull', False), ('joined_at__isnull', False), models.Q(('control_url', ''), _negated=True)), _connector='OR'), name='driver_joined')],
            },
        ),
        CreateModel(
            name='JoinToken',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('public_id', models.CharField(max_length=12, unique=True)),
                ('secret_sha256', models.BinaryField(max_length=32)),
                ('kind', models.CharField(choices=[('node', 'Node'), ('driver', 'Driver'), ('brain', 'Brain')], max_length=8)),
                ('note', models.CharField(blank=True, max_length=120)),
                ('uses_max', models.PositiveIntegerField()),
                ('uses_left', models.PositiveIntegerField()),
                ('created_by', models.CharField(max_length=193)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('expires_at', models.DateTimeField()),
                ('last_used_at', models.DateTimeField(null=True)),
                ('revoked_at', models.DateTimeField(null=True)),
                ('name', models.CharField(blank=True, db_default='', default='', max_length=63)),
                ('workload', models.CharField(blank=True, db_default='', default='', max_length=63)),
            ],
            options={
                'ordering': ('-created_at', '-id'),
                'constraints': [models.CheckConstraint(condition=models.Q(('kind__in', ['node', 'driver', 'brain'])), name='join_token_kind'), models.CheckConstraint(condition=models.Q(('uses_left__lte', models.F('uses_max')), ('uses_max__gt', 0)), name='join_token_uses')],
            },
        ),
        CreateModel(
            name='Nic',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('wio', models.PositiveSmallIntegerField(default=16, validators=[django.core.validators.MinValueValidator(1)])),
                ('gbits', models.PositiveIntegerField(default=100, validators=[django.core.validators.MinValueValidator(1)])),
                ('leaf', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='nics', to='fleet.leaf')),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='nics', to='fleet.node')),
            ],
            options={
                'ordering': ('name',),
                'constraints': [models.UniqueConstraint(fields=('node', 'name'), name='nic_once'), models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='nic_name'), models.CheckConstraint(condition=models.Q(('wio__gt', 0)), name='nic_wio'), models.CheckConstraint(condition=models.Q(('gbits__gt', 0)), name='nic_gbits')],
            },
        ),
        CreateModel(
            name='Port',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('domain', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='ports', to='fleet.domain')),
                ('leaf', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='ports', to='fleet.leaf')),
            ],
            options={
                'ordering': ('leaf__name',),
                'constraints': [models.UniqueConstraint(fields=('domain', 'leaf'), name='port_once')],
            },
        ),
        CreateModel(
            name='Removed',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('node', 'Node'), ('driver', 'Driver'), ('brain', 'Brain')], max_length=8)),
                ('name', models.CharField(max_length=63)),
                ('data_address', models.CharField(blank=True, max_length=500)),
                ('org_slug', models.CharField(blank=True, max_length=48)),
                ('public_key', models.TextField(blank=True, default='')),
                ('heartbeat_sha256', models.BinaryField(max_length=32, null=True)),
                ('stores', models.JSONField(blank=True, default=list)),
                ('removed_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('by_person', models.BooleanField(db_default=False, default=False)),
                ('erased_at', models.DateTimeField(null=True)),
                ('orgs', models.JSONField(blank=True, null=True)),
                ('told_until', models.DateTimeField(null=True)),
                ('was_replaced', models.BooleanField(db_default=False, default=False)),
                ('model', models.JSONField(blank=True, null=True)),
            ],
            options={
                'verbose_name_plural': 'removed',
                'ordering': ('-removed_at', '-id'),
                'indexes': [models.Index(fields=['kind', 'name'], name='removed_by_name')],
            },
        ),
        CreateModel(
            name='RetiringStore',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('place', models.CharField(max_length=1600)),
                ('said', models.JSONField()),
                ('since', models.DateTimeField()),
                ('is_drained', models.BooleanField(default=False)),
                ('state', models.CharField(blank=True, max_length=16)),
                ('reason', models.CharField(blank=True, max_length=500)),
                ('files', models.BigIntegerField(null=True)),
                ('bytes', models.BigIntegerField(null=True)),
                ('seen_at', models.DateTimeField(null=True)),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='retiring_stores', to='fleet.node')),
            ],
            options={
                'ordering': ('since', 'id'),
                'constraints': [models.UniqueConstraint(fields=('node', 'place'), name='retiring_store_once')],
            },
        ),
        CreateModel(
            name='SpineLink',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('spine', models.CharField(max_length=63, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('gbits', models.PositiveIntegerField(validators=[django.core.validators.MinValueValidator(1)])),
                ('leaf', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='spine_links', to='fleet.leaf')),
            ],
            options={
                'ordering': ('name',),
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='spinelink_name'), models.CheckConstraint(condition=models.Q(('gbits__gt', 0)), name='spinelink_gbits')],
            },
        ),
        CreateModel(
            name='Stamp',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
            ],
            options={
                'ordering': ('name',),
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='stamp_name')],
            },
        ),
        migrations.AddField(
            model_name='node',
            name='stamp',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='nodes', to='fleet.stamp'),
        ),
        migrations.AddField(
            model_name='leaf',
            name='stamp',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='leaves', to='fleet.stamp'),
        ),
        migrations.AddField(
            model_name='box',
            name='stamp',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='boxes', to='fleet.stamp'),
        ),
        CreateModel(
            name='Watch',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('listening_since', models.DateTimeField()),
                ('swept_at', models.DateTimeField()),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('id', 1)), name='watch_once')],
            },
        ),
    ]
