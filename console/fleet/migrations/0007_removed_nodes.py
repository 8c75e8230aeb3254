import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0006_trusts'),
    ]

    operations = [
        migrations.CreateModel(
            name='RemovedNode',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63)),
                ('data_address', models.CharField(max_length=500)),
                ('public_key', models.TextField(blank=True, default='')),
                ('removed_at', models.DateTimeField(default=django.utils.timezone.now)),
            ],
            options={
                'ordering': ('-removed_at', '-id'),
            },
        ),
    ]
