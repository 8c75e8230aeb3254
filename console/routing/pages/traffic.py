"""The Routing page: what brains do, for an org or for all."""

from __future__ import annotations

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from console.accounts.browser import SignedInRequest, read_page
from console.accounts.roles import Role
from console.fleet.models import Brain
from console.orgs.services import get_org, visible_orgs
from console.routing import traffic
from console.routing.models import ServedModel
from console.shell.pages import render_live
from telemetry.queries import Unanswerable
from telemetry.topics import FLEET, of_org

ORGS_MAX = 500


@read_page
def show(request: SignedInRequest) -> HttpResponse:
    """All of it for people of the platform; for members of orgs, one of theirs."""
    principal = request.principal
    sees_all = principal.on_platform(Role.VIEWER)
    orgs = list(visible_orgs(principal)[:ORGS_MAX])
    slug = request.GET.get("org", "")
    if not slug and not sees_all:
        if not orgs:
            return render(request, "routing/traffic.html", {"tab": "traffic", "orgs": ()})
        slug = orgs[0].slug
    org = get_org(principal, slug) if slug else None
    if org is None and not sees_all:
        raise Http404("There is no such org.")
    read_at = timezone.now()
    by_org, by_replica, problem = list[traffic.OrgRow](), list[traffic.ReplicaRow](), ""
    try:
        by_org = traffic.by_org([org.slug] if org else None)
        by_replica = traffic.by_replica() if sees_all and org is None else []
    except Unanswerable as error:
        problem = str(error)
    context = {
        "org": org,
        "orgs": orgs,
        "sees_all": sees_all,
        "topic": of_org(org.slug) if org else FLEET,
        "by_org": by_org[: traffic.ROWS_MAX],
        "orgs_left_out": max(0, len(by_org) - traffic.ROWS_MAX),
        "by_replica": by_replica[: traffic.ROWS_MAX],
        "replicas_left_out": max(0, len(by_replica) - traffic.ROWS_MAX),
        "problem": problem,
        "minutes": traffic.MINUTES,
        "read_at": read_at,
        "has_brains": Brain.objects.exists() if sees_all else True,
        "has_models": ServedModel.objects.exists() if sees_all else True,
        "tab": "traffic",
    }
    return render_live(request, "routing/traffic", context)
