from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig


class WorkloadsConfig(AppConfig):
    name = "console.workloads"

    def ready(self) -> None:
        """Register what is found."""
        import_module("console.workloads.services")
