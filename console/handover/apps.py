from __future__ import annotations

from django.apps import AppConfig


class HandoverConfig(AppConfig):
    name = "console.handover"
