from __future__ import annotations

from django.apps import AppConfig


class SessionsConfig(AppConfig):
    name = "console.sessions"
    label = "cache_sessions"  # Django's own sessions, of browsers, have the plain one

    def ready(self) -> None:
        from console.sessions import documents, leaving, machines, removal, services

        _ = documents, leaving, machines, removal, services  # they register what they have
