from __future__ import annotations

from django.apps import AppConfig


class OrgsConfig(AppConfig):
    name = "console.orgs"
