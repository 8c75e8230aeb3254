"""Uploaded tokenizers as a page: the list with who uses each, an upload, and deleting."""

from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET

from console.accounts.browser import SignedInRequest, form_page, post_page
from console.accounts.principal import Refused
from console.accounts.roles import Role
from console.fleet.nodes import Impossible
from console.orgs.services import visible_orgs
from console.shell.pages import Refusing, Telling, paged
from console.visibility import of_orgs
from console.workloads import services, tokenizers
from console.workloads.pages.forms import TokenizerForm
from workload_manager.tokenizers import families


@form_page
def list_tokenizers(request: SignedInRequest) -> HttpResponse:
    principal = request.principal
    may_add = services.may_add(principal)
    form = _form(request) if may_add else None
    if request.method == "POST":
        if form is None:
            raise Refused("Uploading a tokenizer needs the role org admin.")
        if form.is_valid() and (answer := _uploaded(request, form)) is not None:
            return answer
    context = paged(request, tokenizers.visible(principal))
    shown = list(context["page"])
    users = tokenizers.users_of(shown, principal)
    rows = [(one, users[one.pk], tokenizers.may_delete(principal, one)) for one in shown]
    context |= {"form": form, "rows": rows, "may_delete": any(may for *_, may in rows)}
    context["families"] = families(tokenizers.families_folder())
    return render(request, "workloads/tokenizers.html", context)


def _form(request: SignedInRequest) -> TokenizerForm:
    principal = request.principal
    return TokenizerForm(
        request.POST or None,
        request.FILES or None,
        orgs=visible_orgs(principal).filter(of_orgs(principal, Role.ORG_ADMIN, field="pk")),
        may_share=principal.on_platform(Role.PLATFORM_ADMIN),
    )


def _uploaded(request: SignedInRequest, form: TokenizerForm) -> HttpResponse | None:
    """None where it was refused; then the form says why."""
    org, name = form.cleaned_data["org"], form.cleaned_data["name"]
    with Refusing(form, ValidationError, Http404, tokenizers.TooManyChecks):
        found, is_new = tokenizers.add(
            request.principal, org.slug if org else None, name, form.cleaned_data["archive"].read()
        )
        if is_new:
            messages.success(request, f"{found.name} is stored. A workload names it by its SHA-256.")
        else:
            messages.info(request, f"It is there already, as {found.name}: nothing was changed.")
        return redirect("tokenizers")
    return None


@post_page
def delete_tokenizer(request: SignedInRequest, number: int) -> HttpResponse:
    with Telling(request, Impossible):
        found = tokenizers.delete(request.principal, number)
        messages.success(request, f"{found.name} is deleted.")
    return redirect("tokenizers")


@require_GET
def archive(_request: HttpRequest, sha256: str, instance: str, signature: str) -> HttpResponse:
    """For managers, which have the address from the orchestrator."""
    found = tokenizers.archive(sha256, instance, signature)
    return HttpResponse(found, content_type="application/x-tar")
