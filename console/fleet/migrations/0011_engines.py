from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0010_movers")]

    operations = [
        migrations.AddField(
            model_name="driver",
            name="engine",
            field=models.CharField(
                blank=True,
                default="",
                help_text="The engine that it is part of; empty for a daemon.",
                max_length=60,
            ),
        ),
    ]
