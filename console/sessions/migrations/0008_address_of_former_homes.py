from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('cache_sessions', '0007_code_of_streams'),
    ]

    operations = [
        migrations.AddField(
            model_name='formerhome',
            name='address',
            field=models.CharField(blank=True, db_default='', default='', max_length=500),
        ),
    ]
