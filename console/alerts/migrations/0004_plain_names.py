from django.db import migrations, models


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
    ]
