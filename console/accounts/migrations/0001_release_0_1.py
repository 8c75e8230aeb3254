import django.core.validators
import django.db.models.deletion
import django.db.models.functions.text
import django.utils.timezone
from django.db import migrations, models

from console.shell.new_tables import CreateModel


class Migration(migrations.Migration):

    initial = True

    replaces = [
        ('accounts', '0001_initial'),
        ('accounts', '0002_initial'),
        ('accounts', '0003_credentials'),
    ]

    dependencies = [
    ]

    operations = [
        CreateModel(
            name='FailedLogin',
            fields=[
                ('key_sha256', models.BinaryField(max_length=32, primary_key=True, serialize=False)),
                ('window_ends_at', models.DateTimeField(db_index=True)),
                ('count', models.PositiveIntegerField()),
            ],
        ),
        CreateModel(
            name='User',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('password', models.CharField(max_length=128, verbose_name='password')),
                ('last_login', models.DateTimeField(blank=True, null=True, verbose_name='last login')),
                ('username', models.CharField(max_length=63, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9._-]{0,62}$', 'Lower-case letters, digits, dots, dashes and underscores only.')])),
                ('full_name', models.CharField(blank=True, max_length=120, verbose_name='name')),
                ('email', models.EmailField(blank=True, max_length=254)),
                ('platform_role', models.PositiveSmallIntegerField(blank=True, choices=[(1, 'viewer'), (2, 'on-call'), (4, 'platform admin')], help_text='What they may do in every org and on the fleet.', null=True)),
                ('is_active', models.BooleanField(default=True)),
                ('must_change_password', models.BooleanField(default=False)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('credentials_since', models.DateTimeField(editable=False, null=True)),
            ],
            options={
                'ordering': ('username',),
                'constraints': [models.CheckConstraint(condition=models.Q(('platform_role', None), ('platform_role__in', [1, 2, 4]), _connector='OR'), name='user_platform_role'), models.CheckConstraint(condition=models.Q(('username', django.db.models.functions.text.Lower('username'))), name='user_name_in_lower_case')],
            },
        ),
        CreateModel(
            name='ApiToken',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=120)),
                ('public_id', models.CharField(max_length=12, unique=True)),
                ('secret_sha256', models.BinaryField(max_length=32)),
                ('read_only', models.BooleanField()),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('expires_at', models.DateTimeField()),
                ('last_used_at', models.DateTimeField(null=True)),
                ('revoked_at', models.DateTimeField(null=True)),
                ('made_by', models.ForeignKey(help_text='The token that made it. Revoking that one revokes this one.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='made', to='accounts.apitoken')),
            ],
            options={
                'ordering': ('-created_at', '-id'),
            },
        ),
    ]
