"""Numbers by topic: what has come in, and levels of roll-ups in partitions of a day.

Buckets are seconds since 1970, so that neither partitions nor queries depend on a time zone. Partitions
are made and dropped by functions that run as who owns the tables, because the processes should not.
"""

from django.db import migrations

LEVELS = ("10s", "1m", "1h")

TABLES = """
ALTER TABLE telemetry_source ADD COLUMN received int8multirange NOT NULL DEFAULT '{}';
ALTER TABLE telemetry_source SET (fillfactor = 50);

CREATE TABLE telemetry_fresh (
    topic integer NOT NULL,
    shape integer NOT NULL,
    bucket bigint NOT NULL,
    cells bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
ALTER TABLE telemetry_fresh ALTER COLUMN cells SET STORAGE MAIN;
CREATE INDEX telemetry_fresh_bucket_topic ON telemetry_fresh (bucket, topic);

CREATE TABLE telemetry_watermark (level text PRIMARY KEY, at bigint NOT NULL);
"""

LEVEL = """
CREATE TABLE telemetry_{level} (
    topic integer NOT NULL,
    shape integer NOT NULL,
    bucket bigint NOT NULL,
    cells bytea NOT NULL
) PARTITION BY RANGE (bucket);
ALTER TABLE telemetry_{level} ALTER COLUMN cells SET STORAGE MAIN;
CREATE INDEX telemetry_{level}_topic_bucket ON telemetry_{level} (topic, bucket);
CREATE INDEX telemetry_{level}_bucket ON telemetry_{level} USING brin (bucket) WITH (pages_per_range = 16);
INSERT INTO telemetry_watermark VALUES ('{level}', 0);
"""

FUNCTIONS = """
CREATE FUNCTION telemetry_make_day(level text, day date) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    parent text := 'telemetry_' || level;
    child text := parent || '_' || to_char(day, 'YYYYMMDD');
    first bigint := (day - date '1970-01-01') * 86400::bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM telemetry_watermark AS w WHERE w.level = telemetry_make_day.level) THEN
        RAISE EXCEPTION 'there is no level %', level;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('telemetry days'));
    IF to_regclass(child) IS NOT NULL THEN
        RETURN false;
    END IF;
    -- Attached rather than made as a partition: that does not wait for those who read.
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL)', child, parent);
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                   parent, child, first, first + 86400);
    RETURN true;
END $$;

CREATE FUNCTION telemetry_drop_days(level text, before date) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    parent text := 'telemetry_' || level;
    child text;
    dropped integer := 0;
BEGIN
    IF NOT EXISTS (SELECT FROM telemetry_watermark AS w WHERE w.level = telemetry_drop_days.level) THEN
        RAISE EXCEPTION 'there is no level %', level;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('telemetry days'));
    PERFORM set_config('lock_timeout', '2s', true);
    FOR child IN
        SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = parent::regclass
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < before
    LOOP
        EXECUTE format('DROP TABLE %I', child);
        dropped := dropped + 1;
    END LOOP;
    RETURN dropped;
END $$;
"""

FORWARD = TABLES + "".join(LEVEL.format(level=level) for level in LEVELS) + FUNCTIONS
BACKWARD = (
    "DROP FUNCTION telemetry_drop_days; DROP FUNCTION telemetry_make_day; DROP TABLE telemetry_watermark;"
    + "".join(f"DROP TABLE telemetry_{level};" for level in ("fresh", *LEVELS))
    + "ALTER TABLE telemetry_source DROP COLUMN received;"
)


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0001_version_0_1")]
    operations = [migrations.RunSQL(FORWARD, BACKWARD)]
