from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('cache_sessions', '0007_former_homes'),
    ]

    operations = [
        migrations.AddField(
            model_name='job',
            name='keeps_to_boxes',
            field=models.BooleanField(default=False),
        ),
    ]
