from __future__ import annotations

import csv
import json
from collections.abc import AsyncIterator

from django import forms
from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, post_page, read_page
from console.accounts.forms import OrgsMixin, org_field, utc_field
from console.audit import services
from console.audit.models import AuditEntry
from console.audit.services import Filters
from console.orgs.services import visible_orgs
from console.shell.pages import Telling, paged
from telemetry.queries import harmless

CSV_ROWS_MAX = 100_000
CSV_ROWS_AT_ONCE = 1000
CSV_COLUMNS = [
    "id",
    "at",
    "actor",
    "means",
    "address",
    "request_id",
    "action",
    "object_type",
    "object_id",
    "object_name",
    "reason",
    "changes",
]


class FilterForm(OrgsMixin):
    """The filters of the page and of the CSV; all of them live in the address."""

    q = forms.CharField(max_length=120, required=False, label="Search")
    actor = forms.CharField(max_length=120, required=False, label="User")
    action = forms.CharField(
        max_length=48,
        required=False,
        label="Action",
        help_text="As in the table: “Org: update”; or by its name, org.update, and org for all of orgs.",
    )
    org = org_field("all")
    since = utc_field("From (UTC)")
    until = utc_field("Until (UTC)")
    request_id = forms.CharField(max_length=64, required=False, label="Request id")


class UndoForm(forms.Form):
    reason = forms.CharField(max_length=500, required=False, label="Reason")


def _filters(form: FilterForm) -> Filters:
    """What a valid form says; nothing where it is not valid, and the page says what is wrong."""
    return Filters(**form.cleaned_data) if form.is_valid() else Filters()


@read_page
def list_entries(request: SignedInRequest) -> HttpResponse:
    form = FilterForm(request.GET, orgs=visible_orgs(request.principal))
    entries = _filters(form).apply(services.visible_entries(request.principal))
    context = {**paged(request, entries), "form": form}
    return render(request, "audit/list.html", context)


@read_page
def show_entry(request: SignedInRequest, entry_id: int) -> HttpResponse:
    entry = services.get_entry(request.principal, entry_id)
    context = {"entry": entry, "can_undo": services.can_undo(entry), "form": UndoForm()}
    return render(request, "audit/entry.html", context)


@post_page
def undo(request: SignedInRequest, entry_id: int) -> HttpResponse:
    entry = services.get_entry(request.principal, entry_id)
    form = UndoForm(request.POST)
    reason = form.cleaned_data["reason"] if form.is_valid() else ""
    with Telling(request, services.CannotUndo):
        entry = services.undo(request.principal, entry, reason)
        messages.success(request, "Change undone. This is the new entry.")
    return redirect("audit-entry", entry.pk)


@read_page
def export(request: SignedInRequest) -> HttpResponseBase:
    """The filtered trail as CSV, the newest first. It says so if there are more than CSV_ROWS_MAX."""
    form = FilterForm(request.GET, orgs=visible_orgs(request.principal))
    if not form.is_valid():
        return render(request, "errors/error.html", _bad_filters(form), status=400)
    entries = _filters(form).apply(services.visible_entries(request.principal))[: CSV_ROWS_MAX + 1]
    return StreamingHttpResponse(
        _csv(entries),
        content_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": 'attachment; filename="tidegate-audit.csv"'},
    )


def _bad_filters(form: FilterForm) -> dict[str, object]:
    faults = [f"{name}: {' '.join(map(str, errors))}" for name, errors in form.errors.items()]
    return {
        "status": 400,
        "title": "Those filters make no sense",
        "sentence": " ".join(faults),
        "advice": "Go back and mend them.",
    }


class _Line:
    """What csv.writer writes to: gives the line back instead of keeping it."""

    def write(self, line: str) -> str:
        return line


async def _csv(entries: QuerySet[AuditEntry]) -> AsyncIterator[str]:
    """Line by line as the rows come, so that a long trail is never held in memory."""
    writer = csv.writer(_Line())
    yield writer.writerow(CSV_COLUMNS)
    left = CSV_ROWS_MAX
    async for entry in entries.aiterator(chunk_size=CSV_ROWS_AT_ONCE):
        if not left:
            said = f"These are the newest {CSV_ROWS_MAX:,} entries. Filter by time for older ones."
            yield writer.writerow([said])
            break
        left -= 1
        yield writer.writerow([harmless(str(cell)) for cell in _cells(entry)])


def _cells(entry: AuditEntry) -> list[object]:
    changes = {path: [before, after] for path, before, after in entry.changes}
    return [
        entry.pk,
        entry.at.isoformat(),
        entry.actor_name,
        entry.means,
        entry.address or "",
        entry.request_id,
        entry.action,
        entry.object_type,
        entry.object_id,
        entry.object_name,
        entry.reason,
        json.dumps(changes, sort_keys=True) if changes else "",
    ]
