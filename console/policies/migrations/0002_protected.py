"""The database itself refuses to change a version, and to put one in force that limits forbid."""

from django.db import migrations

PROTECT = """
CREATE FUNCTION policy_version_stays() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a version of a policy is never changed: make another one'
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE FUNCTION purge_receipt_stays() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a receipt is never changed' USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE TRIGGER policy_version_no_update
    BEFORE UPDATE ON policies_policyversion
    FOR EACH ROW EXECUTE FUNCTION policy_version_stays();

CREATE TRIGGER purge_receipt_no_update
    BEFORE UPDATE OR DELETE ON policies_purgereceipt
    FOR EACH ROW EXECUTE FUNCTION purge_receipt_stays();

ALTER TABLE policies_policyversion ADD CONSTRAINT policy_version_document
    CHECK (jsonb_typeof(document::jsonb) IN ('object', 'null') AND length(document) <= 65536);

CREATE FUNCTION policy_in_force_is_allowed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    version policies_policyversion;
    limits jsonb;
    policy jsonb;
    field text;
    most jsonb;
    tiers text[] := ARRAY['none', 'dram', 'dram+tier2'];
BEGIN
    SELECT * INTO version FROM policies_policyversion WHERE id = NEW.version_id;
    IF version.org_id IS DISTINCT FROM NEW.org_id THEN
        RAISE EXCEPTION 'a policy in force is a version of its own org' USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.org_id IS NULL THEN
        RETURN NEW;
    END IF;
    SELECT held.document::jsonb -> 'limits' INTO limits
        FROM policies_policyinforce cluster JOIN policies_policyversion held ON held.id = cluster.version_id
        WHERE cluster.org_id IS NULL;
    IF limits IS NULL OR jsonb_typeof(version.document::jsonb) = 'null' THEN
        RETURN NEW;
    END IF;
    -- What a temporary policy has replaced comes back at its end, also where limits forbid it by now:
    -- drivers are told it within the limits, like all that was saved before they were set.
    IF EXISTS (
        SELECT 1 FROM policies_scheduledpolicy scheduled
        JOIN policies_policyversion earlier ON earlier.org_id = scheduled.org_id
        WHERE scheduled.org_id = NEW.org_id AND scheduled.state = 'in force'
            AND earlier.number IN (scheduled.number, scheduled.back_to)
            AND earlier.number = version.same_as AND earlier.document = version.document
    ) THEN
        RETURN NEW;
    END IF;
    FOR policy IN
        SELECT version.document::jsonb -> 'policy'
        UNION ALL SELECT value FROM jsonb_each(version.document::jsonb -> 'models')
    LOOP
        FOREACH field IN ARRAY ARRAY['ttl_first_use_seconds', 'ttl_last_use_seconds', 'dram_bytes',
                                     'tier2_bytes', 'share', 'priority'] LOOP
            most := limits -> (field || '_max');
            IF most IS NOT NULL AND jsonb_typeof(most) = 'number' AND (
                COALESCE(policy -> field, policy -> (field || '_max')) IS NULL
                OR jsonb_typeof(COALESCE(policy -> field, policy -> (field || '_max'))) = 'null'
                OR COALESCE(policy -> field, policy -> (field || '_max'))::numeric > most::numeric
            ) THEN
                RAISE EXCEPTION 'the limits forbid this policy: %', field USING ERRCODE = 'check_violation';
            END IF;
        END LOOP;
        IF array_position(tiers, policy ->> 'tiers') > array_position(tiers, limits ->> 'tiers_max') THEN
            RAISE EXCEPTION 'the limits forbid this policy: tiers' USING ERRCODE = 'check_violation';
        END IF;
    END LOOP;
    RETURN NEW;
END $$;

CREATE TRIGGER policy_in_force_allowed
    BEFORE INSERT OR UPDATE ON policies_policyinforce
    FOR EACH ROW EXECUTE FUNCTION policy_in_force_is_allowed();
"""
LEAVE = """
DROP TRIGGER policy_in_force_allowed ON policies_policyinforce;
DROP FUNCTION policy_in_force_is_allowed();
ALTER TABLE policies_policyversion DROP CONSTRAINT policy_version_document;
DROP TRIGGER purge_receipt_no_update ON policies_purgereceipt;
DROP FUNCTION purge_receipt_stays();
DROP TRIGGER policy_version_no_update ON policies_policyversion;
DROP FUNCTION policy_version_stays();
"""


class Migration(migrations.Migration):
    dependencies = [("policies", "0001_version_0_1")]
    operations = [migrations.RunSQL(PROTECT, LEAVE)]
