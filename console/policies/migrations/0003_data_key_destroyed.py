from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("policies", "0002_protected"),
    ]

    operations = [
        migrations.AddField(
            model_name="purgereceipt",
            name="data_key_destroyed_at",
            field=models.DateTimeField(null=True),
        ),
    ]
