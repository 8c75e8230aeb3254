from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0013_brains'),
    ]

    operations = [
        migrations.AddField(
            model_name='box',
            name='state',
            field=models.CharField(choices=[('ready', 'ready'), ('cordoned', 'cordoned'), ('draining', 'draining')], default='ready', max_length=16),
        ),
        migrations.AddField(
            model_name='box',
            name='state_reason',
            field=models.CharField(blank=True, max_length=500),
        ),
        migrations.AddConstraint(
            model_name='box',
            constraint=models.CheckConstraint(condition=Q(state__in=['ready', 'cordoned', 'draining']), name='box_state'),
        ),
    ]
