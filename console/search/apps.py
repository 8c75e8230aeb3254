from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class SearchConfig(AppConfig):
    name = "console.search"

    def ready(self) -> None:
        """Let every app say how its things are found."""
        autodiscover_modules("services")
