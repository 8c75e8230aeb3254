import console.shell.sealed
import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('routing', '0001_initial'),
        ('routing', '0002_endpoint'),
    ]

    dependencies = [
        ('control', '0001_version_0_1'),
        ('fleet', '0001_version_0_1'),
        ('orgs', '0001_release_0_1'),
    ]

    operations = [
        CreateModel(
            name='ServedModel',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('model', models.CharField(help_text='What clients send as “model”.', max_length=200, unique=True, validators=[django.core.validators.RegexValidator('^[^\\x00-\\x1f\\x7f\\ud800-\\udfff]*$', 'Printed characters, without control characters.')])),
                ('tokens_max', models.PositiveIntegerField(help_text='Tokens of a prompt and its answer, at most.', validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(16777216)])),
                ('tokenizer', models.CharField(blank=True, default='', help_text="Folder with tokenizer.json on the brains' machines. Empty: placed by load only.", max_length=500, validators=[django.core.validators.RegexValidator('^[^\\x00-\\x1f\\x7f\\ud800-\\udfff]*$', 'Printed characters, without control characters.')])),
                ('for_all_orgs', models.BooleanField(default=True)),
                ('orgs', models.ManyToManyField(blank=True, related_name='served_models', to='orgs.org')),
            ],
            options={
                'ordering': ('name',),
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='servedmodel_name'), models.CheckConstraint(condition=models.Q(('tokens_max__gte', 1)), name='served_model_tokens'), models.CheckConstraint(condition=models.Q(('model', ''), _negated=True), name='served_model_named')],
            },
        ),
        CreateModel(
            name='Replica',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores, at most 63.')])),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('url', models.CharField(blank=True, help_text='Without /v1.', max_length=500, validators=[django.core.validators.RegexValidator('^https?://[^\\s/?#@]+(/[^\\s?#]*)?$', 'http:// or https://, a host, and no query or user.')])),
                ('endpoint', models.CharField(choices=[('document', 'here'), ('redis', 'in Redis')], default='document', help_text='Where brains find its address: here, or in Redis for replicas of workloads.', max_length=8)),
                ('engine', models.CharField(choices=[('vllm', 'vLLM'), ('sglang', 'SGLang'), ('other', 'other')], default='vllm', max_length=8)),
                ('draining', models.BooleanField(default=False, help_text='It gets no new requests.')),
                ('served_as', models.CharField(blank=True, default='', help_text='What the engine calls the model, if that is another name.', max_length=200, validators=[django.core.validators.RegexValidator('^([^\\x00-\\x1f\\x7f]*)$', 'Printed characters.')])),
                ('api_key', console.shell.sealed.SealedText(blank=True, default='', help_text='Sealed at rest.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('driver', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='replicas', to='fleet.driver')),
                ('model', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='replicas', to='routing.servedmodel')),
            ],
            options={
                'ordering': ('name',),
                'constraints': [models.UniqueConstraint(fields=('model', 'name'), name='replica_once'), models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9][a-z0-9._-]{0,62}$')), name='replica_name'), models.CheckConstraint(condition=models.Q(('url__regex', '^https?://'), models.Q(('endpoint', 'redis'), ('url', '')), _connector='OR'), name='replica_url'), models.CheckConstraint(condition=models.Q(('endpoint__in', ['document', 'redis'])), name='replica_endpoint'), models.CheckConstraint(condition=models.Q(('engine__in', ['vllm', 'sglang', 'other'])), name='replica_engine')],
            },
        ),
        CreateModel(
            name='OrgLimits',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, help_text='Counts changes; the ETag.')),
                ('requests_per_minute', models.PositiveBigIntegerField(blank=True, null=True)),
                ('tokens_per_minute', models.PositiveBigIntegerField(blank=True, null=True)),
                ('concurrent', models.PositiveIntegerField(blank=True, null=True)),
                ('queued', models.PositiveIntegerField(default=256)),
                ('weight', models.PositiveIntegerField(default=100)),
                ('priority', models.PositiveSmallIntegerField(default=35)),
                ('wait_seconds', models.FloatField(default=60.0)),
                ('change', models.ForeignKey(db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='control.change')),
                ('org', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='routing_limits', to='orgs.org')),
            ],
            options={
                'verbose_name_plural': 'org limits',
                'ordering': ('org',),
                'constraints': [models.CheckConstraint(condition=models.Q(('requests_per_minute', None), models.Q(('requests_per_minute__gte', 1), ('requests_per_minute__lte', 1099511627776)), _connector='OR'), name='org_limits_requests'), models.CheckConstraint(condition=models.Q(('tokens_per_minute', None), models.Q(('tokens_per_minute__gte', 1), ('tokens_per_minute__lte', 1099511627776)), _connector='OR'), name='org_limits_tokens'), models.CheckConstraint(condition=models.Q(('concurrent', None), models.Q(('concurrent__gte', 1), ('concurrent__lte', 1000000)), _connector='OR'), name='org_limits_concurrent'), models.CheckConstraint(condition=models.Q(('queued__lte', 1000000), ('weight__gte', 1), ('weight__lte', 1000000), ('priority__lte', 100), ('wait_seconds__gt', 0), ('wait_seconds__lte', 86400)), name='org_limits_rest')],
            },
        ),
    ]
