"""Served models and their replicas: who sees them, and every way to change them.

Models and replicas are the platform's. An org knows the names of the models that it may use, and nothing
of what serves them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Prefetch, Q, QuerySet
from django.http import Http404

from console.accounts.principal import SYSTEM, Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.control.services import ALL_BRAINS, changed
from console.fleet.models import Driver
from console.fleet.nodes import Impossible
from console.fleet.services import check_fleet
from console.orgs.models import Org
from console.routing.models import Replica, ServedModel
from console.search.services import Found, finder, nearest
from inference_brain.desired import MODELS_MAX, REPLICAS_MAX
from telemetry.topics import FLEET

NO_MODEL: Final = "There is no such model, or it is not yours to see."
NO_REPLICA: Final = "The model has no replica of that name."


def visible_models(principal: Principal) -> QuerySet[ServedModel]:
    """All, with their replicas, for those with a role on the platform. Raises Http404 for others."""
    check_fleet(principal)
    replicas = Prefetch("replicas", Replica.objects.select_related("driver").order_by("name"))
    return ServedModel.objects.prefetch_related(replicas, "orgs").order_by("name")


def models_for(org: Org) -> list[str]:
    """What its people may send as `model`."""
    found = ServedModel.objects.filter(Q(for_all_orgs=True) | Q(orgs=org)).distinct()
    return list(found.order_by("model").values_list("model", flat=True))


def get_model(principal: Principal, name: str) -> ServedModel:
    found = visible_models(principal).filter(name=name).first()
    if found is None:
        raise Http404(NO_MODEL)
    return found


def for_change(principal: Principal, name: str) -> ServedModel:
    """A model, locked until the end of the transaction, for somebody who may change it.

    One that belongs to a workload is changed by that, with its replicas: Impossible for people.
    """
    principal.check_may_change()
    check_fleet(principal, Role.PLATFORM_ADMIN)
    found = ServedModel.objects.select_for_update(no_key=True).filter(name=name).first()
    if found is None:
        raise Http404(NO_MODEL)
    if principal is not SYSTEM and (workload := workload_of(found)):
        raise Impossible(
            f"Model {name} and its replicas belong to workload {workload}. Change the workload instead."
        )
    return found


def workload_of(model: ServedModel) -> str:
    """The name of the workload that it belongs to; empty if it is people's."""
    found = getattr(model, "workload", None)  # the other end is the workload's: routing knows none
    return str(found.name) if found else ""


def check_may_add(principal: Principal) -> None:
    principal.check_may_change()
    check_fleet(principal, Role.PLATFORM_ADMIN)


# Models


@transaction.atomic
def add_model(
    principal: Principal,
    *,
    name: str,
    values: Mapping[str, Any],
    orgs: Collection[Org] | None,
    reason: str = "",
) -> ServedModel:
    """Serve a model, without replicas yet. `orgs`: None for all. Raises ValidationError, by field."""
    check_may_add(principal)
    if ServedModel.objects.count() >= MODELS_MAX:
        raise ValidationError({"name": f"At most {MODELS_MAX} models. Remove one that is not used."})
    model = ServedModel(name=name, for_all_orgs=orgs is None, **values)
    model.full_clean()
    model.save()
    model.orgs.set(orgs or ())
    record(principal, "model.add", _about(model), after=model.snapshot(), reason=reason)
    changed([ALL_BRAINS], f"model {name} is new: {reason}", topic=FLEET)
    return model


@transaction.atomic
def update_model(
    principal: Principal,
    model: ServedModel,
    *,
    values: Mapping[str, Any],
    orgs: Collection[Org] | None,
    reason: str = "",
) -> ServedModel:
    """Change a model that came from `for_change`. The same again changes nothing."""
    before = model.snapshot()
    for name, value in values.items():
        setattr(model, name, value)
    model.for_all_orgs = orgs is None
    model.full_clean()
    model.orgs.set(orgs or ())
    after = model.snapshot()
    if after == before:
        return model
    model.version += 1
    model.save()
    record(principal, "model.update", _about(model), before=before, after=after, reason=reason)
    changed([ALL_BRAINS], f"model {model.name}: {reason}", topic=FLEET)
    return model


