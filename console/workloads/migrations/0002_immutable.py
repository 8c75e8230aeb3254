"""The database itself refuses to change a revision. What its compile job found is added once."""

from django.db import migrations

PROTECT = """
CREATE FUNCTION workload_revision_stays() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (to_jsonb(NEW) - ARRAY['artifact', 'layout', 'epoch', 'compiled_at'])
            IS DISTINCT FROM (to_jsonb(OLD) - ARRAY['artifact', 'layout', 'epoch', 'compiled_at'])
        OR (OLD.artifact IS NOT NULL AND NEW.artifact IS DISTINCT FROM OLD.artifact)
        OR (OLD.layout IS NOT NULL AND NEW.layout IS DISTINCT FROM OLD.layout)
        OR (OLD.epoch IS NOT NULL AND NEW.epoch IS DISTINCT FROM OLD.epoch)
        OR (OLD.compiled_at IS NOT NULL AND NEW.compiled_at IS DISTINCT FROM OLD.compiled_at)
    THEN
        RAISE EXCEPTION 'a revision is never changed: make another one'
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER workload_revision_no_update
    BEFORE UPDATE ON workloads_revision
    FOR EACH ROW EXECUTE FUNCTION workload_revision_stays();
"""
LEAVE = """
DROP TRIGGER workload_revision_no_update ON workloads_revision;
DROP FUNCTION workload_revision_stays();
"""


class Migration(migrations.Migration):
    dependencies = [("workloads", "0001_version_0_1")]
    operations = [migrations.RunSQL(PROTECT, LEAVE)]
