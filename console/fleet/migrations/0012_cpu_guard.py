from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0011_engines")]

    operations = [
        migrations.AddField("node", "cores_used", models.FloatField(blank=True, null=True)),
        migrations.AddField("node", "shards_measured", models.PositiveIntegerField(blank=True, null=True)),
        migrations.AddField("node", "measured_at", models.DateTimeField(blank=True, null=True)),
    ]
