from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("control", "0002_topic"),
    ]

    operations = [
        migrations.CreateModel(
            name="BadAnswers",
            fields=[
                ("fault", models.CharField(max_length=16, primary_key=True, serialize=False)),
                ("count", models.PositiveBigIntegerField(default=0)),
            ],
        ),
        migrations.AddField(
            model_name="target",
            name="fault",
            field=models.CharField(blank=True, default="", max_length=16),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="target",
            name="bad_since",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="target",
            name="asked_until",
            field=models.DateTimeField(null=True),
        ),
    ]
