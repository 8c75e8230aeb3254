import console.shell.sealed
import django.core.serializers.json
import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('workloads', '0001_initial'),
        ('workloads', '0003_tokenizers'),
        ('workloads', '0001_release_0_1'),
        ('workloads', '0003_buckets'),
        ('workloads', '0004_instance_failed'),
        ('workloads', '0005_rollout_traffic'),
        ('workloads', '0006_room_at'),
    ]

    dependencies = [
        ('cache_sessions', '0001_version_0_1'),
        ('fleet', '0001_version_0_1'),
        ('orgs', '0001_release_0_1'),
        ('routing', '0001_release_0_1'),
    ]

    operations = [
        CreateModel(
            name='Revision',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('template', models.JSONField(encoder=django.core.serializers.json.DjangoJSONEncoder, help_text='See spec.Template.')),
                ('digest', models.CharField(max_length=64)),
                ('same_as', models.PositiveIntegerField(null=True)),
                ('author_id', models.BigIntegerField(null=True)),
                ('author_name', models.CharField(max_length=193)),
                ('note', models.CharField(blank=True, max_length=500)),
                ('made_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('artifact', models.CharField(max_length=64, null=True)),
                ('layout', models.JSONField(encoder=django.core.serializers.json.DjangoJSONEncoder, null=True)),
                ('epoch', models.PositiveIntegerField(null=True)),
                ('compiled_at', models.DateTimeField(null=True)),
            ],
            options={
                'ordering': ('-number',),
                'constraints': [models.CheckConstraint(condition=models.Q(('number__gte', 1)), name='revision_number'), models.CheckConstraint(condition=models.Q(('same_as', None), ('same_as__lt', models.F('number')), _connector='OR'), name='revision_same_as_earlier'), models.CheckConstraint(condition=models.Q(('digest__regex', '^[0-9a-f]{64}$')), name='revision_digest')],
            },
        ),
        CreateModel(
            name='Workload',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=36, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9]([a-z0-9-]{0,34}[a-z0-9])?$', 'Lower-case letters, digits and dashes, at most 36.')])),
                ('model', models.CharField(help_text='What clients send as “model”.', max_length=200)),
                ('boxes_per_replica', models.PositiveIntegerField(validators=[django.core.validators.MaxValueValidator(1024)])),
                ('replicas', models.PositiveIntegerField(validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(256)])),
                ('settings', models.JSONField(encoder=django.core.serializers.json.DjangoJSONEncoder, help_text='See spec.Settings.')),
                ('paused', models.BooleanField(default=False, help_text='No rollout proceeds.')),
                ('deleting', models.BooleanField(default=False)),
                ('restarts', models.PositiveIntegerField(default=0, help_text='How often people asked for one.')),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('generation', models.PositiveBigIntegerField(default=1)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('observed_generation', models.PositiveBigIntegerField(default=0)),
                ('cluster_generation', models.PositiveBigIntegerField(default=0)),
                ('org', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='workloads', to='orgs.org')),
                ('revision', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='workloads.revision')),
                ('served', models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='workload', to='routing.servedmodel')),
                ('session', models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='workload', to='cache_sessions.session')),
                ('stable', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='workloads.revision')),
            ],
            options={
                'ordering': ('name',),
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9-]{0,34}[a-z0-9])?$')), name='workload_name'), models.CheckConstraint(condition=models.Q(('replicas__gte', 1), ('replicas__lte', 256)), name='workload_replicas'), models.CheckConstraint(condition=models.Q(('boxes_per_replica__lte', 1024)), name='workload_boxes'), models.CheckConstraint(condition=models.Q(('observed_generation__lte', models.F('generation'))), name='workload_observed')],
            },
        ),
        CreateModel(
            name='Rollout',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('restart', models.PositiveIntegerField(default=0)),
                ('phase', models.CharField(choices=[('running', 'in progress'), ('paused', 'paused'), ('done', 'complete'), ('failed', 'failed'), ('undone', 'rolled back'), ('superseded', 'superseded')], default='running', max_length=16)),
                ('reason', models.CharField(blank=True, max_length=64)),
                ('sentence', models.CharField(blank=True, max_length=500)),
                ('switched', models.PositiveIntegerField(default=0)),
                ('total', models.PositiveIntegerField(default=0)),
                ('started_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('deadline_at', models.DateTimeField(blank=True, null=True)),
                ('ended_at', models.DateTimeField(blank=True, null=True)),
                ('from_revision', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='workloads.revision')),
                ('to_revision', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='rollouts', to='workloads.revision')),
                ('workload', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='rollouts', to='workloads.workload')),
                ('traffic', models.JSONField(blank=True, help_text='How requests fared with both revisions, as it was judged last: see world.Traffic.', null=True)),
                ('resumed_at', models.DateTimeField(blank=True, null=True)),
            ],
            options={
                'ordering': ('-pk',),
                'constraints': [models.UniqueConstraint(condition=models.Q(('ended_at', None)), fields=('workload',), name='rollout_one_at_a_time'), models.CheckConstraint(condition=models.Q(models.Q(('ended_at', None), ('phase__in', ['running', 'paused'])), models.Q(('ended_at__isnull', False), ('phase__in', ['done', 'failed', 'undone', 'superseded'])), _connector='OR'), name='rollout_ended')],
            },
        ),
        migrations.AddField(
            model_name='revision',
            name='workload',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='revisions', to='workloads.workload'),
        ),
        CreateModel(
            name='Instance',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True)),
                ('ordinal', models.PositiveIntegerField(validators=[django.core.validators.MaxValueValidator(100000)])),
                ('restart', models.PositiveIntegerField(default=0)),
                ('epoch', models.PositiveIntegerField(default=1)),
                ('goal', models.CharField(choices=[('run', 'run'), ('release_cache', 'release its cache'), ('drain', 'drain')], default='run', max_length=16)),
                ('goal_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('spec', models.BinaryField(default=bytes, help_text='What its manager is told, as JSON.')),
                ('secrets', console.shell.sealed.SealedText(blank=True, default='', help_text='JSON, sealed at rest.')),
                ('boxes', models.JSONField(default=list)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('ended_at', models.DateTimeField(blank=True, null=True)),
                ('end_reason', models.CharField(blank=True, max_length=500)),
                ('serving', models.BooleanField(default=False, help_text='Requests of its replica go to it.')),
                ('state', models.CharField(choices=[('pending', 'pending'), ('compiling', 'compiling'), ('loading', 'loading'), ('starting', 'starting'), ('standby', 'standby'), ('ready', 'ready'), ('draining', 'draining'), ('gone', 'gone')], default='pending', max_length=16)),
                ('reason', models.CharField(blank=True, max_length=64)),
                ('sentence', models.CharField(blank=True, max_length=500)),
                ('since', models.DateTimeField(default=django.utils.timezone.now)),
                ('ready_at', models.DateTimeField(blank=True, null=True)),
                ('acknowledged_goal', models.CharField(blank=True, choices=[('run', 'run'), ('release_cache', 'release its cache'), ('drain', 'drain')], max_length=16)),
                ('cache', models.CharField(blank=True, choices=[('', 'not known'), ('none', 'none'), ('waiting', 'waiting'), ('attached', 'attached'), ('released', 'released')], default='', max_length=16)),
                ('url', models.CharField(blank=True, max_length=500)),
                ('progress_done', models.BigIntegerField(default=0)),
                ('progress_total', models.BigIntegerField(default=0)),
                ('progress_unit', models.CharField(blank=True, max_length=32)),
                ('progress_seconds', models.FloatField(default=0)),
                ('engine_restarts', models.PositiveIntegerField(default=0)),
                ('host', models.CharField(blank=True, max_length=253)),
                ('running_requests', models.PositiveIntegerField(default=0)),
                ('seen_at', models.DateTimeField(blank=True, null=True)),
                ('revision', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='instances', to='workloads.revision')),
                ('workload', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='instances', to='workloads.workload')),
                ('failed', models.BooleanField(db_default=False, default=False, help_text='It ended by itself.')),
                ('room_at', models.DateTimeField(blank=True, null=True)),
            ],
            options={
                'ordering': ('ordinal', 'pk'),
                'indexes': [models.Index(fields=['workload', '-id'], name='instance_of_workload')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('serving', True)), fields=('workload', 'ordinal'), name='instance_serving_once'), models.CheckConstraint(condition=models.Q(('ended_at', None), ('serving', False), _connector='OR'), name='instance_ended_serves_nobody'), models.CheckConstraint(condition=models.Q(('goal__in', ['run', 'release_cache', 'drain'])), name='instance_goal'), models.CheckConstraint(condition=models.Q(('state__in', ['pending', 'compiling', 'loading', 'starting', 'standby', 'ready', 'draining', 'gone'])), name='instance_state')],
            },
        ),
        CreateModel(
            name='Condition',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('type', models.CharField(max_length=32)),
                ('status', models.CharField(choices=[('True', 'yes'), ('False', 'no'), ('Unknown', 'not known')], max_length=8)),
                ('reason', models.CharField(max_length=64)),
                ('message', models.CharField(blank=True, max_length=500)),
                ('since', models.DateTimeField(default=django.utils.timezone.now)),
                ('workload', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='conditions', to='workloads.workload')),
            ],
            options={
                'ordering': ('pk',),
                'constraints': [models.UniqueConstraint(fields=('workload', 'type'), name='condition_once'), models.CheckConstraint(condition=models.Q(('status__in', ['True', 'False', 'Unknown'])), name='condition_status')],
            },
        ),
        CreateModel(
            name='Tokenizer',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('sha256', models.CharField(max_length=64)),
                ('name', models.CharField(max_length=100)),
                ('size_bytes', models.PositiveBigIntegerField()),
                ('author_id', models.BigIntegerField(null=True)),
                ('author_name', models.CharField(max_length=193)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('org', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='tokenizers', to='orgs.org')),
            ],
            options={
                'ordering': ('-pk',),
                'constraints': [models.UniqueConstraint(fields=('org', 'sha256'), name='tokenizer_once', nulls_distinct=False), models.CheckConstraint(condition=models.Q(('sha256__regex', '^[0-9a-f]{64}$')), name='tokenizer_sha256')],
            },
        ),
        migrations.AddConstraint(
            model_name='revision',
            constraint=models.UniqueConstraint(fields=('workload', 'number'), name='revision_of_workload'),
        ),
        CreateModel(
            name='Bucket',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('endpoint', models.CharField(blank=True, help_text="Empty: Amazon's.", max_length=500, validators=[django.core.validators.RegexValidator('^(https?://[^\\s/?#@]+(/[^\\s?#]*)?)?$', 'An address like https://s3.example.com.')])),
                ('name', models.CharField(max_length=63, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9.-]{1,62}$', "A bucket's name, without s3://.")])),
                ('region', models.CharField(blank=True, max_length=40, validators=[django.core.validators.RegexValidator('^[a-z0-9-]*$', 'Lower-case letters, digits and dashes.')])),
                ('shared', models.BooleanField(default=False)),
                ('credentials', console.shell.sealed.SealedText(help_text='JSON, sealed at rest.')),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('author_id', models.BigIntegerField(blank=True, null=True)),
                ('author_name', models.CharField(max_length=193)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('changed_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('org', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='buckets', to='orgs.org')),
            ],
            options={
                'ordering': ('-pk',),
                'constraints': [models.UniqueConstraint(fields=('org', 'endpoint', 'name'), name='bucket_once', nulls_distinct=False), models.CheckConstraint(condition=models.Q(('shared', False), ('org', None), _connector='OR'), name='bucket_shared_by_platform')],
            },
        ),
    ]
