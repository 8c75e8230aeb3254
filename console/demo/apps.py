from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig
from django.conf import settings


class DemoConfig(AppConfig):
    name = "console.demo"

    def ready(self) -> None:
        """What its drivers are told of the spine is registered there."""
        if settings.DEMO:
            import_module("console.demo.ways")
