"""What a process tells of itself when it joins, and then with each heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from console.fleet.models import Driver


@dataclass(frozen=True, slots=True)
class NicFacts:
    name: str
    leaf: str
    wio: int
    gbits: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent tells of itself and its node, with each heartbeat."""

    control_url: str
    data_address: str
    software_version: str
    protocol_min: int
    protocol_max: int
    memory_bytes: int
    cpus: int
    trusts: str = ""  # the digest of the authorities that it believes
    mover: str = ""  # "compiled" or "python"


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """`model` of an engine, which may be another one after a restart; None of a daemon."""

    control_url: str
    software_version: str
    trusts: str = ""
    mover: str = ""
    engine: str = ""
    model: Mapping[str, Any] | None = None

    def of(self, driver: Driver) -> dict[str, Any]:
        """What holds of them. The model that a job was planned for stays until the job ends: until then
        the engine refuses its document, and says why."""
        found = asdict(self)
        if self.model is None or hasattr(driver, "job"):
            found["model"] = driver.model
        return found


@dataclass(frozen=True, slots=True)
class BrainFacts:
    """`api_url`: where clients send requests."""

    control_url: str
    software_version: str
    trusts: str = ""
    mover: str = ""
    api_url: str = ""
