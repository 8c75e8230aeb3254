from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, post_page
from console.saved import services
from console.saved.forms import SaveForm


@form_page
def list_views(request: SignedInRequest) -> HttpResponse:
    """All that they see; and where a page's own form leads that saves it."""
    of = {"address": request.GET.get("of", "")}
    form = SaveForm(request.principal, request.POST or None, initial=of)
    if request.method == "POST" and form.is_valid():
        try:
            view = services.save_view(request.principal, **form.cleaned_data)
        except ValidationError as error:
            form.add_error(None, ValidationError(error.messages))
        else:
            messages.success(request, f"“{view.name}” is saved.")
            return redirect(view.address)
    listed = [
        (view, services.may_delete(request.principal, view))
        for view in services.visible_views(request.principal)
    ]
    return render(request, "saved/list.html", {"views": listed, "form": form})


@post_page
def delete_view(request: SignedInRequest, number: int) -> HttpResponse:
    services.delete_view(request.principal, number)
    messages.success(request, "Deleted.")
    return redirect("views")
