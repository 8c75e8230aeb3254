from django.db import migrations

import console.shell.sealed


class Migration(migrations.Migration):
    dependencies = [("api", "0001_release_0_1")]
    operations = [
        migrations.AddField("storedanswer", "secret_body", console.shell.sealed.SealedText(null=True)),
    ]
