"""The parts of brains' desired documents: models, their replicas, and the orgs that may use them.

Any number of brains do the same, so all are told the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from django.db.models import Prefetch

from console.control.documents import common_part
from console.control.services import claims_keys_of
from console.fleet.models import Driver
from console.orgs.models import Org
from console.policies.models import Caller
from console.policies.org_keys import keys_of, secrets_of
from console.routing.limits import limits_of
from console.routing.models import EndpointSource, Engine, Replica, ServedModel
from console.sessions.siblings import Siblings
from inference_brain.desired import DriverSpec, OrgSpec, ReplicaSpec
from inference_brain.desired import ServedModel as ModelTold
from swdriver_shim.desired import ModelSpec


@common_part("brain")
def models() -> Mapping[str, Any]:
    """All models, with their replicas."""
    replicas = Prefetch("replicas", Replica.objects.select_related("driver").order_by("name"))
    found = list(ServedModel.objects.order_by("model").prefetch_related(replicas, "orgs"))
    drivers = {one.driver for model in found for one in model.replicas.all() if one.driver}
    keys = claims_keys_of(driver.name for driver in drivers if driver.engine)
    siblings = Siblings()
    return {"models": [_model(model, keys, siblings) for model in found]}


def _model(model: ServedModel, keys: Mapping[str, bytes], siblings: Siblings) -> ModelTold:
    return ModelTold(
        name=model.model,
        tokens_max=model.tokens_max,
        tokenizer=model.tokenizer,
        orgs=None if model.for_all_orgs else tuple(model.org_slugs()),
        replicas=tuple(
            ReplicaSpec(
                name=one.name,
                url=one.url,
                engine=Engine(one.engine).told,
                driver=_driver(one.driver, keys, siblings) if one.driver else None,
                draining=one.draining,
                served_as=one.served_as,
                api_key=str(one.api_key),
                endpoint=EndpointSource(one.endpoint).told,
            )
            for one in model.replicas.all()
        ),
    )


def _driver(driver: Driver, keys: Mapping[str, bytes], siblings: Siblings) -> DriverSpec | None:
    """None of one that has not told its model: nobody could make keys of columns for it. Engines are
    shown claims; the callers of daemons have tokens."""
    model = model_of(driver)
    if model is None:
        return None
    return DriverSpec(driver.name, model, keys.get(driver.name), tuple(siblings.names_of(driver.name)))


def model_of(driver: Driver) -> ModelSpec | None:
    """As it has told it; None for one that has told none, or nonsense."""
    try:
        model = msgspec.convert(driver.model, ModelSpec)
        model.shape()
    except (msgspec.ValidationError, ValueError):
        return None
    return model


@common_part("brain")
def orgs() -> Mapping[str, Any]:
    """The orgs that may use a model, with their keys, the hashes of their tokens, and their limits; and
    nothing of any other org."""
    found = Org.objects.order_by("slug")
    if not ServedModel.objects.filter(for_all_orgs=True).exists():
        found = found.filter(served_models__isnull=False).distinct()
    return {"orgs": list(_orgs(list(found)))}


def _orgs(found: list[Org]) -> Iterator[OrgSpec]:
    keys, limits = keys_of(found), limits_of(found)
    tokens: dict[int, list[str]] = {}
    callers = Caller.objects.filter(org__in=found).order_by("token_sha256")
    for org_id, token in callers.values_list("org_id", "token_sha256"):
        tokens.setdefault(org_id, []).append(token)
    for org in found:
        yield OrgSpec(
            name=org.slug,
            secret=bytes(keys[org.pk].secret),
            tokens=tuple(tokens.get(org.pk, ())),
            limits=limits[org.pk].limits,
            secrets=secrets_of(keys[org.pk]),
        )
