"""The database itself refuses to change what the trail says, whoever asks through whatever code."""

from django.db import migrations

FORBID = """
CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit trail is append-only: % refused', TG_OP
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE TRIGGER audit_no_update_or_delete
    BEFORE UPDATE OR DELETE ON audit_auditentry
    FOR EACH ROW EXECUTE FUNCTION audit_is_append_only();

CREATE TRIGGER audit_no_truncate
    BEFORE TRUNCATE ON audit_auditentry
    FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only();
"""
ALLOW = """
DROP TRIGGER audit_no_truncate ON audit_auditentry;
DROP TRIGGER audit_no_update_or_delete ON audit_auditentry;
DROP FUNCTION audit_is_append_only();
"""


class Migration(migrations.Migration):
    dependencies = [("audit", "0001_release_0_1")]
    operations = [migrations.RunSQL(FORBID, ALLOW)]
