"""How the picker listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from inference_brain.picker.exchange import Bounds

BODY_SECONDS: Final = 60.0  # from the head of a request to the end of its body
STREAMS_MAX: Final = 16_384  # requests of all gateways at once


@dataclass(frozen=True, slots=True)
class Tls:
    """Read again when the files change. `client_authority`: gateways have to show a certificate that it
    has signed; None: they need none."""

    certificate: Path
    key: Path
    client_authority: Path | None = None


@dataclass(frozen=True, slots=True)
class PickerSettings:
    listen: tuple[str, int]
    tls: Tls | None = None
    bounds: Bounds = field(default_factory=Bounds)
    streams_max: int = STREAMS_MAX
    body_seconds: float = BODY_SECONDS
