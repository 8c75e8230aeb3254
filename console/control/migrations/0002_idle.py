from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('control', '0001_release_0_1'),
    ]

    operations = [
        migrations.AddField(
            model_name='target',
            name='is_idle',
            field=models.BooleanField(db_default=False, default=False),
        ),
    ]
