from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0007_removed_nodes'),
    ]

    operations = [
        migrations.RenameModel('RemovedNode', 'Removed'),
        migrations.AlterModelOptions(
            name='removed',
            options={'ordering': ('-removed_at', '-id'), 'verbose_name_plural': 'removed'},
        ),
        migrations.AddField(
            model_name='removed',
            name='kind',
            field=models.CharField(choices=[('node', 'node'), ('driver', 'driver')], default='node', max_length=8),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name='removed',
            name='org_slug',
            field=models.CharField(blank=True, max_length=48),
        ),
        migrations.AddField(
            model_name='removed',
            name='heartbeat_sha256',
            field=models.BinaryField(max_length=32, null=True),
        ),
        migrations.AlterField(
            model_name='removed',
            name='data_address',
            field=models.CharField(blank=True, max_length=500),
        ),
        migrations.AddIndex(
            model_name='removed',
            index=models.Index(fields=['kind', 'name'], name='removed_by_name'),
        ),
    ]
