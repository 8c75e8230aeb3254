import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('saved', '0001_initial'),
    ]

    dependencies = [
        ('orgs', '0001_release_0_1'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        CreateModel(
            name='SavedView',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=60)),
                ('address', models.CharField(max_length=2000)),
                ('on_platform', models.BooleanField(default=False)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('org', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, to='orgs.org')),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='saved_views', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('name', 'pk'),
                'constraints': [models.UniqueConstraint(fields=('owner', 'name'), name='saved_view_once', violation_error_message='You have a view of that name. Take another, or delete it first.'), models.CheckConstraint(condition=models.Q(('org', None), ('on_platform', False), _connector='OR'), name='saved_view_shared_once'), models.CheckConstraint(condition=models.Q(('address__startswith', '/'), models.Q(('address__startswith', '//'), _negated=True)), name='saved_view_stays_here')],
            },
        ),
    ]
