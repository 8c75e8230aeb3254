from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class SearchConfig(AppConfig):
    name = "console.search"

    def ready(self) -> None:
        """Import the services of all apps, which register their finders."""
        autodiscover_modules("services")
