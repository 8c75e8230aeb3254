from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig


class PoliciesConfig(AppConfig):
    name = "console.policies"

    def ready(self) -> None:
        """What drivers and agents are told of orgs, and how a purge goes on, is registered there."""
        import_module("console.policies.drivers")
        import_module("console.policies.nodes")
        import_module("console.policies.purges")
