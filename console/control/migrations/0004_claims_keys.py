from django.db import migrations

import console.control.models
import console.shell.sealed


def make_keys(apps, schema_editor):
    """Each target its own: a default is made once for all rows."""
    target = apps.get_model("control", "Target")
    for one in target.objects.only("pk").iterator():
        target.objects.filter(pk=one.pk).update(claims_key=console.control.models.new_secret())


class Migration(migrations.Migration):
    dependencies = [("control", "0003_isolation")]

    operations = [
        migrations.AddField(
            model_name="target",
            name="claims_key",
            field=console.shell.sealed.SealedBytes(default=console.control.models.new_secret),
        ),
        migrations.RunPython(make_keys, migrations.RunPython.noop),
    ]
