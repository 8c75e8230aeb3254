from __future__ import annotations

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, read_page
from console.accounts.roles import Role
from console.fleet import services
from console.fleet.descriptions import changes
from console.fleet.descriptions.changes import Moved
from console.fleet.descriptions.document import Wrong
from console.fleet.nodes import Impossible
from console.fleet.pages.forms import DescriptionForm

EXAMPLE = """stamps:
  east:
    leaves:
      leaf-1:
        spine_links: {leaf-1-up: {spine: spine-1, gbits: 400}}
    nodes:
      ax-1:
        nics: {eth0: {leaf: leaf-1}}
    boxes:
      cs-1:
        domains:
          - {wio: 8, leaves: [leaf-1]}
          - {wio: 8, leaves: [leaf-1]}
          - {wio: 8, leaves: [leaf-1]}
          - {wio: 8, leaves: [leaf-1]}
"""
SHOWN_MAX = 200
THINGS_MAX = 300  # that anybody changes in a page; of more the text is to be had as a file


@form_page
def describe(request: SignedInRequest) -> HttpResponse:
    """The fleet as a description: to look at, to change, to see what that changes, and to do it."""
    principal = request.principal
    services.check_fleet(principal)
    is_empty = not services.visible_leaves(principal).exists()
    things = services.visible_nodes(principal).count() + services.visible_boxes(principal).count()
    context = {
        "tab": "description",
        "may_change": principal.on_platform(Role.PLATFORM_ADMIN),
        "is_empty": is_empty,
        "too_many": things if things > THINGS_MAX else 0,
    }
    if request.method != "POST":
        text = EXAMPLE if is_empty else "" if things > THINGS_MAX else changes.export(principal)
        form = DescriptionForm(initial={"yaml": text})
        return render(request, "fleet/description.html", {**context, "form": form})
    services.check_fleet(principal, Role.PLATFORM_ADMIN)
    form = DescriptionForm(request.POST, request.FILES)
    if form.is_valid():
        text, seen = form.cleaned_data["yaml"], form.cleaned_data["seen"]
        try:
            if "apply" in request.POST:
                done = changes.apply(principal, text, seen=seen, reason=form.cleaned_data["reason"])
                counts = ", ".join(f"{count} {what}" for what, count in done.counted().items() if count)
                messages.success(request, f"Description applied: {counts or 'no changes'}.")
                return redirect("fleet")
            found, fingerprint = changes.preview(principal, text)
        except Wrong as error:
            form.add_error("yaml", error.problems)
        except (Moved, Impossible) as error:
            form.add_error(None, str(error))
        else:
            seen_form = DescriptionForm(
                initial={"yaml": text, "seen": fingerprint, "reason": form.cleaned_data["reason"]}
            )
            context |= {
                "found": found,
                "shown": found.changes[:SHOWN_MAX],
                "left_out": max(0, len(found.changes) - SHOWN_MAX),
                "alive": changes.alive_but_removed(found),
            }
            return render(request, "fleet/description.html", {**context, "form": seen_form})
    return render(request, "fleet/description.html", {**context, "form": form})


@read_page
def export(request: SignedInRequest) -> HttpResponse:
    response = HttpResponse(changes.export(request.principal), content_type="application/yaml")
    response["Content-Disposition"] = 'attachment; filename="fleet.yaml"'
    return response
