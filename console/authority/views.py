from __future__ import annotations

from collections.abc import Sequence

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, post_page, read_page
from console.authority import services
from console.control.services import in_the_open
from console.fleet.nodes import Impossible
from console.shell.pages import Telling

SHOWN_MAX = 50


def named(names: Sequence[str]) -> str:
    """Those of them that fit, and how many more there are."""
    more = f" and {len(names) - SHOWN_MAX:,} more" if len(names) > SHOWN_MAX else ""
    return f"{', '.join(names[:SHOWN_MAX])}{more}"


@read_page
def show(request: SignedInRequest) -> HttpResponse:
    """Roots, who follows, and which control APIs can be read on the way."""
    roots = services.visible_authorities(request.principal)[:SHOWN_MAX]
    following = services.following()
    context = {
        "roots": roots,
        "following": following,
        "behind": named(following.behind),
        "away": named(following.away),
        "in_the_open": named(in_the_open()),
        "is_replaced": any(root.state in ("next", "superseded") for root in roots),
        "tab": "authority",
    }
    return render(request, "authority/authority.html", context)


@post_page
def rotate(request: SignedInRequest) -> HttpResponse:
    with Telling(request, Impossible):
        services.begin_rotation(request.principal)
        messages.success(
            request, "A new root was created. It signs as soon as all live processes trust it."
        )
    return redirect("fleet-authority")
