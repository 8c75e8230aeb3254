"""All cache maps of the drivers that a brain follows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from inference_brain.maps.hits import Hit
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import Prompt


class DriverPlace(NamedTuple):
    """A driver that is followed. `topic`: as in telemetry, such as `driver:job7`. `model`: with whose
    keys it names columns."""

    topic: str
    model: ModelSpec


class CacheMaps:
    """Not thread-safe: everything is called from the brain's event loop."""

    def __init__(self) -> None:
        self._places: dict[str, DriverPlace] = {}

    def follow(self, drivers: Mapping[str, DriverPlace]) -> None:
        """Follow these drivers and no others. Maps of those that stay are kept."""
        self._places = dict(drivers)

    def hits(
        self,
        drivers: Sequence[str],
        prompts: Mapping[ModelSpec, Prompt],  # noqa: ARG002
        now: float,  # noqa: ARG002
    ) -> list[Hit | None]:
        """What each driver can serve of a prompt at this wall time; None where its map is not known.
        `prompts`: the same tokens, by the model whose keys they have."""
        return [None for _ in drivers]

    def age(self, driver: str, now: float) -> float | None:  # noqa: ARG002
        """How many seconds ago the driver last reported; None if its map is not known."""
        return None

    def forget(self, tags: Collection[bytes]) -> None:
        """Nothing with these isolation tags is known from here on, whatever drivers report."""
