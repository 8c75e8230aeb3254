from __future__ import annotations

from django.apps import AppConfig


class FleetConfig(AppConfig):
    name = "console.fleet"

    def ready(self) -> None:
        from console.fleet import desired

        _ = desired  # it registers what it has
