from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("audit", "0002_append_only")]

    operations = [
        migrations.AddIndex(
            model_name="auditentry",
            index=models.Index(
                fields=["request_id"],
                name="audit_of_request",
                condition=models.Q(("request_id", ""), _negated=True),
            ),
        ),
    ]
