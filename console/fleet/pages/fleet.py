from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.utils import timezone

from console.accounts.browser import SignedInRequest, post_page, read_page
from console.accounts.roles import Role
from console.api.etags import etag
from console.audit.services import visible_entries
from console.fleet import boxes, nodes, retired_stores, services
from console.fleet.insight import activity, front
from console.fleet.insight.overview import look_of, overview
from console.fleet.membership.heartbeats import lost_after
from console.fleet.membership.versions import skew
from console.fleet.models import Brain, Driver, Node, RetiringStore
from console.fleet.models import topic as topic_of
from console.fleet.nodes import Impossible
from console.fleet.pages.forms import BoxStateForm, LabelsForm, NodeFilterForm, SearchForm, StateForm
from console.operations.services import Busy
from console.shell.pages import Refusing, Telling, check_version, paged, render_live
from telemetry.events import events_of
from telemetry.topics import of_source

RECENT = 12


@read_page
def show_fleet(request: SignedInRequest) -> HttpResponse:
    found = overview(request.principal, request.GET.get("stamp", "")[:63])
    context = {
        "overview": found,
        "only": request.GET.get("stamp", ""),
        "may_change": request.principal.on_platform(Role.PLATFORM_ADMIN),
        "lost_after": lost_after(),
        "tab": "fleet",
    }
    return render_live(request, "fleet/fleet", context)


@read_page
def list_nodes(request: SignedInRequest) -> HttpResponse:
    form = NodeFilterForm(request.GET)
    values = form.cleaned_data if form.is_valid() else {}
    filters = services.NodeFilters(**values)
    found = filters.apply(services.visible_nodes(request.principal)).order_by("name")
    context = {
        **paged(request, found),
        "lost_after": lost_after(),
        "form": form,
        "filtered": filters.are_set,
        "tab": "nodes",
    }
    replaced = activity.replaced_nodes()
    for node in context["page"]:
        node.look, node.said = look_of(
            node.state, has_joined=node.has_joined, replaced=node.name in replaced
        )
        node.skew = skew(settings.VERSION, node.software_version)
    return render_live(request, "fleet/nodes", context)


@read_page
def show_node(request: SignedInRequest, name: str) -> HttpResponse:
    return _node_page(request, services.get(services.visible_nodes(request.principal), name))


def _node_page(
    request: SignedInRequest, node: Node, labels_form: LabelsForm | None = None
) -> HttpResponse:
    principal = request.principal
    may_change = principal.on_platform(Role.PLATFORM_ADMIN)
    replaced = node.name in activity.replaced_nodes()
    look, said = look_of(node.state, has_joined=node.has_joined, replaced=replaced)
    wanted, wanted_reason = nodes.wanted(node)
    context = {
        "node": node,
        "topic": topic_of(node),
        "look": look,
        "said": said,
        "wanted": wanted.value,
        "wanted_reason": wanted_reason,
        "losses": activity.losses_on(node),
        "skew": skew(settings.VERSION, node.software_version),
        "retiring": _retiring(node, asks_others=may_change),
        "waiting": front.waiting_of(node, timezone.now()),
        "running": activity.on_node(node, topic_of(node)),
        "events": events_of(topic_of(node)).order_by("-at", "-id")[:RECENT],
        "entries": visible_entries(principal).filter(object_type="node", object_id=node.name)[:RECENT],
        "state_form": StateForm(initial={"state": wanted.value}),
        "labels_form": labels_form or _labels_form(node),
        "may_cordon": principal.on_platform(Role.ON_CALL),
        "may_change": may_change,
        "etag": etag(node.version),
        "has_redundancy": node.streams.exclude(code="").exists(),
        "lost_after": lost_after(),
        "tab": "nodes",
    }
    return render_live(request, "fleet/node", context)


def _labels_form(node: Node, said: QueryDict | None = None) -> LabelsForm:
    lines = "\n".join(f"{key}={value}" for key, value in sorted(node.labels.items()))
    return LabelsForm(said, initial={"labels": lines, "version": node.version}, auto_id="labels_%s")


def _retiring(node: Node, *, asks_others: bool) -> list[tuple[RetiringStore, str]]:
    """Its retiring stores, each with the nodes whose files would go with those of the store."""
    stores = list(node.retiring_stores.all())
    left = [store for store in stores if asks_others and not store.is_drained]
    others = retired_stores.others_at(node, left)
    return [(store, retired_stores.named(others.get(store.pk, ()))) for store in stores]


