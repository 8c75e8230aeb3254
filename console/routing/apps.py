from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig


class RoutingConfig(AppConfig):
    name = "console.routing"

    def ready(self) -> None:
        """Register the parts of brains' desired documents, and what is undone and found."""
        import_module("console.routing.brains")
        import_module("console.routing.desired")
        import_module("console.routing.limits")
        import_module("console.routing.services")
