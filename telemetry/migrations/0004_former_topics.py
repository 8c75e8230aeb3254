from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0003_ended_sources'),
    ]

    operations = [
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
