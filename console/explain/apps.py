from __future__ import annotations

from django.apps import AppConfig


class ExplainConfig(AppConfig):
    name = "console.explain"
