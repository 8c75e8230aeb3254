import django.db.models.deletion
from django.db import migrations, models

import console.shell.sealed


class Migration(migrations.Migration):

    dependencies = [
        ("alerts", "0003_actor_names"),
    ]

    operations = [
        migrations.RenameModel("Flip", "Transition"),
        migrations.RenameField("Alert", "flips_made", "transition_count"),
        migrations.RenameField("Alert", "hidden_by", "suppressed_by"),
        migrations.RemoveConstraint("Channel", "channel_severity"),
        migrations.RenameField("Channel", "least_severity", "min_severity"),
        migrations.RenameField("Channel", "tells_end", "send_resolved"),
        migrations.AddConstraint(
            "Channel",
            models.CheckConstraint(
                condition=models.Q(("min_severity__in", ["page", "ticket", "notice"])),
                name="channel_severity",
            ),
        ),
        migrations.AlterField(
            "Alert",
            "suppressed_by",
            models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="suppresses",
                to="alerts.alert",
            ),
        ),
        migrations.AlterField(
            "Transition",
            "alert",
            models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE,
                related_name="transitions",
                to="alerts.alert",
            ),
        ),
        migrations.AlterField(
            "Channel",
            "kind",
            models.CharField(
                choices=[
                    ("webhook", "webhook"),
                    ("email", "e-mail"),
                    ("slack", "Slack or compatible"),
                    ("pagerduty", "PagerDuty"),
                ],
                max_length=10,
            ),
        ),
        migrations.AlterField(
            "Channel",
            "address",
            console.shell.sealed.SealedText(
                help_text="A URL or e-mail addresses. Encrypted at rest, never shown again."
            ),
        ),
        migrations.AlterField(
            "Channel",
            "secret",
            console.shell.sealed.SealedText(
                blank=True, default="", help_text="A signing or routing key. Encrypted at rest."
            ),
        ),
        migrations.AlterField(
            "Channel",
            "shown",
            models.CharField(
                help_text="The part of the address that may be shown.", max_length=200
            ),
        ),
    ]
