from __future__ import annotations

from django.apps import AppConfig


class FleetConfig(AppConfig):
    name = "console.fleet"

    def ready(self) -> None:
        from console.fleet import documents

        _ = documents  # it registers what it has
