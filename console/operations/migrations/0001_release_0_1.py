import console.operations.core
import console.operations.models
import django.core.serializers.json
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('operations', '0001_initial'),
        ('operations', '0002_actor_names'),
        ('operations', '0003_awaits'),
    ]

    dependencies = [
    ]

    operations = [
        CreateModel(
            name='Operation',
            fields=[
                ('id', models.UUIDField(default=console.operations.models.new_id, editable=False, primary_key=True, serialize=False)),
                ('kind', models.CharField(max_length=48)),
                ('target', models.CharField(help_text='What it works on, as its topic: session:chat.', max_length=120)),
                ('org_id', models.BigIntegerField(help_text="Whose it is; without one, the platform's.", null=True)),
                ('role', models.PositiveSmallIntegerField(choices=[(1, 'viewer'), (2, 'on-call'), (3, 'org admin'), (4, 'platform admin')], help_text='What it takes to cancel it.')),
                ('sentence', models.CharField(max_length=300)),
                ('state', models.CharField(choices=[('running', 'running'), ('undoing', 'undoing'), ('stuck', 'stuck'), ('succeeded', 'succeeded'), ('failed', 'failed'), ('cancelled', 'cancelled')], default=console.operations.core.State['RUNNING'], max_length=12)),
                ('done', models.BooleanField(default=False)),
                ('step', models.PositiveSmallIntegerField(default=0, help_text='To be done next, or taken back next.')),
                ('total', models.PositiveSmallIntegerField()),
                ('percent', models.PositiveSmallIntegerField(default=0)),
                ('message', models.CharField(blank=True, max_length=300)),
                ('attempts', models.PositiveSmallIntegerField(default=0, help_text='Of this step, without an outcome.')),
                ('step_since', models.DateTimeField(default=django.utils.timezone.now)),
                ('wake_at', models.DateTimeField(default=django.utils.timezone.now, help_text='When to look at it again.')),
                ('awaits', models.JSONField(default=list, help_text='Topics whose news wake it before that.')),
                ('cancel_requested', models.BooleanField(default=False)),
                ('plan', models.JSONField(default=dict, encoder=django.core.serializers.json.DjangoJSONEncoder)),
                ('before', models.JSONField(default=dict, encoder=django.core.serializers.json.DjangoJSONEncoder)),
                ('notes', models.JSONField(default=dict, encoder=django.core.serializers.json.DjangoJSONEncoder)),
                ('response', models.JSONField(encoder=django.core.serializers.json.DjangoJSONEncoder, null=True)),
                ('error', models.JSONField(null=True)),
                ('actor_id', models.BigIntegerField(null=True)),
                ('actor_name', models.CharField(max_length=193)),
                ('request_id', models.CharField(blank=True, max_length=64)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('updated_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('done_at', models.DateTimeField(null=True)),
            ],
            options={
                'ordering': ('-id',),
                'indexes': [models.Index(fields=['target', '-id'], name='operation_of_target'), models.Index(condition=models.Q(('done', False)), fields=['wake_at'], name='operation_to_wake')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('done', False)), fields=('target',), name='one_operation_per_target'), models.CheckConstraint(condition=models.Q(models.Q(('done', True), ('done_at__isnull', False), ('state__in', (console.operations.core.State['SUCCEEDED'], console.operations.core.State['FAILED'], console.operations.core.State['CANCELLED']))), models.Q(('done', False), ('done_at__isnull', True), ('state__in', [console.operations.core.State['RUNNING'], console.operations.core.State['UNDOING'], console.operations.core.State['STUCK']])), _connector='OR'), name='operation_done_is_ended'), models.CheckConstraint(condition=models.Q(models.Q(('error__isnull', True), ('response__isnull', False), ('state', console.operations.core.State['SUCCEEDED'])), models.Q(('error__isnull', False), ('response__isnull', True), ('state__in', [console.operations.core.State['FAILED'], console.operations.core.State['CANCELLED']])), models.Q(('done', False), ('response__isnull', True)), _connector='OR'), name='operation_error_or_response')],
            },
        ),
    ]
