import console.shell.sealed
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('authority', '0001_initial'),
    ]

    dependencies = [
    ]

    operations = [
        CreateModel(
            name='Authority',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('fingerprint', models.CharField(max_length=64, unique=True)),
                ('certificate', models.TextField()),
                ('key', console.shell.sealed.SealedText(help_text='Sealed at rest.')),
                ('state', models.CharField(choices=[('next', 'Next'), ('signing', 'Signing'), ('superseded', 'Superseded'), ('removed', 'Removed')], max_length=12)),
                ('state_since', models.DateTimeField(default=django.utils.timezone.now)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('expires_at', models.DateTimeField()),
            ],
            options={
                'verbose_name_plural': 'authorities',
                'ordering': ('pk',),
                'constraints': [models.CheckConstraint(condition=models.Q(('state__in', ['next', 'signing', 'superseded', 'removed'])), name='authority_state'), models.UniqueConstraint(condition=models.Q(('state__in', ['next', 'signing'])), fields=('state',), name='authority_one_of_each')],
            },
        ),
    ]
