from __future__ import annotations

from django.apps import AppConfig


class ShellConfig(AppConfig):
    name = "console.shell"

    def ready(self) -> None:
        # So that `task.delay()` in any process finds this app and its broker.
        from console import celery
        from console.shell import checks

        _ = checks  # registers its checks
        celery.app.set_default()
