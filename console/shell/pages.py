"""What pages have in common: lists with a pager, parts that are fetched anew, refusals as messages."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from difflib import SequenceMatcher
from typing import Any, Final

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.forms import BaseForm, BoundField, ChoiceField, ModelChoiceField
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

PER_PAGE = 50
_STALE: Final = "It has changed since you opened the form. Look again, then save."
LINES_MAX: Final = 20  # of a text of many lines: so many that differ are shown


def paged(request: HttpRequest, rows: QuerySet[Any], per_page: int = PER_PAGE) -> dict[str, Any]:
    """The page of `rows` that is asked for, and the filters for the addresses of the others."""
    query = request.GET.copy()
    query.pop("page", None)
    return {
        "page": Paginator(rows, per_page).get_page(request.GET.get("page")),
        "query": query.urlencode(),
        "filtered": any(query.values()),
    }


def wants_part(request: HttpRequest) -> bool:
    """Whether a script asks, for the part of a page that it replaces."""
    return request.headers.get("HX-Request") == "true"


def render_live(request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
    """A page, or its live part: `fleet/node` is made of `fleet/node.html` and `fleet/node_live.html`."""
    return render(request, f"{template}{'_live' if wants_part(request) else ''}.html", context)


class Telling:
    """Shows one of these refusals as a message on the next page, whichever that is."""

    def __init__(self, request: HttpRequest, *refusals: type[Exception]) -> None:
        self._request = request
        self._refusals = refusals

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, self._refusals):
            return False
        messages.error(self._request, sentence_of(error))
        return True


class Refusing:
    """Shows one of these refusals in a form: at the fields that it is about, as far as they are seen."""

    def __init__(self, form: BaseForm, *refusals: type[Exception]) -> None:
        self._form = form
        self._refusals = refusals

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, self._refusals):
            return False
        told = {"": [sentence_of(error)]}
        if isinstance(error, ValidationError) and hasattr(error, "error_dict"):
            told = error.message_dict
        for path, sentences in told.items():
            name = path.rpartition("/")[2]
            is_seen = name in self._form.fields and not self._form[name].is_hidden
            self._form.add_error(name if is_seen else None, sentences)
        return True


def check_version(
    form: BaseForm, version: int, sentence: str = _STALE, beside: Iterable[BaseForm] = ()
) -> None:
    """Take the version out of what was sent. Raises ValidationError where what the form changes has
    another one by now.

    Whoever saves again must have seen what they would replace. So the form then shows at each of its
    fields what is in force there, if that differs, and sends the version of what it shows. It shows what
    it was made with as `initial`; a page without that shows it elsewhere. `beside`: forms of the same
    page that are saved with it.
    """
    if form.cleaned_data.pop("version") == version:
        return
    for one in (form, *beside):
        for name in one.changed_data:
            field = one[name]
            if name in one.initial and not field.is_hidden and (now := _difference(field)):
                one.add_error(name, now)
    data: Any = copy(form.data)
    data[form.add_prefix("version")] = str(form.initial.get("version", version))
    form.data = data
    raise ValidationError(sentence)


def _difference(field: BoundField) -> str:
    """What is in force, in a sentence, if it reads differently from what was sent."""
    now, sent = (_as_text(field, value) for value in (field.initial, field.value()))
    if now == sent:
        return ""
    if "\n" not in now + sent:
        return f"Now: {now or 'empty'}."
    # In their order and with their indents, which are what some of such texts say.
    here, there = ([*filter(None, map(str.rstrip, text.splitlines()))] for text in (sent, now))
    lines = []
    for kind, start, end, begin, until in SequenceMatcher(None, here, there).get_opcodes():
        if kind != "equal":
            lines += [f"without “{line}”" for line in here[start:end]]
            lines += [f"with “{line}”" for line in there[begin:until]]
    more = f", and {len(lines) - LINES_MAX} more lines" if len(lines) > LINES_MAX else ""
    return f"Now: {', '.join(lines[:LINES_MAX])}{more}." if lines else ""


def _as_text(field: BoundField, value: Any) -> str:
    """As people read it in the form."""
    if isinstance(value, bool):
        return "on" if value else "off"
    shown = field.field.prepare_value(value)
    text = "" if shown is None else str(shown).replace("\r\n", "\n")
    if isinstance(field.field, ChoiceField) and not isinstance(field.field, ModelChoiceField):
        choices: Any = field.field.choices
        return str(dict(choices).get(text, text))
    return text


def sentence_of(error: BaseException) -> str:
    return " ".join(error.messages) if isinstance(error, ValidationError) else str(error)


def show_faults(request: HttpRequest, form: BaseForm) -> None:
    """Show what is wrong with a form that has no page of its own."""
    for field, errors in form.errors.items():
        label = f"{form[field].label}: " if field in form.fields else ""
        messages.error(request, f"{label}{' '.join(map(str, errors))}")
