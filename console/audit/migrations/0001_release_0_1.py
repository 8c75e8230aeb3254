import django.core.serializers.json
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('audit', '0001_initial'),
        ('audit', '0003_request_ids'),
        ('audit', '0004_actor_names'),
    ]

    dependencies = [
    ]

    operations = [
        CreateModel(
            name='AuditEntry',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('actor_id', models.BigIntegerField(null=True)),
                ('actor_name', models.CharField(max_length=193)),
                ('means', models.CharField(max_length=16)),
                ('address', models.GenericIPAddressField(null=True)),
                ('request_id', models.CharField(blank=True, max_length=64)),
                ('action', models.CharField(max_length=48)),
                ('object_type', models.CharField(max_length=32)),
                ('object_id', models.CharField(max_length=112)),
                ('object_name', models.CharField(max_length=160)),
                ('org_id', models.BigIntegerField(null=True)),
                ('reason', models.CharField(blank=True, max_length=500)),
                ('before', models.JSONField(encoder=django.core.serializers.json.DjangoJSONEncoder, null=True)),
                ('after', models.JSONField(encoder=django.core.serializers.json.DjangoJSONEncoder, null=True)),
                ('undoes', models.OneToOneField(null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='undone_by', to='audit.auditentry')),
            ],
            options={
                'verbose_name_plural': 'audit entries',
                'ordering': ('-id',),
                'indexes': [models.Index(fields=['org_id', '-id'], name='audit_of_org'), models.Index(fields=['actor_id', '-id'], name='audit_of_actor'), models.Index(fields=['object_type', 'object_id', '-id'], name='audit_of_object'), models.Index(fields=['action', '-id'], name='audit_of_action'), models.Index(fields=['at'], name='audit_by_time'), models.Index(condition=models.Q(('request_id', ''), _negated=True), fields=['request_id'], name='audit_of_request')],
            },
        ),
    ]
