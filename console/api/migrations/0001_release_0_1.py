import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('api', '0001_initial'),
        ('api', '0002_credentials'),
    ]

    dependencies = [
    ]

    operations = [
        CreateModel(
            name='StoredAnswer',
            fields=[
                ('scope_sha256', models.BinaryField(max_length=32, primary_key=True, serialize=False)),
                ('body_sha256', models.BinaryField(max_length=32)),
                ('status', models.PositiveSmallIntegerField()),
                ('headers', models.JSONField()),
                ('body', models.TextField()),
                ('needs', models.JSONField(default=list)),
                ('created_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
            ],
        ),
    ]
