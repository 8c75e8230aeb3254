"""`{% range_picker %}` once on a page, `{% chart … %}` as often as there are charts.

    {% load charts %}
    {% block scripts %}{% chart_scripts %}{% endblock %}
    {% range_picker %}
    {% chart topic "Refill" "swdriver_refill_seconds" "p50 p99" %}
    {% chart topic "Refill" "swdriver_refill_seconds" "heatmap" %}
    {% chart topic "Hit rate" "swdriver_hit_tokens_total" "ratio" over="swdriver_requested_tokens_total" by="tier" %}

The view does nothing for it. A chart of a topic that the user may not see raises Http404.
"""  # noqa: E501

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import slugify

from console.accounts.browser import SignedInRequest
from console.charts.finder import styles_it_would_write
from console.charts.ranges import EARLIER, NAMES, SPANS, BadRange, Range, of_query
from console.charts.services import Chart, Plan, Row, Sheet, plan_of
from console.saved.services import views_of
from console.shell.templatetags.console import moment
from telemetry import units
from telemetry.queries import Value

register = template.Library()
SAVED_MAX: Final = 8  # next to the range; a page lists all
_SHEET: Final = "_sheet_of_charts"


@register.filter
def topic_words(topic: str) -> str:
    """`org acme`, `the fleet`."""
    return topic.replace(":", " ") if ":" in topic else f"the {topic}"


@register.inclusion_tag("charts/scripts.html")
def chart_scripts() -> dict[str, Any]:
    return {"styles": styles_it_would_write()}


@register.inclusion_tag("charts/range_picker.html", takes_context=True)
def range_picker(context: template.Context) -> dict[str, Any]:
    request: SignedInRequest = context["request"]
    sheet = _sheet(request)
    chosen, compare = sheet.over, sheet.compare
    kept = [(name, value) for name, value in request.GET.items() if name not in NAMES]
    compared = [("compare", compare)] if compare else []
    return {
        "spans": list(SPANS),
        "shifts": _shifts(chosen),
        "earlier": [("", "none"), *((name, label) for name, (_, label) in EARLIER.items())],
        "compare": compare,
        "others": urlencode([*kept, *compared]),  # without the range
        "without_compare": urlencode([*kept, *chosen.fields]),
        "hidden": [*kept, *compared],
        "saved": list(views_of(request.principal, request.path)[:SAVED_MAX]),
        "chosen": chosen,
        "problem": sheet.problem,
        "request": request,
    }


def _shifts(chosen: Range) -> list[tuple[str, str, str]]:
    """The buttons that change the range: name, meaning, and query."""
    later = chosen.later_half
    return [
        ("Earlier", "Half the range earlier", chosen.earlier_half.query),
        *([("Later", "Half the range later", later.query)] if later else []),
        ("Zoom out", "Twice as long", chosen.wider.query),
    ]


@register.simple_tag(takes_context=True)
def range_fields(context: template.Context) -> SafeString:
    """Hidden fields that keep the range in a form of the same page."""
    kept = [(name, value) for name, value in context["request"].GET.items() if name in NAMES]
    return format_html_join("", '<input type="hidden" name="{}" value="{}">', kept)


@register.simple_tag(takes_context=True)
def range_query(context: template.Context) -> str:
    """The range as the end of a link to another page."""
    return f"&{_sheet(context['request']).over.query}"


@register.inclusion_tag("charts/panel.html", takes_context=True)
@register.inclusion_tag("charts/chart.html", takes_context=True, name="bare_chart")
def chart(
    context: template.Context, topic: str, title: str, name: str, folds: str, **more: str
) -> dict[str, Any]:
    """`name`, `folds`, `by`, `over` and `where` (`label:value`) are those of the API, separated by
    blanks. A `bare_chart` has no panel of its own."""
    request: SignedInRequest = context["request"]
    plan = plan_of(topic, title, name, folds, **more)
    drawn = _sheet(request).draw(plan)
    return {
        "chart": drawn,
        "id": _id(plan),
        "alt": f"{title} of {topic_words(topic)}, {' and '.join(plan.folds)}; as a table below.",
        "rows": drawn.rows,
        "request": request,
    }


@register.simple_tag
def table_rows(chart: Chart, rows: Sequence[Row]) -> SafeString:
    """The rows of a chart's table. A template loop would take a third of a page's time."""
    cell = '<td class="number">{}</td>'
    return format_html_join(
        "",
        '<tr><th scope="row" class="when">{}</th>{}</tr>',
        (
            (
                _when(chart, row),
                format_html_join(
                    "", cell, ((chart_value(*one),) for one in zip(row.values, chart.units, strict=True))
                ),
            )
            for row in rows
        ),
    )


def _when(chart: Chart, row: Row) -> str | SafeString:
    at = moment(row.step.from_at)
    if not (chart.slowest and row.values[-1]):
        return at
    behind = f"{chart.slowest}&{row.behind.query}"
    return format_html('<a href="{}" title="Slowest transfers of this step">{}</a>', behind, at)


@register.simple_tag
def chart_value(value: Value, unit: str) -> str | SafeString:
    """A number with its unit, as figures.js writes it."""
    if not isinstance(value, int | float):
        return format_html('<span class="quiet">{}</span>', "—")
    return units.shown(value, unit)


def _sheet(request: SignedInRequest) -> Sheet:
    """One sheet for all charts of a page. If the query is invalid, it has the default range and says
    what is wrong; an invalid comparison is ignored."""
    known: Sheet | None = getattr(request, _SHEET, None)
    if known is None:
        now, problem = time.time(), ""
        asked: Mapping[str, str] = request.GET.dict()
        try:
            over = of_query(asked, now)
        except BadRange as error:
            over, problem = of_query({}, now), str(error)
        compare = asked.get("compare", "")
        known = Sheet(request.principal, over, problem, compare if compare in EARLIER else "")
        setattr(request, _SHEET, known)
    return known


def _id(plan: Plan) -> str:
    parts = (plan.topic, plan.metric.name, *plan.folds, *plan.by, *plan.where.values())
    return f"chart-{slugify('-'.join(parts).replace(':', '-'))}"
