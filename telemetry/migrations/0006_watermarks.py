from django.db import migrations

# A function that was made with the old name of the table keeps it in its text: both are made anew.
RENAME = """
DO $$
DECLARE
    definition text;
BEGIN
    ALTER TABLE {old} RENAME TO {new};
    FOR definition IN
        SELECT pg_get_functiondef(oid) FROM pg_proc
        WHERE proname = ANY (ARRAY['telemetry_make_day', 'telemetry_drop_days'])
            AND pronamespace = current_schema()::regnamespace
    LOOP
        EXECUTE replace(definition, '{old}', '{new}');
    END LOOP;
END $$
"""


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0005_dead_letters")]

    operations = [
        migrations.RunSQL(
            RENAME.format(old="telemetry_line", new="telemetry_watermark"),
            RENAME.format(old="telemetry_watermark", new="telemetry_line"),
        )
    ]
