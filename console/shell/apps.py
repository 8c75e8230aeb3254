from __future__ import annotations

from django.apps import AppConfig


class ShellConfig(AppConfig):
    name = "console.shell"