@transaction.atomic
def remove_model(principal: Principal, model: ServedModel, *, reason: str = "") -> None:
    """Stop serving a model that came from `for_change`, with its replicas. Their engines go on."""
    before = {**model.snapshot(), "replicas": [one.snapshot() for one in model.replicas.all()]}
    record(principal, "model.remove", _about(model), before=before, reason=reason)
    changed([ALL_BRAINS], f"model {model.name} is removed: {reason}", topic=FLEET)
    model.delete()


def _about(model: ServedModel, replica: Replica | None = None) -> Subject:
    if replica is None:
        return Subject("model", model.name, model.name, topics=[FLEET])
    return Subject("replica", f"{model.name}/{replica.name}", str(replica), topics=[FLEET])


# Replicas


def get_replica(model: ServedModel, name: str) -> Replica:
    found = model.replicas.select_related("driver").filter(name=name).first()
    if found is None:
        raise Http404(NO_REPLICA)
    return found


def driver_named(name: str | None) -> Driver | None:
    """Raises ValidationError for none of that name."""
    if not name:
        return None
    driver = Driver.objects.filter(name=name).first()
    if driver is None:
        raise ValidationError({"driver": "The fleet has no driver of that name."})
    return driver


@transaction.atomic
def add_replica(
    principal: Principal, model: ServedModel, *, name: str, values: Mapping[str, Any], reason: str = ""
) -> Replica:
    """Have an engine serve a model that came from `for_change`. Raises ValidationError, by field."""
    if Replica.objects.filter(model=model).count() >= REPLICAS_MAX:
        raise ValidationError({"name": f"At most {REPLICAS_MAX} replicas of a model."})
    replica = Replica(model=model, name=name, **values)
    _check_driver(replica)
    replica.full_clean()
    replica.save()
    _record(principal, "replica.add", replica, after=replica.snapshot(), reason=reason)
    return replica


@transaction.atomic
def update_replica(
    principal: Principal, replica: Replica, *, values: Mapping[str, Any], reason: str = ""
) -> Replica:
    """Change a replica of a model that came from `for_change`. The same again changes nothing."""
    before, key = replica.snapshot(), str(replica.api_key)
    for name, value in values.items():
        setattr(replica, name, value)
    _check_driver(replica)
    replica.full_clean()
    if replica.snapshot() == before and str(replica.api_key) == key:
        return replica
    replica.version += 1
    replica.save()
    after = replica.snapshot()
    if str(replica.api_key) != key:
        after["api_key"] = "changed"
    told = {"before": before, "after": after}
    _record(principal, "replica.update", replica, **told, reason=reason)
    return replica


@transaction.atomic
def remove_replica(principal: Principal, replica: Replica, *, reason: str = "") -> None:
    """Brains send it nothing from then on. Answers that are being streamed go on to their end."""
    _record(principal, "replica.remove", replica, before=replica.snapshot(), reason=reason)
    replica.delete()


def _check_driver(replica: Replica) -> None:
    """A driver is in, or beside, one engine: claims are for one driver, and a map is of one cache."""
    others = Replica.objects.filter(driver=replica.driver).exclude(pk=replica.pk)
    if replica.driver is not None and (taken := others.exclude(url=replica.url).first()):
        raise ValidationError(
            {"driver": f"Driver {replica.driver.name} belongs to replica {taken}, at another URL."}
        )


def _record(
    principal: Principal,
    action: str,
    replica: Replica,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str,
) -> None:
    about = _about(replica.model, replica)
    record(principal, action, about, before=before, after=after, reason=reason)
    changed([ALL_BRAINS], f"replica {replica}: {reason}", topic=FLEET)


@finder("models")
def find_models(principal: Principal, text: str, most: int) -> list[Found]:
    if not principal.on_platform(Role.VIEWER):
        return []
    found = nearest(visible_models(principal), text, "name", "model")[:most]
    return [Found(one.name, one.model, "routing-model", one.name) for one in found]
