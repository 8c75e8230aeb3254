from __future__ import annotations

from django.apps import AppConfig


class ChartsConfig(AppConfig):
    name = "console.charts"
