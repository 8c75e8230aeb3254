from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('operations', '0002_actor_names'),
    ]

    operations = [
        migrations.AddField(
            model_name='operation',
            name='awaits',
            field=models.JSONField(default=list, help_text='Topics whose news wake it before that.'),
        ),
    ]
