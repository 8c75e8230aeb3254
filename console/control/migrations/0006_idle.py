from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('control', '0005_brains'),
    ]

    operations = [
        migrations.AddField(
            model_name='target',
            name='is_idle',
            field=models.BooleanField(default=False),
        ),
    ]
