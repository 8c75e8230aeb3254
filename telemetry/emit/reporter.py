"""Reporting the numbers of a process: to the stream of the console, over OTLP, or both. No Django."""

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
    """Reports until `stop`. Without addresses it does nothing."""

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
        """`collect` and `limits` are those of `emitter.Emitter`. `also` is reported over OTLP only: the
        console can read it itself. `slowest` is reported over the stream only: OTLP cannot carry it."""
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
        """Report what is left, and end."""
        for one in self._reporters:
            one.stop()
