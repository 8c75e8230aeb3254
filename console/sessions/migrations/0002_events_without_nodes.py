from django.db import migrations


class Migration(migrations.Migration):
    """Events of streams across the spine said which nodes of others were in the way. They are seen by the
    members of the session's org, who know of their own nodes only."""

    dependencies = [("cache_sessions", "0001_initial"), ("telemetry", "0003_events")]

    operations = [
        migrations.RunSQL(
            "UPDATE telemetry_event SET sentence = regexp_replace(sentence, ': .*$', '.')"
            " WHERE kind = 'session.spine'",
            migrations.RunSQL.noop,
        )
    ]
