from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("control", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="change",
            name="topic",
            field=models.CharField(blank=True, default="", max_length=80),
            preserve_default=False,
        ),
    ]
