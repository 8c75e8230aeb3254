from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('cache_sessions', '0005_fragments'),
    ]

    operations = [
        migrations.AddField(
            model_name='streamredundancy',
            name='complete_up_to',
            field=models.DateTimeField(null=True),
        ),
    ]
