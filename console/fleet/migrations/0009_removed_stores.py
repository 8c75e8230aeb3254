from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0008_removed'),
    ]

    operations = [
        migrations.AddField(
            model_name='removed',
            name='stores',
            field=models.JSONField(blank=True, default=list),
        ),
    ]
