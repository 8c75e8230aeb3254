"""The model that a driver has reported."""

from __future__ import annotations

import msgspec

from console.fleet.models import Driver
from console.placement.topology import Misconfigured
from swdriver_shim.desired import ModelSpec


def model_of(driver: Driver) -> ModelSpec:
    """Raises Misconfigured for a driver that has reported no model, or an invalid one."""
    if not driver.model:
        raise Misconfigured(f"Driver {driver.name} has not reported its model.")
    try:
        spec: ModelSpec = msgspec.convert(driver.model, ModelSpec)
    except msgspec.ValidationError as error:
        raise Misconfigured(
            f"The model that driver {driver.name} reports is invalid: {error}."
        ) from None
    return spec
