"""What pages have in common: lists with a pager, parts that are fetched anew, refusals as messages."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.forms import BaseForm
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

PER_PAGE = 50


def paged(request: HttpRequest, rows: QuerySet[Any]) -> dict[str, Any]:
    """The page of `rows` that is asked for, and the filters for the addresses of the others."""
    query = request.GET.copy()
    query.pop("page", None)
    return {
        "page": Paginator(rows, PER_PAGE).get_page(request.GET.get("page")),
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
        said = error.messages if isinstance(error, ValidationError) else [str(error)]
        messages.error(self._request, " ".join(said))
        return True


def show_faults(request: HttpRequest, form: BaseForm) -> None:
    """Show what is wrong with a form that has no page of its own."""
    for field, errors in form.errors.items():
        messages.error(request, f"{field}: {' '.join(map(str, errors))}")
