"""Rules, thresholds and evidence have plainer names. What is stored follows: no open alert is left behind,
and evidence that names nodes is still known as such."""

import hashlib
import json
import re

from django.db import migrations

SLUGS = {
    "agent-silent": "agent-not-reporting",
    "driver-silent": "driver-not-reporting",
    "numbers-late": "telemetry-late",
    "numbers-missing": "telemetry-missing",
    "numbers-refused": "telemetry-rejected",
    "numbers-*": "telemetry-*",
    "control-plain": "control-plaintext",
    "root-not-followed": "root-replacement-stalled",
    "overstay": "ttl-exceeded",
    "*-silent": "*-not-reporting",
}
THRESHOLDS = {
    "breach_seconds": "pending_seconds",
    "fine_seconds": "keep_firing_seconds",
    "refused": "rejected",
}
EVIDENCE = {
    "why": "reason",
    "follows": "generation",
    "last_heard": "last_seen",
    "why_not_better": "why_not_a_rail",
    "leaf_of_the_node": "node_leaf",
    "budget_spent_times_too_fast": "burn_rate",
    "seconds_of_that_share": "latency_seconds",
}
MATCHER = re.compile(r"(rule!?=)(.*)")


def rename(apps, _schema):
    for alert in apps.get_model("alerts", "Alert").objects.all():
        alert.evidence = {EVIDENCE.get(name, name): value for name, value in alert.evidence.items()}
        if alert.rule in SLUGS:
            alert.rule = SLUGS[alert.rule]
            text = json.dumps([alert.rule, alert.topic, sorted(alert.labels.items())])
            alert.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        alert.save(update_fields=["rule", "fingerprint", "evidence"])
    for stored in apps.get_model("alerts", "Thresholds").objects.all():
        stored.rule = SLUGS.get(stored.rule, stored.rule)
        stored.values = {THRESHOLDS.get(name, name): value for name, value in stored.values.items()}
        stored.save(update_fields=["rule", "values"])
    for name in ("Silence", "Channel"):
        for stored in apps.get_model("alerts", name).objects.all():
            stored.matchers = [_matcher(text) for text in stored.matchers]
            stored.save(update_fields=["matchers"])
    apps.get_model("alerts", "Evaluation").objects.filter(rule__in=SLUGS).delete()


def _matcher(text):
    found = MATCHER.fullmatch(text)
    return found[1] + SLUGS.get(found[2], found[2]) if found else text


class Migration(migrations.Migration):
    dependencies = [("alerts", "0004_plain_names")]

    operations = [migrations.RunPython(rename, migrations.RunPython.noop)]
