import django.core.validators
import django.db.models.deletion
import django.db.models.expressions
import django.db.models.functions.comparison
import django.db.models.lookups
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('cache_sessions', '0001_initial'),
        ('cache_sessions', '0002_events_without_nodes'),
        ('cache_sessions', '0003_streams'),
        ('cache_sessions', '0004_running_operations'),
        ('cache_sessions', '0005_driver_orgs'),
        ('cache_sessions', '0006_lost_nodes'),
        ('cache_sessions', '0007_former_homes'),
        ('cache_sessions', '0008_jobs_on_their_boxes'),
        ('cache_sessions', '0009_remove_ruleset_rules_quota_is_of_an_org_and_more'),
        ('cache_sessions', '0001_release_0_1'),
        ('cache_sessions', '0002_moves_percent'),
        ('cache_sessions', '0003_borrow'),
        ('cache_sessions', '0004_redundancy'),
        ('cache_sessions', '0005_fragments'),
        ('cache_sessions', '0006_lacks'),
        ('cache_sessions', '0007_code_of_streams'),
        ('cache_sessions', '0008_address_of_former_homes'),
    ]

    dependencies = [
        ('fleet', '0001_version_0_1'),
        ('operations', '0001_release_0_1'),
        ('orgs', '0001_release_0_1'),
    ]

    operations = [
        CreateModel(
            name='Session',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=48, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$', 'Lower-case letters, digits and dashes, at most 48.')])),
                ('path', models.CharField(blank=True, choices=[('require_rail', 'require rail'), ('prefer_rail', 'prefer rail'), ('any', 'any')], max_length=16)),
                ('boxes_desired', models.PositiveIntegerField()),
                ('boxes_min', models.PositiveIntegerField()),
                ('boxes_increment', models.PositiveIntegerField()),
                ('boxes_max', models.PositiveIntegerField(blank=True, null=True)),
                ('bytes_per_token', models.PositiveIntegerField(default=65536, help_text='Of a job over all its boxes, where none is registered yet: plans go by it.', validators=[django.core.validators.MinValueValidator(1)])),
                ('deleting', models.BooleanField(default=False)),
                ('cause', models.CharField(blank=True, max_length=32)),
                ('cause_sentence', models.CharField(blank=True, max_length=500)),
                ('waiting_since', models.DateTimeField(blank=True, null=True)),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('org', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='kvss_sessions', to='orgs.org')),
            ],
            options={
                'ordering': ('name',),
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$')), name='session_name'), models.CheckConstraint(condition=models.Q(('boxes_desired__gte', models.F('boxes_min')), ('boxes_increment__gte', 1), ('boxes_min__gte', 1)), name='session_not_below_its_minimum'), models.CheckConstraint(condition=django.db.models.lookups.Exact(django.db.models.expressions.CombinedExpression(models.F('boxes_desired'), '%%', models.F('boxes_increment')), 0), name='session_on_its_increment'), models.CheckConstraint(condition=models.Q(('boxes_max', None), ('boxes_desired__lte', models.F('boxes_max')), _connector='OR'), name='session_not_above_its_maximum'), models.CheckConstraint(condition=models.Q(('path__in', ['', 'require_rail', 'prefer_rail', 'any'])), name='session_path'), models.CheckConstraint(condition=models.Q(models.Q(('cause', ''), ('waiting_since', None)), models.Q(models.Q(('cause', ''), _negated=True), ('waiting_since__isnull', False)), _connector='OR'), name='session_waits_for_a_cause')],
            },
        ),
        CreateModel(
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
        CreateModel(
            name='Job',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=48, validators=[django.core.validators.RegexValidator('^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$', 'Lower-case letters, digits and dashes, at most 48.')])),
                ('running', models.BooleanField(default=False)),
                ('keeps_to_boxes', models.BooleanField(default=False)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('driver', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, related_name='job', to='fleet.driver')),
                ('session', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='jobs', to='cache_sessions.session')),
            ],
            options={
                'ordering': ('name',),
                'constraints': [models.UniqueConstraint(fields=('session', 'name'), name='job_once'), models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$')), name='job_name')],
            },
        ),
        CreateModel(
            name='SessionBox',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('ready', models.BooleanField(default=False)),
                ('leaving', models.BooleanField(default=False)),
                ('box', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, related_name='session_box', to='fleet.box')),
                ('session', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='boxes', to='cache_sessions.session')),
            ],
            options={
                'ordering': ('box__name',),
            },
        ),
        CreateModel(
            name='JobBox',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='boxes', to='cache_sessions.job')),
                ('session_box', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='jobs', to='cache_sessions.sessionbox')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('job', 'session_box'), name='job_box_once')],
            },
        ),
        CreateModel(
            name='Stream',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('group', models.CharField(max_length=200)),
                ('index', models.PositiveSmallIntegerField()),
                ('domain', models.PositiveSmallIntegerField()),
                ('wio', models.PositiveSmallIntegerField()),
                ('slot_bytes', models.PositiveIntegerField()),
                ('slots', models.BigIntegerField()),
                ('count_from', models.BigIntegerField(default=0)),
                ('tier', models.PositiveSmallIntegerField(choices=[(0, 'rail'), (1, 'leaf'), (2, 'spine')])),
                ('port_leaf', models.CharField(max_length=63)),
                ('nic_leaf', models.CharField(max_length=63)),
                ('why', models.CharField(blank=True, max_length=500)),
                ('next_slots', models.BigIntegerField(null=True)),
                ('next_count_from', models.BigIntegerField(default=0)),
                ('next_tier', models.PositiveSmallIntegerField(choices=[(0, 'rail'), (1, 'leaf'), (2, 'spine')], null=True)),
                ('next_port_leaf', models.CharField(blank=True, max_length=63)),
                ('next_nic_leaf', models.CharField(blank=True, max_length=63)),
                ('next_why', models.CharField(blank=True, max_length=500)),
                ('phase', models.CharField(blank=True, choices=[('', 'settled'), ('making', 'being made'), ('moving', 'moving'), ('sizing', 'changing its size')], default='', max_length=8)),
                ('box', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='streams', to='fleet.box')),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='streams', to='cache_sessions.job')),
                ('next_node', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='coming_streams', to='fleet.node')),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='streams', to='fleet.node')),
                ('operation', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='streams', to='operations.operation')),
                ('code', models.CharField(blank=True, choices=[('1+1', '1+1'), ('2+1', '2+1'), ('4+1', '4+1'), ('4+2', '4+2'), ('8+2', '8+2')], db_default='', default='', max_length=8)),
            ],
            options={
                'ordering': ('job', 'group', 'index'),
                'constraints': [models.UniqueConstraint(fields=('job', 'group', 'index'), name='stream_once'), models.CheckConstraint(condition=models.Q(models.Q(('next_node', None), ('next_slots', None), ('next_tier', None), ('operation', None), ('phase', '')), models.Q(('next_node__isnull', False), ('next_slots__isnull', False), ('next_tier__isnull', False), ('operation__isnull', False)), _connector='OR'), name='stream_next_is_whole'), models.CheckConstraint(condition=models.Q(models.Q(('phase', 'sizing'), _negated=True), ('next_node', models.F('node')), _connector='OR'), name='stream_sizing_is_in_place'), models.CheckConstraint(condition=models.Q(models.Q(('phase__in', ['making', 'moving']), _negated=True), models.Q(('next_node', models.F('node')), _negated=True), _connector='OR'), name='stream_moving_is_elsewhere'), models.CheckConstraint(condition=models.Q(('slot_bytes__gt', 0), ('slots__gte', 0)), name='stream_slots')],
            },
        ),
        CreateModel(
            name='DriverOrg',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('is_leaving', models.BooleanField(default=False)),
                ('since', models.DateTimeField(default=django.utils.timezone.now)),
                ('driver', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='orgs', to='fleet.driver')),
                ('org', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='drivers', to='orgs.org')),
            ],
            options={
                'constraints': [models.UniqueConstraint(models.F('driver'), django.db.models.functions.comparison.Coalesce('org', models.Value(0)), name='driver_org_once'), models.CheckConstraint(condition=models.Q(('is_leaving', False), ('org__isnull', False), _connector='OR'), name='driver_org_that_leaves_is_one')],
            },
        ),
        CreateModel(
            name='FormerHome',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('driver', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='former_homes', to='fleet.driver')),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='former_homes', to='fleet.node')),
                ('address', models.CharField(blank=True, db_default='', default='', max_length=500)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('driver', 'node'), name='former_home_once')],
            },
        ),
        CreateModel(
            name='RuleSet',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('path', models.CharField(choices=[('require_rail', 'require rail'), ('prefer_rail', 'prefer rail'), ('any', 'any')], default='prefer_rail', max_length=16)),
                ('refuse_spine', models.BooleanField(default=False)),
                ('wait_for_rail_seconds', models.PositiveIntegerField(default=0, validators=[django.core.validators.MaxValueValidator(604800)])),
                ('boxes_min', models.PositiveIntegerField(default=1, validators=[django.core.validators.MinValueValidator(1)])),
                ('boxes_increment', models.PositiveIntegerField(default=1, validators=[django.core.validators.MinValueValidator(1)])),
                ('boxes_max', models.PositiveIntegerField(blank=True, null=True)),
                ('grant_percent', models.PositiveSmallIntegerField(default=100, validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(100)])),
                ('boxes_quota', models.PositiveIntegerField(blank=True, null=True)),
                ('replicas_quota', models.PositiveIntegerField(blank=True, help_text='For all workloads of an org, those without boxes included.', null=True)),
                ('replace_lost', models.BooleanField(default=True)),
                ('replace_lost_after_seconds', models.PositiveIntegerField(default=20, validators=[django.core.validators.MaxValueValidator(86400)])),
                ('version', models.PositiveIntegerField(default=1)),
                ('org', models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='session_rules', to='orgs.org')),
                ('moves_percent', models.PositiveSmallIntegerField(db_default=25, default=25, help_text='Of a link, for the bytes of streams that move over it.', validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(100)])),
                ('borrow', models.CharField(choices=[('no', 'not used'), ('node', 'on the same node'), ('leaf', 'on the same node or leaf'), ('spine', 'also across the spine')], db_default='leaf', default='leaf', help_text='How far drivers may copy columns from the memory of siblings.', max_length=8)),
                ('redundancy', models.CharField(choices=[('none', 'none: what an agent loses is computed again'), ('1+1', '1+1: survives the loss of 1 agent, 100 % more bytes'), ('2+1', '2+1: survives the loss of 1 agent, 50 % more bytes'), ('4+1', '4+1: survives the loss of 1 agent, 25 % more bytes'), ('4+2', '4+2: survives the loss of 2 agents, 50 % more bytes'), ('8+2', '8+2: survives the loss of 2 agents, 25 % more bytes')], db_default='none', default='none', help_text='Of columns in tier 2: fragments with data, and with parity.', max_length=8)),
            ],
            options={
                'constraints': [models.UniqueConstraint(django.db.models.functions.comparison.Coalesce('org', models.Value(0)), name='rules_once_also_of_the_cluster'), models.CheckConstraint(condition=models.Q(('boxes_increment__gte', 1), ('boxes_min__gte', 1), models.Q(('boxes_max', None), ('boxes_max__gte', models.F('boxes_min')), _connector='OR')), name='rules_boxes'), models.CheckConstraint(condition=models.Q(('grant_percent__gte', 1), ('grant_percent__lte', 100)), name='rules_grant'), models.CheckConstraint(condition=models.Q(('path__in', ['require_rail', 'prefer_rail', 'any'])), name='rules_path'), models.CheckConstraint(condition=models.Q(models.Q(('boxes_quota', None), ('replicas_quota', None)), ('org__isnull', False), _connector='OR'), name='rules_quota_is_of_an_org'), models.CheckConstraint(condition=models.Q(('moves_percent__gte', 1), ('moves_percent__lte', 100)), name='rules_moves'), models.CheckConstraint(condition=models.Q(('borrow__in', ['no', 'node', 'leaf', 'spine'])), name='rules_borrow'), models.CheckConstraint(condition=models.Q(('redundancy__in', ['none', '1+1', '2+1', '4+1', '4+2', '8+2'])), name='rules_redundancy')],
            },
        ),
        CreateModel(
            name='StreamRedundancy',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('state', models.CharField(max_length=16)),
                ('reason', models.CharField(blank=True, max_length=500)),
                ('columns', models.BigIntegerField()),
                ('incomplete', models.BigIntegerField()),
                ('repaired', models.BigIntegerField()),
                ('unreachable', models.JSONField(default=list)),
                ('seen_at', models.DateTimeField()),
                ('stream', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='redundancy', to='cache_sessions.stream')),
                ('has_stored', models.BooleanField(db_default=False, default=False)),
                ('holders_since', models.DateTimeField(null=True)),
                ('incomplete_at', models.JSONField(db_default=[], default=list)),
                ('most_lacking', models.BigIntegerField(db_default=0, default=0)),
            ],
            options={
                'verbose_name_plural': 'stream redundancies',
            },
        ),
        CreateModel(
            name='FragmentHolder',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('namespace', models.CharField(max_length=32)),
                ('group', models.CharField(max_length=200)),
                ('index', models.PositiveSmallIntegerField()),
                ('place', models.PositiveSmallIntegerField()),
                ('code', models.CharField(choices=[('1+1', '1+1'), ('2+1', '2+1'), ('4+1', '4+1'), ('4+2', '4+2'), ('8+2', '8+2')], max_length=8)),
                ('since', models.DateTimeField(default=django.utils.timezone.now)),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='fragments', to='fleet.node')),
            ],
            options={
                'ordering': ('namespace', 'group', 'index', 'code', 'place'),
                'constraints': [models.CheckConstraint(condition=models.Q(('code__in', ['1+1', '2+1', '4+1', '4+2', '8+2'])), name='fragment_code'), models.UniqueConstraint(fields=('namespace', 'group', 'index', 'code', 'place'), name='fragment_once'), models.UniqueConstraint(fields=('namespace', 'group', 'index', 'code', 'node'), name='fragments_on_different_nodes')],
            },
        ),
    ]
