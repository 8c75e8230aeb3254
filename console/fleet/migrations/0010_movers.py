from django.db import migrations, models

MOVER = models.CharField(
    blank=True,
    choices=[("compiled", "compiled"), ("python", "Python")],
    default="",
    help_text="What moves bytes in it. Compiled code is faster; empty: it has not reported it.",
    max_length=16,
)


class Migration(migrations.Migration):
    dependencies = [("fleet", "0009_removed_stores")]

    operations = [
        migrations.AddField(model_name="driver", name="mover", field=MOVER),
        migrations.AddField(model_name="node", name="mover", field=MOVER),
    ]
