from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig


class PoliciesConfig(AppConfig):
    name = "console.policies"

    def ready(self) -> None:
        """Register the parts of desired documents and the operations that remove."""
        import_module("console.policies.desired")
        import_module("console.policies.evidence.purges")
        import_module("console.policies.evidence.withdrawals")
