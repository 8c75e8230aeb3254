from __future__ import annotations

from django.apps import AppConfig


class SessionsConfig(AppConfig):
    name = "console.sessions"
    label = "cache_sessions"  # Django's own sessions, of browsers, have the plain one

    def ready(self) -> None:
        from console.sessions import desired, services
        from console.sessions.changes import box_drains, drains, driver_removal, replacements
        from console.sessions.steps import machines

        _ = (
            box_drains,
            desired,
            drains,
            machines,
            driver_removal,
            replacements,
            services,
        )  # they register what they have
