from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("alerts", "0001_initial")]

    operations = [
        migrations.AddIndex(
            model_name="flip",
            index=models.Index(fields=["at"], name="flip_by_time"),
        ),
    ]
