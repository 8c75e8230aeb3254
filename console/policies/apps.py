from __future__ import annotations

from django.apps import AppConfig


class PoliciesConfig(AppConfig):
    name = "console.policies"

    def ready(self) -> None:
        """Drivers are told of orgs from here."""
