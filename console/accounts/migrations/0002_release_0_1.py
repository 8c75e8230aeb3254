import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('accounts', '0001_initial'),
        ('accounts', '0002_initial'),
        ('accounts', '0003_credentials'),
    ]

    dependencies = [
        ('accounts', '0001_release_0_1'),
        ('orgs', '0001_release_0_1'),
    ]

    operations = [
        migrations.AddField(
            model_name='apitoken',
            name='org',
            field=models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='tokens', to='orgs.org'),
        ),
        migrations.AddField(
            model_name='apitoken',
            name='user',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='tokens', to=settings.AUTH_USER_MODEL),
        ),
        migrations.AddIndex(
            model_name='apitoken',
            index=models.Index(fields=['user', '-created_at'], name='token_of_user'),
        ),
    ]
