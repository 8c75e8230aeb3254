"""The blocks that pages share: panels, scroll regions, tables, forms and API examples. Their HTML is in
`templates/components/` and `templates/forms/`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from html import unescape
from textwrap import dedent
from typing import Any, Final, NamedTuple

from django import template
from django.forms import BaseForm
from django.template import Context
from django.template.loader import render_to_string
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

register = template.Library()

# A cell with nothing to see, which a narrow screen leaves out with its label.
_BLANK = re.compile(r"(<td\b[^<>]*>)\s*(?:<span>\s*</span>)?\s*</td>")
_CELL = re.compile(r"<(tr|td|th)\b([^<>]*)>")
# Headers of commands with what the shell puts in.
_FILLED_IN: Final = ("Authorization: Bearer $TIDEGATE_TOKEN", "Idempotency-Key: $(date +%s%N)")


class Column(NamedTuple):
    name: str
    is_number: bool
    is_unseen: bool


@register.simple_block_tag(takes_context=True)
def panel(
    context: Context, content: SafeString, name: str, title: str, *, extra: str = ""
) -> SafeString:
    """A panel with a heading, by whose id it is named. `extra` is more CSS classes."""
    beside = context.render_context.dicts[-1].pop("beside", "")
    values = {"content": content, "name": name, "title": title, "extra": extra, "beside": beside}
    return render_to_string("components/panel.html", values)


@register.simple_block_tag(takes_context=True)
def beside(context: Context, content: SafeString) -> str:
    """Within a panel: what is beside its heading, such as a link or a note in quiet letters."""
    context.render_context["beside"] = content
    return ""


@register.simple_block_tag
def scroll(
    content: SafeString, *, label: str = "", by: str = "", extra: str = "", navigable: bool = False
) -> SafeString:
    """A region that scrolls sideways, named by `label` or by the element with the id `by`.

    `extra` is another CSS class. The rows of a `navigable` one are walked with the keyboard.
    """
    values = {"content": content, "label": label, "by": by, "extra": extra, "navigable": navigable}
    return render_to_string("components/scroll.html", values)


@register.simple_block_tag
def table(content: SafeString, *columns: str, **region: Any) -> SafeString:
    """A table in a scroll region, which takes the same names; the content is its rows. Their cells are
    those of the columns: numbers are aligned as such, and a narrow screen shows the name beside each.

    `#Name` is a column of numbers, `~Name` one whose heading only screen readers read. An empty name is
    no column, so that `may_change|yesno:"~Actions,"` is one for some readers only. Where a line gets too
    long, names are one argument, with bars between them.
    """
    names = [name for name in "|".join(columns).split("|") if name]
    headings = [Column(name.lstrip("#~"), name[0] == "#", name[0] == "~") for name in names]
    rows = _of_columns(_BLANK.sub(r"\1</td>", content), headings)
    cells = mark_safe(rows)  # noqa: S308  blanks are left out, and attributes added
    inner = render_to_string("components/table.html", {"columns": headings, "content": cells})
    return scroll(inner, **region)


def _of_columns(rows: str, columns: Sequence[Column]) -> str:
    """Rows whose cells have the label and the class of their columns, but for those that span several or
    have a label of their own."""
    added = [
        ("" if one.is_unseen else format_html(' data-label="{}"', one.name))
        + (' class="number"' if one.is_number else "")
        for one in columns
    ]
    of_row: Iterator[str] = iter(())

    def completed(begin: re.Match[str]) -> str:
        nonlocal of_row
        if begin[1] == "tr":
            of_row = iter(added)
            return begin[0]
        of_column, own = next(of_row, ""), begin[2]
        return begin[0] if "colspan=" in own or "data-label=" in own else f"<{begin[1]}{own}{of_column}>"

    return _CELL.sub(completed, rows)


@register.simple_tag(takes_context=True)
def post_form(
    context: Context,
    form: BaseForm,
    button: str,
    *page: object,
    look: str = "main",
    extra: str = "",
    cancel: str = "",
) -> SafeString:
    """A form that is posted to a page, by its name and what its address needs, or to this one.

    `extra` is a CSS class, `cancel` the address that a link beside the button leads to.
    """
    return _posted(context, page, form=form, button=button, look=look, extra=extra, cancel=cancel)


@register.simple_block_tag(takes_context=True)
def post_button(
    context: Context, content: SafeString, button: str, *page: object, look: str = "", extra: str = ""
) -> SafeString:
    """A button that posts to a page. The content is the question that people are asked before."""
    question = mark_safe(" ".join(content.split()))  # noqa: S308  its spaces are others, no more
    return _posted(context, page, question=question, button=button, look=look, extra=extra)


def _posted(context: Context, page: Sequence[object], **values: object) -> SafeString:
    action = reverse(page[0], args=page[1:]) if page else ""  # type: ignore[arg-type]
    values |= {"action": action, "csrf_token": context["csrf_token"]}
    return render_to_string("forms/post.html", values)


@register.simple_tag
def link_if(
    condition: object, page: str, *names: object, text: object = None, otherwise: object = None
) -> SafeString:
    """A link to a page where `condition` holds, and else the same text, or `otherwise`, without one.

    The text is the last of the names that make the address, if no other is given. Names that peers
    report may fit no address: those are shown without a link, too.
    """
    shown = names[-1] if text is None else text
    without = format_html("{}", shown if otherwise is None else otherwise)
    if not condition:
        return without
    try:
        address = reverse(page, args=names)
    except NoReverseMatch:
        return without
    return format_html('<a href="{}">{}</a>', address, shown)


@register.simple_block_tag(takes_context=True)
def api_example(
    context: Context,
    content: SafeString,
    *,
    title: str = "API example",
    element: str = "",
    dry_run: bool = False,
) -> SafeString:
    """The curl command for the HTTP request in the content, folded away.

    With the id `element` it stays open when the page around it is replaced. `dry_run` adds how to
    preview.
    """
    values = {"command": _curl(context, content), "title": title, "element": element, "dry_run": dry_run}
    return render_to_string("components/api_example.html", values)


@register.simple_block_tag(takes_context=True)
def api_command(context: Context, content: SafeString) -> SafeString:
    """The curl command for the HTTP request in the content, in the open."""
    return render_to_string("components/api_command.html", {"command": _curl(context, content)})


def _curl(context: Context, request: SafeString) -> str:
    """A request, `POST /sessions`, its headers, an empty line and its body, as a command.

    The address and the token are added, and the type of a body that has none. Every value in it is data
    to a shell, whoever wrote it: what the shell is to fill in is in `_FILLED_IN`.
    """
    head, _, body = dedent(unescape(request)).strip().partition("\n\n")
    first, *headers = (line.strip() for line in head.splitlines())
    method, path = first.split(" ", 1)
    url = f"{context['request'].scheme}://{context['request'].get_host()}/api/v1{path.strip()}"
    method_option = "" if method == "GET" else f"-X {method} "
    headers.insert(0, "Authorization: Bearer $TIDEGATE_TOKEN")
    if body and not any(header.startswith("Content-Type:") for header in headers):
        headers.append("Content-Type: application/json")
    parts = [f"curl {method_option}{shlex.quote(url)}"]
    parts += [f"-H {_quoted(header)}" for header in headers]
    if body:
        parts.append(f"-d {shlex.quote(body.strip())}")
    return " \\\n  ".join(parts)


def _quoted(header: str) -> str:
    return f'"{header}"' if header in _FILLED_IN else shlex.quote(header)