@post_page
def set_state(request: SignedInRequest, name: str) -> HttpResponse:
    form = StateForm(request.POST)
    with transaction.atomic():
        node = services.for_change(request.principal, services.visible_nodes, name, Role.ON_CALL)
        if not form.is_valid():
            messages.error(request, "Select a state.")
            return redirect("fleet-node", name)
        with Telling(request, Busy, Impossible):
            nodes.set_state(request.principal, node, **form.cleaned_data)
            said = "will be" if node.state != form.cleaned_data["state"].value else "is"
            messages.success(request, f"{node.name} {said} {form.cleaned_data['state'].value}.")
    return redirect("fleet-node", name)


@post_page
def drain_store(request: SignedInRequest, name: str, store: int) -> HttpResponse:
    also_others = "also_others" in request.POST
    with transaction.atomic():
        node = services.for_change(request.principal, services.visible_nodes, name, Role.PLATFORM_ADMIN)
        with Telling(request, Impossible):
            drained = retired_stores.drain(request.principal, node, store, also_others=also_others)
            messages.success(request, f"The files of {drained.place} are being removed.")
    return redirect("fleet-node", name)


@post_page
def set_labels(request: SignedInRequest, name: str) -> HttpResponse:
    with transaction.atomic():
        node = services.for_change(request.principal, services.visible_nodes, name, Role.PLATFORM_ADMIN)
        form = _labels_form(node, request.POST)
        with Refusing(form, ValidationError):
            if form.is_valid():
                check_version(form, node.version)
        if not form.is_valid():
            return _node_page(request, node, form)
        values = form.cleaned_data
        nodes.set_labels(request.principal, node, values["labels"], reason=values["reason"])
    messages.success(request, f"The labels of {node.name} are saved.")
    return redirect("fleet-node", name)


@read_page
def list_boxes(request: SignedInRequest) -> HttpResponse:
    context = searched(request, services.visible_boxes(request.principal), "boxes")
    return render(request, "fleet/boxes.html", context)


def searched(request: SignedInRequest, things: QuerySet[Any], tab: str) -> dict[str, Any]:
    """A page of those with a name that is searched for, for the tab of this name."""
    form = SearchForm(request.GET)
    query = form.cleaned_data["q"] if form.is_valid() else ""
    return {
        **paged(request, things.filter(name__contains=query).order_by("name")),
        "lost_after": lost_after(),
        "form": form,
        "filtered": bool(query),
        "tab": tab,
    }


@post_page
def set_box_state(request: SignedInRequest, name: str) -> HttpResponse:
    form = BoxStateForm(request.POST)
    with transaction.atomic():
        box = services.for_change(request.principal, services.visible_boxes, name, Role.ON_CALL)
        if not form.is_valid():
            messages.error(request, "Select a state.")
            return redirect("fleet-box", name)
        with Telling(request, Busy):
            boxes.set_state(request.principal, box, **form.cleaned_data)
            messages.success(request, f"{name} is {box.state}.")
    return redirect("fleet-box", name)


@read_page
def show_box(request: SignedInRequest, name: str) -> HttpResponse:
    box = services.get(services.visible_boxes(request.principal), name)
    context = {
        "box": box,
        "running": activity.on_box(box),
        "state_form": BoxStateForm(initial={"state": boxes.nearest_by_people(box).value}),
        "may_cordon": request.principal.on_platform(Role.ON_CALL),
        "tab": "boxes",
    }
    return render_live(request, "fleet/box", context)


@read_page
def list_drivers(request: SignedInRequest) -> HttpResponse:
    visible = services.visible_drivers(request.principal).select_related("job__session")
    context = searched(request, visible, "drivers")
    for driver in context["page"]:
        driver.look, driver.said = look_of_process(driver)
        driver.skew = skew(settings.VERSION, driver.software_version)
    return render_live(request, "fleet/drivers", context)


@read_page
def show_driver(request: SignedInRequest, name: str) -> HttpResponse:
    visible = services.visible_drivers(request.principal).select_related("job__session")
    driver = services.get(visible, name)
    look, said = look_of_process(driver)
    topic = of_source("driver", driver.name)
    context = {
        "driver": driver,
        "topic": topic,
        "look": look,
        "said": said,
        "skew": skew(settings.VERSION, driver.software_version),
        "target": activity.target_of("driver", driver.name),
        "events": events_of(topic).order_by("-at", "-id")[:RECENT],
        "lost_after": lost_after(),
        "may_change": request.principal.on_platform(Role.PLATFORM_ADMIN),
        "tab": "drivers",
    }
    return render_live(request, "fleet/driver", context)


def look_of_process(one: Driver | Brain) -> tuple[str, str]:
    if one.joined_at is None:
        return "off", "not joined"
    return ("bad", "lost") if one.lost_at else ("ok", "alive")
