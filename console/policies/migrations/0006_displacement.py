"""The policy field `eviction` is called `displacement`, also in the versions that are stored."""

from django.db import migrations

# A version never changes, and a trigger sees to that: this is the one exception.
RENAME = r"""
ALTER TABLE policies_policyversion DISABLE TRIGGER policy_version_no_update;
UPDATE policies_policyversion
    SET document = regexp_replace(document, '"{0}"(\s*:\s*")', '"{1}"\1', 'g');
ALTER TABLE policies_policyversion ENABLE TRIGGER policy_version_no_update;
UPDATE policies_scheduledpolicy
    SET document = regexp_replace(document, '"{0}"(\s*:\s*")', '"{1}"\1', 'g');
"""


class Migration(migrations.Migration):
    dependencies = [("policies", "0005_epochs")]
    operations = [
        migrations.RunSQL(
            RENAME.format("eviction", "displacement"), RENAME.format("displacement", "eviction")
        )
    ]
