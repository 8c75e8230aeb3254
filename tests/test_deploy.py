"""What is under deploy/ names metrics and pages that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from console.environment import PROJECT
from console.metrics.catalog import METRICS
from telemetry.metrics import Kind, Metric

RULES = PROJECT / "deploy" / "prometheus" / "tidegate.rules.yaml"
DASHBOARD = PROJECT / "deploy" / "grafana" / "tidegate.json"
OF_PROMETHEUS = {"le", "instance", "job"}
NAME = re.compile(r"\b((?:brain|kvss|swdriver|tidegate|telemetry)_\w+)(\{[^}]*\})?(\[)?")


def expressions() -> Iterator[str]:
    yield from re.findall(r"^ +expr: (.+)$", RULES.read_text(), re.MULTILINE)
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def metric_of(name: str) -> Metric | None:
    """Histograms are told in three parts."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    found = METRICS.get(base)
    if found and found.kind is Kind.HISTOGRAM:
        return found if base != name else None
    return METRICS.get(name)


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_metric_and_label_that_is_named_exists(expression: str) -> None:
    named = NAME.findall(expression)
    assert named, "nothing is asked for"
    labels: set[str] = set()
    for name, selector, _ in named:
        metric = metric_of(name)
        assert metric, f"there is no metric {name}"
        labels |= set(metric.labels)
        for label in re.findall(r"(\w+)=", selector):
            assert label in metric.labels, f"{name} has no label {label}"
    for group in re.findall(r"\b(?:by|ignoring|on) ?\(([^)]*)\)", expression):
        assert {label.strip() for label in group.split(",")} <= labels | OF_PROMETHEUS, group


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_counters_are_asked_for_as_prometheus_has_them(expression: str) -> None:
    """A counter that is corrected is a gauge there: `rate` would take each fall for a new beginning."""
    for verb, name in re.findall(r"\b(rate|increase|delta)\((\w+)", expression):
        metric = metric_of(name)
        assert metric
        grows = metric.kind is not Kind.GAUGE and not metric.corrected
        assert grows == (verb != "delta"), f"{verb} of {name}"


def test_every_alert_has_its_page() -> None:
    text = RULES.read_text()
    pages = re.findall(r"runbook: (\S+)", text)
    assert len(pages) == len(re.findall(r"- alert: ", text))
    for page in pages:
        assert (PROJECT / page).is_file(), page
    listed = (PROJECT / "docs" / "runbooks" / "README.md").read_text()
    for path in (PROJECT / "docs" / "runbooks").glob("*.md"):
        assert path.name in listed or path.name == "README.md", path
