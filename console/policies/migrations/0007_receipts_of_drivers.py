from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("policies", "0006_displacement")]

    operations = [
        migrations.AddField(
            model_name="purgereceipt",
            name="driver",
            field=models.CharField(blank=True, default="", max_length=63),
            preserve_default=False,
        ),
    ]
