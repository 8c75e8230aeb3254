import console.shell.sealed
import django.core.serializers.json
import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('alerts', '0001_initial'),
        ('alerts', '0002_flip_by_time'),
        ('alerts', '0003_actor_names'),
        ('alerts', '0004_plain_names'),
        ('alerts', '0005_rule_slugs'),
        ('alerts', '0001_release_0_1'),
        ('alerts', '0002_wanted_ends'),
    ]

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ('orgs', '0001_release_0_1'),
    ]

    operations = [
        CreateModel(
            name='Evaluation',
            fields=[
                ('rule', models.CharField(max_length=40, primary_key=True, serialize=False)),
                ('at', models.DateTimeField()),
                ('took_ms', models.FloatField()),
                ('problem', models.CharField(blank=True, max_length=300)),
            ],
        ),
        CreateModel(
            name='Alert',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('rule', models.CharField(max_length=40)),
                ('topic', models.CharField(max_length=240)),
                ('labels', models.JSONField(default=dict)),
                ('fingerprint', models.CharField(max_length=64, unique=True)),
                ('severity', models.CharField(max_length=8)),
                ('state', models.CharField(max_length=8)),
                ('episode', models.PositiveIntegerField(default=1)),
                ('transition_count', models.PositiveIntegerField(default=0)),
                ('begun_at', models.DateTimeField()),
                ('state_since', models.DateTimeField()),
                ('fired_at', models.DateTimeField(null=True)),
                ('fine_since', models.DateTimeField(null=True)),
                ('observed_at', models.DateTimeField()),
                ('value', models.FloatField(null=True)),
                ('threshold', models.FloatField(null=True)),
                ('sentence', models.CharField(max_length=300)),
                ('evidence', models.JSONField(default=dict, encoder=django.core.serializers.json.DjangoJSONEncoder)),
                ('acknowledged_at', models.DateTimeField(null=True)),
                ('acknowledged_by', models.CharField(blank=True, max_length=193)),
                ('assignee', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='alerts', to=settings.AUTH_USER_MODEL)),
                ('org', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='alerts', to='orgs.org')),
                ('suppressed_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='suppresses', to='alerts.alert')),
            ],
            options={
                'ordering': ('-id',),
                'indexes': [models.Index(fields=['state', '-state_since'], name='alert_of_state'), models.Index(fields=['org', 'state'], name='alert_of_org'), models.Index(fields=['rule', 'state'], name='alert_of_rule')],
                'constraints': [models.CheckConstraint(condition=models.Q(('state__in', ['quiet', 'pending', 'firing', 'no_data', 'resolved'])), name='alert_state'), models.CheckConstraint(condition=models.Q(('severity__in', ['page', 'ticket', 'notice'])), name='alert_severity'), models.CheckConstraint(condition=models.Q(models.Q(('state__in', ['firing', 'resolved']), _negated=True), ('fired_at__isnull', False), _connector='OR'), name='alert_fires_since_it_fired'), models.CheckConstraint(condition=models.Q(('state_since__lte', models.F('observed_at'))), name='alert_time')],
            },
        ),
        CreateModel(
            name='Channel',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('matchers', models.JSONField(blank=True, default=list)),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('name', models.CharField(max_length=120, unique=True)),
                ('kind', models.CharField(choices=[('webhook', 'webhook'), ('email', 'e-mail'), ('slack', 'Slack or compatible'), ('pagerduty', 'PagerDuty')], max_length=10)),
                ('address', console.shell.sealed.SealedText(help_text='A URL or e-mail addresses. Encrypted at rest, never shown again.')),
                ('secret', console.shell.sealed.SealedText(blank=True, default='', help_text='A signing or routing key. Encrypted at rest.')),
                ('shown', models.CharField(help_text='The part of the address that may be shown.', max_length=200)),
                ('min_severity', models.CharField(default='ticket', max_length=8)),
                ('send_resolved', models.BooleanField(default=True)),
                ('enabled', models.BooleanField(default=True)),
                ('org', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, to='orgs.org')),
            ],
            options={
                'ordering': ('name',),
                'constraints': [models.CheckConstraint(condition=models.Q(('min_severity__in', ['page', 'ticket', 'notice'])), name='channel_severity')],
            },
        ),
        CreateModel(
            name='Comment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('author', models.CharField(max_length=193)),
                ('text', models.CharField(max_length=2000)),
                ('alert', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='comments', to='alerts.alert')),
            ],
            options={
                'ordering': ('id',),
                'constraints': [models.CheckConstraint(condition=models.Q(('text', ''), _negated=True), name='comment_says_something')],
            },
        ),
        CreateModel(
            name='Notification',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('episode', models.PositiveIntegerField(default=0)),
                ('what', models.CharField(choices=[('firing', 'Firing'), ('resolved', 'Resolved'), ('test', 'Test')], max_length=8)),
                ('state', models.CharField(choices=[('waiting', 'Waiting'), ('sent', 'Sent'), ('given_up', 'given up')], default='waiting', max_length=8)),
                ('tries', models.PositiveSmallIntegerField(default=0)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('next_try_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('sent_at', models.DateTimeField(null=True)),
                ('answer', models.CharField(blank=True, max_length=300)),
                ('alert', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='notifications', to='alerts.alert')),
                ('channel', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='notifications', to='alerts.channel')),
                ('wants_end', models.BooleanField(db_default=True, default=True)),
            ],
            options={
                'ordering': ('-id',),
                'indexes': [models.Index(condition=models.Q(('state', 'waiting')), fields=['next_try_at'], name='told_next'), models.Index(fields=['channel', '-id'], name='told_by_channel')],
                'constraints': [models.UniqueConstraint(fields=('channel', 'alert', 'episode', 'what'), name='told_once'), models.CheckConstraint(condition=models.Q(('state', 'sent'), ('sent_at__isnull', True), _connector='XOR'), name='sent_is_when')],
            },
        ),
        CreateModel(
            name='Silence',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('matchers', models.JSONField(blank=True, default=list)),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('starts_at', models.DateTimeField()),
                ('ends_at', models.DateTimeField()),
                ('author', models.CharField(max_length=193)),
                ('reason', models.CharField(max_length=500)),
                ('org', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, to='orgs.org')),
            ],
            options={
                'ordering': ('-ends_at', '-id'),
                'constraints': [models.CheckConstraint(condition=models.Q(('ends_at__gte', models.F('starts_at'))), name='silence_ends'), models.CheckConstraint(condition=models.Q(('reason', ''), _negated=True), name='silence_has_a_reason'), models.CheckConstraint(condition=models.Q(('matchers', []), _negated=True), name='silence_matches')],
            },
        ),
        CreateModel(
            name='Thresholds',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('rule', models.CharField(max_length=40)),
                ('values', models.JSONField(default=dict)),
                ('enabled', models.BooleanField(default=True)),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('org', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='thresholds', to='orgs.org')),
            ],
            options={
                'ordering': ('rule', 'org'),
                'constraints': [models.UniqueConstraint(fields=('rule', 'org'), name='thresholds_once', nulls_distinct=False)],
            },
        ),
        CreateModel(
            name='Transition',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('episode', models.PositiveIntegerField()),
                ('at', models.DateTimeField()),
                ('before', models.CharField(max_length=8)),
                ('after', models.CharField(max_length=8)),
                ('sentence', models.CharField(max_length=300)),
                ('alert', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='transitions', to='alerts.alert')),
            ],
            options={
                'ordering': ('alert', 'number'),
                'indexes': [models.Index(fields=['at'], name='flip_by_time')],
                'constraints': [models.UniqueConstraint(fields=('alert', 'number'), name='flip_once'), models.CheckConstraint(condition=models.Q(('before', models.F('after')), _negated=True), name='flip_is_a_change')],
            },
        ),
    ]
