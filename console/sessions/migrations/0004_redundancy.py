from django.db import migrations, models


class Migration(migrations.Migration):
    reviewed = {
        "AddConstraint": "the release before writes the default of that column, and there are few rows",
    }

    dependencies = [
        ("cache_sessions", "0003_borrow"),
        ("orgs", "0001_release_0_1"),
    ]

    operations = [
        migrations.AddField(
            model_name="ruleset",
            name="redundancy",
            field=models.CharField(
                choices=[
                    ("none", "none: what an agent loses is computed again"),
                    ("1+1", "1+1: survives the loss of 1 agent, 100 % more bytes"),
                    ("2+1", "2+1: survives the loss of 1 agent, 50 % more bytes"),
                    ("4+1", "4+1: survives the loss of 1 agent, 25 % more bytes"),
                    ("4+2", "4+2: survives the loss of 2 agents, 50 % more bytes"),
                    ("8+2", "8+2: survives the loss of 2 agents, 25 % more bytes"),
                ],
                db_default="none",
                default="none",
                help_text="Of columns in tier 2: fragments with data, and with parity.",
                max_length=8,
            ),
        ),
        migrations.AddConstraint(
            model_name="ruleset",
            constraint=models.CheckConstraint(
                condition=models.Q(("redundancy__in", ["none", "1+1", "2+1", "4+1", "4+2", "8+2"])),
                name="rules_redundancy",
            ),
        ),
    ]
