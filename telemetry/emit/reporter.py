"""A process tells its numbers: to the stream of the console, to a collector over OTLP, or to both. No
Django."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from telemetry.emit.deltas import Collect, combined
from telemetry.emit.transfers import TakeSlowest
from telemetry.metrics import LabelLimits

# To load the client of Redis takes a fifth of an agent's start, and OTLP is an extra.
if TYPE_CHECKING:
    from telemetry.emit.emitter import Emitter
    from telemetry.emit.otlp import Exporter


class Reporter:
    """Goes on until `stop`. Without addresses nobody is told."""

    def __init__(
        self,
        redis_url: str | None,
        otlp_url: str | None,
        kind: str,
        version: str,
        *,
        name: str = "",
        collect: Collect | None = None,
        limits: LabelLimits | None = None,
        also: Collect | None = None,
        slowest: TakeSlowest | None = None,
    ) -> None:
        """As `emitter.Emitter` has it. `also`: over OTLP only, what the console could ask itself for.
        `slowest`: over the stream only, since a collector has no place for them."""
        name, limits = name or socket.gethostname(), limits or LabelLimits()
        self._reporters: list[Emitter | Exporter] = []
        if redis_url:
            from telemetry.emit.emitter import Emitter

            self._reporters.append(
                Emitter(
                    redis_url,
                    kind,
                    version,
                    name=name,
                    collect=collect,
                    limits=limits,
                    slowest=slowest,
                ).start()
            )
        if otlp_url and collect:
            from telemetry.emit.otlp import Exporter

            all_of_it = combined(collect, also) if also else collect
            self._reporters.append(
                Exporter(otlp_url, kind, version, name=name, collect=all_of_it, limits=limits).start()
            )

    def stop(self) -> None:
        """Tell what is left, and end."""
        for one in self._reporters:
            one.stop()
