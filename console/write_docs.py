"""`make docs`: write the parts of the docs that are made from code. Tests hold them to it."""

from __future__ import annotations

import os

import django

from console.environment import PROJECT, settings_table

SETTINGS = """# Settings

All of them are environment variables, read once at the start and parsed strictly: a name that is
misspelt, a value that makes no sense or a contradiction stops the start and says so, with everything
that is wrong at once. `make up` sets what it needs by itself. This page is made by `make docs`.

"""


METRICS = """# Metrics

What every process counts. The same numbers are on its `/metrics` page for Prometheus, and in the
console, where `GET /api/v1/metrics/query` tells them over time. Names and labels are kept; what goes is
announced in the changelog first. This page is made by `make docs`.

Agents and drivers want the token of their control API for `/metrics`, the console a token of somebody
with a role on the platform. Histograms have buckets that grow by a factor of two on these pages, and by
the fourth root of two inside. A counter that is *corrected* may fall when more becomes known of what it
has counted; so it is a gauge for Prometheus: ask for `delta`, not `rate`. Of each metric the first 200
values of its first label have series of their own; others are summed up as `other`, and counted.

"""


ALERT_RULES = """# Rules

What the console watches. How rules live, and who is told, is on [alerts](alerts.md). Each limit can be
set for all, and where a rule is about orgs for each org. Every rule also has `breach_seconds` and
`fine_seconds`. This page is made by `make docs`.

"""


def main() -> None:
    _pretend_to_be_set_up()
    from console.alerts.rules.documentation import table as rules
    from console.metrics.catalog import table
    from console.stack import redis_users

    for name, users in redis_users.FILES.items():
        (PROJECT / "deploy" / "redis" / name).write_text(redis_users.acl_file(users))
    (PROJECT / "docs" / "settings.md").write_text(SETTINGS + settings_table())
    (PROJECT / "docs" / "metrics.md").write_text(METRICS + table())
    (PROJECT / "docs" / "alert-rules.md").write_text(ALERT_RULES + rules())


def _pretend_to_be_set_up() -> None:
    """Metrics are declared beside models, which want settings. Nothing is connected to."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    os.environ.setdefault("DATABASE_URL", "postgresql://docs@localhost/docs")
    os.environ.setdefault("REDIS_URL", "redis://localhost/0")
    os.environ.setdefault("TIDEGATE_SECRET_KEY", "only-for-writing-docs-and-never-for-signing-anything")
    os.environ.setdefault("TIDEGATE_MODE", "embedded")
    django.setup()


if __name__ == "__main__":
    main()
